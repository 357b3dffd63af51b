"""Which kernels an operation would run, and why, for any public operation; needs neither a GPU nor arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from typing import Any

from grouped_core import debug
from grouped_core.calls import Call
from jax_grouped import mlp, ops, parallel, routed
from jax_grouped._run import default_arch
from jax_grouped.moe import moe
from jax_grouped.quantize import dequantize, plan_dequantize, plan_quantize, quantize

_PLANS: dict[Callable[..., Any], debug.Planned] = {
    ops.ragged_dot: ops.plan_ragged_dot,
    mlp.grouped_mlp: mlp.plan_grouped_mlp,
    routed.routed_mlp: routed.plan_routed_mlp,
    quantize: plan_quantize,
    dequantize: plan_dequantize,
}


def _check_operation(op: Any) -> None:
    """Refuses what has an operation inside it with words that say which one to pass.

    Raises:
        TypeError: `op` is an instance of a layer, or a function of a whole layer.
    """
    whole = op is moe or op is parallel.moe
    operation = routed.routed_mlp if whole else getattr(op, "operation", None)
    if operation is None or isinstance(op, type):
        return
    given = [each.name for each in signature(operation).parameters.values() if each.default is each.empty]
    came, wanted = f"an instance of {type(op).__name__}", f"its class or {operation.__name__}"
    if whole:
        came, wanted = f"{op.__module__}.{op.__name__}", f"{operation.__name__}, which runs its experts"
    raise TypeError(f"`op`: {came}, expected {wanted}; pass that, with the arguments {', '.join(given)}.")


def _planner(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Sequence[Call]]:
    _check_operation(op)
    planner, arguments = debug.bound_arguments(_PLANS, op, args, kwargs)
    return partial(planner, **arguments)


def why_unsupported(op: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> str | None:
    """None where `op(*args, **kwargs)` and all its gradients run on `arch`, else the message of the error.

    Args:
        op: a public operation, e.g. `ragged_dot`, or the class of its layer.
        *args: as for the operation; a `jax.ShapeDtypeStruct` can replace an array.
        **kwargs: as for `op`.
        arch: "cpu", "sm_80", "sm_90a", ...; None is JAX's default device.

    Raises:
        TypeError: `op` is not an operation of this package, or does not accept such arguments.
    """
    debug.check_arch(arch)
    return debug.why_not(_planner(op, args, kwargs), arch or default_arch())


def explain(op: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> str:
    """One line per native call of `op(*args, **kwargs)` and of its gradients: the kernel, and why others declined.

    Arguments are those of `why_unsupported`.

    Raises:
        TypeError, ValueError: as `op` itself for these arguments.
    """
    debug.check_arch(arch)
    return debug.explain_calls(_planner(op, args, kwargs)(), arch or default_arch())
