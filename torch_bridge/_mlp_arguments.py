"""Arguments of the MLP: checked, in words, and put in the order of the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import activations, linear_spec
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec
from grouped_core.mlp_spec import MlpSpecs, Residuals, check, check_pair, residuals_option
from grouped_core.plans import Planner
from grouped_core.products import in_form, operand_spec
from grouped_core.ranks import check_rank
from grouped_core.recipes import Recipe
from grouped_core.sizes import GroupSizes, unwrap
from torch_bridge import _graph, _mlp_library
from torch_bridge._arguments import (
    Members,
    accumulators_of,
    check_apart,
    check_rows,
    check_writable,
    gradient_dtype,
    refuse_transforms,
    weight_names,
)
from torch_bridge._compiling import is_compiling
from torch_bridge._decided import Decided
from torch_bridge._memory import EXCHANGE
from torch_bridge._mlp_library import NAMES
from torch_bridge._run import spec_of
from torch_bridge.params import check_operand, members_of
from torch_bridge.sizes import prepare_sizes

Accumulators = str | tuple[Tensor | Sequence[Tensor | None] | None, Tensor | Sequence[Tensor | None] | None]
"""What `wgrad_accum` takes: "main_grad", or a pair for the two weights."""


class Arguments(NamedTuple):
    """What a user passed, checked and in the order of the operators."""

    x: Tensor
    wi: list[Tensor]
    wo: list[Tensor]
    sizes: Tensor
    probs: Tensor | None
    wi_bias: list[Tensor]
    wo_bias: list[Tensor]
    text: str
    to_main_grad: bool
    accum_wi: Sequence[Tensor | None]
    accum_wo: Sequence[Tensor | None]

    def differentiates(self) -> bool:
        """Whether anybody needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        inputs = (self.x, self.probs, *self.wi, *self.wo, *self.wi_bias, *self.wo_bias)
        return any(each is not None and each.requires_grad for each in inputs)

    def named(self) -> list[tuple[str, Tensor | None]]:
        """What is read, by name."""
        return [
            *((NAMES.x, self.x), (NAMES.sizes, self.sizes), (NAMES.probs, self.probs)),
            *zip(weight_names(self.wi, NAMES.wi), self.wi, strict=True),
            *zip(weight_names(self.wo, NAMES.wo), self.wo, strict=True),
            *((NAMES.wi_bias, each) for each in self.wi_bias),
            *((NAMES.wo_bias, each) for each in self.wo_bias),
        ]


