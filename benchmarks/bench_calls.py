"""Which CUDA runtime calls do our calls make: launches and memsets, or also copies, allocations and waits?

    python benchmarks/bench_calls.py

PyTorch: the profiler counts the runtime and driver calls of a warm step, for our functions and PyTorch's own. JAX: a
profiler disables CUDA graphs, so XLA's log of its command-buffer pass is read instead; it says which calls became nodes
of a graph, and how often graphs were launched. The exit status is 1 if one of our calls waits, copies or allocates, or
stays outside a graph.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import torch_bridge
from benchmarks import harness

ROWS, GROUPS, K, N = 1024, 4, 256, 320
FORBIDDEN = ("Synchronize", "Memcpy", "Malloc", "Free", "EventQuery", "StreamQuery", "WaitEvent")
LAUNCH = "Launch"


def counted(step: Callable[[], object]) -> collections.Counter[str]:
    """Runtime and driver calls of a warm step, up to its last launch, because the profiler itself ends with a wait."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        step()
    events = sorted(seen.events() or [], key=lambda e: e.time_range.start)
    names = [e.name for e in events if re.match(r"cu(da)?[A-Z]\w*$", e.name)]
    last = max((i for i, name in enumerate(names) if LAUNCH in name), default=-1)
    if last < 0:
        raise RuntimeError(f"the profiler saw no launch, only {names}; expected one per step: is CUPTI available?")
    return collections.Counter(names[: last + 1])


def steps() -> dict[str, Callable[[], object]]:
    """Steps by name; those that begin with "ours" must not wait, copy or allocate."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, w = normal(ROWS, K).requires_grad_(), normal(GROUPS, N, K).requires_grad_()
    members = [member.detach().requires_grad_() for member in w.unbind(0)]
    bias, dy = normal(GROUPS, N).requires_grad_(), normal(ROWS, N)
    scale = torch.rand(ROWS, device="cuda").requires_grad_()
    total = torch.zeros(w.shape, device="cuda")
    sizes = torch.tensor([100, 0, 527, 300], device="cuda", dtype=torch.int32)
    offsets = torch.cumsum(sizes, 0).to(torch.int32)
    linear = torch_bridge.grouped_linear

    def accumulate() -> None:
        linear(x, w, sizes, wgrad_accum=total).backward(dy)

    def every_gradient() -> object:
        y = linear(x, w, sizes, bias=bias, row_scale=scale)
        return torch.autograd.grad(y, (x, w, bias, scale), dy)

    return {
        "ours, forward": lambda: linear(x.detach(), w.detach(), sizes),
        "ours, forward and backward": lambda: torch.autograd.grad(linear(x, w, sizes), (x, w), dy),
        "ours, bias, row scale, all gradients": every_gradient,
        "ours, a list of weights": lambda: torch.autograd.grad(linear(x, members, sizes), (x, *members), dy),
        "ours, added to a float32 buffer": accumulate,
        "F.grouped_mm, forward and backward": lambda: torch.autograd.grad(
            torch.nn.functional.grouped_mm(x, w.transpose(1, 2), offs=offsets), (x, w), dy
        ),
    }


def of_torch() -> bool:
    """Prints the counts and returns whether ours are clean."""
    clean = True
    for name, step in steps().items():
        calls = counted(step)
        found = {call: count for call, count in sorted(calls.items()) if any(word in call for word in FORBIDDEN)}
        verdict = "" if not name.startswith("ours") else f"   FORBIDDEN: {found}" if found else "   clean"
        print(f"{name:<40}" + ", ".join(f"{call} {count}" for call, count in sorted(calls.items())) + verdict)
        clean &= not (found and name.startswith("ours"))
    return clean


RUNS = 5
PROGRAM = f"""
import jax, jax.numpy as jnp, jax_grouped
x = jax.random.normal(jax.random.key(0), ({ROWS}, {K}), jnp.bfloat16)
w = jax.random.normal(jax.random.key(1), ({GROUPS}, {K}, {N}), jnp.bfloat16)
v = jax.random.normal(jax.random.key(2), ({GROUPS}, {N}, {K}), jnp.bfloat16)
sizes = jnp.array([100, 0, 527, 300], jnp.int32)
def loss(x, w, v):
    h = jax_grouped.ragged_dot(x, w, sizes)
    return jax_grouped.ragged_dot(h, v, sizes).astype(jnp.float32).sum()
step = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, w, v).compile()
print(step.as_text())
for _ in range({RUNS}):
    jax.block_until_ready(step(x, w, v))
"""
LOG = {
    "XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TF_CPP_MIN_LOG_LEVEL": "0",
    "TF_CPP_MAX_VLOG_LEVEL": "0",
    "TF_CPP_VMODULE": "command_buffer_conversion_pass=3,command_buffer_thunk=3",
    "PYTHONPATH": str(Path(__file__).parents[1]),
}
OURS = re.compile(r"%?([\w.\-]+) = [^\n]* custom-call\([^\n]*custom_call_target=\"jg_")
GRAPH = re.compile(r"Creating command buffer thunk.* with the following thunks: (.*)")
RUN = re.compile(r"Execute command buffer")


def of_jax() -> bool:
    """Prints what XLA logs for a forward and backward of two GEMMs; returns whether all of ours are in graphs."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env={**os.environ, **LOG})
    if done.returncode:
        raise RuntimeError(f"the program in JAX failed:\n{done.stderr[-2000:]}")
    ours = OURS.findall(done.stdout)
    log = done.stderr
    graphs = [(found.start(), found[1].split(", ")) for found in GRAPH.finditer(log)]
    graphs = [(at, graph) for at, graph in graphs if set(ours) & set(graph)]  # without the graphs of the set-up
    inside = [name for name in ours if any(name in graph for _, graph in graphs)]
    launches = len(RUN.findall(log[graphs[0][0] :])) if graphs else 0
    print(f"jax: {len(ours)} calls of ours, {len(inside)} of them in {len(graphs)} graph: {', '.join(ours)}")
    print(f"jax: {launches} graph launches in {RUNS} runs; the first run warms up, call by call")
    if len(inside) < len(ours):
        print("\n".join(line for line in log.splitlines() if "command" in line.lower())[:4000])
    return bool(ours) and len(inside) == len(ours) and launches > 0


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    clean = of_torch()
    graphed = of_jax()
    print(harness.machine())
    return int(not (clean and graphed))


if __name__ == "__main__":
    sys.exit(main())
