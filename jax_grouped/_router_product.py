"""The router's product in fp32 with the library's own kernels, so that every framework routes with the same bits.

Letters: T tokens, H hidden size, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jaxtyping import Array, Float

from grouped_core import gradients
from grouped_core.calls import ArraySpec, spec_of
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear, Names
from jax_grouped._arguments import one_group
from jax_grouped._run import RUN, differentiable, reduce_to, varying_axes

_OP = Linear(names=Names(x="x", w="router"))


def router_logits(x: Float[Array, "T H"], router: Float[Array, "H E"]) -> Float[Array, "T E"]:
    """x @ router in fp32. Backward casts x again instead of keeping it in fp32."""
    return differentiable(_product, None, x, router)


@partial(jax.tree_util.register_dataclass, data_fields=["x", "router"], meta_fields=["needs", "specs", "varying"])
@dataclass(frozen=True)
class _Saved:
    """The operands that a needed gradient reads, as they were given, and the specs of both."""

    x: Any
    router: Any
    needs: Needs
    specs: tuple[ArraySpec, ArraySpec]
    varying: tuple[frozenset[str], frozenset[str]]


def _value(_: None, x: Any, router: Any) -> Any:
    wide = RUN.cast(x, "float32"), RUN.cast(router, "float32")[None]
    return gradients.linear(RUN, _OP, *wide, one_group(x.shape[0]))


def _fwd(_: None, *primals: Any) -> tuple[Any, _Saved]:
    x, router = custom_vjp_primal_tree_values(primals)
    of_x, of_router = (each.perturbed for each in primals)
    return _value(None, x, router), _Saved(
        x=x if of_router else None,
        router=router if of_x else None,
        needs=Needs(of_x, of_router, False, False),
        specs=(spec_of(x), spec_of(router)),
        varying=(varying_axes(x), varying_axes(router)),
    )


def _bwd(_: None, saved: _Saved, dy: Any) -> tuple[Any, Any]:
    x = None if saved.x is None else RUN.cast(saved.x, "float32")
    router = None if saved.router is None else RUN.cast(saved.router, "float32")[None]
    of_x, of_router = saved.specs
    specs = (ArraySpec(of_x.shape, "float32"), ArraySpec((1, *of_router.shape), "float32"), None, None)
    operands = (x, router, one_group(of_x.shape[0]), None, None, dy)
    found = gradients.linear_backward(RUN, _OP, specs, *operands, saved.needs).grads
    cotangents = (found.x, None if found.w is None else found.w[0])
    dx, dw = (
        None if each is None else reduce_to(RUN.cast(each, spec.dtype), axes)
        for each, spec, axes in zip(cotangents, saved.specs, saved.varying, strict=True)
    )
    return dx, dw


_product = jax.custom_vjp(_value, nondiff_argnums=(0,))
_product.defvjp(_fwd, _bwd, symbolic_zeros=True)
