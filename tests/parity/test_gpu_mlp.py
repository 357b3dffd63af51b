"""The experts' MLP on a GPU: same bits in both frontends and for all policies, within bounds, in CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_grouped
import torch_bridge
from grouped_core.activations import GATED_KINDS, PLAIN_KINDS, Activation
from grouped_core.mlp_spec import POLICIES, Mlp, MlpNames, MlpNeeds
from grouped_core.recipes import BF16
from jax_grouped import accumulate
from tests import asserts, bounds, cases
from tests.jax_frontend.jax_tools import copies, optimised
from tests.parity.adapters import to_torch
from tests.parity.mlp_adapters import JAX, LEAVES, TORCH, in_halves, present, problem
from tests.torch_frontend.gpu_tools import REPLAYED, ROWS, TEMPORARY_BYTES, captured, launches_only, temporary_bytes
from tests.torch_frontend.torch_tools import leaf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),
]

WIDE = cases.Case("wide", (130, 0, 257, 64, 1), 500, 136, 200, frozenset())
"""Several tiles, none of them full."""
EVEN = cases.Case("even", (130, 0, 257, 64, 1), 500, 136, 192, frozenset())
"""Halves of three tiles, which kernels read in place."""
NAMED = ("tail", "jagged", "clamped", "negative", "all_empty", "k_n_odd")
CASES = [*(cases.named(name) for name in NAMED), WIDE, EVEN]


def kernels_of(given: dict[str, Any], **options: Any) -> dict[str, str]:
    """The kernels that bounds ask about: composed ones round dz."""
    held: dict[str, Any] = {name: None if given[name] is None else to_torch(given[name]) for name in LEAVES}
    options["rhs_transposed"] = options.pop("transposed")
    held["x"].requires_grad_()
    text = torch_bridge.explain(torch_bridge.grouped_mlp, **held, group_sizes=to_torch(given["group_sizes"]), **options)
    names = {"grouped_matmul": "on_a_gpu_sm90", "group_sum": "on_a_gpu_cuda", "row_dot": "on_a_gpu_cuda"}
    for call in ("grouped_matmul_act", "grouped_matmul_dact"):
        composed = f"{call}_composed_cuda"
        names[call] = composed if f": {composed}" in text else f"{call}_bf16_sm90"
    return names


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.default_device(jax.devices("cuda")[0]))
        stack.enter_context(torch.device("cuda"))
        yield


@pytest.mark.rule("ALL-1", "ALL-2", "MAT-3", "MLP-1", "MLP-2", "MLP-3", "MLP-5", "MLP-7", "MLP-8", "GRP-5", "GRP-6")
@pytest.mark.matrix(
    case=CASES,
    kind=(*PLAIN_KINDS, *GATED_KINDS),
    interleave=(None, 1, 8),
    dtype=cases.DTYPES,
    transposed=(False, True),
    probs=(None, "float32", "bfloat16"),
    bias=(None, "float32", "bfloat16"),
    policy=POLICIES,
    halves=(False, True),
    valid=lambda kind, interleave, halves, **_: not halves or (kind in GATED_KINDS and interleave is None),
)
def test_both_frontends_give_the_same_bits_within_the_bounds(
    case, kind, interleave, dtype, transposed, probs, bias, policy, halves
):
    activation = Activation(kind, interleave=interleave if kind in GATED_KINDS and case.n % 8 == 0 else None)
    given, dy = problem(case, dtype, activation, transposed=transposed, probs=probs, bias=bias)
    needs = present(given)
    options: dict[str, Any] = {"activation": activation, "transposed": transposed}
    y = TORCH.forward(given, **options)
    found = TORCH.gradients(given, dy, needs, **options)
    form = in_halves(given, transposed) if halves else given
    for frontend in (JAX, TORCH):
        asserts.bitwise(frontend.forward(form, residuals=policy, **options), y, f"y of {frontend}")
        again = frontend.gradients(form, dy, needs, residuals=policy, **options)
        for name, need, a, b in zip(LEAVES, needs, again, found, strict=True):
            if need:
                asserts.bitwise(a, b, f"gradient of {name} from {frontend} with {policy}")
    op, kernels = Mlp(MlpNames(), activation, transposed=transposed), kernels_of(given, **options)
    asserts.within(y, bounds.expect_mlp(op, **given, kernels=kernels), "y")
    expected = bounds.expect_mlp_grads(op, **given, dy=dy, needs=needs, kernels=kernels)
    for name, a, b in zip(LEAVES, found, expected, strict=True):
        if a is not None:
            asserts.within(a, b, f"gradient of {name}")


@pytest.mark.rule("MLP-8", "ERR-3")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_and_composed_kernels_agree(dtype, transposed):
    """The bits are the same except where dz is rounded: y, and values computed from it, do not differ."""
    given, dy = problem(WIDE, dtype, Activation("swiglu"), transposed=transposed, bias="float32")
    fused, composed = (TORCH.forward(given, transposed=transposed, implementation=i) for i in (None, "composed"))
    asserts.bitwise(fused, composed, "y")
    op = Mlp(MlpNames(), Activation("swiglu"), transposed=transposed)
    for implementation in (None, "composed"):
        kernels = kernels_of(given, transposed=transposed, implementation=implementation)
        expected = bounds.expect_mlp_grads(op, **given, dy=dy, needs=MlpNeeds(), kernels=kernels)
        found = TORCH.gradients(given, dy, MlpNeeds(), transposed=transposed, implementation=implementation)
        for name, a, b in zip(LEAVES, found, expected, strict=True):
            asserts.within(a, b, f"gradient of {name} with {implementation}")


class Step:
    """Forward and backward of the MLP on static buffers, tail rows poisoned."""

    def __init__(self, dtype: torch.dtype, policy: str) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.policy = policy
        self.leaves = {
            "x": normal(ROWS, 256),
            "wi": normal(4, 384, 256) / 16,
            "wo": normal(4, 256, 192) / 14,
            "probs": torch.rand(ROWS, generator=generator),
            "wi_bias": normal(4, 384),
            "wo_bias": normal(4, 256),
        }
        for each in self.leaves.values():
            each.requires_grad_()
        self.dy = normal(ROWS, 256)
        self.sizes = torch.zeros(4, dtype=torch.int32)
        self.rows = (self.leaves["x"], self.leaves["probs"], self.dy)
        self.clean = [t.detach().clone() for t in self.rows]

    def load(self, sizes: tuple[int, ...]) -> None:
        valid = min(ROWS, sum(max(size, 0) for size in sizes))
        for tensor, clean in zip(self.rows, self.clean, strict=True):
            tensor.data.copy_(clean)
            tensor.data[valid:] = float("nan")
        self.sizes.copy_(torch.tensor(sizes, dtype=torch.int32))

    def run(self) -> list[torch.Tensor]:
        y = torch_bridge.grouped_mlp(**self.leaves, group_sizes=self.sizes, residuals=self.policy)
        return [y, *torch.autograd.grad(y, list(self.leaves.values()), self.dy)]


@pytest.mark.rule("CAP-1", "CAP-2", "GRP-3", "GRP-5")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_captured_graph_replays_with_other_sizes(dtype, policy):
    """One graph, nine size vectors, twice each, bitwise equal to eager calls."""
    step = Step(dtype, policy)
    step.load(REPLAYED[0])
    graph, results = captured(step.run)
    for sizes in REPLAYED:
        step.load(sizes)
        eager = [t.clone() for t in step.run()]
        for _ in range(2):
            for tensor in results:
                tensor.fill_(float("nan"))
            graph.replay()
            for name, a, b in zip(("y", *LEAVES), results, eager, strict=True):
                asserts.bitwise(a, b, f"{name} with sizes {sizes}")


@pytest.mark.rule("CAP-1", "DLY-3", "DLY-8")
def test_deferred_weight_gradients_replay_as_a_graph_of_their_own():
    """Backward in one graph, weight gradients in another, drained after the next sizes: the sum of undelayed runs."""
    step = Step(torch.bfloat16, "save_fc1")
    step.load(REPLAYED[0])
    held = {name: each.detach() for name, each in step.leaves.items()}

    def backward() -> Any:
        _, res = torch_bridge.grouped_mlp_fwd(**held, group_sizes=step.sizes)
        return torch_bridge.grouped_mlp_bwd_dx(res, step.dy)

    first, (*_, deferred) = captured(backward)
    totals = [torch.zeros(held[name].shape) for name in ("wi", "wo")]
    second, _ = captured(lambda: torch_bridge.grouped_mlp_bwd_dw(deferred, tuple(totals)))
    expected = [torch.zeros_like(each) for each in totals]
    for each in totals:
        each.zero_()
    for sizes in REPLAYED:
        step.load(sizes)
        y = torch_bridge.grouped_mlp(
            **{name: leaf(each) for name, each in held.items()}, group_sizes=step.sizes, wgrad_accum=tuple(expected)
        )
        y.backward(step.dy)
        first.replay()
        second.replay()
        for name, a, b in zip(("wi", "wo"), totals, expected, strict=True):
            asserts.bitwise(a, b, f"{name} after sizes {sizes}")


@pytest.mark.rule("CAP-1", "GRP-3")
@pytest.mark.parametrize("policy", POLICIES)
def test_calls_neither_synchronise_nor_copy_nor_allocate(policy):
    step = Step(torch.bfloat16, policy)
    step.load(REPLAYED[3])
    launches_only(step.run)


@pytest.mark.rule("CAP-5", "ACC-4")
def test_a_jitted_training_step_copies_no_weight_and_gathers_nothing():
    """The HLO that runs on the GPU: no copies of weights or accumulators, and the fused kernels' calls."""
    given, _ = problem(WIDE, "bfloat16", Activation("swiglu"), bias="float32")
    held = {name: jnp.asarray(given[name]) for name in LEAVES}
    accum = tuple(jnp.zeros(held[name].shape, jnp.float32) for name in ("wi", "wo"))

    def loss(weights, accum, x, probs):
        y = jax_grouped.grouped_mlp(x, weights[0], weights[1], given["group_sizes"], probs=probs, wgrad_accum=accum)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    step = jax.jit(accumulate.value_and_accumulate_grad(loss), donate_argnums=1)
    weights = (held["wi"], held["wo"])
    text = optimised(step.lower(weights, accum, held["x"], held["probs"]))
    assert copies(text, r"(bf16|f32)\[5,") == 0, "a weight or an accumulator is copied"
    assert "all-gather" not in text
    assert text.count('custom_call_target="jg_grouped_matmul_act_v1"') == 1
    assert text.count('custom_call_target="jg_grouped_matmul_dact_v1"') == 1
    with jax.transfer_guard("disallow"):
        _, _, new = step(weights, accum, held["x"], held["probs"])
    assert all(bool(jnp.isfinite(each).all()) for each in new)


