"""Native calls in JAX: registration, lowering, workspace, types under shard_map, and unsupported transformations.

Everything that JAX has to know about native calls is in this file; `grouped_core` uses it through `JaxRunner`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.core
import numpy as np
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from grouped_core import _native, plans
from grouped_core.calls import SLOTS, ArraySpec, Call, Param, spec_of
from jax_grouped._partition import (
    check_whole,
    lower_local,
    may_be_partitioned,
    split_over,
    split_specs,
    told_its_devices,
)


def check_ffi_version(built: tuple[int, int], runtime: tuple[int, int]) -> None:
    """Refuses handlers that are newer than the runtime: registering one would make XLA's whole backend fail.

    Args:
        built, runtime: (major, minor) of the XLA FFI API of the native module and of the installed jaxlib.

    Raises:
        ImportError: the runtime does not accept the module's handlers.
    """
    if built[0] != runtime[0] or built[1] > runtime[1]:
        raise ImportError(
            f"grouped_core._native: built with XLA FFI API {built[0]}.{built[1]}, but the jaxlib beside JAX "
            f"{jax.__version__} has {runtime[0]}.{runtime[1]}, expected {built[0]}.{built[1]} or a later minor; "
            "install a newer jaxlib, or build jax-grouped against this one."
        )


def runtime_ffi_version() -> tuple[int, int]:
    """(major, minor) of the XLA FFI API of the installed jaxlib, read from its headers."""
    header = (Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h").read_text()
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header))
    return int(found["MAJOR"]), int(found["MINOR"])


def _register() -> None:
    check_ffi_version(_native.ffi_api_version, runtime_ffi_version())
    for platform, targets in _native.handlers().items():
        for target, handler in targets.items():
            jax.ffi.register_ffi_target(target, handler, platform=platform)


_register()


@cache
def cuda_arch() -> str:
    """The arch that CUDA programs are planned for: that of the visible GPU, without one the module's default."""
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:
        return _native.default_cuda_arch
    return _native.arch_built_for(int(capability.replace(".", "")))


def default_arch() -> str:
    """The arch of JAX's default device."""
    return "cpu" if jax.default_backend() == "cpu" else cuda_arch()


# ---------------------------------------------------------------------------------------------------------------------
# The primitive. Its kernel is chosen at lowering, for the platform of the lowering. So a program traces to the same
# jaxpr on every platform, and a machine without a GPU can lower for one.

call_p = Primitive("grouped_call")
"""Every native call is this primitive; its one parameter `call` is a `grouped_core.calls.Call`."""
call_p.multiple_results = True


@call_p.def_abstract_eval
def _result_types(*operands: Any, call: Call) -> list[Any]:
    like = operands[0]  # all operands vary over the same axes of the mesh, so any of them types the results
    mesh = like.sharding.mesh
    _, parts = split_specs(call, split_over(call, [operand.sharding.spec for operand in operands]))

    def typed(spec: ArraySpec, part: Any) -> Any:
        sharding = like.sharding if mesh.empty else jax.sharding.NamedSharding(mesh, part)
        return like.update(shape=spec.shape, dtype=np.dtype(spec.dtype), weak_type=False, sharding=sharding)

    return list(map(typed, [spec for spec in call.outputs if spec is not None], parts))


