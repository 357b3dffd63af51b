"""The operations on NumPy arrays (CPU) and CuPy arrays (GPU), without tracing or recording for gradients.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from grouped_core import _native, activations, gradients, linear_spec, mlp, plans, quantizing, scaling
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, Call, spec_of
from grouped_core.formats import Format, QTensor, check_quantized, format_option, wide
from grouped_core.gradients import Amaxes, Gradients, Needs
from grouped_core.linear_spec import Linear, Names
from grouped_core.memory import overlap
from grouped_core.mlp import MlpGradients
from grouped_core.mlp_spec import (
    Mlp,
    MlpNames,
    MlpNeeds,
    MlpSpecs,
    Residuals,
    check,
    check_join,
    check_pair,
    joins,
    residuals_option,
    restrict,
)
from grouped_core.plans import Planner
from grouped_core.products import Array, in_form, operand_spec, quantized_spec
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.reference import numpy_dtype
from grouped_core.scaling import ScalingState
from grouped_core.sizes import unwrap

_NAMES = Names("x", "w", transposed="transposed", result="result_dtype")
_MLP_NAMES = MlpNames(transposed="transposed")
_CPU = 1  # kDLCPU
_AnyNeeds = TypeVar("_AnyNeeds", Needs, MlpNeeds)
_BITS = {1: "uint8", 2: "uint16"}


class ArrayRunner:
    """Runs native calls on arrays of the library and the device of `like`; results belong to that library."""

    def __init__(self, like: Array | QTensor[Any]) -> None:
        array: Array = like.values if isinstance(like, QTensor) else like
        device, index = array.__dlpack_device__()
        self.arch = "cpu" if int(device) == _CPU else _native.device_arch(int(index))
        self.xp = _namespace(array)

    def __call__(self, call: Call, arrays: Sequence[Array | None]) -> tuple[Array, ...]:
        """Runs `call`; a result that aliases an operand is that operand."""
        plans.plan(call, self.arch)  # raises if no kernel supports the call
        given = {output: arrays[slot] for slot, output in call.aliases}
        results = [
            given.get(i) if spec is None or given.get(i) is not None else self._empty(spec)
            for i, spec in enumerate(call.outputs)
        ]
        _native.call(
            call.name,
            self.arch,
            call.implementation,
            [None if array is None else _exported(array) for array in arrays],
            [None if array is None else _exported(array) for array in results],
            dict(call.params),
            lambda count: self.xp.empty(count, dtype="uint8"),
            self._stream(),
        )
        return tuple(results)

    def _empty(self, spec: ArraySpec) -> Array:
        return self.xp.empty(spec.shape, dtype=numpy_dtype(spec.dtype))

    def spec(self, array: Array) -> ArraySpec:
        """Shape and dtype of an array."""
        return spec_of(array)

    def cast(self, array: Array, dtype: str) -> Array:
        """The array rounded to `dtype`; the same array where it has that dtype."""
        return array if spec_of(array).dtype == dtype else array.astype(numpy_dtype(dtype))

    def sizes(self, group_sizes: Array) -> Array:
        """Group sizes as int32; other integers saturate, so that a size never changes its sign (GRP-1)."""
        if spec_of(group_sizes).dtype == "int32":
            return group_sizes
        if group_sizes.dtype.itemsize < 4:
            return group_sizes.astype("int32")
        limits, native = self.xp.iinfo(group_sizes.dtype), self.xp.iinfo("int32")
        low, high = max(int(limits.min), int(native.min)), min(int(limits.max), int(native.max))
        return self.xp.clip(group_sizes, low, high).astype("int32")

    def _stream(self) -> int:
        # NOTE: GPU arrays are CuPy arrays here, so CuPy is loaded.
        return 0 if self.arch == "cpu" else int(sys.modules["cupy"].cuda.get_current_stream().ptr)


def _namespace(array: Array) -> Any:
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    return importlib.import_module(type(array).__module__.split(".")[0])


def _exported(array: Array) -> tuple[Array, str]:
    """(the array for DLPack, the name of its dtype): arrays of ml_dtypes become unsigned integers of the same size."""
    name = spec_of(array).dtype
    return (array if array.dtype.isbuiltin == 1 else array.view(_BITS[array.dtype.itemsize])), name


def _specs(required: dict[str, Any], **optional: Any) -> list[Any]:
    """The specs of the arrays, None for an absent optional one; refuses anything but plain NumPy and CuPy arrays."""
    arrays = required | optional
    for name, array in _leaves(arrays).items():
        if array is None and name in optional:
            continue
        if not (hasattr(array, "__dlpack_device__") and hasattr(array, "flags")):
            raise TypeError(
                f"`{name}`: {type(array).__name__}, expected a NumPy or CuPy array; convert it with numpy.asarray."
            )
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(
                f"`{name}`: a masked array, expected one without a mask, which kernels do not see; call `.filled()`."
            )
    return [None if array is None else _spec(array) for array in arrays.values()]


def _needs(given: Any, default: _AnyNeeds) -> _AnyNeeds:
    """`needs=` of a function, or its default."""
    if given is None or isinstance(given, type(default)):
        return given or default
    kind = type(default).__name__
    raise TypeError(f"`needs`: {type(given).__name__}, expected None or {kind}; pass {kind}(x=..., ...).")


def _spec(operand: Any) -> Any:
    return quantized_spec(operand, spec_of) if isinstance(operand, QTensor) else spec_of(operand)


def _leaves(operands: dict[str, Any]) -> dict[str, Array | None]:
    """The arrays of named operands; a quantised one gives one entry per field."""
    leaves: dict[str, Array | None] = {}
    for name, operand in operands.items():
        if isinstance(operand, QTensor):
            fields = ("values", "scales", "group_scales", "other")
            parts = {f"{name}.{field}": getattr(operand, field) for field in fields}
            leaves |= _leaves({field: part for field, part in parts.items() if part is not None})
        else:
            leaves[name] = operand
    return leaves


def _checked(written: dict[str, Array | None], read: dict[str, Array | None]) -> None:
    """Refuses strided arrays, arrays on different devices, and read-only or overlapping buffers.

    Nothing is copied silently (ERR-5).
    """
    home = None
    read = _leaves(read)
    arrays = read | written
    for name, array in arrays.items():
        if array is None:
            continue
        device = tuple(map(int, array.__dlpack_device__()))
        home = home or device
        if device != home:
            raise ValueError(
                f"`{name}`: on DLPack device {device}, expected {home} = device of `{_NAMES.x}`; move it there."
            )
        if not array.flags.c_contiguous:
            raise ValueError(
                f"`{name}`: strides {array.strides}, expected a C-contiguous array; "
                "copy it into one; the operation does not copy operands itself."
            )
    seen = [(name, array) for name, array in read.items() if array is not None]
    for name, array in written.items():
        if array is None:
            continue
        if not getattr(array.flags, "writeable", True):
            raise ValueError(f"`{name}`: a read-only array, expected one that may be written; pass a copy of it.")
        for other, each in seen:
            if _namespace(array).may_share_memory(array, each):
                raise overlap(name, other)
        seen.append((name, array))


def _checked_bound(bound: BoundRecipe, groups: int, products: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the arrays of a bound recipe that an operation writes, those that it must not write), by name, for `_checked`.

    Raises:
        TypeError, ValueError: the state or the key does not fit the operation.
    """
    held = {}
    if isinstance(bound.state, ScalingState):
        held = {f"state.{name}": getattr(bound.state, name) for name in scaling.ARRAYS}
        _specs(held)
    scaling.check_bound(bound, groups, products)
    key = {} if bound.key is None else {"key": bound.key}
    _specs(key)
    history = held.pop("state.history", None)
    return {"state.history": history}, {**held, **key}


