"""How well does an expert-parallel layer scale in PyTorch, and what does each transport cost beside NCCL alone?

    python benchmarks/bench_parallel_torch.py --out parallel.json             # on all GPUs of the machine
    python benchmarks/bench_parallel_torch.py --local --out packing.json      # on one GPU: the local parts at EP 8
    python benchmarks/bench_parallel_torch.py --device cpu --ranks 2          # whether it runs

Weak scaling: every rank has the tokens and the experts of the shape, so the layer of P ranks has P times as many of
both. "scaling" is the time of one rank without an exchange over that of P ranks, forward and backward. "shared beside"
computes a shared expert while tokens travel, "shared after" when they are back, "once_per_rank" sends a token to a rank
once, "captured" replays the step from a CUDA graph. "raw" is an `all_to_all_single` of one way of all parts, and GB/s
are what a rank sends to others.

`--local` times what a rank of eight does beside its experts: it chooses the order, gathers tokens, or quantises them
and gathers codes and scales ("packing"), and adds up the rows that come back ("unpacking"). "GB/s" are the bytes that
these steps must move, the zeros of unused budget among them, "share" is that rate over a copy's. In the row "local
parts" ms are those of a step, in which tokens and gradients each go both ways, and the share is that of the layer's
time, forward and backward. They are replayed from graphs of ten calls, because their launches cost the host more than
the GPU; a layer's launches hide behind its products. Recipes with one scale for many rows send no codes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import harness
from grouped_core import exchange
from torch_bridge import MXFP8, FP8Block, FP8Current, FP8Delayed, Recipe, SharedExpert, _exchange, moe, parallel
from torch_bridge._symmetric import why_unavailable
from torch_bridge.moe import of_shared


class Shape(NamedTuple):
    """Tokens of a rank, hidden size, expert width, experts of a rank on two ranks and on eight, experts per token."""

    tokens: int
    hidden: int
    width: int
    own: int
    own_of_8: int
    k: int


SHAPES = {
    "mixtral_8x7b": Shape(8192, 4096, 14336, 4, 1, 2),
    "deepseek_v3": Shape(4096, 7168, 2048, 16, 32, 8),
    "olmoe_1b_7b": Shape(8192, 2048, 1024, 32, 8, 8),
}
SMALL = {"small": Shape(256, 128, 128, 4, 4, 2)}
"""On a CPU."""
LOCAL_RANKS = 8
TRANSPORTS = ("all_to_all", "symmetric_memory")
WARMUP, ROUNDS = 3, 5
Rows = list[dict[str, Any]]


def milliseconds(call: Callable[[], Any], device: str, rounds: int = ROUNDS) -> float:
    """The median over rounds of the time of a call; as many calls on every rank."""
    for _ in range(WARMUP):
        call()
    clock = harness.cuda_clock if device == "cuda" else harness.cpu_clock
    times = [clock(lambda _: call(), at, 1) for at in range(rounds)]
    return float(torch.tensor(times).median()) / 1e3


def replayed(call: Callable[[], Any], device: str) -> float:
    """As `milliseconds`, of calls replayed from a graph: several launches of a few microseconds each."""
    thunk = harness.captured(call, device)
    return milliseconds(lambda: thunk(0), device) / harness.REPEATS


def drawn(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    """Normal values of bfloat16, small enough that nothing overflows."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, device=device, dtype=torch.bfloat16, generator=generator) * 0.02


def weights_of(shape: Shape, own: int, device: str, seed: int) -> list[Tensor]:
    """wi and wo of the experts of a rank, as leaves."""
    made = [drawn((own, 2 * shape.width, shape.hidden), device, seed)]
    made.append(drawn((own, shape.hidden, shape.width), device, seed + 1))
    return [each.requires_grad_() for each in made]


