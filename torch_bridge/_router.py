"""The operators of the router's product: logits in fp32 from tokens of any dtype, and its gradients.

Backward keeps the tokens themselves. Letters: T tokens, H hidden size, E experts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import router_product, routing_spec
from grouped_core.calls import ArraySpec
from grouped_core.formats import WIDE
from grouped_core.linear_spec import Linear, Names, check_keywords
from grouped_core.ranks import check_rank
from torch_bridge._checks import check_readable, refuse_transforms
from torch_bridge._compiling import allow_in_graph, is_compiling
from torch_bridge._operators import call, define
from torch_bridge._routing import Gradients, differentiate_once, save
from torch_bridge._symbols import settle_rows
from torch_bridge._tensors import dtype_name, fixed_spec, rows_spec
from torch_bridge.route import topk_router
from torch_bridge.sizes import every_row

_OP = Linear(Names("x", "router"), transposed=True)


_ROUTING = frozenset(inspect.signature(topk_router).parameters)


def check_routing(function: str, kind: Callable[..., Any], routing: Mapping[str, Any]) -> None:
    """Refuses keywords of `function`, a layer `kind`, that `topk_router` does not have. Raises TypeError."""
    if any(name not in _ROUTING for name in routing):  # in a graph nothing else is traced
        check_keywords(function, routing, kind, topk_router)


def router_logits(x: Tensor, router: Tensor) -> Tensor:
    """Returns fp32 [T, E] = x router^T, computed in fp32; differentiable in both, once.

    Args:
        x: [T, H] fp32, bf16 or fp16. router: [E, H], in any of these dtypes.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: wrong shapes, devices or layouts.
    """
    return _node(x, router) if is_compiling() else _logits(x, router)


@allow_in_graph
def _node(x: Tensor, router: Tensor) -> Tensor:
    settle_rows(x)
    return _logits(x, router)


def _logits(x: Tensor, router: Tensor) -> Tensor:
    refuse_transforms("moe", x, router)
    for name, each in (("x", x), ("router", router)):
        check_readable(name, each, x)
        if dtype_name(each.dtype) not in WIDE:
            raise TypeError(f"`{name}` of moe: dtype {each.dtype}, expected one of {', '.join(WIDE)}; cast it first.")
    check_rank("moe", "x", "x", x.shape, of="moe")
    check_rank("moe", "router", "router", router.shape, transposed=True, of="moe")
    routing_spec.check_router("moe", router.shape, x.shape[1], transposed=True)
    if torch.is_grad_enabled() and (x.requires_grad or router.requires_grad):
        return _Product.apply(x, router)
    return _product(x, router)


class ProductFacts(NamedTuple):
    """The product has no static facts."""


class _Operands(NamedTuple):
    x: Any
    router: Any  # [1, E, H]
    sizes: Any


def _forward_rule(run: Any, static: ProductFacts, o: _Operands) -> tuple[Any]:
    del static
    return (router_product.router_logits(run, _OP, o.x, o.router, o.sizes),)


FORWARD = define("router_product", _forward_rule, _Operands, ProductFacts, rows=("x",))


class ProductGradFacts(NamedTuple):
    """Specs of x [T, H], whose T may be symbolic, and of the router [1, E, H]; which of them need a gradient."""

    x: ArraySpec
    router: ArraySpec
    needs: tuple[bool, bool]


class _GradOperands(NamedTuple):
    x: Any
    router: Any
    sizes: Any
    d_logits: Any


def _grad_rule(run: Any, static: ProductGradFacts, o: _GradOperands) -> tuple[Any, Any]:
    x = static.x._replace(shape=(run.spec(o.d_logits).shape[0], static.x.shape[1]))
    specs, arrays = (x, static.router), (o.x, o.router, o.sizes, o.d_logits)
    found = router_product.router_grads(run, _OP, specs, *arrays, static.needs)
    return found.x, found.router


_GRAD = define("router_product_grad", _grad_rule, _GradOperands, ProductGradFacts, rows=("x", "d_logits"))


def _product(x: Tensor, router: Tensor) -> Tensor:
    return call(FORWARD, ProductFacts(), _Operands(x, router.unsqueeze(0), every_row(x)), x.shape[0])[0]


class _Product(torch.autograd.Function):
    """The autograd function of the router's product. It saves the tokens and the weight themselves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, router: Tensor) -> Tensor:
        """Returns the logits [T, E]."""
        needs_x, needs_w = ctx.needs_input_grad
        ctx.facts = ProductGradFacts(rows_spec(x), fixed_spec(router.unsqueeze(0)), (needs_x, needs_w))
        save(ctx, x if needs_w else None, router if needs_x else None)
        return _product(x, router)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> Gradients:
        """Returns the gradients of forward's arguments, given that of the logits."""
        return differentiate_once("moe", ctx, grad_outputs, _backward)


def _backward(ctx: Any, d_logits: Tensor) -> Gradients:
    x, router = ctx.saved_tensors
    router = None if router is None else router.unsqueeze(0)
    operands = _GradOperands(x, router, every_row(d_logits), d_logits)
    dx, dw = call(_GRAD, ctx.facts, operands, d_logits.shape[0])
    return dx, None if dw is None else dw.squeeze(0)