def check_arguments(
    x: Tensor,
    wi: Members,
    wo: Members,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    rhs_transposed: bool = True,
    activation: str | Activation = "swiglu",
    probs: Tensor | None = None,
    wi_bias: Members | None = None,
    wo_bias: Members | None = None,
    recipe: Recipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_accum: Accumulators | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Arguments:
    """The arguments of `grouped_mlp`, checked."""
    compiling = is_compiling()
    sizes, rows_hint = unwrap(group_sizes)
    options = (rhs_transposed, activation, recipe, residuals, rows_hint, implementation, is_pair(wi))
    operands = (x, wi, wo, sizes, probs, wi_bias, wo_bias)
    if compiling:
        sizes, text = _check_operands(operands, text_of(*options), rhs_transposed)
    else:
        refuse_transforms("grouped_mlp", x, wi, wo, probs, wi_bias, wo_bias)
        sizes, text = _checked_once(operands, text_of(*options), rhs_transposed)
    given = Arguments(
        x,
        _members(wi),
        _members(wo),
        sizes,
        probs,
        _members(wi_bias),
        _members(wo_bias),
        text,
        isinstance(wgrad_accum, str),
        (),
        (),
    )
    if wgrad_accum is None or wgrad_accum == "main_grad":
        return given
    if not isinstance(wgrad_accum, (tuple, list)) or len(wgrad_accum) != 2:
        raise ValueError(
            f"`{NAMES.accum}`: {wgrad_accum!r}, expected None, 'main_grad' or a pair, of `{NAMES.wi}` and of "
            f"`{NAMES.wo}`; put None where a weight has no accumulator."
        )
    first, second = (
        () if each is None else accumulators_of(each, members, f"{NAMES.accum}[{at}]", name)
        for at, (each, members, name) in enumerate(
            zip(wgrad_accum, (given.wi, given.wo), (NAMES.wi, NAMES.wo), strict=True)
        )
    )
    if not compiling:  # where there are no addresses yet
        written = [(f"{NAMES.accum}[0]", each) for each in first] + [(f"{NAMES.accum}[1]", each) for each in second]
        check_apart(written, given.named())
    return given._replace(accum_wi=first, accum_wo=second)


_checked: Decided[tuple[bytes, str], str] = Decided()  # texts of operands that were checked, sizes as they are


def _checked_once(operands: tuple[Any, ...], text: str, rhs_transposed: bool) -> tuple[Tensor, str]:
    """As with the linear operation: what is checked depends on the facts of the operands alone."""
    facts = EXCHANGE.describe(operands)
    if facts is not None and (facts, text) in _checked:
        return operands[3], text
    sizes, text = _check_operands(operands, text, rhs_transposed)
    if facts is not None and sizes is operands[3]:
        _checked.keep((facts, text), text)
    return sizes, text


def is_pair(operand: Any) -> bool:
    """Whether a first weight is gate and linear half, which have all groups each; not a list of one a group."""
    if not isinstance(operand, (list, tuple)) or len(operand) != 2:
        return False
    return isinstance(operand[0], Tensor) and operand[0].dim() == 3


def _members(operand: Members | None) -> list[Tensor]:
    return [] if operand is None else [operand] if isinstance(operand, Tensor) else list(operand)


def _check_operands(operands: tuple[Any, ...], text: str, rhs_transposed: bool) -> tuple[Tensor, str]:
    """(sizes as kernels read them, the operation as text); raises for operands that do not fit, in words."""
    x, wi, wo, sizes, probs, wi_bias, wo_bias = operands
    check_rows(NAMES.x, x, x)
    sizes = check_members(x, wi, wo, sizes, probs, wi_bias, wo_bias, transposed=rhs_transposed)
    if not is_compiling():  # where M is a symbol; the operators refuse what does not fit
        op = _mlp_library.decode(text)
        if op.paired:
            check_pair(op, *(spec_of(half) for half in wi))
        weights, biases = (_members(wi), _members(wo)), (_members(wi_bias), _members(wo_bias))
        given = Arguments(x, *weights, sizes, probs, *biases, text, False, (), ())
        specs, sizes_spec = specs_of(given)
        check(op, *specs[:3], sizes_spec, *specs[3:])
    return sizes, text


def check_members(
    x: Tensor, wi: Any, wo: Any, sizes: Any, probs: Any, wi_bias: Any, wo_bias: Any, *, transposed: bool
) -> Tensor:
    """Sizes as kernels read them; raises for operands that are not what is beside rows, as of the linear operation.

    Args:
        x: whose device counts. wi, wo: None where they are quantised.
    """
    sizes, _ = prepare_sizes(sizes, x, linear_spec.Names(NAMES.x, NAMES.wi))
    if probs is not None:
        check_operand(NAMES.probs, probs, x)
        check_rank("mlp", "probs", NAMES.probs, probs.shape)
    if is_pair(wi):
        for at, half in enumerate(wi):
            check_operand(f"{NAMES.wi}[{at}]", half, x)
            check_rank("mlp", "half", f"{NAMES.wi}[{at}]", half.shape, transposed=transposed)
    for name, operand in (("wi", wi), ("wo", wo), ("wi_bias", wi_bias), ("wo_bias", wo_bias)):
        if operand is not None and not (name == "wi" and is_pair(wi)):
            members_of(("mlp", name), getattr(NAMES, name), operand, x, transposed=transposed)
    return sizes


def text_of(*options: Any) -> str:
    """The operation as text.

    Args:
        options: rhs_transposed, activation, recipe, residuals, hint of rows, implementation, whether wi is a pair.
    """
    return _constant(_graph.taken_apart(options)) if is_compiling() else _encode(*options)


@torch.compiler.assume_constant_result
def _constant(options: Any) -> str:
    return _encode(*_graph.together(options))


def _encode(
    rhs_transposed: bool,
    activation: str | Activation,
    recipe: Recipe | None,
    residuals: str | Residuals,
    rows_hint: int,
    implementation: str | Sequence[str] | None,
    paired: bool,
) -> str:
    return _mlp_library.encode(
        bool(rhs_transposed),
        activations.resolve(activation),
        linear_spec.recipe_option(recipe).recipe,
        residuals_option(residuals),
        rows_hint,
        linear_spec.implementation_names(implementation),
        paired,
    )


def specs_of(given: Arguments) -> tuple[MlpSpecs, ArraySpec]:
    """Specs of the operands, packed, and of the sizes."""

    def packed(members: list[Tensor], rank: int) -> ArraySpec | None:
        if not members:
            return None
        one = spec_of(members[0])
        return one if len(one.shape) == rank else ArraySpec((len(members), *one.shape), one.dtype)

    wi, wo = packed(given.wi, 3), packed(given.wo, 3)
    op = _mlp_library.decode(given.text)
    if op.paired:
        wi = operand_spec(Planner(), in_form(op.fc1(), tuple(spec_of(half) for half in given.wi)))
    assert wi is not None, "a weight is always given"
    assert wo is not None, "a weight is always given"
    probs = None if given.probs is None else spec_of(given.probs)
    specs = MlpSpecs(spec_of(given.x), wi, wo, probs, packed(given.wi_bias, 2), packed(given.wo_bias, 2))
    return specs, spec_of(given.sizes)


def check_buffers(out: Tensor | None, grad_input: Tensor | None, given: Arguments) -> None:
    """BUF-2."""
    x = given.x
    buffers = ((NAMES.out, out), (NAMES.grad_input, grad_input))
    for name, buffer in buffers:
        if buffer is not None:
            check_operand(name, buffer, x)
            check_writable(name, buffer)
    if not is_compiling():  # where there are no addresses yet
        check_apart(buffers, given.named())
    wanted = ArraySpec(tuple(x.shape), gradient_dtype(x))  # of both, y has the shape and dtype of x
    if out is not None:
        linear_spec.check_buffer(NAMES.out, spec_of(out), wanted)
    if grad_input is not None:
        linear_spec.check_buffer(NAMES.grad_input, spec_of(grad_input), wanted)
        if not x.requires_grad:
            raise ValueError(
                f"`{NAMES.grad_input}`: given, but `x` needs no gradient; expected None, or an x with requires_grad; "
                "leave it out."
            )
