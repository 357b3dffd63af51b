"""What does it cost to offload activations to host memory, and how many of the copies does the computation hide?

    python benchmarks/bench_offload.py

Measures forward and backward of a stack of `GroupedMLP`s with and without `cpu_offload` around each, interleaved. The
bound is the time with perfect overlap: in forward the longer of the computation and the copies to the host, in backward
the longer of the computation and the copies back.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import harness
from torch_bridge import _transfer, nn
from torch_bridge.offload import cpu_offload


def milliseconds(run: Callable[[], Any]) -> float:
    """Device time of one call."""
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def rate(to: torch.Tensor, of: torch.Tensor) -> float:
    """Rate in GB/s of a copy that runs alone."""
    return of.nbytes / median([milliseconds(lambda: to.copy_(of, non_blocking=True)) for _ in range(5)]) / 1e6


def moved_bytes(run: Callable[[], Any]) -> tuple[int, int]:
    """Returns (bytes to the host, bytes back) of one call, counted where the copies are made."""
    down = up = 0
    send, start = _transfer.Moved.__init__, _transfer.Moved.start

    def counted_send(self: Any, tensor: torch.Tensor, retain: bool) -> None:
        nonlocal down
        down += tensor.nbytes
        send(self, tensor, retain)

    def counted_start(self: Any) -> None:
        nonlocal up
        up += 0 if self._device is not None else self._host.nbytes
        start(self)

    _transfer.Moved.__init__, _transfer.Moved.start = counted_send, counted_start
    try:
        run()
    finally:
        _transfer.Moved.__init__, _transfer.Moved.start = send, start
    return down, up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16384, help="routed rows of each layer (default: %(default)s)")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--mlp-dim", type=int, default=7168)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_default_device("cuda")
    shape = (options.groups, options.hidden, options.mlp_dim)
    kinds: dict[str, Any] = {"dtype": torch.bfloat16, "single_grouped_weight": True}
    layers: list[Any] = [nn.GroupedMLP(*shape, **kinds) for _ in range(options.layers)]
    x = torch.randn(options.rows, options.hidden).to(torch.bfloat16).requires_grad_()
    sizes = torch.full((options.groups,), options.rows // options.groups, dtype=torch.int32)
    probs, dy = torch.rand(options.rows), torch.randn_like(x)
    weights = [each for layer in layers for each in layer.parameters()]
    for weight in weights:  # gradients are added in place, so that they do not count in the memory compared
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.bfloat16)
    for layer in layers:
        layer.linear_fc1.accumulate_into_main_grad = layer.linear_fc2.accumulate_into_main_grad = True

    def forward(**keywords: Any) -> torch.Tensor:
        y = x
        for layer in layers:
            with cpu_offload(enabled=bool(keywords), retain_pinned=True, **keywords):
                y = layer(y, sizes, probs)
        return y

    def step(**keywords: Any) -> None:
        forward(**keywords).backward(dy)
        x.grad = None

    variants: dict[str, Callable[[], None]] = {
        "on the device": step,
        "grouped_x": lambda: step(names={"grouped_x"}),
        "grouped_fc1": lambda: step(names={"grouped_fc1"}),
        "both": lambda: step(names=None),
        "both, prefetch 2": lambda: step(names=None, prefetch=2),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    facts: dict[str, tuple[int, int, int]] = {}
    for name, run in variants.items():
        run()
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        facts[name] = (*moved_bytes(run), torch.cuda.max_memory_allocated() - before)
    for _ in range(options.rounds):
        for name, run in variants.items():
            times[name].append(milliseconds(run))

    block = torch.empty(256 << 20, dtype=torch.uint8)
    host = torch.empty(256 << 20, dtype=torch.uint8, device="cpu", pin_memory=True)
    rates = [rate(host, block), rate(block, host)]
    base, ahead = median(times["on the device"]), median([milliseconds(forward) for _ in range(options.rounds)])
    print(f"the link alone: {rates[0]:.1f} GB/s to the host, {rates[1]:.1f} GB/s back")
    print(f"computation alone: {ahead:.1f} ms forward, {base - ahead:.1f} ms backward")
    head = ("ms", "down GB", "up GB", "copies alone ms", "bound ms", "bound / ms", "peak MiB")
    print(f"{'moved':<18}" + "".join(f"{each:>17}" for each in head))
    for name in variants:
        down, up, peak = facts[name]
        ms, down_ms, up_ms = median(times[name]), down / rates[0] / 1e6, up / rates[1] / 1e6
        bound = max(ahead, down_ms) + max(base - ahead, up_ms)
        row = (ms, down / 1e9, up / 1e9, down_ms + up_ms, bound, bound / ms, peak / 2**20)
        print(f"{name:<18}" + "".join(f"{each:>17.2f}" for each in row))
    print(harness.machine())


if __name__ == "__main__":
    main()
