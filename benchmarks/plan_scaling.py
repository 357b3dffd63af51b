"""What does expert parallelism cost on many GPUs? A model of one layer's step, for docs/scaling.md.

    python benchmarks/plan_scaling.py            # the table, and beside it what was measured on two to eight GPUs
    python benchmarks/plan_scaling.py --model deepseek_v3 --tokens 8192 --nic 90

A rank sends every other rank a part of a budget's rows, twice forward and twice backward. Ranks of one node reach each
other by NVLink, others by one network card each, both at the same time. Around an exchange rows are packed and unpacked
at a rate of memory. Budgets are those of the library (`grouped_core.exchange`), a row for each token and expert; in the
columns "rank" a row for each token and rank (`once_per_rank`), in "node" for each token and other node.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from grouped_core.exchange import Exchange, exchange_option

FORWARD_AND_BACKWARD = 18
"""Floating-point operations per row, H and F: three products with a gated first weight, each also in two gradients."""
BESIDE = 8
"""Bytes of the number and the weight of each expert that a row may have."""
BLOCK = 128
"""Elements that share an fp32 scale where codes travel."""


@dataclass(frozen=True)
class Model:
    """The MoE layers of a published model; its router sends a token to `most_nodes` nodes at most, 0: any."""

    hidden: int
    width: int
    experts: int
    slots: int
    layers: int
    most_nodes: int = 0


MODELS = {
    "mixtral_8x7b": Model(4096, 14336, 8, 2, 32),
    "qwen3_30b_a3b": Model(2048, 768, 128, 8, 48),
    "qwen3_235b_a22b": Model(4096, 1536, 128, 8, 94),
    "deepseek_v3": Model(7168, 2048, 256, 8, 58, most_nodes=4),
    "kimi_k2": Model(7168, 2048, 384, 8, 60),
}


@dataclass(frozen=True)
class Machine:
    """Rates in GB/s and TFLOP/s.

    Those of NVLink, packing and products were measured (RESULTS.md); network card and messages are assumed.
    """

    node: int = 8
    nvlink: float = 300.0
    nic: float = 45.0
    message_us: float = 5.0
    pack: float = 2800.0
    unpack: float = 1830.0
    products: float = 550.0


@dataclass(frozen=True)
class Step:
    """One layer, forward and backward, in ms; bytes of a rank.

    Attributes:
        experts: time of the products. wire: of the exchanges. local: of packing and unpacking.
        near, far: bytes that go to ranks of the same node and of other ones.
        messages: sent by a rank.
    """

    experts: float
    wire: float
    local: float
    near: float
    far: float
    messages: int

    @property
    def serial(self) -> float:
        """The share of the time that the experts compute, if nothing overlaps."""
        return self.experts / (self.experts + self.wire + self.local)

    @property
    def halves(self) -> float:
        """The same if two halves of the tokens take turns: one travels while the other computes."""
        overlapped = max(self.experts, self.wire) + min(self.experts, self.wire) / 2
        return self.experts / (overlapped + self.local)


def row_bytes(hidden: int, codes: bool, experts: int) -> tuple[int, int]:
    """Bytes of a row of so many experts on its way to them, and of each of the three other ways."""
    sent = hidden + 4 * -(-hidden // BLOCK) if codes else 2 * hidden
    return sent + BESIDE * experts, 2 * hidden


def other_nodes(model: Model, nodes: int) -> float:
    """The nodes besides its own to which a token goes, of `nodes`, if its experts are drawn evenly and apart."""
    reached = nodes * (1 - (1 - 1 / nodes) ** model.slots)
    return (min(reached, model.most_nodes) if model.most_nodes else reached) * (nodes - 1) / nodes


def step(model: Model, machine: Machine, op: Exchange, codes: bool, once_per_node: bool = False) -> Step:
    """The step of a rank whose exchange is `op`.

    Args:
        once_per_node: a token goes to each other node once, and from there by NVLink, which this library does not do.
    """
    there, back = row_bytes(model.hidden, codes, op.slots_of_row)
    near_ranks = min(op.ranks, machine.node) - 1
    far_ranks = op.ranks - 1 - near_ranks
    travelling = op.budget * (there + 3 * back)
    near, far = near_ranks * travelling, far_ranks * travelling
    if once_per_node and far_ranks:
        rows = op.tokens * other_nodes(model, op.ranks // machine.node)
        near, far = near + far, rows * (there + 3 * back)
    messages = 4 * (op.ranks - 1)
    wire = max(near / machine.nvlink, far / machine.nic) / 1e6 + messages * machine.message_us / 1e3
    moved = 2 * op.rows * 2 * model.hidden  # read and written
    local = 2 * (moved / machine.pack + moved / machine.unpack) / 1e6
    work = FORWARD_AND_BACKWARD * op.tokens * op.slots * model.hidden * model.width
    return Step(work / machine.products / 1e9, wire if op.ranks > 1 else 0.0, local, near, far, messages)


TIMES = {  # ms of one rank and of all with all_to_all, by bench_parallel.py: on two H100, on four and eight H200
    2: {"mixtral_8x7b": (30.0, 32.0), "deepseek_v3": (15.8, 21.0), "qwen3_30b_a3b": (4.42, 7.75)},
    4: {"mixtral_8x7b": (28.6, 31.9), "deepseek_v3": (15.1, 20.5), "qwen3_30b_a3b": (4.09, 7.96)},
    8: {"mixtral_8x7b": (28.9, 33.3), "deepseek_v3": (15.3, 22.4), "qwen3_30b_a3b": (4.00, 8.55)},
}
TIMED = {"mixtral_8x7b": (8192, 4), "deepseek_v3": (4096, 16), "qwen3_30b_a3b": (8192, 64)}
"""Tokens and experts of a rank there."""


def compare(machine: Machine, factor: float) -> None:
    """The model beside what several GPUs took."""
    print(f"{'measured':<16} {'GPUs':>5} {'one, ms':>8} {'all, ms':>8} {'model':>8}")
    for ranks, times in TIMES.items():
        for name, (one, together) in times.items():
            model, (tokens, own) = MODELS[name], TIMED[name]
            sizes = {"ranks": ranks, "experts": ranks * own, "tokens": tokens, "slots": model.slots}
            found = step(model, machine, exchange_option("plan", **sizes, budget_factor=factor), False)
            print(f"{name:<16} {ranks:>5} {one:>8.2f} {together:>8.2f} {one + found.wire + found.local:>8.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=MODELS, nargs="+", default=list(MODELS))
    add("--ranks", type=int, nargs="+", default=[8, 16, 32, 64], help="(default: 8 16 32 64)")
    add("--tokens", type=int, default=4096, help="of a rank (default: %(default)s)")
    add("--budget-factor", type=float, default=1.25, help="(default: %(default)s)")
    for name in ("nvlink", "nic", "message_us", "pack", "unpack", "products"):
        value = getattr(Machine, name)
        add(f"--{name.replace('_', '-')}", type=float, default=value, help="(default: %(default)s)")
    options = vars(parser.parse_args())
    machine = Machine(**{name: options[name] for name in options if name in Machine.__annotations__})
    compare(machine, options["budget_factor"])
    print(f"\n{'model':<16}   P  sent experts    wire  local  near MB   far MB messages serial halves", end="")
    print(" rank MB   rank   node    GiB")
    for name in options["model"]:
        model = MODELS[name]
        for ranks in (each for each in options["ranks"] if model.experts % each == 0):
            given = {"ranks": ranks, "experts": model.experts, "tokens": options["tokens"], "slots": model.slots}
            op, of_ranks = (
                exchange_option("plan", **given, budget_factor=options["budget_factor"], once_per_rank=once)
                for once in (False, True)
            )
            held = model.layers * op.own * 3 * model.hidden * model.width * 2 / 2**30
            for codes in (False, True):
                s = step(model, machine, op, codes)
                print(
                    f"{name:<16} {ranks:>3} {'codes' if codes else 'bf16':>5} {s.experts:>7.2f} {s.wire:>7.2f}", end=""
                )
                print(f" {s.local:>6.2f} {s.near / 1e6:>8.0f} {s.far / 1e6:>8.0f} {s.messages:>8}", end="")
                rank = step(model, machine, of_ranks, codes)
                node = step(model, machine, op, codes, once_per_node=True)
                print(f" {s.serial:>6.2f} {s.halves:>6.2f} {(rank.near + rank.far) / 1e6:>7.0f}", end="")
                print(f" {rank.halves:>6.2f} {node.halves:>6.2f} {held:>6.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
