"""How fast is each product and MLP beside the fastest of the other libraries, in one process, with power and clocks?

    python benchmarks/bench_peers.py --json out.json             # everything
    python benchmarks/bench_peers.py --parts bf16 --cases A D    # products of bf16 alone

Each problem is prepared once and measured twice: call by call in turns with the other candidates, and in long runs of
each candidate, as in training, with the power and clock that the GPU has then. Ratios above 1 are in our favour. A pair
has no row where one of the two is not installed or refuses; the reasons come after the table. `bench_decode.py` has
small batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import bench_fp8, bench_grouped_matmul, bench_mlp, harness
from tests import cases

PRODUCTS = ("forward", "dgrad", "wgrad")


class Pair(NamedTuple):
    """A candidate of ours, the candidate that it is compared with, and the products in which it is."""

    ours: str
    other: str
    products: Sequence[str]


class Part(NamedTuple):
    """One table: its problems, its pairs, and what prepares the blocks of a problem that have these candidates."""

    cases: Sequence[str]
    pairs: Sequence[Pair]
    prepare: Callable[[cases.Case, Sequence[str], str], Iterator[harness.Block]]  # problem, candidates, device

    @property
    def names(self) -> list[str]:
        """The candidates, "dense" first."""
        return list(dict.fromkeys(["dense", *(name for pair in self.pairs for name in pair[:2])]))


def _bf16(case: cases.Case, names: Sequence[str], device: str) -> Iterator[harness.Block]:
    for product in PRODUCTS:
        yield bench_grouped_matmul.prepare(case, product, "bfloat16", device, names)


def _blocks(case: cases.Case, names: Sequence[str], _: str) -> Iterator[harness.Block]:
    for product in PRODUCTS:
        yield bench_fp8.prepare(case, product, names)


def _mlp(case: cases.Case, names: Sequence[str], device: str) -> Iterator[harness.Block]:
    yield from bench_mlp.prepare(case, "bfloat16", device, names).values()


BF16 = "ours, torch, [G,N,K]"
MLP = "ours, [G,N,K]"
FP8 = tuple(f"ours, {name}" for name in ("FP8Delayed", "FP8Current", "FP8Block"))
SHAPES = ("A", "B", "C", "D", "E")
PARTS = {
    "bf16": Part(
        ("A", "B", "C", "Cz", "Ce", "D", "E", "G256"),
        (
            Pair(BF16, "QuACK gemm", PRODUCTS),
            Pair(BF16, "torch grouped_mm", PRODUCTS),
            Pair("ours, torch, fp32 +=", "QuACK gemm, fp32 +=", ("wgrad",)),
        ),
        _bf16,
    ),
    "blocks": Part(
        SHAPES,
        (
            Pair("ours, blocks", "DeepGEMM", ("forward", "dgrad")),
            Pair("ours, blocks, float32 +=", "DeepGEMM", ("wgrad",)),
            Pair("ours, blocks", "torch grouped, fast", PRODUCTS),
        ),
        _blocks,
    ),
    "mlp": Part(
        (*SHAPES, "D8k"),
        (
            Pair(MLP, "torch grouped_mm", bench_mlp.PRODUCTS),
            *(Pair(recipe, MLP, bench_mlp.PRODUCTS) for recipe in FP8),
        ),
        _mlp,
    ),
}


def measured(
    part: Part, case: cases.Case, device: str, protocols: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, harness.Row]]:
    """The rows of a problem with the protocol that each was measured by; `protocols`: options of `harness.measure`."""
    for block in part.prepare(case, part.names, device):
        for name, protocol in protocols.items():
            for row in block.rows(**protocol):
                yield name, row
        del block  # its tensors, before those of the next are made
        torch.cuda.empty_cache()


HEAD = f"{'case':<8}{'product':<18}{'ours':<26}{'other':<22}{'protocol':<11}"
HEAD += f"{'us':>9}{'other us':>10}{'+-':>6}{'ratio':>7}{'dense':>7}{'W, MHz':>12}{'other':>12}"


def lines(part: Part, found: Sequence[tuple[str, harness.Row]]) -> Iterator[str]:
    """One line per pair, product and protocol: both times, the larger spread, the other's time over ours, ours as a
    share of the dense product, and power and clock of both in long runs.
    """
    rows = {(row.product, protocol, row.candidate): row for protocol, row in found}
    for product, protocol in dict.fromkeys((row.product, protocol) for protocol, row in found):
        for pair in part.pairs:
            ours, other = (rows[product, protocol, name] for name in pair[:2])
            if product not in pair.products or ours.timing is None or other.timing is None:
                continue
            mine, its = ours.timing, other.timing
            times = f"{mine.median_us:>9.0f}{its.median_us:>10.0f}{max(mine.spread, its.spread):>6.0%}"
            yield (
                f"{ours.case:<8}{product:<18}{pair.ours:<26}{pair.other:<22}{protocol:<11}{times}"
                f"{its.median_us / mine.median_us:>7.3f}{ours.share:>7.3f}{_chip(mine):>12}{_chip(its):>12}"
            )


def left_out(part: Part, found: Sequence[tuple[str, harness.Row]]) -> Iterator[harness.Row]:
    """The rows without a time that a pair compares."""
    compared = {(name, product) for pair in part.pairs for name in pair[:2] for product in pair.products}
    return (row for _, row in found if row.timing is None and (row.candidate, row.product) in compared)


def _chip(timing: harness.Timing) -> str:
    return "" if timing.watts is None or timing.mhz is None else f"{timing.watts:.0f}, {timing.mhz:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--cases", nargs="+", help="names of problems in tests/cases.py; default: those of each part")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: in turns alone, to try it out")
    parser.add_argument("--budget", type=float, default=1.2, help="seconds of interleaved calls per block")
    parser.add_argument("--steady", type=float, default=0.12, metavar="SECONDS", help="length of a long run")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    protocols: dict[str, dict[str, Any]] = {
        "in turns": {"clock": harness.cuda_clock, "budget_s": options.budget},
        "long runs": harness.steady(options.steady),
    }
    if options.device == "cpu":
        if "blocks" in options.parts:
            parser.error("products of 8-bit operands are for GPUs; choose others with --parts")
        protocols = {"in turns": {"clock": harness.cpu_clock, "budget_s": options.budget}}
    rows: list[harness.Row] = []
    measured_by: list[str] = []
    missing: dict[tuple[str, str, str], list[str]] = {}  # names of problems by candidate, product and reason
    print(HEAD)
    for part in (PARTS[name] for name in options.parts):
        for name in options.cases or part.cases:
            found = list(measured(part, cases.named(name), options.device, protocols))
            for line in lines(part, found):
                print(line, flush=True)
            for row in left_out(part, found):
                missing.setdefault((row.candidate, row.product, row.skipped), []).append(name)
            measured_by += [protocol for protocol, _ in found]
            rows += [row for _, row in found]
    for (name, product, reason), places in missing.items():
        print(f"left out {name}, {product} of {', '.join(dict.fromkeys(places))}: {reason}")
    print(harness.machine())
    if options.json:
        harness.save(rows, options.json, protocols=measured_by, copy_bytes_per_s=harness.copy_rate(options.device))


if __name__ == "__main__":
    main()
