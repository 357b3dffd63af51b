"""The only tolerances there are, each derived from formats and the number of summed terms (numerics 7).

`Expected` is a runner: a rule of grouped_core run through it yields, for every result and gradient, the exact value and
the error that an implementation is allowed, carried through each cast and each call:

    error = M(|a| + da, |b| + db) - M(|a|, |b|)     errors that the operands bring along
          + gamma * M(|a| + da, |b| + db)           sums in fp32
          + half an ulp of the result               one rounding

with M the call's oracle over absolute values, which is monotone, because calls only multiply and add.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from grouped_core import gradients, mlp, reference_routing
from grouped_core.activations import KINDS, half_columns
from grouped_core.calls import RESULTS, SLOTS, ArraySpec, Call, grouped_matmul, spec_of
from grouped_core.gradients import Gradients, Needs
from grouped_core.linear_spec import Linear
from grouped_core.mlp_spec import Mlp, MlpNeeds, MlpSpecs, restrict
from grouped_core.recipes import plain
from grouped_core.reference import Oracle, activation_of, between_dtype, group_ends, hidden_row_of, with_values

F32_HALF_ULP = 2.0**-24
"""Relative error of one fp32 operation."""
ALL_NEEDS = tuple(Needs(*map(bool, bits)) for bits in np.ndindex(2, 2, 2, 2))
"""Every choice of gradients of the linear operation."""

SMALLEST_F32 = 2.0**-149
"""Absolute error of an fp32 operation whose result is subnormal, doubled."""
BF16_FLUSH = 2.0**-126
"""x86 `vdpbf16ps` takes and gives zero for subnormals (numerics 8)."""
FLUSH = 2.0**-126
"""A GPU's approximate exponential and reciprocal may give zero for a subnormal logistic function."""
TF32_STEP = 2.0**-136
"""Distance of neighbouring subnormals of tf32: what an operand on those tensor cores may lose beside its rounding."""
FUNCTIONS = 2.0**-20
"""Relative error of the logistic function, exp, tanh, erf, and of what a few of them are made into (numerics 5)."""
ACTIVATIONS = 4 * 2.0**-23
"""Relative, of fp32: of an activation, and of its derivative against the magnitude of its terms (numerics 5)."""
MULTIPLIED_AS_BF16 = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Element types of operands that a CPU multiplies as bfloat16."""
ORACLES = 1e-12
"""Two float64 oracles of one small layer against one another, absolute."""
MARGIN_STEP = 1e-5
"""How far beyond the edge of a bin a margin may be: some 80 ulp of scores up to 1."""
MEAN_OF_BIASES = 1e-6
"""Of fp32 biases below 1 whose mean was taken off, absolute."""
FINITE_DIFFERENCES = 1e-6
"""Gradient formulas against finite differences of the fp64 oracle, relative."""
RELATIVE = {"ieee": 2e-6, "tf32x3": 5e-6, "tf32": 1e-3}
"""By mode of float32: the norm of a product's error over that of the product, for data of random signs (numerics 7)."""
ROUNDED_ONCE = 2.0**-9 + RELATIVE["ieee"]
"""The same for a product of float32 sums that is rounded once to bfloat16."""
LAYER = 3 * RELATIVE["ieee"] + 4 * FUNCTIONS
"""Of a mixture-of-experts layer in float32: the norm of the error of its result, or of a gradient, over that of the
exact one, for data of random signs. Three products follow one another, with the functions of scores and activation."""
RING = 10 * 2.0**-9
"""Of a layer in bfloat16 whose tokens travel round a ring of up to 8 ranks, over the largest element: the part of each
rank is rounded once, their sum once, and that of one device once."""
RING_CODES = 0.15
"""Of a layer with 8-bit operands in a ring, where scales and blocks are those of the rows of one rank: the norm of the
difference to one device over that of the result. Codes of 3 mantissa bits are off by 2^-4 / sqrt(3) in the mean; two
products follow one another, each of two operands, rounded differently on both sides: 4 * 2^-4 / sqrt(3)."""
DEVICES = 2e-2
"""Of a layer in bfloat16 or with 8-bit operands on a GPU and on the CPU: the norm of the difference over that of the
result. Some values of each step fall on the other side of a rounding, of 2^-8 or of an FP8 code."""
LEFT_OUT = 2.0**-22
"""Products of parts of two float32 values that the router's product leaves out, of the product of the values."""
ADDED = (2.0**-8, 2.0**-16)
"""Relative and absolute: a 16-bit gradient against what was added to an accumulator that holds 0.5 in float32."""
MERGED = {name: 10 * 2.0 ** -(bits + 1) + 2 * LAYER for name, bits in (("float32", 23), ("bfloat16", 7))}
"""By dtype: of an experts' MLP with adapters merged into its weights, against the adapters beside them: the norm of the
difference over that of the result, for data of random signs. Roundings to the dtype, half a step each: of either of two
products the merged weight or the rows of A, and the result, twice; and the activated rows, twice. Sums are float32."""
REPEATED = 1e-6
"""Relative: a float32 sum over steps in one program against the sum of the steps' own results."""
MODEL = 4 * LAYER
"""Of two float32 runs of a transformer, per layer: each run has the error of the experts, and of attention and norms
around them as much again."""
MMA_DEPTH = {"float32": 8, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 16, "float8_e5m2": 16}
"""Terms that one tensor-core instruction adds up (kappa); fp8 values are widened to bf16 first."""