@pytest.mark.rule("MAT-3")
def test_lists_of_weights_give_the_same_bits():
    given, dy = problem(WIDE, "bfloat16", Activation("swiglu"), transposed=True, bias="bfloat16")
    sizes = to_torch(given["group_sizes"])
    packed = {name: leaf(to_torch(given[name])) for name in LEAVES}
    listed: dict[str, Any] = {
        n: [leaf(m) for m in v] if v.dim() > 1 and n != "x" else leaf(v) for n, v in packed.items()
    }
    y = torch_bridge.grouped_mlp(**packed, group_sizes=sizes)
    z = torch_bridge.grouped_mlp(**listed, group_sizes=sizes)
    asserts.bitwise(z, y, "y")
    y.backward(to_torch(dy))
    z.backward(to_torch(dy))
    for name in LEAVES:
        got = torch.stack([m.grad for m in listed[name]]) if isinstance(listed[name], list) else listed[name].grad
        asserts.bitwise(got, packed[name].grad, name)


@pytest.mark.rule("MLP-8", "MAT-7")
@pytest.mark.parametrize("name", ["x", "wi", "wo"])
def test_odd_addresses_give_results_within_the_bounds(name):
    """They go to composed kernels, whose workspace is larger, in forward, in backward, or in both."""
    given, dy = problem(WIDE, "bfloat16", Activation("swiglu"), bias="float32")
    held = {key: to_torch(given[key]) for key in LEAVES}
    room = torch.empty(held[name].numel() + 1, dtype=held[name].dtype)
    held[name] = room[1:].view(held[name].shape).copy_(held[name])
    held = {key: value.detach().requires_grad_() for key, value in held.items()}
    assert held[name].data_ptr() % 16
    sizes = to_torch(given["group_sizes"])
    y = torch_bridge.grouped_mlp(**held, group_sizes=sizes, rhs_transposed=False)
    y.backward(to_torch(dy))
    op = Mlp(MlpNames(), Activation("swiglu"))
    kernels = dict.fromkeys(("grouped_matmul", "group_sum", "row_dot"), "on_a_gpu_cuda")
    kernels |= {call: f"{call}_composed_cuda" for call in ("grouped_matmul_act", "grouped_matmul_dact")}
    asserts.within(y, bounds.expect_mlp(op, **given, kernels=kernels), "y")
    expected = bounds.expect_mlp_grads(op, **given, dy=dy, needs=MlpNeeds(), kernels=kernels)
    for key, wanted in zip(LEAVES, expected, strict=True):
        asserts.within(held[key].grad, wanted, f"gradient of {key}")
    with torch.no_grad():
        asserts.bitwise(torch_bridge.grouped_mlp(**held, group_sizes=sizes, rhs_transposed=False), y, "y of inference")