def with_gradients(value: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """A function of a static argument and of operands, with a `custom_vjp` of its own for each set of operands that are
    differentiated.

    What forward saves depends on that set. JAX traces a function once for `jit`, `checkpoint` and `scan`, and may
    differentiate the trace for several sets, such as x and weights in one layer and weights alone in another. Of one
    `custom_vjp` it would then read all residuals by the tree of the set that came last.

    Args:
        value: (static, *operands) -> results. forward: (static, *primals) -> (results, residuals), where the leaves of
            primals are `CustomVJPPrimal`s. backward: (static, residuals, cotangents) -> cotangents of the operands.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0, 1))
    def of_set(static: Any, _: frozenset[int], *operands: Any) -> Any:
        return value(static, *operands)

    def save(static: Any, moved: frozenset[int], *primals: Any) -> Any:
        leaves, tree = jax.tree.flatten(custom_vjp_primal_tree_values(primals))
        return forward(static, *tree.unflatten([CustomVJPPrimal(leaf, at in moved) for at, leaf in enumerate(leaves)]))

    def transpose(static: Any, _: frozenset[int], saved: Any, cotangents: Any) -> Any:
        return backward(static, saved, cotangents)

    of_set.defvjp(save, transpose, symbolic_zeros=True)

    @partial(jax.custom_jvp, nondiff_argnums=(0,))
    def function(static: Any, *operands: Any) -> Any:
        return value(static, *operands)

    def rule(static: Any, primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
        leaves, tree = jax.tree.flatten(primals)
        of_leaves = tree.flatten_up_to(tangents)
        moved = [at for at, tangent in enumerate(of_leaves) if not _is_zero(tangent)]

        def of_moved(*values: Any) -> Any:
            every = list(leaves)
            for at, each in zip(moved, values, strict=True):
                every[at] = each
            return of_set(static, frozenset(moved), *tree.unflatten(every))

        return jax.jvp(of_moved, [leaves[at] for at in moved], [of_leaves[at] for at in moved])

    function.defjvp(rule, symbolic_zeros=True)
    return function


def _is_zero(tangent: Any) -> bool:
    """Whether a tangent is a zero by its type, or that of an array that has none, such as one of integers."""
    return isinstance(tangent, SymbolicZero) or tangent.dtype == jax.dtypes.float0


def differentiable(function: Any, *arguments: Any) -> Any:
    """Calls a function of `with_gradients`; the first argument is static.

    An eager `jax.shard_map` cannot evaluate such a function directly, but it can evaluate a jitted one.
    """
    try:
        return function(*arguments)
    except NotImplementedError as error:
        if "symbolic_zeros" not in str(error):
            raise
        return jax.jit(partial(function, arguments[0]))(*arguments[1:])


def nonzero(cotangent: Any) -> Any:
    """The cotangent that a backward with symbolic zeros got; None where it is zero."""
    return None if isinstance(cotangent, SymbolicZero) else cotangent


@partial(jax.jit, static_argnames="call")
def _compiled(*operands: jax.Array, call: Call) -> list[jax.Array]:
    return call_p.bind(*operands, call=call)


@call_p.def_impl
def _run_now(*operands: jax.Array, call: Call) -> list[jax.Array]:
    check_whole(call, operands)
    if jax.config.jax_disable_jit:  # pyrefly: ignore[missing-attribute] -- compiling is the only way to run it
        with jax.disable_jit(False):
            return _compiled(*operands, call=call)
    return _compiled(*operands, call=call)


def _attribute(value: Param) -> Any:
    if isinstance(value, str):
        return value
    return np.float32(value) if isinstance(value, float) else np.int64(value)


local_p = Primitive("grouped_call_on_one_shard")
"""`call_p` where it is known that no operand is sharded."""
local_p.multiple_results = True
local_p.def_abstract_eval(_result_types)


def _lower(ctx: Any, *operands: Any, call: Call, platform: str) -> Sequence[Any]:
    if may_be_partitioned(ctx):
        return lower_local(ctx, local_p.bind, call, operands)
    return _lower_as_it_is(ctx, *operands, call=call, platform=platform)


def _lower_as_it_is(ctx: Any, *operands: Any, call: Call, platform: str) -> Sequence[Any]:
    arch = "cpu" if platform == "cpu" else cuda_arch()
    plan = plans.plan(call, arch)
    present, made = (
        [slot for slot, spec in enumerate(specs) if spec is not None] for specs in (call.inputs, call.outputs)
    )
    params = {name: _attribute(value) for name, value in call.params}
    # NOTE: XLA's own scratch memory does not exist on the CPU and does not work in CUDA graphs, so the workspace is a
    # result. XLA aligns every buffer to 16 bytes; if one were not aligned, the launch would refuse the workspace as too
    # small.
    workspace = jax.core.ShapedArray((plan.aligned_workspace_bytes,), np.dtype(np.uint8))
    rule = jax.ffi.ffi_lowering(
        f"jg_{call.name}_v1",
        operand_output_aliases={present.index(slot): made.index(output) for slot, output in call.aliases},
    )
    *results, _ = rule(
        ctx.replace(avals_out=[*ctx.avals_out, workspace]),
        *operands,
        **params,
        operands=np.int64(sum(1 << slot for slot in present)),
        results=np.int64(sum(1 << slot for slot in made)),
        arch=arch,
        implementation=call.implementation,
    )
    return results


for _platform in ("cpu", "cuda"):
    mlir.register_lowering(call_p, partial(_lower, platform=_platform), platform=_platform)
    mlir.register_lowering(local_p, partial(_lower_as_it_is, platform=_platform), platform=_platform)
told_its_devices(call_p)


def _refuse_vmap(operands: Sequence[Any], axes: Sequence[Any], *, call: Call) -> Any:
    slots = [slot for slot, spec in zip(SLOTS[call.name], call.inputs, strict=True) if spec is not None]
    mapped = ", ".join(
        f"{slot} {spec_of(array)} over axis {axis}"
        for slot, array, axis in zip(slots, operands, axes, strict=True)
        if axis is not None
    )
    if call.name == "scale_update":
        remedy = "leave `jax.vmap` out: leading axes of a state are kept."
    elif "group_sizes" in slots:
        remedy = (
            "fold the axis into rows or groups instead: reshape [B, M, K] to [B * M, K], stack the weights and sizes "
            "of all B to B * G groups."
        )
    else:
        remedy = "fold the axis into rows instead: reshape [B, M, K] to [B * M, K]."
    raise NotImplementedError(
        f"jax.vmap of {call.name}: mapped {mapped}, expected operands without a mapped axis; {remedy}"
    )


def _refuse_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> Any:
    other = "jax.lax.ragged_dot" if call.name.startswith("grouped_matmul") else "operations of jax.numpy"
    raise NotImplementedError(
        f"derivative of {call.name}: asked for a second derivative, for forward mode, or for that of a part of an "
        "operation (`jax_grouped.accumulate`), expected one jax.grad or jax.vjp of the whole operation; use "
        f"{other} where you need more."
    )


def _refuse_transpose(cotangents: Any, *_: Any, call: Call) -> Any:
    raise NotImplementedError(
        f"transpose of {call.name}: asked for by jax.linear_transpose, expected one jax.grad or jax.vjp of the "
        "operation; take `jax.vjp` at any point instead."
    )


batching.primitive_batchers[call_p] = _refuse_vmap
ad.primitive_jvps[call_p] = _refuse_jvp
ad.primitive_transposes[call_p] = _refuse_transpose


# ---------------------------------------------------------------------------------------------------------------------
# The runner, and axes of the mesh.


def varying_axes(array: Any) -> frozenset[str]:
    """Manual axes of the mesh over which `array` varies; empty outside `shard_map` and with `check_vma=False`."""
    return jax.typeof(array).mat.varying


def vary_alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, each made to vary over every axis that any of them varies over; no data moves."""
    axes = frozenset().union(*map(varying_axes, arrays))
    return [
        jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if (missing := axes - varying_axes(array)) else array
        for array in arrays
    ]


def reduce_to(
    cotangent: jax.Array, axes: frozenset[str], collective: Callable[..., jax.Array] = jax.lax.psum
) -> jax.Array:
    """The cotangent of a value that varies only over `axes`: `cotangent` summed (`collective`) over its other axes.

    With `check_vma=False` JAX does not track varying axes, and `shard_map` does the sum.
    """
    extra = varying_axes(cotangent) - axes
    return collective(cotangent, tuple(sorted(extra))) if extra else cotangent


def _check_local(call: Call, arrays: Sequence[jax.Array | None]) -> None:
    """Refuses arrays that are not local to one shard (ACC-10); only Explicit meshes show this in the type."""
    split_over(call, [jax.typeof(array).sharding.spec for array in arrays if array is not None])


noting: ContextVar[bool] = ContextVar("noting", default=False)
"""Whether a program is traced only to see its calls, as `debug.explain` does: then no call is refused."""


class JaxRunner:
    """Runs native calls on JAX arrays, traced or not (`grouped_core.products.Runner`)."""

    def __call__(self, call: Call, arrays: Sequence[jax.Array | None]) -> tuple[jax.Array | None, ...]:
        """Results of `call`, one per result slot, None where it has none.

        Raises:
            NotImplementedError: no kernel of any platform supports the call. Where only the program's platform has no
                such kernel, lowering the program raises it.
            ValueError: an operand is sharded over an Explicit mesh.
        """
        _check_local(call, arrays)
        if not noting.get() and not any(plans.attempt(call, arch).kernel for arch in ("cpu", cuda_arch())):
            plans.plan(call, default_arch())
        results = iter(call_p.bind(*vary_alike([a for a in arrays if a is not None]), call=call))
        return tuple(None if spec is None else next(results) for spec in call.outputs)

    def spec(self, array: Any) -> ArraySpec:
        """Shape and dtype."""
        return spec_of(array)

    def cast(self, array: jax.Array, dtype: str) -> jax.Array:
        """The array rounded to `dtype`; the same array where it has that dtype."""
        return jax.lax.convert_element_type(array, np.dtype(dtype))


RUN = JaxRunner()
