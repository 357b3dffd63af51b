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

from grouped_core import router_product
from grouped_core.calls import ArraySpec, spec_of
from grouped_core.linear_spec import Linear, Names
from jax_grouped._arguments import one_group
from jax_grouped._run import RUN, differentiable, reduce_to, varying_axes, with_gradients

_OP = Linear(names=Names(x="x", w="router"))


def router_logits(x: Float[Array, "T H"], router: Float[Array, "H E"]) -> Float[Array, "T E"]:
    """x @ router in fp32. Backward reads x as it was given."""
    return differentiable(_product, None, x, router)


@partial(jax.tree_util.register_dataclass, data_fields=["x", "router"], meta_fields=["needs", "specs", "varying"])
@dataclass(frozen=True)
class _Saved:
    """The operands that a needed gradient reads, as they were given, and the specs of both."""

    x: Any
    router: Any
    needs: tuple[bool, bool]
    specs: tuple[ArraySpec, ArraySpec]
    varying: tuple[frozenset[str], frozenset[str]]


def _value(_: None, x: Any, router: Any) -> Any:
    return router_product.router_logits(RUN, _OP, x, router[None], one_group(x.shape[0]))


def _fwd(_: None, *primals: Any) -> tuple[Any, _Saved]:
    x, router = custom_vjp_primal_tree_values(primals)
    of_x, of_router = (each.perturbed for each in primals)
    return _value(None, x, router), _Saved(
        x=x if of_router else None,
        router=router if of_x else None,
        needs=(of_x, of_router),
        specs=(spec_of(x), spec_of(router)),
        varying=(varying_axes(x), varying_axes(router)),
    )


def _bwd(_: None, saved: _Saved, dy: Any) -> tuple[Any, Any]:
    of_x, of_router = saved.specs
    router = None if saved.router is None else saved.router[None]
    arrays = (saved.x, router, one_group(of_x.shape[0]), dy)
    specs = (of_x, ArraySpec((1, *of_router.shape), of_router.dtype))
    found = router_product.router_grads(RUN, _OP, specs, *arrays, saved.needs)
    cotangents = (found.x, None if found.router is None else found.router[0])
    dx, dw = (
        None if each is None else reduce_to(each, axes) for each, axes in zip(cotangents, saved.varying, strict=True)
    )
    return dx, dw


_product = with_gradients(_value, _fwd, _bwd)