FP8_DEPTH = 32
"""Terms of one instruction on 8-bit operands."""
FP8_PROMOTED = 2.0**-9
"""Relative error of sums of 8-bit products that go to fp32 every 128 terms, however many there are (numerics 7)."""


BESIDE_EXPERTS = 1.5
"""How much larger than another the error of a narrow transformer's logits and gradients may be, if experts of the same
accuracy differ in where they round: later layers round other values, so the errors are two draws of one size."""
SWITCHED, SWITCHED_WITH_RECIPE = 1e-4, 0.02
"""How far the first losses of an example may be from those of the model as it is: other orders of sums, and FP8."""
PEAK_OVER_BF16 = 1.25
"""Peak memory of forward and backward of the MLP with a recipe of FP8, without its gradients, over the same in bf16."""
PEAK_OVER_BF16_ACCUMULATED = {"A": 1.14, "B": 2.31, "C": 1.8, "D": 1.25, "E": 1.21}
"""The same where weight gradients are added to accumulators, and rows and weights are saved as they came, by case: what
is counted in benchmarks/RESULTS.md. At B and C the codes of one weight are as large as what bf16 takes in all."""


ROUNDED_APART = 0.02
"""Part of the elements of bfloat16 sums that may differ where float32 terms are added in another order."""
BALANCED_ULPS, BALANCED_WITHOUT_ULPS = 64, 32
"""How far Sinkhorn's sums over tokens are from 1 / E after 8 iterations; its values from those without some tokens."""


