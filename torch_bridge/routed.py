"""The experts' MLP of tokens as one differentiable operation: gather, MLP, sum. `grouped_core` defines the mathematics.

For backward it keeps the tokens, not their rows. Letters: T tokens, k experts per token, M rows, M = T k, G groups
(experts), K hidden size of the model, F expert width, W columns of the hidden rows: 2F for gated activations, else F.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from grouped_core import linear_spec
from grouped_core import routed as rules
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec
from grouped_core.formats import QTensor
from grouped_core.gradients import with_weight_grad
from grouped_core.mlp_spec import Mlp, MlpNeeds, Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.routing import Order
from torch_bridge import _adapted_mlp, _saved
from torch_bridge._args import Accumulators, Arguments, Members, positions
from torch_bridge._autograd import Deliver, Facts, Forwarded, MainGradients, Operation, Saved
from torch_bridge._calling import OPERATIONS
from torch_bridge._checks import ROUTED_NAMES
from torch_bridge._gradients import WeightFacts, WeightGradient, WeightOperands, weight_grad
from torch_bridge._operators import call_prepared, define
from torch_bridge._record import prepare
from torch_bridge._routed_args import routed_arguments, rows_of_tokens
from torch_bridge._scaling import Scaling, X
from torch_bridge._tensors import StraightThrough, home, rows_spec
from torch_bridge._weight_forms import read_by_dgrad
from torch_bridge.mlp import MLP, NO_EXTRAS, GradFacts, facts_of, in_stages, weights_of
from torch_bridge.sizes import every_row


def routed_mlp(
    x: Tensor | QTensor[Tensor] | StraightThrough,
    experts: Tensor,
    weights: Tensor,
    wi: Members | QTensor[Tensor] | StraightThrough,
    wo: Members | QTensor[Tensor] | StraightThrough,
    *,
    rhs_transposed: bool = True,
    activation: str | Activation = "swiglu",
    wi_bias: Members | None = None,
    wo_bias: Members | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    max_rows: int | None = None,
    wgrad_accum: Accumulators | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
    lora: Sequence[Any] | None = None,
    lora_scaling: float = 1,  # not 1.0, which Dynamo would make a symbol
    lora_dropout: float = 0,
    lora_key: Tensor | None = None,
    lora_wgrad_accum: str | Sequence[Any] | None = None,
) -> Tensor:
    """y[t] = sum over the places j of weights[t, j] * MLP of expert experts[t, j] at x[t], in fp32, rounded once.

    The bits are those of `route.permute`, `grouped_mlp` with the weights as `probs`, and `route.unpermute`. For
    backward it keeps the tokens and maps instead of the rows [T * k, K], and gathers again. Differentiable in x, the
    weights, wi, wo and the biases, once; gradients that are not needed are neither computed nor prepared for.

    Args:
        x: [T, K] fp32, bf16 or fp16. Under `torch.autocast` x, wi, wo and the biases are cast to its dtype. Or
            quantised along K in a format with scales per row, such as "fp8_1x128" or "mxfp8": the gradient of wi then
            reads the dequantised values, and x has a gradient if it is a `straight_through`.
        experts: integers [T, k]; a place with another number than 0 to G - 1 adds nothing.
        weights: [T, k], fp32 in the computation; the gradient has their dtype.
        wi, wo, rhs_transposed, activation, wi_bias, wo_bias, recipe, wgrad_accum, implementation: as in `grouped_mlp`.
        residuals: what is kept besides tokens and maps: "save_all" the hidden [M, W] and activated rows [M, F],
            "save_fc1" the hidden rows, "save_input" nothing. The choice does not change the bits.
        max_rows: room for rows; places beyond, the last in the order of experts, then tokens, add nothing and have no
            gradient. None: T k, one for each place.
        out, grad_input: the caller's buffers for y and the gradient of x, both [T, K], as in `grouped_linear`.
        lora, lora_scaling, lora_dropout, lora_key, lora_wgrad_accum: as in `grouped_mlp`.

    Raises:
        TypeError: wrong dtypes, or an argument is not a tensor. ValueError: wrong shapes, devices, layouts, buffers or
            options. NotImplementedError: no kernel supports the call. RuntimeError: in backward, `main_grad` cannot be
            written, or the operation is differentiated twice.
    """
    arguments = (x, experts, weights, wi, wo, rhs_transposed, activation, wi_bias, wo_bias, recipe, residuals)
    arguments = (*arguments, max_rows)
    names, options = (ROUTED.name, _adapted_mlp.ROUTED_NAME), (lora_scaling, lora_dropout, lora_key)
    of_lora = (lora, options, wgrad_accum, lora_wgrad_accum)
    return _adapted_mlp.run_mlp(names, arguments, *of_lora, implementation, out, grad_input, cast=_CAST)


_CAST = positions(routed_arguments, "x", "wi", "wo", "wi_bias", "wo_bias")
"""The positions of the arguments that autocast casts, besides adapters."""


# ---------------------------------------------------------------------------------------------------------------------
# Operators

RoutedOperands = namedtuple("RoutedOperands", "x experts weights wi wo tokens wi_bias wo_bias out extras")
"""Operands of forward; `extras` has those of both products."""


def _forward_rule(run: Any, static: tuple[Mlp, MlpNeeds], o: RoutedOperands) -> tuple[Any, ...]:
    op, needs = static
    y, order, *rest = rules.forward(run, op, *o[:-1], needs=needs, extras=o.extras or NO_EXTRAS)[:6]
    if not any(needs):
        return y, *[None] * 8
    return y, order.sizes, order.source, order.inverse, order.probs, *rest


_FORWARD = define(
    "routed_mlp",
    _forward_rule,
    RoutedOperands,
    derived=("x", "experts", "weights", "out"),
    written=("out",),
    most_results=18,  # y, four of the order, h, and rows and weights of both products in the forms that backward reads
)

HiddenOperands = namedtuple("HiddenOperands", "x h z wi wo sizes source inverse probs wi_bias wo_bias dy extras")
"""Operands of the first stage, which ends at the gradient of the hidden rows."""


def _hidden_rule(run: Any, static: GradFacts, o: HiddenOperands) -> tuple[Any, ...]:
    op, specs, needs, new_wo = static
    order = Order(o.sizes, o.source, o.inverse, None, o.probs)
    read = (o.x, o.h, o.z, o.wi, o.wo, order, o.wi_bias, o.wo_bias, o.dy)
    probs: Any = specs.probs
    options: dict[str, Any] = {"weights_dtype": probs.dtype, "extras": o.extras or NO_EXTRAS}
    *found, z, dy = rules.at_hidden(run, op, specs, *read, needs, **options)[:6]
    return *found, *with_weight_grad(run, op.fc2(), specs.wo, z, dy, o.sizes, wanted=new_wo)


_AT_HIDDEN = define(
    "routed_at_hidden",
    _hidden_rule,
    HiddenOperands,
    derived=("x", "h", "z", "source", "inverse", "probs", "dy"),
    most_results=15,  # three gradients, two forms of dh; the gradient of wo, or z and dy in the forms that it reads
)

FirstOperands = namedtuple("FirstOperands", "dh of_dh x wi sizes source inverse grad_input extras")
"""Operands of the second stage, the gradients of the first product; dh and its codes come from the first stage."""


def _first_rule(run: Any, static: GradFacts, o: FirstOperands) -> tuple[Any, ...]:
    op, specs, needs, new_wi = static
    order = Order(o.sizes, o.source, o.inverse, None, None)
    (extras, *_) = o.extras or NO_EXTRAS
    gathers_late = not rules.measures_rows(op)  # rows of x are made after dx, so that they are not alive before
    read = (None if gathers_late else o.x, o.wi, order, o.dh, o.of_dh)
    found = rules.first_product(run, op, specs, *read, needs, grad_input=o.grad_input, extras=extras)
    rows = found.rows
    if new_wi and gathers_late:
        rows = rules.first_rows(run, op.fc1(), specs.wi, o.x, o.source, o.inverse, o.sizes, extras.x)
    own = with_weight_grad(run, op.fc1(), specs.wi, rows, found.dy, o.sizes, wanted=new_wi)
    return found.x, found.bias, *own


_FIRST_PRODUCT = define(
    "routed_first_product",
    _first_rule,
    FirstOperands,
    derived=("x", "source", "inverse", "dh", "of_dh", "grad_input"),
    written=("grad_input",),
    most_results=8,  # two gradients, and that of wi, or x and dh in the forms that it reads
)


GatheredOperands = namedtuple("GatheredOperands", "x source inverse scale dy sizes into into_up")
"""Operands of the gradient of wi if its rows are gathered when it is computed."""


def _gathered_rule(run: Any, static: WeightFacts, o: GatheredOperands) -> list[Any]:
    op, weight, _, _ = static
    rows = rules.first_rows(run, op, weight, o.x, o.source, o.inverse, o.sizes, o.scale)
    return weight_grad(run, static, WeightOperands(rows, o.dy, o.sizes, o.into, o.into_up))


_GATHERED = define(
    "routed_weight_grad",
    _gathered_rule,
    GatheredOperands,
    rows=("dy",),
    written=("into", "into_up"),
    derived=("x", "source", "inverse"),
)


@dataclass(slots=True, eq=False)
class _GatheredGradient(WeightGradient):
    """The gradient of wi, for which the rows of x [T, K] at the slots `source` [M] are gathered when it is computed.

    Attributes:
        inverse: [T, k], the row of each slot. scale: the quantisation scales [G] of delayed scaling, or None.
    """

    x: Any
    source: Any
    inverse: Any
    scale: Any

    def launch(self, halves: tuple[int, ...], accumulate: bool, into: Any, into_up: Any) -> list[Any]:
        maps = (self.source, self.inverse)
        operands = (self.x, *maps, self.scale, self.dy, self.sizes, into, into_up)  # in the order of GatheredOperands
        return call_prepared(prepare(_GATHERED, (self.op, self.weight, halves, accumulate)), operands, self.count)

    def read(self) -> tuple[Any, ...]:
        return self.x, self.dy, self.source, self.inverse, self.scale


# ---------------------------------------------------------------------------------------------------------------------
# Forward and backward


def _kept_tokens(facts: Facts) -> tuple[bool, bool]:
    """Returns whether backward reads x in its first stage, and whether it does for the gradient of wi."""
    specs = facts.specs
    return rules.kept_tokens(facts.op, facts.needs, specs.wi_bias is not None, specs.wo_bias is not None)


def _result_spec(x: Any) -> ArraySpec:
    """Returns the spec of y [T, K]."""
    return ArraySpec(tuple(x.shape), x.dtype) if isinstance(x, QTensor) else rows_spec(x)


def _forward(given: Arguments, facts: Facts, scaling: Scaling, m: Any, out: Tensor | None) -> Forwarded:
    x: Any = given.x
    (wi, wo), (wi_bias, wo_bias), keep = weights_of(given, facts, scaling), given.biases, facts.keep
    if out is not None:
        linear_spec.check_buffer(ROUTED_NAMES.out, rows_spec(out), _result_spec(x))
    extras = scaling.extras(2, None, training=facts.training)
    experts, weights, tokens = given.sizes, given.row_scale, every_row(home(x))
    operands = (x, experts, weights, wi, wo, tokens, wi_bias, wo_bias, out, extras)  # in the order of RoutedOperands
    y, sizes, source, inverse, probs, h, z, wi, wo = call_prepared(facts.forward, operands, m)
    if not facts.training:
        return y, ()
    x, probs = x if any(_kept_tokens(facts)) else None, probs if keep.probs else None
    wi_bias, wo_bias = wi_bias if keep.wi_bias else None, wo_bias if keep.wo_bias else None
    return y, (x, h, z, sizes, source, inverse, probs, scaling.key, wi, wo, wi_bias, wo_bias)


def _backward(saved: Saved, kept: list[Any], dy: Tensor, grad_input: Tensor | None, deliver: Deliver) -> MainGradients:
    x, h, z, sizes, source, inverse, probs, key, wi, wo, wi_bias, wo_bias = kept
    kept.clear()
    facts = saved.facts
    again, of_weight = _kept_tokens(facts)
    scaling = saved.scaling
    of_wi: Callable[..., WeightGradient] = WeightGradient
    if of_weight and not rules.measures_rows(facts.op):  # then rows are gathered where the gradient is computed
        of_wi = partial(_GatheredGradient, x=x, source=source, inverse=inverse, scale=scaling.scale(0, X))
    grad_input, extras = grad_input if facts.needs.x else None, scaling.extras(2, key, training=True)
    rows, biases = (x if again else None, h, z), (wi_bias, wo_bias)
    wo = read_by_dgrad(wo, facts.op.recipe)
    at_hidden = [(*rows, wi, wo, sizes, source, inverse, probs, *biases, dy, extras)]  # in the order of HiddenOperands
    x, extras = x if of_weight else None, scaling.extras(1, key, training=True)
    first = [(x, wi, sizes, source, inverse, grad_input, extras)]  # in the order of FirstOperands, from x on
    del x, h, z, rows, wi, wo
    return in_stages(saved, sizes, at_hidden, first, deliver, of_wi)


ROUTED = Operation(
    name="routed_mlp",
    product=_FORWARD,
    weights=(ROUTED_NAMES.wi, ROUTED_NAMES.wo),
    rows=_saved.OF_ROWS,
    places=positions(routed_arguments, "wi", "wo"),
    scale_place=positions(routed_arguments, "weights")[0],
    check=routed_arguments,
    needs=MLP.needs,
    facts=partial(facts_of, (_FORWARD, _AT_HIDDEN, _FIRST_PRODUCT)),
    forward=_forward,
    backward=_backward,
    count=rows_of_tokens,
)
OPERATIONS[ROUTED.name] = ROUTED
