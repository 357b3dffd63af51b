"""How fast are grouped GEMMs of 8-bit operands, compared with a dense GEMM of the same operations and other libraries?

python benchmarks/bench_fp8.py --cases A B C D E --json out.json

Codes are random normal numbers in E4M3, and scales are given: `bench_quantize.py` measures quantising. The dense GEMM
is `torch._scaled_mm` with one scale per row and per column and fast accumulation, PyTorch's fastest on Hopper.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import harness
from benchmarks.baselines import MissingError, tried, usable
from grouped_core import calls, plans
from grouped_core.calls import SLOTS, ArraySpec, QuantizedSpec
from grouped_core.formats import FORMATS, padded_rows
from grouped_core.recipes import FP8Block, FP8Current, Recipe
from tests import cases

PRODUCTS = ("forward", "dgrad", "wgrad")
E4M3 = torch.float8_e4m3fn
CHUNK = 1 << 28  # elements converted to codes at once


@dataclass
class Work:
    """One GEMM of one problem: `rows` x `depth` codes against `width` columns, or a contraction over rows."""

    case: cases.Case
    product: str

    @property
    def depth(self) -> int:
        """K of a GEMM with ragged rows."""
        return self.case.n if self.product == "dgrad" else self.case.k

    @property
    def width(self) -> int:
        """N of a GEMM with ragged rows."""
        return self.case.k if self.product == "dgrad" else self.case.n

    @property
    def flops(self) -> float:
        """Useful operations: only rows that belong to groups count."""
        return 2.0 * self.case.valid * self.case.k * self.case.n

    @property
    def sizes(self) -> torch.Tensor:
        """int32 [G]."""
        return torch.tensor(self.case.sizes, dtype=torch.int32, device="cuda")


def codes(*shape: int) -> torch.Tensor:
    """Standard normal numbers in E4M3."""
    out = torch.empty(shape, dtype=E4M3, device="cuda")
    flat = out.view(-1)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        part.copy_(torch.randn(part.numel(), device="cuda"))
    return out


def transposed(work: Work, width: int) -> torch.Tensor:
    """Transposed codes [X, P], with zeros between the last row of a group and the end of its segment."""
    case = work.case
    held = codes(width, padded_rows(case.rows, case.groups, 128))
    valid = torch.zeros(held.shape[1], dtype=torch.uint8, device="cuda")
    at = 0
    for span in case.spans():
        count = span.stop - span.start
        valid[at : at + count] = 1
        at += -(-count // 128) * 128
    held.view(torch.uint8).mul_(valid)
    return held


def scales(*shape: int) -> torch.Tensor:
    """Positive numbers around 1."""
    return torch.rand(shape, device="cuda") + 0.5


def dense(work: Work) -> harness.Thunk:
    """One dense GEMM with the same operations."""
    case = work.case
    if work.product == "wgrad":
        depth = case.valid // 16 * 16
        lhs, rhs = codes(case.k, depth), codes(case.n, depth)
    else:
        lhs, rhs = codes(case.rows, work.depth), codes(work.width, work.depth)
    of_rows, of_columns = scales(lhs.shape[0], 1), scales(1, rhs.shape[0])
    return lambda i: torch._scaled_mm(
        lhs, rhs.T, scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def torch_grouped(fast: bool) -> Callable[[Work], harness.Thunk]:
    """`torch._scaled_grouped_mm`, one scale per row and per column; for wgrad, groups are padded to 16 rows."""

    def build(work: Work) -> harness.Thunk:
        case, offsets = work.case, torch.cumsum(work.sizes, 0).to(torch.int32)
        function = getattr(torch, "_scaled_grouped_mm", None)
        if function is None:
            raise MissingError("torch._scaled_grouped_mm is not in this PyTorch")
        options = {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
        if work.product == "wgrad":
            ends = torch.cumsum((work.sizes + 15) // 16 * 16, 0).to(torch.int32)
            depth = int(ends[-1])
            lhs, rhs = codes(case.k, depth), codes(case.n, depth)
            a, b = scales(case.groups * case.k), scales(case.groups * case.n)
            return tried(lambda: lambda i: function(lhs, rhs.T, a, b, offs=ends, **options))
        lhs, rhs = codes(case.rows, work.depth), codes(case.groups, work.width, work.depth)
        a, b = scales(case.rows), scales(case.groups, work.width)
        return tried(lambda: lambda i: function(lhs, rhs.transpose(1, 2), a, b, offs=offsets, **options))

    return build


def _spec(tensor: torch.Tensor) -> ArraySpec:
    return ArraySpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _quantised(
    values: torch.Tensor, block: torch.Tensor | None, group: torch.Tensor | None, format: str, axis: int, *shape: int
) -> tuple[QuantizedSpec, dict[str, torch.Tensor | None]]:
    of_block, of_group = (None if t is None else _spec(t) for t in (block, group))
    spec = QuantizedSpec(_spec(values), of_block, of_group, FORMATS[format], axis, shape, "bfloat16")
    return spec, {"": values, "_scales": block, "_group_scales": group}


def ours(
    recipe: Recipe, result: str = "bfloat16", accumulate: bool = False, *, across: bool = False
) -> Callable[[Work], harness.Thunk]:
    """Our kernels through their native plan, called as a recipe's forward or wgrad calls them. `across`: weights are
    those of forward in dgrad, contracted across their lines.
    """

    def build(work: Work) -> harness.Thunk:
        case, by_block = work.case, recipe.forward[0].block > 0
        rows, weight = ("fp8_1x128", "fp8_128x128") if by_block else ("fp8_tensor", "fp8_tensor")
        group = None if by_block else scales(case.groups)
        if work.product == "wgrad":
            if recipe.accumulate == "fast" or across:
                raise MissingError("fast accumulation is for forward products, reading across lines for dgrad")
            axes, sides = (0, 0), []
            for width in (case.k, case.n):
                held = transposed(work, width)
                block = scales(held.shape[1] // 128, width) if by_block else None
                sides.append(_quantised(held, block, group, rows, 0, case.rows, width))
            shape: tuple[int, ...] = (case.groups, case.k, case.n)
        else:
            if result != "bfloat16" or accumulate:
                raise MissingError("only weight gradients are float32 here")
            if across and work.product == "forward":
                raise MissingError("forward reads lines of weights")
            axes, depth, width = (1, 1), work.depth, work.width
            stored, along = ((depth, width), 2) if across else ((width, depth), 1)
            of_rows = scales(-(-depth // 128), case.rows) if by_block else None
            of_weight = scales(case.groups, -(-width // 128), -(-depth // 128)) if by_block else None
            sides = [
                _quantised(codes(case.rows, depth), of_rows, group, rows, 1, case.rows, depth),
                _quantised(codes(case.groups, *stored), of_weight, group, weight, along, case.groups, depth, width),
            ]
            shape = (case.rows, width)
        (lhs, left), (rhs, right) = sides
        out, sizes = torch.zeros(shape, dtype=getattr(torch, result), device="cuda"), work.sizes
        call = calls.grouped_matmul(
            lhs,
            rhs,
            axes,
            ArraySpec((case.groups,), "int32"),
            result,
            recipe=recipe,
            into=_spec(out) if accumulate else None,
            accumulate=accumulate,
        )
        plan = plans.plan(call, "sm_90a")
        workspace = torch.empty(max(1, plan.workspace_bytes), dtype=torch.uint8, device="cuda")
        given = {f"lhs{name}": t for name, t in left.items()} | {f"rhs{name}": t for name, t in right.items()}
        given |= {"group_sizes": sizes, "into": out if accumulate else None}
        held = [given.get(slot) for slot in SLOTS["grouped_matmul"]]
        addresses = [0 if t is None else t.data_ptr() for t in (*held, out, workspace)]

        def thunk(i: int, alive: object = (held, workspace)) -> torch.Tensor:
            plan.launch(addresses, torch.cuda.current_stream().cuda_stream)
            return out

        return thunk

    return build


def deep_gemm(work: Work) -> harness.Thunk:
    """DeepGEMM's grouped GEMMs, 1x128 by 128x128, and for weight gradients 1x128 by 1x128, added to float32.

    Before timing, groups are padded to 128 rows, and scales get the layout that its kernels read. For weight gradients
    it wants the sizes on the host.
    """
    import deep_gemm as peer

    case, laid_out = work.case, peer.get_mn_major_tma_aligned_tensor
    padded = [-(-size // 128) * 128 for size in case.sizes]
    rows, blocks = sum(padded), -(-work.depth // 128)
    if work.product == "wgrad":
        lhs, rhs = ((codes(rows * width), scales(rows // 128, width).T) for width in (case.k, case.n))
        total = torch.zeros((case.groups, case.k, case.n), device="cuda")
        sizes = torch.tensor(padded, dtype=torch.int32, device="cuda")
        return tried(lambda: lambda i: peer.k_grouped_fp8_gemm_nt_contiguous(lhs, rhs, total, padded, sizes, total))
    of_row = torch.repeat_interleave(torch.arange(case.groups), torch.tensor(padded)).to("cuda", torch.int32)
    lhs = (codes(rows, work.depth), laid_out(scales(rows, blocks)))
    rhs = (codes(case.groups, work.width, work.depth), scales(case.groups, -(-work.width // 128), blocks))
    out = torch.empty((rows, work.width), dtype=torch.bfloat16, device="cuda")
    return tried(lambda: lambda i: peer.m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, of_row))


FAST = FP8Current.replace(accumulate="fast")
CANDIDATES: dict[str, Callable[[Work], harness.Thunk]] = {
    "dense": dense,
    "ours, groups, fast": ours(FAST),
    "ours, groups": ours(FP8Current),
    "ours, groups, across": ours(FP8Current, across=True),
    "ours, blocks": ours(FP8Block),
    "ours, groups, float32": ours(FP8Current, "float32"),
    "ours, groups, float32 +=": ours(FP8Current, "float32", accumulate=True),
    "ours, blocks, float32": ours(FP8Block, "float32"),
    "ours, blocks, float32 +=": ours(FP8Block, "float32", accumulate=True),
    "torch grouped, fast": torch_grouped(True),
    "torch grouped": torch_grouped(False),
    "DeepGEMM": deep_gemm,
}
"""Candidates by name; "dense" is the upper bound of every row."""


def prepare(case: cases.Case, product: str, names: Sequence[str]) -> harness.Block:
    """All candidates on one GEMM of one problem."""
    work = Work(case, product)

    def made(name: str) -> harness.Thunk:
        thunk = CANDIDATES[name](work)
        thunk(0)
        return thunk

    thunks, skipped = usable(names, made)
    return harness.Block(case.name, product, "e4m3", names, thunks, skipped, work.flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", help="names of problems in tests/cases.py; default: all for a GPU")
    parser.add_argument("--products", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--candidates", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--budget", type=float, default=20.0, help="seconds per block of the table")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--steady", type=float, metavar="SECONDS", help="time each candidate in runs of so many seconds"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = list(dict.fromkeys(["dense", *options.candidates]))
    protocol = {"clock": harness.cuda_clock, "rounds": options.rounds, "budget_s": options.budget}
    if options.steady is not None:
        protocol = harness.steady(options.steady)
    rows = []
    for case in cases.select("bench"):
        if options.cases and case.name not in options.cases:
            continue
        for product in options.products:
            block = prepare(case, product, names).rows(**protocol)
            print(harness.table([row for row in block if row.timing is not None]), flush=True)
            rows += block
            torch.cuda.empty_cache()
    for row in {row.candidate: row for row in rows if row.timing is None}.values():
        print(f"skipped {row.candidate}: {row.skipped}")
    print(harness.machine())
    if options.json:
        harness.save(rows, options.json, copy_bytes_per_s=harness.copy_rate("cuda"))


if __name__ == "__main__":
    main()
