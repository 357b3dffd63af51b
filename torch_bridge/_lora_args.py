"""Checks the adapters of `grouped_linear` and of the MLPs, together with the arguments of the frozen base operation.

Letters: G groups, K in, N out, r rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from grouped_core import lora, lora_mlp
from grouped_core.calls import ArraySpec
from grouped_core.formats import QTensor
from grouped_core.linear_spec import Linear, Names
from grouped_core.lora import LORA, Adapter, LoraNeeds
from grouped_core.lora_mlp import Adapters, Factors, LoraMlpNeeds
from grouped_core.mlp_spec import Mlp, MlpNames, MlpSpecs
from grouped_core.recipes import Recipe
from torch_bridge import _codec
from torch_bridge._args import (
    Arguments,
    Checked,
    Lists,
    Members,
    accumulators_of_product,
    check_apart_from_operands,
    check_members,
    linear_arguments,
    lists_of,
    mlp_arguments,
    packed_spec,
    positions,
    whole_operand,
)
from torch_bridge._checks import check_operand, refuse_transforms
from torch_bridge._routed_args import routed_arguments
from torch_bridge._tensors import StraightThrough, fixed_spec, home, members
from torch_bridge._weight_forms import WeightForms

_codec.register(Adapter, Adapters, Factors, LoraNeeds, LoraMlpNeeds)  # static facts of operators

LORA_NAMES = (f"{LORA}[0]", f"{LORA}[1]")
MLP_LORA_NAMES = tuple(f"{place}[{at}]" for place in lora_mlp.PLACES for at in (0, 1))
"""The names of A and B of wi, and of A and B of wo, in messages."""


class Adapted(NamedTuple):
    """A linear operation with a frozen weight, and the adapter of that weight."""

    base: Linear
    adapter: Adapter

    @property
    def names(self) -> Names:
        """The names of the base product's arguments."""
        return self.base.names


class AdaptedSpecs(NamedTuple):
    """The specs of the base operation's operands, and the specs of the factors: A and B of each weight."""

    base: Any
    factors: Any


def adapted_arguments(
    x: Any,
    weight: Any,
    group_sizes: Any,
    rhs_transposed: bool,
    bias: Members | None,
    row_scale: Tensor | None,
    scale_bias: bool,
    recipe: Any,
    a: Any,
    b: Any,
    lora_scaling: float,
    lora_dropout: float,
    lora_key: Tensor | None,
    lora_wgrad_accum: Any,
    implementation: str | Sequence[str] | None,
    caches: tuple[WeightForms | None, ...] = (None,),
) -> Arguments:
    """Checks the arguments of `grouped_linear` with an adapter (a, b) and returns them; it raises the same errors."""
    adapter = lora.option(LORA, lora_scaling, lora_dropout, lora_key)
    own = (x, weight, group_sizes, rhs_transposed, bias, row_scale, scale_bias, recipe)
    base = linear_arguments(*own, None, implementation)
    accums = lora_wgrad_accum if isinstance(lora_wgrad_accum, str) else lora.accumulators_option(lora_wgrad_accum)
    found = _FactorArguments("grouped_linear", LORA_NAMES, (a, b), base, lora_key)
    names, specs = base.checked.op.names, base.checked.specs
    checked = _adapted(base.checked.op, specs, adapter, found.specs, found.key, lists_of((a, b), (bias,)))
    return found.arguments(checked, (names.w,), accums, caches)


@lru_cache(maxsize=1024)
def _adapted(op: Linear, specs: Any, adapter: Adapter, factors: Any, key: ArraySpec | None, lists: Lists) -> Checked:
    """Checks an adapter beside its checked base operation; cached, so that what follows is found only once."""
    lora.check(op, adapter, specs[0], specs[1], *factors, key)
    return Checked(Adapted(op, adapter), AdaptedSpecs(specs, factors), lists, LORA_NAMES)


