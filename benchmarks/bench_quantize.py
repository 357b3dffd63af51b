"""Which share of the rate of a device copy do quantising and dequantising reach?

    python benchmarks/bench_quantize.py                      # on a GPU
    python benchmarks/bench_quantize.py --formats mxfp8 --cases C
    python benchmarks/bench_quantize.py --cases D --gathered 8 --formats fp8_tensor_delayed fp8_1x128
    python benchmarks/bench_quantize.py --dtype float32 --weights --lists 64 4096
    python benchmarks/bench_quantize.py --device cpu --cases cpu

The bytes of a candidate are what it must read and write: the valid rows of the source, and the codes and scales of
whole results. The bound is a copy of the size of the source, timed in the same run and interleaved with the candidates
of a case. With `--gathered k` rows are also those of a k-th as many tokens, in a random order: gathered by what
quantises them, and by a pass before it, whose time is then part of the row. `--lists` gives the numbers of listed
weights, each allocated separately and also measured packed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import harness
from grouped_core import _native, calls, plans, routing_calls
from grouped_core.calls import SLOTS, ArraySpec, Call
from grouped_core.formats import FORMATS, Format
from tests import cases
from torch_bridge._memory import EXCHANGE, address_table

FORMS = {"rows": (True, False), "cross": (False, True), "both": (True, True)}
DELAYED = FORMATS["fp8_tensor"].replace(name="fp8_tensor_delayed", delayed=True)
ROTATED = FORMATS["nvfp4"].replace(name="nvfp4_rotate_stochastic", rotate=True, stochastic=True)
FROM_ONE = DELAYED.replace(name="fp8_tensor_delayed_from_one", starts_at_one=True)
"""Without the launch that looks for groups that are not initialised."""
CHOICES = {f.name: f for f in (*FORMATS.values(), DELAYED, FROM_ONE, ROTATED) if not f.plain}
ROWS = ("fp8_1x128", "fp8_tensor", "fp8_tensor_delayed", "mxfp8", "nvfp4", "nvfp4_rotate_stochastic")
WEIGHTS = ("fp8_128x128", "mxfp8", "nvfp4_2d")
LISTED = ("fp8_tensor", "fp8_tensor_delayed", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_2d")
WITHOUT_COLUMNS = ("mxfp4",)
"""Formats whose column form has no bandwidth-bound kernel."""
TORCH_BYTES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclasses.dataclass
class Launch:
    """A planned call with its buffers."""

    run: Callable[[int], Any]
    bytes: int  # bytes that it reads and writes
    kernel: str
    results: list[torch.Tensor | None]


def memory(spec: ArraySpec, device: str) -> torch.Tensor:
    """Allocates the bytes of `spec`, 256-byte aligned."""
    count = cases.numpy_dtype(spec.dtype).itemsize
    for axis in spec.shape:
        count *= axis
    return torch.zeros(max(count, 1), dtype=torch.uint8, device=device)


def launch(call: Call, device: str, **operands: torch.Tensor | None) -> Launch:
    """Plans `call` on these operands; results and workspace are allocated once."""
    arch = _native.device_arch(0) if device == "cuda" else "cpu"
    plan = plans.plan(call, arch)
    results = [None if spec is None else memory(spec, device) for spec in call.outputs]
    slots = [operands.get(slot) for slot in SLOTS[call.name]]
    for slot, result in call.aliases:
        slots[slot] = results[result]
    workspace = torch.empty(plan.workspace_bytes + 1, dtype=torch.uint8, device=device)
    held = [*slots, *results, workspace]
    addresses = [0 if each is None else each.data_ptr() for each in held]
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else 0

    def run(_: int) -> Any:
        plan.launch(addresses, stream)
        return held

    moved = sum(each.nbytes for each in (*slots, *results) if each is not None)
    return Launch(run, moved, plan.kernel, results)


def quantizer(
    source: torch.Tensor | list[torch.Tensor],
    format: Format,
    form: str,
    sizes: torch.Tensor | None,
    places: torch.Tensor | None = None,
) -> Launch:
    """Quantises rows (with `sizes`), or weights as one packed tensor or a list; `places` gathers rows of tokens."""
    first = source[0] if isinstance(source, list) else source
    device, dtype = first.device.type, str(first.dtype).removeprefix("torch.")
    spec = ArraySpec((len(source), *first.shape) if isinstance(source, list) else tuple(first.shape), dtype)
    groups = spec.shape[0] if sizes is None else sizes.shape[0]
    call = calls.quantize(
        *(spec, format, FORMS[form], None if sizes is None else ArraySpec((groups,), "int32")),
        table=isinstance(source, list),
        scale=format.delayed,
        amax=format.delayed,
        key=format.stochastic,
        gather=None if places is None else (places.shape[0], places.shape[0] // spec.shape[0]),
    )
    more: dict[str, torch.Tensor] = {}
    if format.delayed:
        more["scale"] = torch.full((groups,), 64.0, device=device)
    if format.stochastic:
        more["key"] = torch.tensor([1, 2], dtype=torch.int32, device=device)
    if not isinstance(source, list):
        return launch(call, device, source=source, group_sizes=sizes, places=places, **more)
    table = address_table(EXCHANGE.addresses(source), -1 if first.device.index is None else first.device.index)
    made = launch(call, device, source_table=table, **more)
    moved = made.bytes + sum(each.nbytes for each in source)
    return dataclasses.replace(made, run=lambda i: (made.run(i), source), bytes=moved)  # keeps the members alive


def dequantizer(source: torch.Tensor, format: Format, form: str, sizes: torch.Tensor | None) -> Launch:
    """Dequantises the results of `quantizer`."""
    made = quantizer(source, format, form, sizes)
    made.run(0)
    dtype = str(source.dtype).removeprefix("torch.")
    cross = form == "cross"
    groups = source.shape[0] if sizes is None else sizes.shape[0]
    axis = source.ndim - 2 if cross else source.ndim - 1
    spec = calls.spec_in_format(format, tuple(source.shape), axis, dtype, groups)
    call = calls.dequantize(spec, None if sizes is None else ArraySpec((groups,), "int32"), dtype)
    values, scales, group_scales = made.results[3:6] if cross else made.results[:3]
    named = {"values": values, "scales": scales, "group_scales": group_scales}
    return launch(call, source.device.type, group_sizes=sizes, **named)


def gathered(
    source: torch.Tensor, slots: int, sizes: torch.Tensor, args: argparse.Namespace
) -> dict[str, tuple[Launch, ...]]:
    """Quantises rows of tokens, `slots` of each, as many as `source` has: in one pass, and in two."""
    tokens, device = source[: source.shape[0] // slots], source.device.type
    count, dtype = tokens.shape[0] * slots, str(source.dtype).removeprefix("torch.")
    places = torch.randperm(count, device=device).int()
    inverse = torch.empty_like(places)
    inverse[places.long()] = torch.arange(count, device=device, dtype=torch.int32)
    specs = (ArraySpec(tuple(tokens.shape), dtype), ArraySpec((count,), "int32"), slots, None)
    call = routing_calls.gather_rows(*specs, ArraySpec((tokens.shape[0], slots), "int32"))
    gather = launch(call, device, rows=tokens, source=places, places=inverse)
    rows = gather.results[0]
    assert rows is not None, "gather_rows has one result"
    rows, made = rows.view(source.dtype).view(count, -1), {}
    for name in args.formats or ROWS:
        if not CHOICES[name].gathers or not CHOICES[name].segment:
            continue
        for form in FORMS:
            made[f"{name}, {form}, gathered"] = (quantizer(tokens, CHOICES[name], form, sizes, places),)
            made[f"{name}, {form}, gathered before"] = (gather, quantizer(rows, CHOICES[name], form, sizes))
    return made


def in_turn(launches: tuple[Launch, ...]) -> Launch:
    """One launch after the other; named after the last."""

    def run(index: int) -> list[Any]:
        return [each.run(index) for each in launches]

    return Launch(run, sum(each.bytes for each in launches), launches[-1].kernel, launches[-1].results)


def of_lists(case: cases.Case, count: int, device: str, args: argparse.Namespace) -> dict[str, Launch]:
    """Quantises `count` separately allocated weights, and the same weights packed.

    Together they are about as large as the case's weights, in whole tiles of 128 x 128, with at most 2^28 values.
    """
    tall = max(1, case.groups * case.k // count // 128) * 128
    width = min(case.n, max(1, 2**28 // (count * tall) // 128) * 128)
    members = [torch.randn(tall, width, device=device).to(TORCH_BYTES[args.dtype]) for _ in range(count)]
    packed, made = torch.stack(members), {}
    for name in args.formats or LISTED:
        for form in FORMS if name in LISTED else ():
            if form != "rows" and name in WITHOUT_COLUMNS:
                continue
            made[f"{count} listed {name}, {form}"] = quantizer(members, CHOICES[name], form, None)
            made[f"{count} packed {name}, {form}"] = quantizer(packed, CHOICES[name], form, None)
    return made


def compiled_rows(source: torch.Tensor) -> Callable[[int], Any]:
    """1x128 in row form as torch.compile generates it: with float32 scales, ignoring groups."""

    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = x.float().view(x.shape[0], -1, 128)
        scale = 448.0 / blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12)
        return (blocks * scale).to(torch.float8_e4m3fn).view(x.shape), 1 / scale.squeeze(-1)

    compiled = torch.compile(quantize)
    return lambda _: compiled(source)


def rows_of(case: cases.Case, device: str, args: argparse.Namespace) -> list[harness.Row]:
    """The candidates for one case's rows x [M, K] and weights [G, K, N]."""
    torch.manual_seed(0)
    source = torch.randn(case.rows, case.k, device=device).to(TORCH_BYTES[args.dtype])
    sizes = torch.tensor(case.sizes, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    made: dict[str, Launch] = {}
    for name in args.formats or ROWS:
        format = CHOICES[name]
        if format.square or not format.segment:
            continue
        for form in FORMS:
            made[f"{name}, {form}"] = quantizer(source, format, form, sizes)
        if not (format.stochastic or format.delayed):
            for form in ("rows", "cross"):
                made[f"{name}, {form}, back"] = dequantizer(source, format, form, sizes)
    if args.weights:
        weights = torch.randn(case.groups, case.k, case.n, device=device, dtype=TORCH_BYTES[args.dtype])
        for name in args.formats or WEIGHTS:
            for form in FORMS if name in WEIGHTS else ():
                made[f"W {name}, {form}"] = quantizer(weights, CHOICES[name], form, None)
    if args.gathered:
        made |= {name: in_turn(each) for name, each in gathered(source, args.gathered, sizes, args).items()}
    for count in args.lists:
        made |= of_lists(case, count, device, args)
    thunks: dict[str, Callable[[int], Any]] = {"copy": lambda _: target.copy_(source)}
    thunks |= {name: each.run for name, each in made.items()}
    if args.compiled:
        thunks["torch.compile, fp8_1x128, rows"] = compiled_rows(source)
    clock = harness.cuda_clock if device == "cuda" else harness.cpu_clock
    timings = harness.measure(thunks, clock=clock, rounds=args.rounds, budget_s=args.budget)
    copy_rate = 2 * source.nbytes / timings["copy"].median_us
    rows = []
    for name, timing in timings.items():
        each = made.get(name)
        moved = each.bytes if each else 2 * source.nbytes if name == "copy" else source.nbytes * 3 // 2
        label = f"{name}  [{each.kernel.removeprefix('quantize_').removeprefix('dequantize_')}]" if each else name
        gigabytes = moved / timing.median_us / 1e3
        share = moved / timing.median_us / copy_rate
        rows.append(harness.Row(case.name, "quantize", args.dtype, label, timing, gigabytes, share, "copy", None))
    return rows


def table(rows: list[harness.Row]) -> str:
    """Formats the rows: microseconds, spread, GB/s, share of the copy rate."""
    lines = [f"{'case':<10}{'candidate':<52}{'us':>10}{'+-':>6}{'GB/s':>9}{'share':>8}"]
    for r in rows:
        assert r.timing is not None
        lines.append(
            f"{r.case:<10}{r.candidate:<52}{r.timing.median_us:>10.1f}{r.timing.spread:>6.0%}{r.tflops:>9.0f}{r.share:>8.3f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--cases", nargs="+", default=["A", "B", "C"])
    parser.add_argument("--formats", nargs="+", choices=tuple(CHOICES))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(TORCH_BYTES))
    parser.add_argument("--weights", action="store_true", help="measure weights too")
    parser.add_argument(
        "--lists", type=int, nargs="*", default=[], metavar="COUNT", help="lists of so many weights, and packed ones"
    )
    parser.add_argument("--gathered", type=int, default=0, metavar="SLOTS", help="also rows of tokens, so many of each")
    parser.add_argument("--compiled", action="store_true", help="also measure what torch.compile generates")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds per case")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[harness.Row] = []
    for name in args.cases:
        rows += rows_of(cases.named(name), args.device, args)
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(table(rows), flush=True)
    if args.json:
        harness.save(rows, args.json)
    if os.environ.get("GROUPED_DEBUG"):
        print("GROUPED_DEBUG adds checks, and time")


if __name__ == "__main__":
    main()
