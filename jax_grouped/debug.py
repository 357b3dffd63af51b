"""Which kernels an operation would run, and why, for any public operation; needs neither a GPU nor arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import Parameter, signature
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grouped_core import debug
from grouped_core.calls import Call
from grouped_core.formats import QTensor
from jax_grouped import mlp, ops, parallel, route, routed
from jax_grouped._run import call_p, default_arch, noting
from jax_grouped.moe import SharedExpert, moe
from jax_grouped.quantize import dequantize, plan_dequantize, plan_quantize, quantize


def _planner_of_program(operation: Callable[..., Any]) -> debug.Planned:
    """The native calls of a function that consists of several operations, and of all its gradients."""

    def calls(**arguments: Any) -> list[Call]:
        arguments |= arguments.pop("routing", {})  # further keywords of `moe`
        nodes, tree = jax.tree.flatten(arguments, is_leaf=lambda node: isinstance(node, QTensor))
        nodes = list(map(_at_full_width, nodes))
        places = [at for at, node in enumerate(nodes) if _is_traced(node)]
        live = [at for at in places if not isinstance(nodes[at], QTensor) and _is_float(nodes[at])]

        def step(traced: list[Any]) -> Any:
            given = dict(enumerate(nodes)) | dict(zip(places, traced, strict=True))

            def results(primals: list[Any]) -> list[Any]:
                now = given | dict(zip(live, primals, strict=True))
                found = operation(**_with_frozen_weights(jax.tree.unflatten(tree, now.values())))
                return [each for each in jax.tree.leaves(found) if _is_float(each)]

            found, pull = jax.vjp(results, [given[at] for at in live])
            return pull(list(map(jnp.ones_like, found)))

        token = noting.set(True)
        try:
            return list(_calls_in(jax.make_jaxpr(step)([nodes[at] for at in places]).jaxpr))
        finally:
            noting.reset(token)

    return calls


def _at_full_width(node: Any) -> Any:
    """A `jax.ShapeDtypeStruct` that JAX would trace in another dtype, as a NumPy array, which keeps its dtype."""
    if not isinstance(node, jax.ShapeDtypeStruct) or jax.dtypes.canonicalize_dtype(node.dtype) == node.dtype:
        return node
    return np.broadcast_to(np.zeros((), node.dtype), node.shape)


def _is_traced(node: Any) -> bool:
    """Whether JAX traces it as it is; operations refuse other NumPy arrays, or convert them themselves."""
    if isinstance(node, np.ndarray) and not isinstance(node, np.ma.MaskedArray):
        numbers = node.dtype.kind not in "OSUmM"  # which `canonicalize_dtype` does not know
        return numbers and node.dtype.isnative and jax.dtypes.canonicalize_dtype(node.dtype) == node.dtype
    return isinstance(node, jax.Array | jax.ShapeDtypeStruct | QTensor)


def _is_float(node: Any) -> bool:
    return jnp.issubdtype(node.dtype, jnp.floating)


def _with_frozen_weights(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `moe` with weights that have no gradient where adapters are beside them."""
    if arguments.get("lora") is not None:
        arguments |= {name: jax.lax.stop_gradient(arguments[name]) for name in ("wi", "wo")}
    shared = arguments.get("shared")
    if isinstance(shared, SharedExpert) and shared.lora is not None:
        wi, wo = jax.lax.stop_gradient((shared.wi, shared.wo))
        arguments["shared"] = shared._replace(wi=wi, wo=wo)
    return arguments


def _calls_in(program: Any) -> Iterator[Call]:
    """The native calls of a jaxpr and of those in it, in order."""
    for equation in program.eqns:
        if equation.primitive is call_p:
            yield equation.params["call"]
        for value in jax.tree.leaves(tuple(equation.params.values())):
            inner = getattr(value, "jaxpr", value)  # of a closed one
            if hasattr(inner, "eqns"):
                yield from _calls_in(inner)


_PLANS: dict[Callable[..., Any], debug.Planned] = {
    ops.ragged_dot: ops.plan_ragged_dot,
    mlp.grouped_mlp: mlp.plan_grouped_mlp,
    routed.routed_mlp: routed.plan_routed_mlp,
    moe: _planner_of_program(moe),
    **{
        each: _planner_of_program(each)
        for each in (
            *(route.topk_router, route.permute, route.unpermute, route.pad_groups, route.unpad_groups),
            *(route.hash_experts, route.update_bias, route.balance_quantile),
        )
    },
    quantize: plan_quantize,
    dequantize: plan_dequantize,
}


def _check_operation(op: Any) -> None:
    """Refuses what has an operation inside it with words that say which one to pass.

    Raises:
        TypeError: `op` is an instance of a layer, or a function that runs over the axes of a mesh.
    """
    spread = op is parallel.moe
    operation = routed.routed_mlp if spread else getattr(op, "operation", None)
    if operation is None or isinstance(op, type):
        return
    named = [each for each in signature(operation).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    given = [each.name for each in named if each.default is each.empty]
    came, wanted = f"an instance of {type(op).__name__}", f"its class or {operation.__name__}"
    if spread:
        came, wanted = f"{op.__module__}.{op.__name__}", f"{operation.__name__}, which runs its experts"
    raise TypeError(f"`op`: {came}, expected {wanted}; pass that, with the arguments {', '.join(given)}.")


def _planner(op: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Sequence[Call]]:
    _check_operation(op)
    planner, arguments = debug.bound_arguments(_PLANS, op, args, kwargs)
    return partial(planner, **arguments)


def why_unsupported(op: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> str | None:
    """None where `op(*args, **kwargs)` and all its gradients run on `arch`, else the message of the error.

    Args:
        op: a public operation, e.g. `ragged_dot`, `moe` or `route.permute`, or the class of its layer.
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