class AdaptedMlp(NamedTuple):
    """An MLP with frozen weights, and the adapters of these weights."""

    base: Mlp
    adapters: Adapters

    @property
    def names(self) -> MlpNames:
        """The names of the MLP's arguments."""
        return self.base.names

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of the products with the frozen weights."""
        return self.base.recipe

    @property
    def max_rows(self) -> int | None:
        """The largest number of rows of the tokens, or None."""
        return self.base.max_rows


def factor_places(check: Callable[..., Arguments]) -> tuple[int, ...]:
    """Returns the positions of A and B of wi and of wo: behind the arguments of `check` up to its accumulators."""
    (first,) = positions(check, "wgrad_accum")
    return tuple(range(first, first + 4))


_FIRST_FACTOR, _FIRST_ROUTED_FACTOR = [factor_places(each)[0] for each in (mlp_arguments, routed_arguments)]


def adapted_mlp_arguments(*arguments: Any) -> Arguments:
    """Checks the arguments of `grouped_mlp` with adapters and returns them.

    Args:
        arguments: those of `mlp_arguments` up to `residuals`; then A and B of wi, A and B of wo, each of them or None;
            `lora_scaling`, `lora_dropout`, `lora_key`; accumulators as `Factors`, text or None; `implementation`; and
            optionally the caches of the layers.
    """
    return _of_mlp("grouped_mlp", mlp_arguments, arguments, _FIRST_FACTOR)


def adapted_routed_arguments(*arguments: Any) -> Arguments:
    """Checks the arguments of `routed_mlp` with adapters and returns them.

    Args:
        arguments: as in `adapted_mlp_arguments`, with `max_rows` after `residuals`.

    Raises:
        TypeError: the tokens are quantised. Also the errors of `routed_mlp`.
    """
    if isinstance(arguments[0], (QTensor, StraightThrough)):
        raise TypeError(
            "`x` of routed_mlp with adapters: quantised, expected a plain tensor, because adapters read the tokens "
            "themselves; pass these."
        )
    return _of_mlp("routed_mlp", routed_arguments, arguments, _FIRST_ROUTED_FACTOR)


def _of_mlp(name: str, check: Any, arguments: tuple[Any, ...], count: int) -> Arguments:
    own, (a_wi, b_wi, a_wo, b_wo, scaling, dropout, key, accums, implementation, *rest) = (
        arguments[:count],
        arguments[count:],
    )
    pairs = [None if a is None else (a, b) for a, b in ((a_wi, b_wi), (a_wo, b_wo))]
    adapters, factors = lora_mlp.option(pairs, scaling, dropout, key)
    base = check(*own, None, implementation)
    found = _FactorArguments(name, MLP_LORA_NAMES, factors, base, key)
    op, specs = base.checked.op, base.checked.specs
    lists = lists_of(factors, base.biases)
    routed = name == "routed_mlp"
    checked = _adapted_mlp(op, routed, specs, adapters, Factors(*found.specs), found.key, lists)
    caches = rest[0] if rest else (None, None)
    return found.arguments(checked, (op.names.wi, op.names.wo), accums, caches)


@lru_cache(maxsize=1024)
def _adapted_mlp(
    op: Mlp,
    routed: bool,
    specs: MlpSpecs,
    adapters: Adapters,
    factors: Factors,
    key: ArraySpec | None,
    lists: Lists,
) -> Checked:
    lora_mlp.check(op, adapters, specs, factors, key)
    op = dataclasses.replace(op, keeps_rows=not routed)
    return Checked(AdaptedMlp(op, adapters), AdaptedSpecs(specs, factors), lists, MLP_LORA_NAMES)


class _FactorArguments:
    """The factors of adapters, checked as operands together with those of the base operation.

    Attributes:
        leaves: for each factor, the tensors that receive its gradient; [] for one that is absent.
        specs: the specs of the factors, None for one that is absent. key: the spec of the dropout's key, or None.
    """

    def __init__(
        self, operation: str, names: Sequence[str], factors: Sequence[Any], base: Arguments, key: Tensor | None
    ) -> None:
        for (name, _), leaves in zip(_frozen(base), base.leaves, strict=True):
            if any(each.requires_grad for each in leaves):
                raise ValueError(
                    f"`{name}`: requires a gradient beside `{LORA}`, expected a frozen weight; call "
                    f"requires_grad_(False) on it, or pass `{name}.detach()`."
                )
        refuse_transforms(operation, *factors)
        first, transposed = home(base.x), base.checked.op.transposed
        for at, (name, factor) in enumerate(zip(names, factors, strict=True)):
            if factor is not None:
                check_members((LORA, "ab"[at % 2]), name, factor, first, transposed=transposed)
        if key is not None:
            check_operand(f"{LORA}_key", key, first)
        self.names, self.base, self.lora_key = names, base, key
        self.factors = [whole_operand(each) for each in factors]
        self.leaves = tuple([[] if each is None else members(each) for each in factors])
        self.specs = tuple([packed_spec(each) for each in factors])
        self.key = None if key is None else fixed_spec(key)

    def arguments(
        self, checked: Checked, weights: tuple[str, ...], accums: Any, caches: tuple[WeightForms | None, ...]
    ) -> Arguments:
        """Returns the arguments of the operation with adapters.

        Args:
            weights: the names of the frozen weights. accums: one accumulator or None per factor, or "main_grad", or
                None.
        """
        to_main_grad = isinstance(accums, str)
        accumulators: tuple[Sequence[Tensor | None], ...] = ((),) * len(self.leaves)
        if accums is not None:
            given = (accums,) * len(self.leaves) if to_main_grad else accums
            named = zip(given, self.leaves, self.specs, self.names, strict=True)
            accumulators = tuple(
                [
                    accumulators_of_product(each, own, spec, self.base.x, _accum(name), name) if own else ()
                    for each, own, spec, name in named
                ]
            )
        arguments = self.base._replace(
            weights=tuple(self.factors),
            leaves_of=tuple(self.factors),
            checked=checked,
            to_main_grad=to_main_grad,
            accumulators=accumulators,
            caches=caches,
            base=tuple(zip(weights, self.base.weights, strict=True)),
            key=self.lora_key,
        )
        named = zip(self.names, accumulators, strict=True)
        written = [(_accum(name), each) for name, some in named for each in some]
        if written:
            check_apart_from_operands(written, arguments)
        return arguments


def _frozen(base: Arguments) -> list[tuple[str, Any]]:
    return list(zip(base.checked.names, base.weights, strict=True))


def _accum(factor: str) -> str:
    """Returns the name of the accumulator of a factor in messages."""
    return f"{LORA}_wgrad_accum{factor.removeprefix(LORA)}"