def half_ulp(values: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Half a unit in the last place of `dtype` at `values`, elementwise."""
    info = ml_dtypes.finfo(np.dtype(getattr(ml_dtypes, dtype)) if hasattr(ml_dtypes, dtype) else np.dtype(dtype))
    _, exponent = np.frexp(np.abs(values))  # |v| in [2^(e-1), 2^e)
    exponent = np.where(values == 0, int(info.minexp), np.maximum(exponent - 1, int(info.minexp)))
    return np.ldexp(0.5, exponent - int(info.nmant))


def merged(size: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Error of W + s A B of magnitudes `size`, of a rank up to 16, in fp32 and rounded once to `dtype`."""
    return half_ulp(size, dtype) + 2.0**-20 * (size + np.max(size, initial=0.0))


def of_partial_sums(parts: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Of the sum of `parts` [k, ...] in float32, rounded to `dtype`, against the same sum made of partial sums that are
    rounded to `dtype`.

    With s the sum of magnitudes and u half a step relative to a value: partial sums are off by u s together, and either
    sum by u s where it is rounded and by k 2^-24 s where it is added up. Where something is added to the result and is
    counted among the parts, by u s each once more.
    """
    size = np.abs(np.asarray(parts).astype(np.float64)).sum(axis=0)
    return (5 * 2.0 ** -(ml_dtypes.finfo(dtype).nmant + 1) + 2 * len(parts) * 2.0**-24) * size


def of_two_roundings(count: int) -> float:
    """How much larger than another the norm of `count` errors of the same size may be, if both are random: one standard
    deviation of the ratio of two norms, each of which varies by 1 / sqrt(2 count) of itself.
    """
    return 1 + count**-0.5


def _is_tf32(dtype: str, kernel: str, fp32_mode: str) -> bool:
    return dtype == "float32" and fp32_mode != "ieee" and kernel.endswith(("_sm90", "_tf32_cuda"))


def gamma(terms: NDArray[np.float64] | float, dtype: str, kernel: str, fp32_mode: str = "ieee") -> NDArray[np.float64]:
    """Relative error of a sum of `terms` products of `dtype` operands, against the sum of their magnitudes.

    Args:
        kernel: name of the kernel that sums; it says on what it runs.
    """
    c = np.asarray(terms, np.float64)
    if "_fp8_" in kernel:  # tensor cores keep about 14 bits of a sum of 8-bit products, and truncate
        fast = (c + np.ceil(c / FP8_DEPTH)) * 2.0**-13
        return fast if "_fast_" in kernel else np.full_like(c, FP8_PROMOTED)
    # Sums that a kernel cuts into P parts are no worse: n blocks take n additions whole, and n / P + P - 1 at most in
    # parts, none of which is empty (schedule_check.cc).
    tensor_core = 2 * F32_HALF_ULP * (c + np.ceil(c / MMA_DEPTH[dtype]))
    if dtype != "float32" and "_cpu" not in kernel:
        return tensor_core
    if not _is_tf32(dtype, kernel, fp32_mode):
        return (c + 1) * F32_HALF_ULP
    return 2.0**-20 + 3 * tensor_core if fp32_mode == "tf32x3" else 2.0**-9 + tensor_core


@dataclass(frozen=True)
class Bounded:
    """A value, the error allowed around it, and the dtype in which it is stored."""

    value: NDArray[np.float64]
    error: NDArray[np.float64]
    dtype: str

    @staticmethod
    def of(array: NDArray[Any], dtype: str | None = None) -> Bounded:
        """An array that is given, hence exact."""
        value = np.asarray(array).astype(np.float64)
        return Bounded(value, np.zeros_like(value), dtype or spec_of(array).dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.value.shape


class Expected:
    """A runner over `Bounded` arrays; group sizes stay plain.

    Args:
        kernels: by call, the name of the kernel that is tested; a call that is not there runs on the CPU.
    """

    def __init__(self, kernels: dict[str, str] | None = None) -> None:
        self.kernels = kernels or {}
        self._exact = Oracle(exact=True)

    def __call__(self, call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """A `Bounded` for each result, None where it is not asked for."""
        kernel = self.kernels.get(call.name, f"{call.name}_any_cpu")
        if call.name in _ACTIVATED:
            return _Activated(call, arrays, kernel).results()
        if call.name == "low_rank_grads":
            return _of_low_rank(call, arrays, kernel)
        kernel = _inside(call, kernel)
        scale_steps, scale_size = _scaling(call, arrays)
        call, arrays = _valued(call, arrays)
        params = dict(call.params)
        value = self._run(call, arrays, lambda b: b.value)
        sizes = _of_magnitudes(call)
        largest = self._run(sizes, arrays, lambda b: np.abs(b.value) + b.error)
        carried = 0.0
        if any(isinstance(a, Bounded) and a.error.any() for a in arrays):
            carried = largest - self._run(sizes, arrays, lambda b: np.abs(b.value))
        terms, steps, written = _work(call, arrays)
        operands = _multiplied(call)
        mode = str(params.get("fp32_mode", "ieee"))
        rate = np.max([gamma(terms, each, kernel, mode) for each in operands], axis=0)
        rate = rate + (steps + scale_steps) * F32_HALF_ULP
        error = carried + rate * largest + (np.asarray(terms) + steps) * SMALLEST_F32 * scale_size
        as_bf16 = any(each in MULTIPLIED_AS_BF16 for each in operands)
        if "_cpu" in kernel and as_bf16 and call.name == "grouped_matmul":
            error = error + BF16_FLUSH * scale_size * _size_of_operands(call, arrays, terms)
        if any(_is_tf32(each, kernel, mode) for each in operands):
            error = error + TF32_STEP * _size_of_operands(call, arrays, terms)
        (spec,) = call.outputs
        assert spec is not None
        error = error + half_ulp(np.abs(value) + error, spec.dtype)
        return (Bounded(value, np.where(written, error, 0.0), spec.dtype),)

    def _run(self, call: Call, arrays: Sequence[Any], part: Any) -> NDArray[np.float64]:
        plain = [part(a) if isinstance(a, Bounded) else a for a in arrays]
        (result,) = self._exact(call, plain)
        return np.asarray(result, np.float64)

    def spec(self, array: Any) -> ArraySpec:
        """Shape and stored dtype."""
        return ArraySpec(array.shape, array.dtype) if isinstance(array, Bounded) else spec_of(array)

    def cast(self, array: Bounded, dtype: str) -> Bounded:
        """One rounding more, where `dtype` is another."""
        if array.dtype == dtype:
            return array
        error = array.error + half_ulp(np.abs(array.value) + array.error, dtype)
        if _holds(dtype, array.dtype):  # widening is exact
            error = array.error
        return Bounded(array.value, error, dtype)


def _of_low_rank(call: Call, arrays: Sequence[Any], kernel: str) -> tuple[Bounded, ...]:
    """The gradients of a low-rank product: two products, with the bounds of products."""
    o: dict[str, Any] = dict(zip(SLOTS[call.name], arrays, strict=True))
    specs: dict[str, Any] = dict(zip(SLOTS[call.name], call.inputs, strict=True))
    axis = dict(call.params)["factor_axis"]
    recipe = plain(specs["rows"].dtype).replace(fp32=dict(call.params)["fp32_mode"])
    run, found = Expected({"grouped_matmul": kernel}), []
    of_factor = ("rows", "low_rows") if axis == 1 else ("low_rows", "rows")
    pairs = ((("rows", "factor"), (1, axis)), (of_factor, (0, 0)))
    for ((lhs, rhs), axes), result in zip(pairs, call.outputs, strict=True):
        assert result is not None
        product = grouped_matmul(specs[lhs], specs[rhs], axes, specs["group_sizes"], result.dtype, recipe=recipe)
        found += run(product, product.arrange(lhs=o[lhs], rhs=o[rhs], group_sizes=o["group_sizes"]))
    return tuple(found)


def _valued(call: Call, arrays: Sequence[Any]) -> tuple[Call, list[Any]]:
    """`with_values`, exact operands as `Bounded`."""
    call, arrays = with_values(call, arrays)
    slots = zip(SLOTS[call.name], call.inputs, arrays, strict=True)
    return call, [
        Bounded.of(a, spec.dtype) if slot in ("lhs", "rhs") and spec and isinstance(a, np.ndarray) else a
        for slot, spec, a in slots
    ]


def _scaling(call: Call, arrays: Sequence[Any]) -> tuple[int, float]:
    """Of a product of quantised operands: its further fp32 steps, and what absolute errors grow by, at most.

    A sum is multiplied by the product of two group scales; an element, or a part of the sum, by block scales, which
    rounds unless they are powers of two or short.
    """
    steps, size = 0, 1.0
    for slot, array in zip(SLOTS[call.name], arrays, strict=True):
        if slot.endswith("_scales") and array is not None and array.dtype == np.float32:
            steps += 1
            if slot.endswith("_group_scales"):
                size *= 1.0 + float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))
    return steps, size


def _of_magnitudes(call: Call) -> Call:
    """The call whose oracle is monotone in the magnitudes of its operands: a factor of rows counts by its own."""
    if call.name != "add_rows":
        return call
    params: dict[str, Any] = dict(call.params)
    return dataclasses.replace(call, params=tuple({**params, "factor": abs(params["factor"])}.items()))


def _holds(wide: str, narrow: str) -> bool:
    return wide == "float32" or narrow.startswith("float8")


def _work(call: Call, arrays: Sequence[Any]) -> tuple[Any, int, NDArray[np.bool_]]:
    """Summed terms (broadcastable to the result), further fp32 steps of the epilogue, and the elements written."""
    operands = dict(zip(SLOTS[call.name], arrays, strict=True))
    params = dict(call.params)
    (spec,) = call.outputs
    assert spec is not None
    sizes = np.asarray(operands["group_sizes"])
    by_group = call.name == "group_sum" or bool(params.get("contract_rows", 0))
    if by_group:
        rows = operands["rows" if call.name == "group_sum" else "lhs"].shape[0]
        ends = group_ends(sizes, rows)
        counts = np.diff(ends, prepend=0).astype(np.float64).reshape((-1,) + (1,) * (len(spec.shape) - 1))
        steps = 1 + int(bool(params.get("accumulate", 0)))
        return counts, steps, np.broadcast_to(counts > 0, spec.shape)
    end = int(group_ends(sizes, spec.shape[0])[-1])
    written = np.zeros(spec.shape, bool)
    written[:end] = True
    if call.name == "row_dot":
        widths = [operands[name].shape[1] for name in ("lhs", "group_lhs") if operands[name] is not None]
        return float(sum(widths)), 1, written
    if call.name in ("scale_rows", "add_rows"):
        return 0.0, 1 + int(call.name == "add_rows"), written
    steps = sum(operands[name] is not None for name in ("bias", "row_scale")) + int(bool(params["accumulate"]))
    depth = operands["lhs"].shape[1]
    if (low := operands["low_lhs"]) is not None:
        # In one sum, or in one of its own that is scaled and added.
        depth, steps = depth + low.shape[1], steps + 1 + int(operands["row_scale"] is not None)
    return float(depth), steps, written


def _multiplied(call: Call) -> tuple[str, ...]:
    """What the products are summed from: operands as stored in a matrix product, fp32 numbers everywhere else."""
    if call.name != "grouped_matmul":
        return ("float32",)
    operands = (call.inputs[call.slot(name)] for name in ("lhs", "low_lhs"))
    return tuple(spec.dtype for spec in operands if spec is not None)


def _inside(call: Call, kernel: str) -> str:
    """A kernel whose bound is that of a product inside of `kernel`.

    What a composed call chose inside is not known here: the tensor cores' bound is the widest of its device.
    """
    specs = [call.inputs[call.slot(name)] if name in SLOTS[call.name] else None for name in ("lhs", "rhs")]
    codes = all(spec is not None and spec.dtype.startswith("float8") for spec in specs)
    for composed in ("_low_composed_cuda", "_composed_cuda"):
        kernel = kernel.replace(composed, "_fp8_sm90" if codes else "_sm90")
    return kernel


def _size_of_operands(call: Call, arrays: Sequence[Any], terms: Any) -> NDArray[np.float64]:
    """What an absolute error of 1 in every operand and product makes of a sum of `terms`, at most."""
    operands = dict(zip(SLOTS[call.name], arrays, strict=True))
    top = 1.0
    for name in ("lhs", "rhs", "rhs_up", "low_lhs", "low_rhs"):
        if operands.get(name) is None:
            continue
        values = np.abs(operands[name].value)
        top += float(np.max(values, initial=0.0, where=np.isfinite(values)))
    if operands["row_scale"] is not None:
        values = np.abs(operands["row_scale"].value)
        top *= 1.0 + float(np.max(values, initial=0.0, where=np.isfinite(values)))
    return np.asarray(top * np.asarray(terms, np.float64))


# ---------------------------------------------------------------------------------------------------------------------
# Calls with an activation.

SCALES = tuple(slot for slot in SLOTS["grouped_matmul"] if slot.endswith("_scales"))
"""Slots of a product that hold scales of quantised operands."""
CLAMPED_BEHIND = ("silu_clamped_glu",)
"""Kinds that clamp a value which they compute: its last places decide whether a derivative is masked."""
_ACTIVATED = ("activation", "activation_grad", "grouped_matmul_act", "grouped_matmul_dact")


def _joined(x: Bounded, y: Bounded, axis: int) -> Bounded:
    value, error = (np.concatenate((getattr(x, part), getattr(y, part)), axis) for part in _PARTS)
    return Bounded(value, error, x.dtype)


def _times(x: Bounded, y: Bounded) -> Bounded:
    """The product of exact values, and what the errors of both make of it."""
    error = np.abs(x.value) * y.error + np.abs(y.value) * x.error + x.error * y.error
    return Bounded(x.value * y.value, error, "float64")


def _rounded(x: Bounded, dtype: str, steps: int) -> Bounded:
    """After `steps` fp32 operations and the store, which rounds where `dtype` is narrower."""
    error = x.error + steps * (F32_HALF_ULP * (np.abs(x.value) + x.error) + SMALLEST_F32)
    if dtype != "float32":
        error = error + half_ulp(np.abs(x.value) + error, dtype)
    return Bounded(x.value, error, dtype)


class _Activated:
    """The results of one call with an activation, from its operands.

    Errors of the hidden rows (an element of h rounded to the other side, by a fused kernel) reach t through the largest
    derivative around, and the derivatives through twice their largest change there; both are looked for at the ends of
    the interval, which is a few ulp wide, in either half.
    """

    def __init__(self, call: Call, arrays: Sequence[Any], kernel: str) -> None:
        self.call, self.kernel = call, kernel
        self.o = dict(zip(SLOTS[call.name], arrays, strict=True))
        self.p: dict[str, Any] = dict(call.params)
        self.specs = dict(zip(RESULTS[call.name], call.outputs, strict=True))
        if (up := self.o.get("rhs_up")) is not None:  # as one array, for the product inside
            self.o["rhs"], self.o["rhs_up"] = _joined(self.o["rhs"], up, 3 - self.p["rhs_axis"]), None

    def results(self) -> tuple[Bounded | None, ...]:
        found: dict[str, Bounded] = {}
        if self.call.name in ("activation", "grouped_matmul_act"):
            hidden = self.o["rows"] if self.call.name == "activation" else self._product(between_dtype(self.call))
            found = {"hidden": hidden, "result": self._activated(hidden, "result")}
        else:
            found = self._gradients()
        return tuple(None if spec is None else self._masked(found[name]) for name, spec in self.specs.items())

    def _product(self, dtype: str) -> Bounded:
        """The grouped product inside of a fused call, stored as `dtype`."""
        slots = SLOTS["grouped_matmul"]
        specs = dict(zip(SLOTS[self.call.name], self.call.inputs, strict=True))
        product = ("lhs", "rhs", "group_sizes", "bias", "rhs_table", "bias_table", *SCALES)
        product = (*product, *(slot for slot in slots if slot.startswith("low_")))
        width = self.o["rhs"].shape[3 - self.p["rhs_axis"]]
        if (hidden := self.o.get("hidden")) is not None:  # columns of two codes per byte need not fill the last one
            width = hidden.shape[1] // (2 if KINDS[self.p["kind"]].gated else 1)
        shape = (self.o["lhs"].shape[0], width)
        call = Call(
            "grouped_matmul",
            tuple(specs.get(slot) if slot in product else None for slot in slots),
            (ArraySpec(shape, dtype),),
            tuple({**self.p, "contract_rows": 0, "scale_bias": 0, "accumulate": 0, "result_half": 0}.items()),
        )
        arrays = [self.o.get(slot) if slot in product else None for slot in slots]
        return Expected({"grouped_matmul": _inside(self.call, self.kernel)})(call, arrays)[0]

    def _scale(self) -> Bounded | None:
        scale = self.o["row_scale"]
        return None if scale is None else Bounded(scale.value[:, None], scale.error[:, None], scale.dtype)

    def _scaled(self, x: Bounded, dtype: str, steps: int) -> Bounded:
        scale = self._scale()
        return _rounded(x, dtype, steps) if scale is None else _rounded(_times(scale, x), dtype, steps + 1)

    def _activated(self, hidden: Bounded, slot: str) -> Bounded:
        spec = self.specs[slot]
        assert spec is not None, f"{slot} is asked for"
        return self._scaled(self._slopes(hidden)[0], spec.dtype, 0)

    def _gradients(self) -> dict[str, Bounded]:
        fused = not any(word in self.kernel for word in ("_composed_", "_widened_", "_cpu"))
        if self.call.name == "activation_grad":
            hidden, dz = self.o["rows"], self.o["grad"]
        else:  # a fused kernel keeps dz in fp32
            hidden, dz = self.o["hidden"], self._product("float32" if fused else between_dtype(self.call))
        t, da, du = self._slopes(hidden)
        found: dict[str, Bounded] = {}
        if (spec := self.specs["result"]) is not None:
            halves = [self._scaled(_times(dz, slope), spec.dtype, 1) for slope in (da, du)]
            value, error = (hidden_row_of(self.p, *(getattr(half, part) for half in halves)) for part in _PARTS)
            found["result"] = Bounded(value, error, spec.dtype)
        if self.specs["activated"] is not None:
            found["activated"] = self._activated(hidden, "activated")
        if self.specs["row_sum"] is not None:
            found["row_sum"] = self._row_sum(_times(dz, t))
        return found

    def _row_sum(self, products: Bounded) -> Bounded:
        width = products.shape[1]
        largest = np.sum(np.abs(products.value) + products.error, axis=1)
        value, error = np.sum(products.value, axis=1), np.sum(products.error, axis=1)
        if (base := self.o["row_base"]) is not None:
            value, error, largest = value + base.value, error + base.error, largest + np.abs(base.value) + base.error
        error = error + (width + 2) * (2 * F32_HALF_ULP * largest + SMALLEST_F32)
        return Bounded(value, error, "float32")

    def _slopes(self, hidden: Bounded) -> tuple[Bounded, Bounded, Bounded]:
        """t, dt/da and dt/du in fp32 arithmetic, [M, F] each."""
        kind = KINDS[self.p["kind"]]
        centre = activation_of(self.p, hidden.value)
        gate, linear = half_columns(centre.t.shape[1], self.p["interleave"])
        error = np.where(np.isfinite(hidden.error), hidden.error, 0.0)  # the tail is not read
        size = np.where(np.isfinite(hidden.value), np.abs(hidden.value), 0.0)  # clamps make infinities finite
        reach = error + ACTIVATIONS * size if self.p["kind"] in CLAMPED_BEHIND else error
        around = [centre]
        if reach.any():
            for signs in itertools.product((-1, 0, 1), (-1, 0, 1) if kind.gated else (0,)):
                moved = hidden.value.copy()
                for columns, sign in zip((gate, linear) if kind.gated else (gate,), signs, strict=False):
                    moved[:, columns] += sign * reach[:, columns]
                around.append(activation_of(self.p, moved))
        a, ea = size[:, gate], error[:, gate]
        u, eu = (size[:, linear], error[:, linear]) if kind.gated else (np.zeros_like(a), np.zeros_like(a))
        with np.errstate(all="ignore"):
            # What the functions lose where they are subnormal, multiplied by the other half and by the parameters;
            # the derivative of gelu_tanh multiplies that by a^3 more.
            least = (SMALLEST_F32 if "_cpu" in self.kernel else FLUSH) * (1 + a) * (1 + u)
            least = least * math.prod(1 + abs(self.p[n]) for n in kind.defaults if np.isfinite(self.p[n]))
            terms = 2 * np.abs(np.where(a > 0, centre.t / a, 0.0)) + np.abs(centre.da)
            steepest = [np.max([np.abs(getattr(s, part)) for s in around], axis=0) for part in ("da", "du")]
            t = ACTIVATIONS * np.abs(centre.t) + least + steepest[0] * ea + steepest[1] * eu
            da, du = (
                ACTIVATIONS * magnitude
                + (1 + a) ** 3 * least
                + 2 * np.max([np.abs(getattr(s, part) - getattr(centre, part)) for s in around], axis=0)
                for part, magnitude in (("da", terms), ("du", np.abs(centre.du)))
            )
        return Bounded(centre.t, t, "float64"), Bounded(centre.da, da, "float64"), Bounded(centre.du, du, "float64")

    def _masked(self, found: Bounded) -> Bounded:
        """Tail rows: zero where that is asked for, and on the CPU; else anything."""
        end = int(group_ends(np.asarray(self.o["group_sizes"]), found.shape[0])[-1])
        written = (np.arange(found.shape[0]) < end).reshape((-1,) + (1,) * (len(found.shape) - 1))
        known = bool(self.p["zero_tail"]) or "_cpu" in self.kernel or len(found.shape) == 1
        error = np.where(written, found.error, 0.0 if known else np.inf)
        return Bounded(np.where(written, found.value, 0.0), error, found.dtype)


_PARTS = ("value", "error")


# ---------------------------------------------------------------------------------------------------------------------
# The linear operation, whole.


def expect_linear(
    op: Linear,
    x: NDArray[Any],
    w: NDArray[Any],
    group_sizes: NDArray[Any],
    bias: NDArray[Any] | None = None,
    row_scale: NDArray[Any] | None = None,
    *,
    kernels: dict[str, str] | None = None,
) -> Bounded:
    """y of the linear operation and the error allowed; w in the layout that `op.transposed` says."""
    run = Expected(kernels)
    return gradients.linear(run, op, Bounded.of(x), Bounded.of(w), group_sizes, _maybe(bias), _maybe(row_scale))


def expect_linear_grads(
    op: Linear,
    x: NDArray[Any],
    w: NDArray[Any],
    group_sizes: NDArray[Any],
    bias: NDArray[Any] | None,
    row_scale: NDArray[Any] | None,
    dy: NDArray[Any],
    needs: Needs | None = None,
    *,
    into_w: NDArray[Any] | None = None,
    accumulate: bool = False,
    kernels: dict[str, str] | None = None,
) -> Gradients:
    """Gradients of the linear operation, each a `Bounded`, and the errors allowed."""
    run = Expected(kernels)
    needs = needs or Needs(bias=bias is not None, row_scale=row_scale is not None)
    arrays = tuple(_maybe(array) for array in (x, w, bias, row_scale))
    bx, bw, bb, bs = arrays
    specs = tuple(None if array is None else run.spec(array) for array in arrays)
    return gradients.linear_grads(
        run,
        op,
        specs,
        bx,
        bw,
        group_sizes,
        bb,
        bs,
        Bounded.of(dy),
        needs,
        into_w=_maybe(into_w),
        accumulate=accumulate,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The MLP, whole.


def expect_mlp(
    op: Mlp,
    x: NDArray[Any],
    wi: NDArray[Any],
    wo: NDArray[Any],
    group_sizes: NDArray[Any],
    probs: NDArray[Any] | None = None,
    wi_bias: NDArray[Any] | None = None,
    wo_bias: NDArray[Any] | None = None,
    *,
    kernels: dict[str, str] | None = None,
) -> Bounded:
    """y of the MLP and the error allowed; weights in the layout that `op.transposed` says."""
    bx, w1, w2, p, b1, b2 = (_maybe(array) for array in (x, wi, wo, probs, wi_bias, wo_bias))
    return mlp.mlp(Expected(kernels), op, bx, w1, w2, group_sizes, p, b1, b2).y


def expect_mlp_grads(
    op: Mlp,
    x: NDArray[Any],
    wi: NDArray[Any],
    wo: NDArray[Any],
    group_sizes: NDArray[Any],
    probs: NDArray[Any] | None = None,
    wi_bias: NDArray[Any] | None = None,
    wo_bias: NDArray[Any] | None = None,
    *,
    dy: NDArray[Any],
    needs: MlpNeeds | None = None,
    kernels: dict[str, str] | None = None,
) -> mlp.MlpGradients:
    """Gradients of the MLP, each a `Bounded`, and the errors allowed."""
    run = Expected(kernels)
    given = [_maybe(array) for array in (x, wi, wo, probs, wi_bias, wo_bias)]
    bx, w1, w2, p, b1, b2 = given
    specs = MlpSpecs(*(None if array is None else run.spec(array) for array in given))
    needs = restrict(needs or MlpNeeds(), specs)
    top = Bounded.of(dy)
    everything = MlpNeeds(wo=False)  # then the hidden rows are kept
    h = mlp.mlp(run, op, bx, w1, w2, group_sizes, p, b1, b2, needs=everything).h
    main = mlp.main_grads(run, op, specs, bx, h, None, w1, w2, group_sizes, p, b1, b2, top, needs)
    wi_grad = mlp.weight_grad(run, op.fc1(), specs.wi, bx, main.dh, group_sizes) if needs.wi else None
    wo_grad = mlp.weight_grad(run, op.fc2(), specs.wo, main.z, top, group_sizes) if needs.wo else None
    return mlp.MlpGradients(main.x, wi_grad, wo_grad, main.probs, main.wi_bias, main.wo_bias)


def _maybe(array: NDArray[Any] | None) -> Bounded | None:
    return None if array is None else Bounded.of(array)


RELATIVE_ERRORS = {
    "FP8Delayed": (0.045, 0.070, 0.070),
    "FP8Current": (0.045, 0.070, 0.070),
    "FP8Block": (0.045, 0.045, 0.045),
    "MXFP8": (0.045, 0.045, 0.045),
    "NVFP4": (0.18, 0.21, 0.20),
}
"""Of y, dx and dW against full precision, by recipe: Frobenius norms over standard normal data (numerics 7, tier 2)."""


# ---------------------------------------------------------------------------------------------------------------------
# Routing: scores are quotients of exponentials and their sums, in fp32.


def score_rate(logits: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """[T, 1]: relative error of what is made of the scores of a token: functions, sums over E and k, a few steps, and
    exponentials, whose error grows with their argument, which is rounded.
    """
    with np.errstate(invalid="ignore"):
        spread = np.abs(logits).max(axis=1, keepdims=True, initial=0.0) * 2
    return 8 * FUNCTIONS + (2 * logits.shape[1] + 2 * k + 16) * F32_HALF_ULP + 4 * spread * F32_HALF_ULP


def _around(value: NDArray[Any], error: NDArray[Any]) -> Bounded:
    return Bounded(np.asarray(value, np.float64), np.asarray(error, np.float64) + FLUSH, "float32")


def routing(call: Call, arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a call of routing with the error allowed around each; integers come as they are."""
    o = dict(zip(SLOTS[call.name], arrays, strict=True))
    exact = dict(zip(RESULTS[call.name], Oracle(exact=True)(call, arrays), strict=True))
    found = {name: array for name, array in exact.items() if array is not None}
    error = _ROUTING[call.name](o, dict(call.params), found)
    return tuple(
        None if array is None else array if name not in error else _around(array, error[name])
        for name, array in exact.items()
    )


def _router_error(o: dict[str, Any], p: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    logits = np.asarray(o["logits"], np.float64)
    logits = logits if o["mask"] is None else np.where(np.asarray(o["mask"])[:, None] == 0, 0.0, logits)
    rate = score_rate(logits, found["experts"].shape[1])
    return {"weights": rate * np.abs(found["weights"])}


def _router_sums_error(o: dict[str, Any], p: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    counted, sequence = reference_routing.tokens_that_count(o)
    logits = np.asarray(o["logits"], np.float64)[counted]
    probs, stats = reference_routing.token_stats(p["score"], logits)
    rate = score_rate(logits, o["experts"].shape[1])
    size = np.abs(logits).max(axis=1, keepdims=True, initial=0.0) + np.log(probs.shape[1])  # of the logsumexp
    entropy = (rate * (1 + 2 * size)) * (1 + np.log(probs.shape[1]))
    of_stats = np.concatenate([2 * size * (rate + 4 * size * F32_HALF_ULP), entropy, 0 * rate], axis=1)
    error = {}
    for name, each, own in (("prob_sums", probs, rate * probs), ("stat_sums", stats, of_stats)):
        error[name], whole = np.zeros(found[name].shape), np.zeros(found[name].shape)
        np.add.at(error[name], sequence, own)
        np.add.at(whole, sequence, np.abs(each))
        # Additions of a run, of a lane that adds every 32nd run, and of the tree of lanes; whole numbers are exact.
        steps = TOKENS_A_RUN + len(o["logits"]) // (32 * TOKENS_A_RUN) + 6
        error[name] += steps * F32_HALF_ULP * (whole + error[name])
    error["stat_sums"][:, 2] = 0
    return error


def _router_grad_error(o: dict[str, Any], p: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    logits = np.asarray(o["logits"], np.float64)
    logits = logits if o["mask"] is None else np.where(np.asarray(o["mask"])[:, None] == 0, 0.0, logits)
    tokens, experts = logits.shape
    scores, own = reference_routing.scores_of(p["score"], logits)
    smooth = reference_routing.softmax(logits)
    size = np.zeros((tokens, 1))  # of everything that is added up for one score of a token
    if o["d_weights"] is not None:
        chosen = np.clip(np.asarray(o["experts"]), 0, experts - 1)
        least = np.take_along_axis(scores, chosen, axis=1).sum(axis=1, keepdims=True) if p["normalize"] else 1.0
        size = size + 2 * abs(p["scale"]) * np.abs(o["d_weights"]).sum(axis=1, keepdims=True) / np.maximum(least, TINY)
    factor = np.zeros((tokens, 1))
    if o["slopes"] is not None:
        total = 1.0 if p["score"] == "softmax" else np.maximum(scores.sum(axis=1, keepdims=True), TINY)
        size = size + 2 * np.abs(o["slopes"]).max() * abs(float(o["d_losses"][0])) / total
        logsum = np.abs(logits).max(axis=1, keepdims=True) + np.log(experts)
        factor = 2 * logsum * abs(float(o["z_slope"][0]) * float(o["d_losses"][1]))
    share = np.maximum(scores, smooth) if p["score"] == "softmax" else own
    if p["after_topk"]:
        share = np.ones_like(share)
    rate = score_rate(logits, o["experts"].shape[1])
    return {"result": 4 * rate * (size * share + factor * smooth)}


def _router_losses_error(o: dict[str, Any], p: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    sequences, experts = o["counts"].shape
    rate = (sequences + experts + 12) * F32_HALF_ULP
    return {name: rate * np.abs(found[name]) for name in ("losses", "slopes", "z_slope")}


def _sinkhorn_error(o: dict[str, Any], p: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    logits = np.asarray(o["logits"], np.float64)
    logits = logits if o["mask"] is None else np.where(np.asarray(o["mask"])[:, None] == 0, 0.0, logits)
    # Each scaling adds the error of its sum; positive terms alone, so that errors do not grow otherwise.
    rate = score_rate(logits, 1) + 2 * p["iterations"] * (sum(logits.shape) + 8) * F32_HALF_ULP
    return {"result": 2 * rate.max(initial=0.0) * found["result"]}


def _combine_dot_error(o: dict[str, Any], p: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    rows, grad = (np.abs(np.asarray(o[name], np.float64)) for name in ("rows", "grad"))
    at = np.asarray(o["inverse"], np.int64)
    inside = (at >= 0) & (at < len(rows))
    sizes = np.einsum("tkh,th->tk", rows[np.where(inside, at, 0)], grad) if len(rows) else np.zeros(at.shape)
    return {"result": (rows.shape[1] + 1) * F32_HALF_ULP * sizes}


def _quantile_error(o: dict[str, Any], p: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    size = max(abs(p["low"]), abs(p["high"]))
    return {"result": np.full_like(found["result"], (o["counts"].shape[0] + 8) * F32_HALF_ULP * size)}


TINY = reference_routing.TINY
TOKENS_A_RUN = 8
"""Tokens that a router's sums add in order before sums of these are added (numerics 9)."""
_ROUTING = {
    "router": _router_error,
    "router_sums": _router_sums_error,
    "router_grad": _router_grad_error,
    "router_losses": _router_losses_error,
    "sinkhorn": _sinkhorn_error,
    "combine_dot": _combine_dot_error,
    "margin_histogram": lambda o, p, found: {},
    "quantile_bias": _quantile_error,
}

# ---------------------------------------------------------------------------------------------------------------------
# Hosts: experts of another library, computed by it and by us.

AGAINST_HOST = 2 * LAYER
"""Two computations of the same experts in float32, each within `LAYER` of the exact one; norm over norm."""
NO_FARTHER = 1.01
"""Norm of our error in bfloat16 over that of the host's own, both against float64. We round in fewer places; where the
rounding of hidden rows is nearly all of the error, which both have, the rest makes either one a little larger."""