@pytest.mark.rule("MAT-1", "MLP-9")
def test_no_rows_between_the_parts_of_fused_calls_are_in_memory():
    """Inference holds the activated rows and no hidden ones; a backward the gradients at hidden rows and no dz."""
    rows, groups, k, width = 8192, 8, 512, 4096
    x = torch.randn(rows, k, dtype=torch.bfloat16).requires_grad_()
    wi, wo = (
        torch.randn(groups, *shape, dtype=torch.bfloat16).requires_grad_() for shape in ((2 * width, k), (k, width))
    )
    sizes = torch.full((groups,), rows // groups - 3, dtype=torch.int32)
    activated = rows * width * x.itemsize
    assert activated > 4 * TEMPORARY_BYTES

    def forward() -> torch.Tensor:
        return torch_bridge.grouped_mlp(x, wi, wo, sizes)

    with torch.no_grad():
        taken = temporary_bytes(lambda: (forward(),))
    assert taken < activated + TEMPORARY_BYTES, f"inference takes {taken / 2**20:.1f} MiB"
    y = forward()
    dy = torch.randn_like(y)
    taken = temporary_bytes(lambda: torch.autograd.grad(y, (x, wi, wo), dy, retain_graph=True))
    assert taken < 3 * activated + TEMPORARY_BYTES, f"backward takes {taken / 2**20:.1f} MiB"

    def inference(x, wi, wo, sizes):
        return jax_grouped.grouped_mlp(x, wi, wo, sizes, rhs_transposed=True)

    shapes = [jax.ShapeDtypeStruct(tuple(t.shape), "bfloat16") for t in (x, wi, wo)]
    counts = jax.ShapeDtypeStruct((groups,), "int32")
    memory: Any = jax.jit(inference).lower(*shapes, counts).compile().memory_analysis()
    taken = memory.temp_size_in_bytes
    assert taken < activated + TEMPORARY_BYTES, f"inference in JAX takes {taken / 2**20:.1f} MiB"


@pytest.mark.rule("ALL-7")
def test_batch_invariant_rows_do_not_see_the_batch():
    rng = np.random.default_rng(0)

    def array(*shape: int) -> torch.Tensor:
        return to_torch((rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(cases.numpy_dtype("bfloat16")))

    x, wi, wo = array(ROWS, 256) * 16, array(4, 384, 256), array(4, 256, 192)
    recipe = BF16.replace(batch_invariant=True)
    y = torch_bridge.grouped_mlp(x, wi, wo, torch.tensor([300, 100, 24, 600], dtype=torch.int32), recipe=recipe)
    some = x[390:398].contiguous()
    one = torch.tensor([8], dtype=torch.int32)
    alone = torch_bridge.grouped_mlp(some, wi[1:2].contiguous(), wo[1:2].contiguous(), one, recipe=recipe)
    asserts.bitwise(alone, y[390:398], "rows alone")
