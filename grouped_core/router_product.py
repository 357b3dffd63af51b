"""The router's product: logits in float32 from tokens of any dtype, and its gradients.

Beside bf16 tokens, float32 operands are split into three bf16 parts of 8 bits each, whose products tensor cores sum in
float32: as accurate as float32 products, and tokens are read as they are. Letters: T tokens, H hidden size, E experts.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from grouped_core import gradients, routing_calls
from grouped_core.calls import ArraySpec
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear
from grouped_core.products import Array, Runner

THREE = "123"
"""The parts of a float32 operand that are multiplied with a bf16 operand, in order (`routing_calls.split_parts`)."""
PAIRS = {"float32": ("112123", "121321"), "bfloat16": ("123", "111")}
"""By the dtype of the router, where float16 counts as float32: the parts of the gradient of the logits and those of the
router that are multiplied, pair by pair. Products of other pairs of parts are below 2^-24 of the whole.
"""


class RouterGrads(NamedTuple):
    """Gradients of the tokens [T, H] and of the router, in their dtypes; None where not needed."""

    x: Array | None
    router: Array | None


def _splits(x: str, experts: int) -> bool:
    """Whether operands are split: tokens are bf16, and rows of parts [T, 3 E] begin at multiples of 16 bytes."""
    return x == "bfloat16" and experts % 8 == 0


def _split(run: Runner, array: Array, axis: int, order: str) -> Array:
    call = routing_calls.split_parts(run.spec(array), axis, order)
    return run(call, call.arrange(source=array))[0]


def _sum(run: Runner, array: Array, axis: int) -> Array:
    call = routing_calls.sum_parts(run.spec(array), axis, len(THREE))
    return run(call, call.arrange(source=array))[0]


def router_logits(run: Runner, op: Linear, x: Array, router: Array, tokens: Array) -> Array:
    """float32 [T, E] = x router.

    Args:
        op: names of the arguments, and whether the router is transposed. x: [T, H]. router: [1, H, E], or [1, E, H]
            when transposed. tokens: int32 [1], T.
    """
    n_axis = op.weight_axes()[1]
    spec, of_x = run.spec(router), run.spec(x)
    if not _splits(of_x.dtype, spec.shape[n_axis]):
        wide = run.cast(x, "float32"), run.cast(router, "float32")
        return gradients.linear_forward(run, op, *wide, tokens).y
    op = dataclasses.replace(op, result_dtype="float32")
    if spec.dtype == "bfloat16":
        return gradients.linear_forward(run, op, x, router, tokens).y
    parts = _split(run, run.cast(router, "float32"), n_axis, THREE)
    return _sum(run, gradients.linear_forward(run, op, x, parts, tokens).y, 1)


def router_grads(
    run: Runner,
    op: Linear,
    specs: tuple[ArraySpec, ArraySpec],
    x: Array | None,
    router: Array | None,
    tokens: Array,
    d_logits: Array,
    needs: tuple[bool, bool],
) -> RouterGrads:
    """The gradients of `router_logits` in x and in the router, those of them that `needs` says.

    Args:
        specs: those of x [T, H] and of the router as `router_logits` took them. x: read for the gradient of the router,
            router: read for the gradient of x; None if that gradient is not needed. d_logits: float32 [T, E].
    """
    of_x, of_router = specs
    n_axis = op.weight_axes()[1]
    if _splits(of_x.dtype, of_router.shape[n_axis]):
        dx = _split_dx(run, op, router, tokens, d_logits) if needs[0] else None
        dw = _split_dw(run, op, of_router, x, tokens, d_logits) if needs[1] else None
    else:
        wide = (of_x._replace(dtype="float32"), of_router._replace(dtype="float32"), None, None)
        x, router = (None if each is None else run.cast(each, "float32") for each in (x, router))
        found = gradients.linear_grads(
            run, op, wide, x, router, tokens, None, None, d_logits, Needs(*needs, False, False)
        )
        dx, dw = found.x, found.w
    return RouterGrads(
        None if dx is None else run.cast(dx, of_x.dtype),
        None if dw is None else run.cast(dw, of_router.dtype),
    )


def _split_dx(run: Runner, op: Linear, router: Array, tokens: Array, d_logits: Array) -> Array:
    """bf16 [T, H] = d_logits router^T, rounded once: one product over the pairs of parts."""
    n_axis = op.weight_axes()[1]
    of_d, of_w = PAIRS["bfloat16" if run.spec(router).dtype == "bfloat16" else "float32"]
    parts = _split(run, d_logits, 1, of_d), _split(run, run.cast(router, "float32"), n_axis, of_w)
    back = dataclasses.replace(op, transposed=not op.transposed)
    return gradients.linear_forward(run, back, *parts, tokens).y


def _split_dw(run: Runner, op: Linear, of_router: ArraySpec, x: Array, tokens: Array, d_logits: Array) -> Array:
    """float32 [1, H, E], or [1, E, H]: x^T d_logits."""
    n_axis = op.weight_axes()[1]
    parts = _split(run, d_logits, 1, THREE)
    shape = tuple(size * (len(THREE) if axis == n_axis else 1) for axis, size in enumerate(of_router.shape))
    specs = (run.spec(x), ArraySpec(shape, "bfloat16"), None, None)
    op = dataclasses.replace(op, wgrad_dtype="float32")
    needs = Needs(False, True, False, False)
    found = gradients.linear_grads(run, op, specs, x, None, tokens, None, None, parts, needs)
    return _sum(run, found.w, n_axis)
