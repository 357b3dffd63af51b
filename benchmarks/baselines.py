"""Candidates for the grouped GEMMs behind one signature: ours through both frontends, and other libraries.

A candidate is built for a `Work` and returns a thunk, or raises `MissingError` with the reason why it cannot take part.
Letters: G groups, M rows, K input features, N output features. Weights are held in both layouts, [G, K, N] and
[G, N, K]; each library is given the layout in which it is fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import ml_dtypes
import numpy as np
import torch

from benchmarks.harness import Thunk, cuda_clock

PRODUCTS = ("forward", "dgrad", "wgrad")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MissingError(Exception):
    """A candidate cannot take part; the message gives the reason."""


_Made = TypeVar("_Made")


def usable(names: Iterable[str], make: Callable[[str], _Made]) -> tuple[dict[str, _Made], dict[str, str]]:
    """What `make` returns for each candidate, and the reasons of those that cannot take part."""
    made: dict[str, _Made] = {}
    skipped: dict[str, str] = {}
    for name in names:
        try:
            made[name] = make(name)
        except MissingError as reason:
            skipped[name] = str(reason)
        except (ImportError, OSError) as reason:  # not installed, or its libraries do not load
            skipped[name] = f"cannot be imported: {reason}"
    return made, skipped


def compiled_swiglu() -> Callable[[torch.Tensor], torch.Tensor]:
    """SwiGLU as models write it, compiled anew: programs for earlier problems count towards Dynamo's limit, beyond
    which it compiles none.
    """

    def swiglu(h: torch.Tensor) -> torch.Tensor:
        gate, linear = h.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * linear

    torch.compiler.reset()
    return torch.compile(swiglu, dynamic=False)


@dataclass
class Work:
    """One GEMM on one problem, with `sets` copies of its operands.

    Attributes:
        product: "forward" y = x W, "dgrad" dx = dy W^T, "wgrad" dW = x^T dy.
        x [M, K], dy [M, N], w_kn [G, K, N], w_nk [G, N, K]: tensors, one per set.
        sizes: group sizes as a list; `device_sizes` holds them as int32 [G] on the device.
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
        """Useful operations: only rows that belong to groups count."""
        return 2.0 * sum(self.sizes) * self.x[0].shape[1] * self.dy[0].shape[1]

    @property
    def device(self) -> torch.device:
        return self.x[0].device

    @property
    def bytes(self) -> float:
        """Bytes that must be read or written once: rows that belong to groups, weights of groups that have rows."""
        rows, k, n = sum(self.sizes), self.x[0].shape[1], self.dy[0].shape[1]
        return self.x[0].itemsize * (rows * (k + n) + sum(size > 0 for size in self.sizes) * k * n)

    def ends(self) -> list[int]:
        """End row of every group."""
        return np.cumsum(self.sizes).tolist()

    def jax(self, tensors: list[torch.Tensor]) -> list[Any]:
        """Converts the tensors to JAX arrays on the matching device."""
        import jax
        import jax.numpy as jnp

        if self.device.type == "cuda":
            return [jax.dlpack.from_dlpack(t.contiguous()) for t in tensors]
        carrier = {"bfloat16": (torch.int16, ml_dtypes.bfloat16)}.get(self.dtype)
        if carrier and tensors[0].dtype == torch.bfloat16:
            return [jnp.asarray(t.view(carrier[0]).numpy().view(carrier[1])) for t in tensors]
        return [jnp.asarray(t.numpy()) for t in tensors]


def make_work(product: str, dtype: str, sizes: list[int], rows: int, k: int, n: int, device: str, sets: int) -> Work:
    """Random normal operands with a fixed seed; weights are scaled so that results have unit variance."""
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
    """The result for set 0 in float64, group by group."""
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
    """The upper bound: one dense GEMM with the same operations (same contracted length, rows that belong to groups)."""
    rows = sum(work.sizes)
    if work.device.type == "cpu" and work.dtype == "float16":  # CPUs do not multiply fp16, so the bound is fp32
        parts = [[t.float() for t in side] for side in (work.x, work.dy, work.w_kn, work.w_nk)]
        work = replace(work, x=parts[0], dy=parts[1], w_kn=parts[2], w_nk=parts[3])
    x, dy = [t[:rows] for t in work.x], [t[:rows] for t in work.dy]
    if work.product == "forward":
        return lambda i: x[i] @ work.w_kn[i][0]
    if work.product == "dgrad":
        return lambda i: dy[i] @ work.w_nk[i][0]
    return lambda i: x[i].T @ dy[i]


