"""Candidates of the grouped products behind one signature: ours through both faces, and the peers.

A candidate is built for a `Work` and returns a thunk, or raises `MissingError` with the reason why it cannot take part.
Letters: G groups, M rows, K in, N out. Weights are held in both layouts, [G, K, N] and [G, N, K]; each peer is given
the one that suits it best.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import torch

from benchmarks.harness import Thunk

PRODUCTS = ("forward", "dgrad", "wgrad")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MissingError(Exception):
    """A candidate cannot take part; the text says why."""


@dataclass
class Work:
    """One product on one problem, with `sets` copies of its operands.

    Attributes:
        product: "forward" y = x W, "dgrad" dx = dy W^T, "wgrad" dW = x^T dy.
        x [M, K], dy [M, N], w_kn [G, K, N], w_nk [G, N, K]: tensors, one a set.
        sizes: int32 [G] on the device, and the same as a list.
    """

    product: str
    dtype: str
    sizes: list[int]
    x: list[torch.Tensor]
    dy: list[torch.Tensor]
    w_kn: list[torch.Tensor]
    w_nk: list[torch.Tensor]
    device_sizes: torch.Tensor

    @property
    def flops(self) -> float:
        """Useful operations: rows of groups only."""
        return 2.0 * sum(self.sizes) * self.x[0].shape[1] * self.dy[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.x[0].device

    def ends(self) -> list[int]:
        """End row of every group."""
        return np.cumsum(self.sizes).tolist()

    def jax(self, tensors: list[torch.Tensor]) -> list[Any]:
        """The tensors as JAX arrays on the matching device."""
        import jax
        import jax.numpy as jnp

        if self.device.type == "cuda":
            return [jax.dlpack.from_dlpack(t.contiguous()) for t in tensors]
        carrier = {"bfloat16": (torch.int16, ml_dtypes.bfloat16)}.get(self.dtype)
        if carrier and tensors[0].dtype == torch.bfloat16:
            return [jnp.asarray(t.view(carrier[0]).numpy().view(carrier[1])) for t in tensors]
        return [jnp.asarray(t.numpy()) for t in tensors]


def make_work(product: str, dtype: str, sizes: list[int], rows: int, k: int, n: int, device: str, sets: int) -> Work:
    """Random normal operands with a fixed seed; weights scaled so that results have unit variance."""
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(TORCH_DTYPES[dtype])

    groups = len(sizes)
    x = [normal(rows, k) for _ in range(sets)]
    dy = [normal(rows, n) for _ in range(sets)]
    w_kn = [normal(groups, k, n, scale=k**-0.5) for _ in range(sets)]
    w_nk = [w.transpose(1, 2).contiguous() for w in w_kn]
    return Work(product, dtype, sizes, x, dy, w_kn, w_nk, torch.tensor(sizes, dtype=torch.int32, device=device))


def reference(work: Work) -> torch.Tensor:
    """The product of set 0 in float64, group by group."""
    x, dy, w = work.x[0].double(), work.dy[0].double(), work.w_kn[0]
    starts = [0, *work.ends()[:-1]]
    spans = [slice(a, b) for a, b in zip(starts, work.ends(), strict=True)]
    if work.product == "wgrad":
        return torch.stack([x[s].T @ dy[s] for s in spans])
    out = torch.zeros(
        x.shape[0], (dy if work.product == "forward" else x).shape[1], dtype=torch.float64, device=x.device
    )
    for g, s in enumerate(spans):
        out[s] = x[s] @ w[g].double() if work.product == "forward" else dy[s] @ w[g].double().T
    return out


def dense(work: Work) -> Thunk:
    """The upper bound: one ungrouped product of the same operations (same contracted length, rows of groups)."""
    rows = sum(work.sizes)
    if work.device.type == "cpu" and work.dtype == "float16":  # no CPU multiplies fp16: fp32 is what can be reached
        parts = [[t.float() for t in side] for side in (work.x, work.dy, work.w_kn, work.w_nk)]
        work = replace(work, x=parts[0], dy=parts[1], w_kn=parts[2], w_nk=parts[3])
    x, dy = [t[:rows] for t in work.x], [t[:rows] for t in work.dy]
    if work.product == "forward":
        return lambda i: x[i] @ work.w_kn[i][0]
    if work.product == "dgrad":
        return lambda i: dy[i] @ work.w_nk[i][0]
    return lambda i: x[i].T @ dy[i]


def ours_torch(layout: str, implementation: str | None = None) -> Callable[[Work], Thunk]:
    """Ours from eager PyTorch, for weights [G, N, K] ("nk") or [G, K, N] ("kn"); a gradient alone is a backward."""

    def build(work: Work) -> Thunk:
        import torch_bridge

        transposed = layout == "nk"
        weights = work.w_nk if transposed else work.w_kn

        def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch_bridge.grouped_linear(
                x, w, work.device_sizes, rhs_transposed=transposed, implementation=implementation
            )

        def forward(i: int) -> torch.Tensor:
            return call(work.x[i], weights[i])

        if work.product == "forward":
            return forward
        x, w = work.x, weights
        if work.product == "dgrad":
            x = [t.detach().requires_grad_() for t in x]
        else:
            w = [t.detach().requires_grad_() for t in w]
        wanted = x if work.product == "dgrad" else w
        results = [call(a, b) for a, b in zip(x, w, strict=True)]
        return lambda i: torch.autograd.grad(results[i], wanted[i], work.dy[i], retain_graph=True)[0]

    return build


def ours_accumulating(work: Work) -> Thunk:
    """The weight gradient added to a float32 accumulator in place, from eager PyTorch, weights [G, N, K]."""
    import torch_bridge

    if work.product != "wgrad":
        raise MissingError("only weight gradients accumulate")
    total = torch.zeros(work.w_nk[0].shape, dtype=torch.float32, device=work.device)
    w = [t.detach().requires_grad_() for t in work.w_nk]
    results = [
        torch_bridge.grouped_linear(a, b, work.device_sizes, wgrad_accum=total) for a, b in zip(work.x, w, strict=True)
    ]

    def thunk(i: int) -> torch.Tensor:
        torch.autograd.backward(results[i], work.dy[i], retain_graph=True)
        return total

    total.zero_()
    return thunk


def _jax_product(work: Work, ragged_dot: Callable[..., Any], transposed: bool) -> Thunk:
    import jax

    weights = work.jax(work.w_nk if transposed else work.w_kn)
    x, dy = work.jax(work.x), work.jax(work.dy)
    sizes = work.jax([work.device_sizes])[0]

    def pulled(argument: int) -> Callable[..., Any]:
        def gradient(lhs: Any, rhs: Any, cotangent: Any) -> Any:
            primal = (lhs, rhs)[argument]

            def run(value: Any) -> Any:
                operands = (value, rhs) if argument == 0 else (lhs, value)
                return ragged_dot(*operands, sizes)

            return jax.vjp(run, primal)[1](cotangent)[0]

        return jax.jit(gradient)

    forward = jax.jit(lambda lhs, rhs: ragged_dot(lhs, rhs, sizes))
    functions = {
        "forward": lambda i: forward(x[i], weights[i]),
        "dgrad": (lambda g: lambda i: g(x[i], weights[i], dy[i]))(pulled(0)),
        "wgrad": (lambda g: lambda i: g(x[i], weights[i], dy[i]))(pulled(1)),
    }
    function = functions[work.product]
    return lambda i: function(i).block_until_ready()


def ours_jax(layout: str) -> Callable[[Work], Thunk]:
    """Ours from JAX, jitted; under grad only the asked product runs (the others are dead code)."""

    def build(work: Work) -> Thunk:
        import jax_grouped

        transposed = layout == "nk"
        return _jax_product(
            work, lambda a, b, s: jax_grouped.ragged_dot(a, b, s, rhs_transposed=transposed), transposed
        )

    return build


def lax_ragged_dot(work: Work) -> Thunk:
    """`jax.lax.ragged_dot`, jitted."""
    import jax

    return _jax_product(work, jax.lax.ragged_dot, False)


def jax_loop(work: Work) -> Thunk:
    """A static loop of `jnp.dot` over the groups: sizes are compile-time constants."""
    import jax.numpy as jnp

    if len(work.sizes) > 64 or work.device.type != "cpu":
        raise MissingError("a static loop over this many groups is not what anybody would run")
    starts = np.cumsum([0, *work.sizes])

    def loop(lhs: Any, rhs: Any, s: Any) -> Any:
        parts = [lhs[a:b] @ rhs[g] for g, (a, b) in enumerate(itertools.pairwise(starts)) if b > a]
        tail = jnp.zeros((lhs.shape[0] - starts[-1], rhs.shape[2]), lhs.dtype)
        return jnp.concatenate([*parts, tail])

    return _jax_product(work, loop, False)


def torch_grouped_mm(work: Work) -> Thunk:
    """`torch.nn.functional.grouped_mm` with weights stored K-major, its better layout."""
    function = getattr(torch.nn.functional, "grouped_mm", None)
    if function is None:
        raise MissingError("torch.nn.functional.grouped_mm is not in this PyTorch")
    offsets = torch.cumsum(work.device_sizes, 0).to(torch.int32)
    calls = {
        "forward": lambda i: function(work.x[i], work.w_nk[i].transpose(1, 2), offs=offsets),
        "dgrad": lambda i: function(work.dy[i], work.w_kn[i].transpose(1, 2), offs=offsets),
        "wgrad": lambda i: function(work.x[i].T, work.dy[i], offs=offsets),
    }
    thunk = calls[work.product]
    try:
        thunk(0)
    except (RuntimeError, ValueError) as error:
        raise MissingError(str(error).splitlines()[0][:90]) from None
    return thunk


def torch_loop(work: Work) -> Thunk:
    """A loop of `torch.matmul` over the groups, sizes known on the host, results written in place."""
    starts = np.cumsum([0, *work.sizes]).tolist()
    spans = [(g, slice(a, b)) for g, (a, b) in enumerate(itertools.pairwise(starts)) if b > a]

    def forward(i: int) -> torch.Tensor:
        out = work.x[i].new_zeros(work.dy[i].shape)
        for g, s in spans:
            torch.mm(work.x[i][s], work.w_nk[i][g].T, out=out[s])
        return out

    def dgrad(i: int) -> torch.Tensor:
        out = work.x[i].new_zeros(work.x[i].shape)
        for g, s in spans:
            torch.mm(work.dy[i][s], work.w_kn[i][g].T, out=out[s])
        return out

    def wgrad(i: int) -> torch.Tensor:
        out = torch.zeros_like(work.w_kn[i])
        for g, s in spans:
            torch.mm(work.x[i][s].T, work.dy[i][s], out=out[g])
        return out

    return {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}[work.product]


CANDIDATES: dict[str, Callable[[Work], Thunk]] = {
    "dense": dense,
    "ours, torch, [G,N,K]": ours_torch("nk"),
    "ours, torch, [G,K,N]": ours_torch("kn"),
    "ours, portable, [G,N,K]": ours_torch("nk", "reference"),
    "ours, torch, fp32 +=": ours_accumulating,
    "ours, jax, [G,K,N]": ours_jax("kn"),
    "ours, jax, [G,N,K]": ours_jax("nk"),
    "lax.ragged_dot": lax_ragged_dot,
    "jnp.dot loop": jax_loop,
    "torch grouped_mm": torch_grouped_mm,
    "torch loop": torch_loop,
}
"""Candidates by name; "dense" is the bound of every row."""

TRANSPOSED = frozenset(name for name in CANDIDATES if "[G,N,K]" in name or "fp32 +=" in name)
"""Candidates whose weight gradients are [G, N, K]."""