def _linear(
    transposed: bool,
    recipe: BoundRecipe,
    scale_bias: bool,
    result_dtype: str | None,
    wgrad_dtype: str | None,
    rows_hint: int,
    implementation: str | Sequence[str] | None,
) -> Linear:
    return Linear(
        _NAMES,
        transposed=transposed,
        recipe=recipe.recipe,
        scale_bias=scale_bias,
        result_dtype=linear_spec.dtype_option(result_dtype),
        wgrad_dtype=linear_spec.dtype_option(wgrad_dtype),
        rows_hint=rows_hint,
        implementation=linear_spec.implementation_names(implementation),
    )


def grouped_linear(
    x: Array,
    w: Array,
    group_sizes: Any,
    *,
    transposed: bool = False,
    bias: Array | None = None,
    row_scale: Array | None = None,
    scale_bias: bool = False,
    recipe: Recipe | BoundRecipe | None = None,
    result_dtype: str | None = None,
    out: Array | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """y [M, N]: y[r] = c[r] (x[r] W[g] + b[g]), or x[r] W[g] + c[r] b[g] with `scale_bias`; c = row_scale or 1.

    Args:
        x: [M, K], float32, bfloat16, float16 or a float8 of ml_dtypes. w: [G, K, N], or [G, N, K] when `transposed`.
        group_sizes: integers [G] on the device of x, or `GroupSizes`. bias: [G, N]. row_scale: [M].
        recipe: None uses the operands as given.
        result_dtype: float32, bfloat16 or float16; None: that of x (bfloat16 for float8).
        out: an [M, N] buffer for y; its rows past the last group are left unchanged. Without it they are zero.
        implementation: None, a kernel's name, or several.

    Raises:
        ValueError, TypeError: operands that do not fit together. NotImplementedError: no kernel takes them.
    """
    sizes, hint = unwrap(group_sizes)
    bound = linear_spec.recipe_option(recipe)
    op = _linear(transposed, bound, scale_bias, result_dtype, None, hint, implementation)
    required = {"x": x, "w": w, "group_sizes": sizes}
    linear_spec.check_linear(op, *_specs(required, bias=bias, row_scale=row_scale, out=out))
    written, held = _checked_bound(bound, w.shape[0])
    _checked({"out": out, **written}, {**required, "bias": bias, "row_scale": row_scale, **held})
    run = ArrayRunner(x)
    found = gradients.linear_forward(
        run, op, x, w, run.sizes(sizes), bias, row_scale, out, extras=scaling.extras(bound)
    )
    _merge(bound, found.amax)
    return found.y


def grouped_linear_grads(
    x: Array,
    w: Array,
    group_sizes: Any,
    dy: Array | QTensor[Array],
    *,
    transposed: bool = False,
    bias: Array | None = None,
    row_scale: Array | None = None,
    scale_bias: bool = False,
    recipe: Recipe | BoundRecipe | None = None,
    result_dtype: str | None = None,
    wgrad_dtype: str | None = None,
    wgrad_accum: Array | None = None,
    grad_input: Array | None = None,
    needs: Needs | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Gradients:
    """Gradients of `grouped_linear` for the cotangent `dy` [M, N], in the dtype of y; None where `needs` says no.

    A quantised dy needs the forms that dgrad and wgrad read; gradients of biases and row scales use its values.

    Args:
        wgrad_dtype: the dtype of a new weight gradient; None: that of w (bfloat16 for float8).
        wgrad_accum: in the layout of w; dW is added to it in place, and it is returned.
        grad_input: an [M, K] buffer for dx; its rows past the last group are left unchanged.
        needs: which gradients to compute; None: those of all operands given.

    Raises:
        ValueError, TypeError: operands that do not fit together. NotImplementedError: no kernel takes them.
    """
    sizes, hint = unwrap(group_sizes)
    bound = linear_spec.recipe_option(recipe)
    op = _linear(transposed, bound, scale_bias, result_dtype, wgrad_dtype, hint, implementation)
    required = {"x": x, "w": w, "group_sizes": sizes}
    buffers = {_NAMES.accum: wgrad_accum, _NAMES.grad_input: grad_input}
    specs = _specs(required, bias=bias, row_scale=row_scale)
    x_spec, w_spec, _, bias_spec, scale_spec = specs
    _check_cotangent(dy, linear_spec.check_linear(op, *specs))
    accum_spec, input_spec = _specs({}, **buffers)
    if accum_spec is not None:
        linear_spec.check_accumulator(_NAMES.accum, accum_spec, w_spec)
        linear_spec.check_wgrad_dtype(op, accum_spec)
    if input_spec is not None:
        linear_spec.check_buffer(_NAMES.grad_input, input_spec, ArraySpec(x_spec.shape, wide(x_spec.dtype)))
    dy = dy if isinstance(dy, QTensor) else _namespace(dy).ascontiguousarray(dy)
    written, held = _checked_bound(bound, w.shape[0])
    _checked({**buffers, **written}, {**required, "bias": bias, "row_scale": row_scale, "dy": dy, **held})
    run = ArrayRunner(x)
    found = gradients.linear_backward(
        run,
        op,
        (x_spec, w_spec, bias_spec, scale_spec),
        x,
        w,
        run.sizes(sizes),
        bias,
        row_scale,
        dy,
        _needs(needs, Needs(bias=bias is not None, row_scale=row_scale is not None)),
        into_w=wgrad_accum,
        accumulate=wgrad_accum is not None,
        grad_input=grad_input,
        extras=scaling.extras(bound),
    )
    _merge(bound, found.amax)
    return found.grads


def _check_cotangent(dy: Any, y: ArraySpec) -> None:
    (spec,) = _specs({"dy": dy})
    if (spec.shape, spec.dtype) != y:
        raise ValueError(f"`dy`: {spec}, expected {y} = that of the result; pass the cotangent of the result.")


def _merge(bound: BoundRecipe, amax: Amaxes, product: int = 0) -> None:
    """Merges amaxes into slot 0 of the state's history, in place."""
    for role, found in enumerate(amax, len(amax) * product):
        if found is not None:
            live = bound.state.history[role, 0]
            _namespace(live).maximum(live, found, out=live)


def quantize(
    x: Array,
    format: str | Format,
    *,
    axis: int | tuple[int, ...] = -1,
    group_sizes: Any = None,
    key: Array | None = None,
) -> QTensor[Any]:
    """x quantised for products that contract `axis`; for two axes, one pass makes both forms.

    Args:
        x: rows [M, X] or weights [G, A, B], float32, bfloat16 or float16.
        format: a name of `FORMATS`, e.g. "fp8_1x128", or a `Format`.
        axis: the contracted axis: 1 or 0 of rows (with 0, blocks run along rows and restart at each group), 2 or 1 of
            weights; or a tuple of both: `other` of the result is then the second form.
        group_sizes: integers [G], of rows; None: one group of all rows.
        key: uint32 [2], of stochastic rounding; None: zeros.

    Raises:
        ValueError, TypeError: arguments do not fit together. NotImplementedError: no kernel supports them.
    """
    sizes = unwrap(group_sizes)[0] if group_sizes is not None else None
    fmt = format_option(format)
    (x_spec,), (sizes_spec, key_spec) = _specs({"x": x}), _specs({}, group_sizes=sizes, key=key)
    axes = quantizing.check_quantize(x_spec, fmt, axis, sizes_spec, key_spec)
    _checked({}, {"x": x, "group_sizes": sizes, "key": key})
    run = ArrayRunner(x)
    if len(x_spec.shape) == 2:
        # A copy, because the caller may write the next sizes into its own.
        sizes = run.xp.full((1,), x_spec.shape[0], "int32") if sizes is None else run.xp.array(run.sizes(sizes))
    return quantizing.quantize(run, x, fmt, axes, sizes, key=key)


def dequantize(q: QTensor[Any], dtype: str | None = None, *, group_sizes: Any = None) -> Array:
    """The values of q in its logical shape, code * scales in float32 with one rounding; tail rows are zero.

    If q has only a rotated form (as NVFP4 uses for wgrad), the values are rotated too.

    Args:
        dtype: float32, bfloat16 or float16; None: the nominal dtype of q. group_sizes: for rows; None: those of q.

    Raises:
        TypeError: q is not quantised; results cannot have the dtype. ValueError: rows without group sizes.
    """
    check_quantized(q)
    given = None if group_sizes is None else unwrap(group_sizes)[0]
    _, sizes_spec = _specs({"q": q}, group_sizes=given)
    if sizes_spec is not None:
        linear_spec.check_sizes(_NAMES, sizes_spec)
    _checked({}, {"q": q, "group_sizes": given})
    run = ArrayRunner(q.values)
    sizes = None if given is None else run.sizes(given)
    return quantizing.dequantize(run, q, sizes, linear_spec.wide_option("dtype", dtype) or q.dtype)


def scaling_state(recipe: Recipe, num_groups: int, *, products: int = 1) -> ScalingState[Any]:
    """A new state of delayed scaling in NumPy, for one linear operation, or with products=2 for one MLP.

    Operations merge amaxes into `history[:, 0]` in place; `update_scaling` makes the state of the next step.

    Raises:
        ValueError: the recipe has no delayed scaling.
    """
    scaling.check_groups(num_groups)
    fp8_max = np.asarray(scaling.fp8_maxes(recipe, products), np.float32)
    scale = np.zeros((len(fp8_max), num_groups), np.float32)
    history = np.zeros((len(fp8_max), recipe.history, num_groups), np.float32)
    return ScalingState(scale, history, fp8_max, recipe.amax_algorithm)


def update_scaling(state: ScalingState[Any]) -> ScalingState[Any]:
    """The state of the next step (numerics 2.5): scales from the amax history, and an empty slot for new amaxes."""
    scaling.check_state(state)
    arrays = {f"state.{name}": getattr(state, name) for name in scaling.ARRAYS}
    _specs(arrays)
    _checked({}, arrays)
    return scaling.update(ArrayRunner(state.scale), state)


# ---------------------------------------------------------------------------------------------------------------------
# The experts' MLP


def _mlp(
    transposed: bool,
    activation: str | Activation,
    recipe: BoundRecipe,
    residuals: str | Residuals,
    wgrad_dtype: str | None,
    rows_hint: int,
    implementation: str | Sequence[str] | None,
    paired: bool,
) -> Mlp:
    return Mlp(
        _MLP_NAMES,
        activations.resolve(activation),
        transposed=transposed,
        recipe=recipe.recipe,
        residuals=residuals_option(residuals),
        wgrad_dtype=linear_spec.dtype_option(wgrad_dtype),
        rows_hint=rows_hint,
        implementation=linear_spec.implementation_names(implementation),
        paired=paired,
    )


def _members(name: str, operand: Any) -> dict[str, Any]:
    """The arrays of an operand, which may be several, by name."""
    several = isinstance(operand, (tuple, list))
    return {f"{name}[{at}]": each for at, each in enumerate(operand)} if several else {name: operand}


def _mlp_specs(op: Mlp, required: dict[str, Any], **optional: Any) -> list[Any]:
    """Does what `_specs` does, for x, the arrays of wi, wo, group_sizes, and optional operands; wi has one spec."""
    x, *others = _specs(required, **optional)
    if not op.paired:
        return [x, *others]
    count = len(required) - 3
    halves = tuple(others[:count])
    check_pair(op, *halves)
    return [x, operand_spec(Planner(), in_form(op.fc1(), halves)), *others[count:]]


def _joined(op: Mlp, halves: dict[str, Any], accumulator: Any = None) -> tuple[Mlp, Any]:
    """The operation and the first weight, with gate and linear half concatenated, so that they share scales."""
    check_pair(op, *_specs(halves))
    check_join(op, any(each is not None for each in _members("", accumulator).values()))
    _checked({}, halves)
    first, second = halves.values()
    whole = ArrayRunner(first).xp.concatenate([first, second], op.fc1().weight_axes()[1])
    return dataclasses.replace(op, paired=False), whole


def grouped_mlp(
    x: Array,
    wi: Array | Sequence[Array],
    wo: Array,
    group_sizes: Any,
    *,
    transposed: bool = False,
    activation: str | Activation = "swiglu",
    probs: Array | None = None,
    wi_bias: Array | None = None,
    wo_bias: Array | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    out: Array | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Array:
    """y [M, K]: y[r] = (p[r] act(x[r] wi[g] + wi_bias[g])) wo[g] + p[r] wo_bias[g], p = probs or 1.

    Args:
        x: [M, K], float32, bfloat16 or float16. wi: [G, K, W], W = 2F for gated activations (gate columns first), else
            F; [G, W, K] when `transposed`; or a pair of gate and linear half, [G, K, F] each ([G, F, K]).
        wo: [G, F, K], or [G, K, F].
        group_sizes: integers [G] on the device of x, or `GroupSizes`. probs: [M]. wi_bias: [G, W]. wo_bias: [G, K].
        activation: a kind, or an `Activation`. recipe: None uses the operands as given.
        out: an [M, K] buffer for y; its rows past the last group are left unchanged. Without it they are zero.
        implementation: None, a kernel's name, or several.

    Raises:
        ValueError, TypeError: operands that do not fit together. NotImplementedError: no kernel takes them.
    """
    sizes, hint = unwrap(group_sizes)
    bound = linear_spec.recipe_option(recipe)
    members = _members("wi", wi)
    op = _mlp(transposed, activation, bound, Residuals(), None, hint, implementation, "wi" not in members)
    if joins(op, x):
        op, wi = _joined(op, members)
        members = {"wi": wi}
    required = {"x": x, **members, "wo": wo, "group_sizes": sizes}
    optional = {"probs": probs, "wi_bias": wi_bias, "wo_bias": wo_bias}
    check(op, *_mlp_specs(op, required, **optional, out=out))
    written, held = _checked_bound(bound, wo.shape[0], products=2)
    _checked({"out": out, **written}, {**required, **optional, **held})
    run, first = ArrayRunner(x), in_form(op.fc1(), tuple(wi) if op.paired else wi)
    extras = (scaling.extras(bound, 0), scaling.extras(bound, 1))
    found = mlp.mlp(run, op, x, first, wo, run.sizes(sizes), probs, wi_bias, wo_bias, out, extras=extras)
    for product, amax in enumerate(found.amax):
        _merge(bound, amax, product)
    return found.y


def grouped_mlp_grads(
    x: Array,
    wi: Array | Sequence[Array],
    wo: Array,
    group_sizes: Any,
    dy: Array | QTensor[Array],
    *,
    transposed: bool = False,
    activation: str | Activation = "swiglu",
    probs: Array | None = None,
    wi_bias: Array | None = None,
    wo_bias: Array | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_dtype: str | None = None,
    wgrad_accum: tuple[Any, Array | None] | None = None,
    grad_input: Array | None = None,
    needs: MlpNeeds | None = None,
    implementation: str | Sequence[str] | None = None,
) -> MlpGradients:
    """Gradients of `grouped_mlp` for the cotangent `dy` [M, K], in the dtype of y; None where `needs` says no.

    A quantised dy needs the forms that dgrad and wgrad read; gradients of biases and probabilities use its values.

    This call runs forward again first, because nothing is saved between two calls.

    Args:
        residuals: what forward saves for backward; all policies give the same bits.
        wgrad_dtype: the dtype of new weight gradients; None: that of the weights.
        wgrad_accum: for wi (a pair where wi is a pair) and wo, in their layouts, or None; the gradient is added in
            place, and the array is returned.
        grad_input: an [M, K] buffer for dx; its rows past the last group are left unchanged.
        needs: which gradients to compute; None: those of all operands given.

    Raises:
        ValueError, TypeError: operands that do not fit together. NotImplementedError: no kernel takes them.
    """
    sizes, hint = unwrap(group_sizes)
    bound = linear_spec.recipe_option(recipe)
    members = _members("wi", wi)
    op = _mlp(transposed, activation, bound, residuals, wgrad_dtype, hint, implementation, "wi" not in members)
    wgrad_accum = wgrad_accum or (None, None)
    parted = joins(op, x)
    if parted:
        op, wi = _joined(op, members, wgrad_accum[0])
        members, wgrad_accum = {"wi": wi}, (None, wgrad_accum[1])
    required = {"x": x, **members, "wo": wo, "group_sizes": sizes}
    optional = {"probs": probs, "wi_bias": wi_bias, "wo_bias": wo_bias}
    into_wi = (None, None) if op.paired and wgrad_accum[0] is None else wgrad_accum[0]
    accums = {**_members("wgrad_accum[0]", into_wi), "wgrad_accum[1]": wgrad_accum[1]}
    written: dict[str, Any] = {**accums, "grad_input": grad_input}
    x_spec, wi_spec, wo_spec, sizes_spec, p_spec, bi_spec, bo_spec = _mlp_specs(op, required, **optional)
    y = check(op, x_spec, wi_spec, wo_spec, sizes_spec, p_spec, bi_spec, bo_spec)
    _check_cotangent(dy, y)
    weights = [*((op.fc1(), each) for each in members.values()), (op.fc2(), wo)]
    for (name, buffer), (linear, weight) in zip(accums.items(), weights, strict=True):
        if buffer is not None:
            (spec,) = _specs({name: buffer})
            linear_spec.check_accumulator(name, spec, spec_of(weight))
            linear_spec.check_wgrad_dtype(linear, spec)
    if grad_input is not None:
        (input_spec,) = _specs({"grad_input": grad_input})
        linear_spec.check_buffer("grad_input", input_spec, ArraySpec(x_spec.shape, wide(x_spec.dtype)))
    dy = dy if isinstance(dy, QTensor) else _namespace(dy).ascontiguousarray(dy)
    state, held = _checked_bound(bound, wo.shape[0], products=2)
    _checked({**written, **state}, {**required, **optional, "dy": dy, **held})

    run, first = ArrayRunner(x), in_form(op.fc1(), tuple(wi) if op.paired else wi)
    native = run.sizes(sizes)
    specs = MlpSpecs(x_spec, wi_spec, wo_spec, p_spec, bi_spec, bo_spec)
    wanted = restrict(_needs(needs, MlpNeeds()), specs)
    extras = (scaling.extras(bound, 0), scaling.extras(bound, 1))
    more = (probs, wi_bias, wo_bias)
    found = mlp.mlp(run, op, x, first, wo, native, *more, needs=wanted, extras=extras)
    held = (found.x, found.h, found.z, found.wi, found.wo, native)
    main = mlp.main_grads(run, op, specs, *held, *more, dy, wanted, grad_input=grad_input, extras=extras)
    for product, (amax, later) in enumerate(zip(found.amax, main.amax, strict=True)):
        _merge(bound, amax.and_later(later), product)

    def weight_grad(
        linear: Linear, spec: ArraySpec, rows: Array, grad: Array, into: Array | None, half: int = 0
    ) -> Array:
        accumulate = into is not None
        return mlp.weight_grad(run, linear, spec, rows, grad, native, into=into, accumulate=accumulate, half=half)

    dwi = dwo = None
    *into_wi, into_wo = accums.values()
    if wanted.wi:
        halves = zip(into_wi, op.parts(), strict=True)
        dwi = tuple(weight_grad(op.fc1(), wi_spec, main.rows, main.dh, into, half) for into, half in halves)
        dwi = dwi if op.paired else dwi[0]
        if parted:
            dwi = tuple(map(run.xp.ascontiguousarray, run.xp.split(dwi, 2, op.fc1().weight_axes()[1])))
    if wanted.wo:
        dwo = weight_grad(op.fc2(), wo_spec, main.z, main.dy, into_wo)
    return MlpGradients(main.x, dwi, dwo, main.probs, main.wi_bias, main.wo_bias)