def dense_tf32(work: Work) -> Thunk:
    """The same GEMM with TF32 allowed in PyTorch; `dense` is IEEE."""
    if work.device.type == "cpu" or work.dtype != "float32":
        raise MissingError("TF32 is a mode of float32 on a GPU")
    thunk, allowed = dense(work), torch.backends.cuda.matmul

    def coarse(i: int) -> torch.Tensor:
        allowed.allow_tf32 = True
        try:
            return thunk(i)
        finally:
            allowed.allow_tf32 = False

    return coarse


PORTABLE_TF32 = "grouped_matmul_tf32_cuda"


def ours_torch(layout: str, implementation: str | None = None, fp32: str = "tf32x3") -> Callable[[Work], Thunk]:
    """Our op in eager PyTorch, for weights [G, N, K] ("nk") or [G, K, N] ("kn"); a gradient is timed as a backward.

    `fp32` is the recipe's float32 mode; other dtypes have only the default.
    """

    def build(work: Work) -> Thunk:
        import torch_bridge

        if fp32 != "tf32x3" and work.dtype != "float32":
            raise MissingError(f"{fp32} is a mode of float32")
        if implementation is not None and work.device.type == "cpu":
            raise MissingError(f"{implementation} is for CUDA")
        recipe = None if fp32 == "tf32x3" else torch_bridge.FP32.replace(fp32=fp32)
        transposed = layout == "nk"
        weights = work.w_nk if transposed else work.w_kn

        def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return torch_bridge.grouped_linear(
                x, w, work.device_sizes, rhs_transposed=transposed, recipe=recipe, implementation=implementation
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
    """The weight gradient added in place to a float32 accumulator, in eager PyTorch, weights [G, N, K]."""
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


class JaxProduct(NamedTuple):
    """One GEMM as a JAX function."""

    function: Callable[..., Any]
    operands: tuple[list[torch.Tensor], ...]  # x or dy, weights, and dy for a gradient: one list of sets each

    def specs(self, work: Work) -> list[Any]:
        """Shapes and dtypes of the function's arguments, for JAX."""
        import jax

        held = (*(sets[0] for sets in self.operands), work.device_sizes)
        return [jax.ShapeDtypeStruct(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in held]


def jax_product(work: Work, ragged_dot: Callable[..., Any], transposed: bool) -> JaxProduct:
    """`work` through `ragged_dot(lhs, rhs, group_sizes)`, with gradients as JAX derives them."""
    import jax

    weights = work.w_nk if transposed else work.w_kn

    def gradient(argument: int) -> Callable[..., Any]:
        def run(lhs: Any, rhs: Any, cotangent: Any, sizes: Any) -> Any:
            def product(value: Any) -> Any:
                return ragged_dot(*((value, rhs) if argument == 0 else (lhs, value)), sizes)

            return jax.vjp(product, (lhs, rhs)[argument])[1](cotangent)[0]

        return run

    if work.product == "forward":
        return JaxProduct(ragged_dot, (work.x, weights))
    return JaxProduct(gradient(PRODUCTS.index(work.product) - 1), (work.x, weights, work.dy))


class Queued:
    """A JAX thunk on a GPU: it returns before its result is ready (`harness.queue_clock`)."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self._call = call

    def __call__(self, i: int) -> Any:
        return self._call(i)


def _jax_thunk(work: Work, product: JaxProduct) -> Thunk:
    import jax

    function: Callable[..., Any] = jax.jit(product.function)
    if work.device.type == "cuda":
        function = jax.jit(product.function).lower(*product.specs(work)).compile()
        needed = function.memory_analysis().temp_size_in_bytes
        state = jax.devices("cuda")[0].memory_stats()  # unused memory of JAX's pool counts as free
        free = torch.cuda.mem_get_info()[0] + state.get("pool_bytes", 0) - state["bytes_in_use"]
        if needed > free:
            raise MissingError(f"needs {needed / 2**30:.0f} GiB of temporaries, {free / 2**30:.0f} GiB are free")
    held = [work.jax(sets) for sets in product.operands]
    (sizes,) = work.jax([work.device_sizes])

    def call(i: int) -> Any:
        return function(*(sets[i] for sets in held), sizes)

    return Queued(call) if work.device.type == "cuda" else lambda i: call(i).block_until_ready()


def _ours_jax(layout: str) -> Callable[[Work], JaxProduct]:
    def build(work: Work) -> JaxProduct:
        import jax_grouped

        transposed = layout == "nk"
        return jax_product(work, partial(jax_grouped.ragged_dot, rhs_transposed=transposed), transposed)

    return build


def _lax(work: Work) -> JaxProduct:
    import jax

    return jax_product(work, jax.lax.ragged_dot, False)


def _tokamax(work: Work) -> JaxProduct:
    import tokamax

    return jax_product(work, tokamax.ragged_dot, False)


JAX_PRODUCTS: dict[str, Callable[[Work], JaxProduct]] = {
    "ours, jax, [G,K,N]": _ours_jax("kn"),
    "ours, jax, [G,N,K]": _ours_jax("nk"),
    "lax.ragged_dot": _lax,
    "tokamax.ragged_dot": _tokamax,
}
"""Candidates whose GEMMs are JAX functions; under grad only the requested GEMM runs (the others are dead code)."""


def jitted(name: str) -> Callable[[Work], Thunk]:
    """One of `JAX_PRODUCTS`, jitted."""

    def build(work: Work) -> Thunk:
        product = JAX_PRODUCTS[name](work)
        return _jax_thunk(work, product) if name.startswith("ours") else tried(lambda: _jax_thunk(work, product))

    return build


def jax_loop(work: Work) -> Thunk:
    """A static loop of `jnp.dot` over the groups: sizes are compile-time constants."""
    import jax.numpy as jnp

    if len(work.sizes) > 64 or work.device.type != "cpu":
        raise MissingError("a static loop over this many groups is not realistic")
    starts = np.cumsum([0, *work.sizes])

    def loop(lhs: Any, rhs: Any, s: Any) -> Any:
        parts = [lhs[a:b] @ rhs[g] for g, (a, b) in enumerate(itertools.pairwise(starts)) if b > a]
        tail = jnp.zeros((lhs.shape[0] - starts[-1], rhs.shape[2]), lhs.dtype)
        return jnp.concatenate([*parts, tail])

    return _jax_thunk(work, jax_product(work, loop, False))


def tried(build: Callable[[], Thunk]) -> Thunk:
    """Builds another library's thunk and runs it once; any error becomes the reason why it does not take part."""
    try:
        thunk = build()
        thunk(0)
    except (MissingError, ImportError):
        raise
    except Exception as error:
        raise MissingError(f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:120]}") from None
    return thunk


def torch_grouped_mm(work: Work) -> Thunk:
    """`torch.nn.functional.grouped_mm` with K-major weights, its faster layout."""
    function = getattr(torch.nn.functional, "grouped_mm", None)
    if function is None:
        raise MissingError("torch.nn.functional.grouped_mm is not in this PyTorch")
    offsets = torch.cumsum(work.device_sizes, 0).to(torch.int32)
    calls = {
        "forward": lambda i: function(work.x[i], work.w_nk[i].transpose(1, 2), offs=offsets),
        "dgrad": lambda i: function(work.dy[i], work.w_kn[i].transpose(1, 2), offs=offsets),
        "wgrad": lambda i: function(work.x[i].T, work.dy[i], offs=offsets),
    }
    return tried(lambda: calls[work.product])


QUACK_TILES = {  # rows, columns, ping-pong, cluster: the best of a scan of all; its own tuner misses them
    "forward": ((192, 128, True, 1, 2), (128, 128, True, 1, 2), (128, 208, True, 1, 2), (128, 160, True, 1, 2)),
    "dgrad": ((192, 128, True, 1, 2), (128, 192, True, 1, 2), (128, 208, True, 1, 2), (128, 160, True, 1, 2)),
    "wgrad": ((128, 192, True, 2, 1), (128, 160, True, 2, 1), (128, 128, True, 2, 1), (128, 192, True, 1, 2)),
}


def quack_gemm(work: Work, adds: bool = False) -> Thunk:
    """QuACK's `gemm` over ragged rows or sums, with the fastest of `QUACK_TILES`, in the layouts of its layers.

    With `adds`, a weight gradient is added in place to float32.
    """
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import gemm_tuned

    if adds and work.product != "wgrad":
        raise MissingError("only weight gradients accumulate")
    ends = torch.cumsum(work.device_sizes, 0)
    bounds = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    operands = {
        "forward": lambda i: (work.x[i], work.w_nk[i].transpose(1, 2)),
        "dgrad": lambda i: (work.dy[i], work.w_kn[i].transpose(1, 2)),
        "wgrad": lambda i: (work.x[i].T, work.dy[i]),
    }[work.product]
    sums = work.product == "wgrad"
    total = torch.zeros(work.w_kn[0].shape, dtype=torch.float32, device=work.device) if adds else None

    def with_tile(tile: tuple[int, int, bool, int, int]) -> Thunk:
        rows, cols, pingpong, cluster_m, cluster_n = tile
        options: dict[str, Any] = {"cu_seqlens_k" if sums else "cu_seqlens_m": bounds, "add_to_output": adds}
        options["config"] = GemmConfig(
            tile_m=rows,
            tile_n=cols,
            pingpong=pingpong,
            is_dynamic_persistent=False,
            cluster_m=cluster_m,
            cluster_n=cluster_n,
            device_capacity=9,
        )

        def product(i: int) -> torch.Tensor:
            a, b = operands(i)
            shape = (len(ends), a.shape[0], b.shape[1]) if sums else (a.shape[0], b.shape[2])
            out = a.new_empty(shape) if total is None else total
            gemm_tuned.fn(a, b, out, **options)
            return out

        return product

    thunks = [tried(lambda tile=tile: with_tile(tile)) for tile in QUACK_TILES[work.product]]
    best = min(thunks, key=lambda thunk: min(cuda_clock(thunk, 0, 1) for _ in range(5)))
    if total is not None:
        total.zero_()
    return best


class Padded:
    """A thunk of a library that needs padded groups; `rows` are the indices of its result's valid rows, or None."""

    def __init__(self, call: Callable[[int], torch.Tensor], rows: torch.Tensor | None) -> None:
        self._call = call
        self.rows = rows

    def __call__(self, i: int) -> torch.Tensor:
        return self._call(i)


def result_of(thunk: Thunk, result: Any) -> Any:
    """The result without padding."""
    return result[thunk.rows] if isinstance(thunk, Padded) and thunk.rows is not None else result


def deep_gemm(work: Work) -> Thunk:
    """DeepGEMM: groups are padded to its alignment before timing; weight gradients are added in float32."""
    import deep_gemm as peer

    if work.dtype != "bfloat16":
        raise MissingError("takes bfloat16")
    align = peer.get_mk_alignment_for_contiguous_layout()
    padded = [-(-size // align) * align for size in work.sizes]
    starts = np.cumsum([0, *padded])
    rows = np.concatenate([np.arange(size) + start for size, start in zip(work.sizes, starts, strict=False)])
    of_row = np.full(starts[-1], -1, np.int32)
    of_row[rows] = np.repeat(np.arange(len(padded)), work.sizes)
    place, groups = torch.from_numpy(rows).to(work.device), torch.from_numpy(of_row).to(work.device)

    def spread(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [t.new_zeros((len(of_row), t.shape[1])).index_copy_(0, place, t[: len(rows)]) for t in tensors]

    x, dy = spread(work.x), spread(work.dy)
    if work.product == "wgrad":
        total = torch.zeros(work.w_kn[0].shape, dtype=torch.float32, device=work.device)
        sizes = torch.tensor(padded, dtype=torch.int32, device=work.device)

        def add(i: int) -> torch.Tensor:
            peer.k_grouped_bf16_gemm_tn_contiguous(x[i], dy[i], total, padded, sizes, total)
            return total

        thunk = tried(lambda: Padded(add, None))
        total.zero_()
        return thunk
    lhs, rhs = (x, work.w_nk) if work.product == "forward" else (dy, work.w_kn)

    def product(i: int) -> torch.Tensor:
        out = lhs[i].new_empty((len(of_row), rhs[i].shape[1]))
        peer.m_grouped_bf16_gemm_nt_contiguous(lhs[i], rhs[i], out, groups)
        return out

    return tried(lambda: Padded(product, place))


MOST_MASKED_ROWS = 512
"""Per group: every group has a buffer of its own, as long as that of the longest one."""


def deep_gemm_masked(work: Work) -> Thunk:
    """DeepGEMM's product for decoding, forward: each group has a buffer of its own, which is filled before timing."""
    import deep_gemm as peer

    if work.dtype != "bfloat16" or work.product != "forward":
        raise MissingError("takes bfloat16, forward")
    align = peer.get_mk_alignment_for_contiguous_layout()
    most = -(-max(work.sizes) // align) * align
    if most > MOST_MASKED_ROWS:
        raise MissingError(f"is for decoding: up to {MOST_MASKED_ROWS} rows per group")
    starts = np.arange(len(work.sizes)) * most
    rows = np.concatenate([np.arange(size) + start for size, start in zip(work.sizes, starts, strict=True)])
    place = torch.from_numpy(rows).to(work.device)
    shape = (len(work.sizes), most)

    def spread(t: torch.Tensor) -> torch.Tensor:
        flat = t.new_zeros((len(work.sizes) * most, t.shape[1])).index_copy_(0, place, t[: len(rows)])
        return flat.view(*shape, t.shape[1])

    x, mean = [spread(t) for t in work.x], -(-len(rows) // len(work.sizes))

    def product(i: int) -> torch.Tensor:
        out = x[i].new_empty((*shape, work.w_nk[i].shape[1]))
        peer.m_grouped_bf16_gemm_nt_masked(x[i], work.w_nk[i], out, work.device_sizes, mean)
        return out.flatten(0, 1)

    return tried(lambda: Padded(product, place))


def sonic_moe(work: Work) -> Thunk:
    """SonicMoE has no separate GEMMs to measure."""
    import sonicmoe  # noqa: F401

    raise MissingError("offers whole layers; its plain products are QuACK's gemm")


def torch_loop(work: Work) -> Thunk:
    """A loop of `torch.matmul` over the groups; sizes are known on the host, and results are written in place."""
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
    "dense, TF32": dense_tf32,
    "ours, torch, [G,N,K]": ours_torch("nk"),
    "ours, torch, [G,K,N]": ours_torch("kn"),
    "ours, TF32, [G,N,K]": ours_torch("nk", fp32="tf32"),
    "ours, TF32, [G,K,N]": ours_torch("kn", fp32="tf32"),
    "ours, portable, [G,N,K]": ours_torch("nk", "reference"),
    "ours, portable tf32x3, [G,N,K]": ours_torch("nk", PORTABLE_TF32),
    "ours, portable TF32, [G,N,K]": ours_torch("nk", PORTABLE_TF32, fp32="tf32"),
    "ours, torch, fp32 +=": ours_accumulating,
    **{name: jitted(name) for name in JAX_PRODUCTS},
    "jnp.dot loop": jax_loop,
    "torch grouped_mm": torch_grouped_mm,
    "torch loop": torch_loop,
    "QuACK gemm": quack_gemm,
    "QuACK gemm, fp32 +=": partial(quack_gemm, adds=True),
    "DeepGEMM": deep_gemm,
    "DeepGEMM masked": deep_gemm_masked,
    "SonicMoE": sonic_moe,
}
"""Candidates by name; "dense" is the upper bound of every row."""

TRANSPOSED = frozenset(name for name in CANDIDATES if "[G,N,K]" in name or name == "ours, torch, fp32 +=")
"""Candidates whose weight gradients are [G, N, K]."""
