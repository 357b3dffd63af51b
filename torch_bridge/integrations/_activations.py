"""Which `Activation` a model's own code computes between the two products of an expert.

The names of functions are not relied on. `facts_of` collects what the code reads; `recognised` runs the code on fixed
rows in float64, gives it access to nothing but these facts, and compares the results with the reference formulas. Facts
are plain tuples of classes, functions, numbers and text, so that they can be keys of a cache and constants for Dynamo.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from grouped_core.activations import KINDS, Activation, half_columns
from torch_bridge import _codec
from torch_bridge._compiling import is_compiling

Facts = tuple[Any, ...]
"""("value", number or text), ("function", f), ("partial", f, arguments, keywords), ("module", class, reads), or
("method", function, reads), where reads are pairs of a name and its facts; ("unknown",) for anything else."""

_UNKNOWN: Facts = ("unknown",)
_PLAIN = (bool, int, float, str, type(None))
_TOLERANCE = 1e-12
"""How much two float64 evaluations of one formula may differ, relative to 1 + the size of their operands."""
_WIDTH = 4
"""Activated columns of a row of the probe."""


# ---------------------------------------------------------------------------------------------------------------------
# What the code reads


def facts_of(module: Any, *, gated: bool) -> Facts:
    """Facts of the `_apply_gate` of an experts module, or of the `act_fn` of one without a gate."""
    if not gated:
        return _facts(module.act_fn)
    function = type(module)._apply_gate
    if "_apply_gate" in module.__dict__ or type(function) is not FunctionType:
        return _UNKNOWN
    return ("method", function, _reads(module, function))


def _facts(value: Any) -> Facts:
    if type(value) in _PLAIN:
        return ("value", _codec.to_tuples(value) if is_compiling() else value)
    if type(value) in (FunctionType, BuiltinFunctionType):
        return ("function", value)
    if isinstance(value, functools.partial) and not value.args:
        return ("partial", value.func, tuple([(name, _facts(each)) for name, each in value.keywords.items()]))
    # What hooks or a forward of the instance compute is not in the code of the class.
    if isinstance(value, Module) and "forward" not in value.__dict__ and not _is_hooked(value):
        return ("module", type(value), _reads(value, type(value).forward))
    return _UNKNOWN


def _is_hooked(module: Module) -> bool:
    return len(module._forward_hooks) > 0 or len(module._forward_pre_hooks) > 0


def _reads(owner: Any, function: Any) -> Facts:
    """Pairs of names and facts of the attributes of `owner` whose names occur in a function."""
    found = [(name, _facts(_attribute(owner, name))) for name in _names(function)]
    return tuple([pair for pair in found if pair[1] != _UNKNOWN])


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, submodule or constant of the class of a module; an object without facts for anything else."""
    if name in owner.__dict__:
        return owner.__dict__[name]
    if name in owner._modules:
        return owner._modules[name]
    constant = getattr(type(owner), name, _UNKNOWN)  # a method is not one
    return constant if type(constant) in _PLAIN else _UNKNOWN


@torch.compiler.assume_constant_result
def _names(function: Any) -> tuple[str, ...]:
    """The names of attributes and globals in the code of a function written in Python."""
    return function.__code__.co_names if isinstance(function, FunctionType) else ()


def _numbers(facts: Any) -> Iterator[float]:
    """Every finite number in the facts."""
    if len(facts) == 2 and facts[0] == "value":
        if type(facts[1]) in (int, float) and math.isfinite(facts[1]):
            yield float(facts[1])
        return
    for each in facts:
        if isinstance(each, tuple):
            yield from _numbers(each)


# ---------------------------------------------------------------------------------------------------------------------
# The code, run with nothing but the facts


class _StandIn:
    """An object that has the attributes of the facts and no others."""

    def __init__(self, function: Callable[..., Any], reads: Facts) -> None:
        self.__dict__.update({name: _built(facts) for name, facts in reads})
        self._function = function

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"it reads `{name}`, which is neither a number, a text, a function nor a module of these")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self, *args, **kwargs)


def _built(facts: Facts) -> Any:
    """What the facts describe."""
    kind, *parts = facts
    if kind == "partial":
        return functools.partial(parts[0], **{name: _built(each) for name, each in parts[1]})
    if kind == "module":
        return _StandIn(parts[0].forward, parts[1])
    return _StandIn(*parts) if kind == "method" else parts[0]