def step(layer: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    """Forward and backward."""
    y = layer()
    torch.autograd.grad(y, leaves, torch.ones_like(y))


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks


class Variant(NamedTuple):
    """One way to run the layer; `shared`: None, "beside" or "after"."""

    transport: str
    chunks: int = 1
    shared: str | None = None
    recipe: Recipe | None = None
    once_per_rank: bool = False
    captured: bool = False

    @property
    def label(self) -> str:
        parts = [self.transport, f"{self.chunks} chunks" if self.chunks > 1 else ""]
        parts += [f"shared {self.shared}" if self.shared else "", self.recipe.name if self.recipe else ""]
        parts += ["once_per_rank" if self.once_per_rank else "", "captured" if self.captured else ""]
        return ", ".join(each for each in parts if each)


def variants(transports: list[str]) -> list[Variant]:
    """Those that are timed."""
    return [
        variant
        for transport in transports
        for variant in (
            Variant(transport),
            Variant(transport, chunks=2),
            Variant(transport, shared="after"),
            Variant(transport, shared="beside"),
            Variant(transport, chunks=2, shared="beside"),
            Variant(transport, recipe=MXFP8),
            Variant(transport, once_per_rank=True),
            Variant(transport, recipe=MXFP8, once_per_rank=True),
            Variant(transport, captured=True),
            Variant(transport, once_per_rank=True, captured=True),
            Variant(transport, recipe=MXFP8, once_per_rank=True, captured=True),
        )
    ]


def spread(name: str, shape: Shape, device: str, factor: float, transports: list[str]) -> Rows:
    """Times of one shape on this rank, beside all others."""
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    x = drawn((shape.tokens, shape.hidden), device, 10 + rank).requires_grad_()
    router = drawn((ranks * shape.own, shape.hidden), device, 1)
    wi, wo = weights_of(shape, shape.own, device, 20 + 2 * rank)
    shared_wi, shared_wo = weights_of(shape, 1, device, 5)
    of_shared_expert = SharedExpert(shared_wi, shared_wo)
    leaves = [x, wi, wo]
    rows: Rows = []
    alone: dict[Any, float] = {}

    def one_rank(variant: Variant) -> float:
        key = (variant.shared is None, variant.recipe and variant.recipe.name, variant.captured)
        if key not in alone:
            own, shared = router[: shape.own], None if variant.shared is None else of_shared_expert
            given: dict[str, Any] = {"shared": shared, "recipe": variant.recipe}
            alone[key] = timed(lambda: step(lambda: moe(x, own, wi, wo, shape.k, **given)[0], leaves), variant)
        return alone[key]

    def timed(call: Callable[[], Any], variant: Variant) -> float:
        if not variant.captured:
            return milliseconds(call, device)
        thunk = harness.captured(call, device, repeats=1)
        return milliseconds(lambda: thunk(0), device)

    for variant in variants(transports):
        row: dict[str, Any] = {"shape": name, "ranks": ranks, "variant": variant.label}
        rows.append(row)
        if variant.transport == "symmetric_memory" and (reason := why_unavailable()):
            row["skipped"] = reason
            continue
        options: dict[str, Any] = {"process_group": group, "budget_factor": factor, "recipe": variant.recipe}
        options |= {"transport": variant.transport, "chunks": variant.chunks, "once_per_rank": variant.once_per_rank}
        options["shared"] = of_shared_expert if variant.shared == "beside" else None
        dropped: list[Tensor] = []

        def layer(options: dict[str, Any] = options, variant: Variant = variant, dropped: Any = dropped) -> Tensor:
            y, aux = parallel.moe(x, router, wi, wo, shape.k, **options)
            dropped[:] = [aux.dropped]
            return y + of_shared(x, of_shared_expert) if variant.shared == "after" else y

        row["one_ms"] = one_rank(variant)
        dist.barrier()
        row["ms"] = timed(lambda layer=layer: step(layer, leaves), variant)
        row["scaling"] = row["one_ms"] / row["ms"]
        row["dropped"] = int(dropped[0])
    rows.extend(raw(name, shape, device, factor, transports))
    return rows


def raw(name: str, shape: Shape, device: str, factor: float, transports: list[str]) -> Rows:
    """One way of all parts by NCCL alone, and by each transport as the layer sends rows."""
    ranks = dist.get_world_size()
    op = option(shape, ranks, ranks * shape.own, factor)
    rows = drawn((op.rows, shape.hidden), device, 3)
    out = torch.empty_like(rows)
    world: Any = dist.group.WORLD
    group = _exchange.Group(world.group_name, ranks)
    counts = torch.full((ranks,), op.budget, dtype=torch.int64, device=device)
    calls: dict[str, Callable[[], Any]] = {"raw all_to_all_single": lambda: dist.all_to_all_single(out, rows)}
    calls["rows, all_to_all"] = lambda: _exchange.begin(rows, group)(None)
    if "symmetric_memory" in transports and not why_unavailable():
        parallel.SymmetricMemory(world)
        calls["rows, symmetric_memory"] = lambda: _exchange.begin(rows, group, counts)(counts)
    sent = op.budget * (ranks - 1) * shape.hidden * rows.element_size()
    found: Rows = []
    for label, call in calls.items():
        dist.barrier()
        taken = milliseconds(call, device)
        found.append({"shape": name, "ranks": ranks, "variant": label, "ms": taken, "GB/s": sent / taken / 1e6})
    return found


def option(shape: Shape, ranks: int, experts: int, factor: float, *, once: bool = False) -> exchange.Exchange:
    """The facts of the exchange."""
    facts = {"ranks": ranks, "experts": experts, "tokens": shape.tokens, "slots": shape.k}
    return exchange.exchange_option("bench", **facts, budget_factor=factor, once_per_rank=once)


def process(rank: int, ranks: int, device: str, folder: str, names: list[str], options: argparse.Namespace) -> None:
    """All shapes on one rank; the first one writes the rows to a file of the folder."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    backend, store = "nccl" if device == "cuda" else "gloo", f"file://{folder}/store"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    rows: Rows = []
    for name in names:
        shape = (SHAPES | SMALL)[name]
        rows += spread(name, shape, device, options.budget_factor, options.transports)
        if rank == 0:
            Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(names: list[str], options: argparse.Namespace) -> Rows:
    """The rows of all shapes, over `options.ranks` processes."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        given = (options.ranks, options.device, folder, names, options)
        ranks = [context.Process(target=process, args=(rank, *given)) for rank in range(options.ranks)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            print(f"a rank failed: {[each.exitcode for each in ranks]}", file=sys.stderr)
        found = Path(folder, "rows.json")
        return json.loads(found.read_text()) if found.exists() else []


# ---------------------------------------------------------------------------------------------------------------------
# One rank


def local(name: str, shape: Shape, device: str, factor: float, copied: float) -> Rows:
    """What a rank of LOCAL_RANKS does before it sends tokens or codes, and once rows came back."""
    experts = LOCAL_RANKS * shape.own_of_8
    x = drawn((shape.tokens, shape.hidden), device, 0)
    generator = torch.Generator(device).manual_seed(1)
    scores = torch.rand((shape.tokens, experts), device=device, generator=generator)
    chosen = scores.topk(shape.k).indices.int()
    own = max(shape.own_of_8, shape.k)  # as many rows as come to a rank of an even exchange
    router = drawn((own, shape.hidden), device, 2)
    weights = weights_of(shape, own, device, 3)
    leaves = [x.clone().requires_grad_(), *weights]
    whole = milliseconds(lambda: step(lambda: moe(leaves[0], router, *weights, shape.k)[0], leaves), device)
    found: Rows = []
    for once in (False, True):
        op, beside = option(shape, LOCAL_RANKS, experts, factor, once_per_rank=once), ", once_per_rank" if once else ""
        rows = parts(op, x, chosen, device, copied)
        both = 2 * (rows[0]["ms"] + rows[-1]["ms"])
        rows.append({"variant": "local parts", "ms": both, "one_ms": whole, "share": both / whole})
        found += [{"shape": name, "ranks": LOCAL_RANKS, **row, "variant": row["variant"] + beside} for row in rows]
    return found


def parts(op: exchange.Exchange, x: Tensor, chosen: Tensor, device: str, copied: float) -> Rows:
    """Packing of tokens and of codes, and unpacking."""
    probs = torch.ones(chosen.shape, device=device)
    a_row = x.nbytes / op.tokens
    found: Rows = []
    for recipe in (None, MXFP8, FP8Block, FP8Current, FP8Delayed):
        label = "tokens" if recipe is None else recipe.name
        row: dict[str, Any] = {"variant": f"packing, {label}"}
        found.append(row)
        codes = exchange.format_sent("bench", None, recipe)
        if recipe is not None and codes is None:
            row["skipped"] = "one scale for many rows, so tokens travel"
            continue
        with torch.no_grad():
            sent = _exchange.send(op, x, chosen, probs, codes)
            row["ms"] = replayed(lambda codes=codes: _exchange.send(op, x, chosen, probs, codes), device)
        rows = int((sent.source >= 0).sum())
        if sent.values is not None:
            assert sent.scales is not None, "codes have scales"
            coded = (sent.values.nbytes + sent.scales.nbytes) / op.rows
            moved = x.nbytes + op.tokens * coded + (rows + op.rows) * coded
        else:
            moved = (rows + op.rows) * a_row
        row |= {"rows": rows, "GB/s": moved / row["ms"] / 1e6, "share": moved / row["ms"] * 1e3 / copied}
    with torch.no_grad():
        sent = _exchange.send(op, x, chosen, probs)
        came = torch.empty_like(sent.rows).copy_(sent.rows)
        taken = replayed(lambda: _exchange.sums(came, sent.source, sent.inverse), device)
    moved = int((sent.source >= 0).sum()) * a_row + x.nbytes
    row = {"variant": "unpacking, tokens", "ms": taken}
    return [*found, row | {"GB/s": moved / taken / 1e6, "share": moved / taken * 1e3 / copied}]


# ---------------------------------------------------------------------------------------------------------------------


def table(rows: Rows) -> str:
    """The rows as fixed-width text."""
    lines = [f"{'shape':<14}{'ranks':>6}  {'variant':<48}{'one ms':>9}{'ms':>9}{'scaling':>9}{'GB/s':>9}{'share':>7}"]
    for row in rows:
        left = f"{row['shape']:<14}{row['ranks']:>6}  {row['variant']:<48}"
        if "skipped" in row:
            lines.append(f"{left}  skipped: {row['skipped']}")
            continue
        cells = [(row.get(name), width) for name, width in (("one_ms", 9), ("ms", 9), ("scaling", 9), ("GB/s", 9))]
        cells.append((row.get("share"), 7))
        lines.append(left + "".join(" " * width if value is None else f"{value:>{width}.3f}" for value, width in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, help="(default: all GPUs of the machine)")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), help="(default: all)")
    parser.add_argument("--transports", nargs="+", choices=list(TRANSPORTS), default=list(TRANSPORTS))
    parser.add_argument("--budget-factor", type=float, default=1.25)
    parser.add_argument("--local", action="store_true", help="packing on one device")
    parser.add_argument("--out", type=Path, help="a JSON file")
    options = parser.parse_args()
    names = (options.shapes or list(SHAPES)) if options.device == "cuda" else list(SMALL)
    if options.local:
        copied = harness.copy_rate(options.device)
        rows = [
            row
            for name in names
            for row in local(name, (SHAPES | SMALL)[name], options.device, options.budget_factor, copied)
        ]
    else:
        options.ranks = options.ranks or max(1, torch.cuda.device_count())
        rows = on_ranks(names, options)
    if options.out:
        options.out.write_text(json.dumps({"machine": harness.machine(), "rows": rows}, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
