"""The whole MoE layer on a GPU: the same bits in both frontends, close to the CPU's, and usable in CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import jax_grouped
import torch_bridge
from tests import asserts, bounds, cases
from tests.asserts import as_numpy
from tests.torch_frontend.gpu_tools import captured, launches_only
from tests.torch_frontend.routing_tools import ROUTERS
from torch_bridge import MXFP8, FP8Block

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
]

T, K, H, F = 300, 2, 256, 128
LOSSES = {"aux_coeff": 0.5, "z_coeff": 0.25}
UPSTREAM = (2.0, 3.0)
"""Gradients of both losses."""
NAMES = ("y", "losses", "load", "dx", "drouter", "dwi", "dwo")


def _draw(*shape: int, seed: str, dtype: str, scale: float = 1.0) -> NDArray[Any]:
    return (cases.normal(shape, "float32", "gpu moe", seed) * np.float32(scale)).astype(cases.numpy_dtype(dtype))


def _operands(experts: int, dtype: str) -> dict[str, NDArray[Any]]:
    return {
        "x": _draw(T, H, seed="x", dtype=dtype),
        "router": _draw(experts, H, seed="router", dtype="float32", scale=H**-0.5),
        "wi": _draw(experts, 2 * F, H, seed="wi", dtype=dtype, scale=H**-0.5),
        "wo": _draw(experts, H, F, seed="wo", dtype=dtype, scale=F**-0.5),
        "dy": _draw(T, H, seed="dy", dtype=dtype),
    }


def _to_torch(array: NDArray[Any], device: str) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)


def _torch_step(o: dict[str, NDArray[Any]], device: str, **options: Any) -> list[Any]:
    held = {name: _to_torch(each, device).requires_grad_(name != "dy") for name, each in o.items()}
    y, aux = torch_bridge.moe(held["x"], held["router"], held["wi"], held["wo"], K, **LOSSES, **options)
    upstream = [held["dy"].detach(), *(torch.tensor(each, device=device) for each in UPSTREAM)]
    torch.autograd.backward([y, aux.aux_loss, aux.z_loss], upstream)
    grads = [held[name].grad for name in ("x", "router", "wi", "wo")]
    return [y.detach(), torch.stack([aux.aux_loss, aux.z_loss]).detach(), aux.load, *grads]


def _jax_step(o: dict[str, NDArray[Any]], **options: Any) -> list[Any]:
    @jax.jit
    def step(x: Any, router: Any, wi: Any, wo: Any, dy: Any) -> Any:
        def function(x: Any, router: Any, wi: Any, wo: Any) -> Any:
            y, aux = jax_grouped.moe(x, router, wi, wo, K, rhs_transposed=True, **LOSSES, **options)
            return (y, jnp.stack([aux.aux_loss, aux.z_loss])), aux.load

        found, back, load = jax.vjp(function, x, router, wi, wo, has_aux=True)
        return *found, load, *back((dy, jnp.array(UPSTREAM, jnp.float32)))

    given = (o["x"], np.ascontiguousarray(o["router"].T), o["wi"], o["wo"], o["dy"])
    y, losses, load, dx, d_router, dwi, dwo = step(*map(jnp.asarray, given))
    return [y, losses, load, dx, jnp.asarray(d_router).T, dwi, dwo]


@pytest.mark.rule("LYR-1", "LYR-16")
@pytest.mark.matrix(
    router=("softmax", "mixtral", "deepseek_v3", "capacity_probs"),
    experts=(8, 12, 128),
    dtype=("bfloat16", "float32"),
    recipe=(None, FP8Block, MXFP8),
)
def test_both_frontends_give_the_same_bits_close_to_the_cpu(router, experts, dtype, recipe):
    o, options = _operands(experts, dtype), {"recipe": recipe, **ROUTERS[router]}
    found = _torch_step(o, "cuda", **options)
    for name, ours, theirs in zip(NAMES, found, _jax_step(o, **options), strict=True):
        asserts.bitwise(as_numpy(ours), as_numpy(theirs), name)
    # Where a choice is a matter of rounding the CPU may take another expert; with these operands none is.
    on_cpu = _torch_step(o, "cpu", **options)
    asserts.bitwise(as_numpy(found[2]), as_numpy(on_cpu[2]), "load")
    for name, ours, theirs in zip(NAMES, found, on_cpu, strict=True):
        a, b = (as_numpy(each).astype(np.float64) for each in (ours, theirs))
        assert np.linalg.norm(a - b) <= bounds.DEVICES * np.linalg.norm(b), name


class _Layer:
    """A layer with fixed buffers for its tokens and their gradient."""

    def __init__(self, recipe: Any) -> None:
        torch.manual_seed(0)
        self.layer = torch_bridge.nn.MoE(
            *(H, F, 16, K),
            normalize=True,
            aux_coeff=0.1,
            recipe=recipe,
            device="cuda",
            dtype=torch.bfloat16,
        )
        self.x = torch.zeros(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        self.dy = torch.zeros_like(self.x)

    def load(self, seed: int, scale: float) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for tensor in (self.x, self.dy):
            tensor.detach().copy_(scale * torch.randn(T, H, generator=generator, device="cuda"))

    def run(self) -> list[torch.Tensor]:
        y, aux = self.layer(self.x)
        parameters = [each for each in self.layer.parameters() if each.requires_grad]
        total = (y * self.dy).sum() + aux.aux_loss
        return [y.detach(), aux.load, aux.aux_loss.detach(), *torch.autograd.grad(total, [self.x, *parameters])]


@pytest.fixture(params=[None, FP8Block], ids=["plain", "FP8Block"])
def layer(request: pytest.FixtureRequest) -> Iterator[_Layer]:
    yield _Layer(request.param)
    torch.cuda.synchronize()


@pytest.mark.rule("CAP-1")
def test_a_captured_layer_replays_with_other_tokens(layer):
    """Forward and backward in one graph: other tokens go to other experts, with the bits of eager calls."""
    layer.load(0, 1.0)
    graph, results = captured(layer.run)
    loads = set()
    for seed, scale in ((0, 1.0), (1, 1.0), (2, 0.0), (3, 20.0)):
        layer.load(seed, scale)
        eager = [each.clone() for each in layer.run()]
        loads.add(tuple(eager[1].tolist()))
        for each in results:
            each.detach().fill_(0)
        graph.replay()
        for i, (ours, theirs) in enumerate(zip(results, eager, strict=True)):
            asserts.bitwise(ours, theirs, f"result {i} of tokens {seed}")
    assert len(loads) == 4


@pytest.mark.rule("CAP-1")
def test_a_layer_neither_synchronises_nor_copies_nor_allocates(layer):
    layer.load(5, 1.0)
    launches_only(layer.run)