class _InFloat64(TorchFunctionMode):
    """Leaves out casts to float32, in which kernels compute the activation anyway."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (*args[1:], *(kwargs or {}).values())
        if func is Tensor.float or (func is Tensor.to and given == (torch.float32,)):
            return args[0]
        return func(*args, **(kwargs or {}))


def _run(facts: Facts, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The model's own results [R, F] in float64."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"), _InFloat64():
        found = _built(facts)(torch.from_numpy(rows.copy()))
    if found.dtype != torch.float64:
        raise TypeError(f"it gives {found.dtype} for rows of torch.float64")
    return found.numpy()


# ---------------------------------------------------------------------------------------------------------------------
# Recognition


class _Known:
    """Holds each recognised activation in a separate attribute, so that Dynamo guards each of them separately."""

    def name_of(self, activation: Activation) -> str:
        """The name of its attribute, which is made if there is none."""
        for name, each in vars(self).items():
            if each == activation:
                return name
        name = f"activation_{len(vars(self))}"
        setattr(self, name, activation)
        return name


_KNOWN = _Known()


def recognised(name: str, gated: bool, facts: Facts) -> Activation:
    """The activation that the code computes.

    Args:
        name: the name of the experts' class in the message. gated: whether rows hold a gate and a linear half.

    Raises:
        NotImplementedError: it is none of `KINDS`, or reads what cannot be compared.
    """
    return getattr(_KNOWN, _key(name, gated, facts))


@torch.compiler.assume_constant_result
def _key(name: str, gated: bool, facts: Facts) -> str:
    """The name of the activation in `_KNOWN`; constant where a graph is traced."""
    found, reason = _search(gated, facts)
    if found is None:
        what = "_apply_gate" if gated else "act_fn"
        kinds = ", ".join(name for name, kind in KINDS.items() if kind.gated is gated)
        raise NotImplementedError(
            f"`{what}` of {name}: {reason}; expected one of {kinds}, with numbers that it reads from the module; "
            'choose another implementation for this model, e.g. `model.set_experts_implementation("grouped_mm")`.'
        )
    return found


@functools.lru_cache(maxsize=256)
def _search(gated: bool, facts: Facts) -> tuple[str | None, str]:
    """(the name of the activation in `_KNOWN`, or None, and why)."""
    if facts == _UNKNOWN:
        return None, "an object that is no function or module of its class alone"
    numbers = sorted(set(_numbers(facts)))
    rows = _probe(gated, numbers)
    try:
        found = _run(facts, rows)
    except Exception as error:  # of code that others wrote: whatever it is, it is the reason
        return None, f"it does not run alone on float64 rows ({type(error).__name__}: {error})"
    width = _WIDTH if gated else rows.shape[1]
    if found.shape != (len(rows), width):
        return None, f"it gives shape {found.shape} for rows {rows.shape}"
    for candidate in _candidates(gated, numbers):
        if _matches(candidate, rows, found):
            return _KNOWN.name_of(candidate), ""
    return None, f"its values are those of none of our activations, also not with the numbers {numbers} that it reads"


def _candidates(gated: bool, numbers: list[float]) -> Iterator[Activation]:
    """Every kind with its default parameters, or some of `numbers` in their place, in both orders of columns."""
    for name, kind in KINDS.items():
        if kind.gated is not gated:
            continue
        for chosen in itertools.product(*[[default, *numbers] for default in kind.defaults.values()]):
            options = dict(zip(kind.defaults, chosen, strict=True))
            for interleave in (None, 1) if gated else (None,):
                try:
                    yield Activation(name, interleave=interleave, **options)
                except ValueError:  # a number outside the range of this parameter
                    continue


def _matches(candidate: Activation, rows: NDArray[np.float64], found: NDArray[np.float64]) -> bool:
    kind = KINDS[candidate.kind]
    if kind.gated:
        gate, linear = half_columns(_WIDTH, candidate.interleave)
        a, u = rows[:, gate], rows[:, linear]
    else:
        a, u = rows, np.zeros_like(rows)
    numbers = {**{name: getattr(candidate, name) for name in kind.defaults}, **kind.fixed}
    with np.errstate(all="ignore"):
        t = kind.formula(numbers, a, u).t
        return bool((np.abs(t - found) <= _TOLERANCE * (1 + np.abs(a)) * (1 + np.abs(u))).all())


def _probe(gated: bool, numbers: list[float]) -> NDArray[np.float64]:
    """Rows in which every value of a list meets every other one: small and large ones, and around every number."""
    limits = {abs(each) for each in numbers} | {abs(each) for kind in KINDS.values() for each in kind.defaults.values()}
    around = [sign * each * factor for each in sorted(limits) for factor in (0.97, 1.03, 2.1) for sign in (-1, 1)]
    values = np.array([*np.linspace(-11.3, 12.1, 24), -1e-3, 0.0, 2e-3, *around])
    if not gated:
        return values[None]
    pairs = np.stack([each.ravel() for each in np.meshgrid(values, values)], axis=1)
    np.random.default_rng(0).shuffle(pairs)
    pairs = np.resize(pairs, (-(-len(pairs) // _WIDTH), _WIDTH, 2))  # the last ones again, to fill a row
    return np.concatenate([pairs[..., 0], pairs[..., 1]], axis=1)
