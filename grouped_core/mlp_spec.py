"""Static parameters of the experts' MLP, the checks of its arguments, and what each policy saves for backward.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of h: 2F for gated activations, else F.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from grouped_core import linear_spec
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, OperandSpec, QuantizedSpec
from grouped_core.formats import WIDE, Format, QTensor, wide
from grouped_core.hashing import hashed_once
from grouped_core.linear_spec import Linear, Names
from grouped_core.ranks import check_rank
from grouped_core.recipes import Recipe

POLICIES = ("save_all", "save_fc1", "save_input")
"""Row arrays that forward saves, besides weights and sizes: x, h and z; x and h; only x."""


@hashed_once
@dataclass(frozen=True)
class Residuals:
    """What a differentiated MLP saves between forward and backward.

    `save_all` saves x, h and z, `save_fc1` x and h, `save_input` only x: M (K + W + F), M (K + W) and M K elements.
    Arrays that no gradient reads are never saved. All three policies give the same bits.

    Attributes:
        policy: one of `POLICIES`.
        offload: default names of saved arrays that wait in host memory, where the frontend can move them itself.
        names: a mapping, or pairs, from the default names of saved arrays to the names that `jax.checkpoint` policies
            see; the defaults are `grouped_x`, `grouped_fc1`, `grouped_act`.

    Raises:
        ValueError: an unknown policy or name. TypeError: `offload` or `names` has another form.
    """

    policy: str = "save_fc1"
    offload: Sequence[str] = ()
    names: Any = ()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(
                f"`residuals`: {self.policy!r}, expected one of {', '.join(POLICIES)}; choose one of them."
            )
        pairs = tuple(sorted(dict(_pairs(self.names)).items()))
        unknown = [name for name, _ in pairs if name not in ROW_NAMES]
        if unknown:
            raise ValueError(
                f"`names` of Residuals: {unknown[0]!r}, expected one of {', '.join(ROW_NAMES)}; rename one of these."
            )
        if not isinstance(self.offload, (str, list, tuple, set, frozenset)):
            raise TypeError(
                f"`offload` of Residuals: {self.offload!r}, expected some of {', '.join(ROW_NAMES)}; leave it out, or "
                "pass a tuple."
            )
        away = (self.offload,) if isinstance(self.offload, str) else tuple(self.offload)
        unknown = [name for name in away if name not in ROW_NAMES]
        if unknown:
            raise ValueError(
                f"`offload` of Residuals: {unknown[0]!r}, expected some of {', '.join(ROW_NAMES)}; choose among these."
            )
        object.__setattr__(self, "names", pairs)
        object.__setattr__(self, "offload", away)

    def name(self, ours: str) -> str:
        """The name that `jax.checkpoint` policies see for the array named `ours` by default."""
        return dict(self.names).get(ours, ours)


def _pairs(names: Any) -> list[tuple[str, str]]:
    """The names of `Residuals` as pairs. Raises TypeError: they are none."""
    pairs = list(names.items()) if isinstance(names, Mapping) else names
    if not isinstance(pairs, (list, tuple)) or any(
        not isinstance(each, (list, tuple)) or len(each) != 2 or not isinstance(each[1], str) for each in pairs
    ):
        raise TypeError(
            f"`names` of Residuals: {names!r}, expected a mapping of default names to names, or pairs of these; pass "
            'e.g. {"grouped_x": "mlp_input"}.'
        )
    return [(each[0], each[1]) for each in pairs]


ROW_NAMES = ("grouped_x", "grouped_fc1", "grouped_act")
"""Default names of x, h and z where they are saved."""


class MlpNames(NamedTuple):
    """A frontend's names of the arguments; error messages of the frontends differ in nothing else."""

    x: str = "x"
    wi: str = "wi"
    wo: str = "wo"
    sizes: str = "group_sizes"
    probs: str = "probs"
    wi_bias: str = "wi_bias"
    wo_bias: str = "wo_bias"
    transposed: str = "rhs_transposed"
    wgrad: str = "wgrad_dtype"
    accum: str = "wgrad_accum"
    out: str = "out"
    grad_input: str = "grad_input"


@hashed_once
@dataclass(frozen=True)
class Mlp:
    """Static parameters of one MLP: frozen, hashable, without arrays.

    Attributes:
        names: the frontend's argument names, for messages.
        activation: the activation between the two products.
        transposed: weights are [G, W, K] and [G, K, F] instead of [G, K, W] and [G, F, K].
        recipe: the recipe of both products; None uses the operands as given.
        residuals: what is saved for backward.
        wgrad_dtype: dtype of new weight gradients; None: that of the weights.
        master_dtypes: dtypes of the master weights of wi and wo, and so of their new gradients; None without a master.
        rows_hint: usual number of rows per group, for tile choice only; 0 is unknown.
        few_rows: as in `Linear`.
        implementation: pinned kernels, separated by commas; "" lets dispatch choose. A name affects only its own call.
        clear_residuals: tail rows of saved arrays are zero instead of undefined.
        paired: the first weight is two arrays, gate and linear half.
        keeps_rows: forward keeps x in the form that backward reads; False: the caller passes x to backward again.
        max_rows: for tokens, the largest number of their rows; None: one row for each slot.
    """

    names: MlpNames
    activation: Activation
    transposed: bool = False
    recipe: Recipe | None = None
    residuals: Residuals = Residuals()
    wgrad_dtype: str | None = None
    master_dtypes: tuple[str | None, str | None] = (None, None)
    rows_hint: int = 0
    implementation: str = ""
    clear_residuals: bool = False
    paired: bool = False
    keeps_rows: bool = True
    max_rows: int | None = None
    few_rows: bool = False

    def parts(self) -> tuple[int, ...]:
        """The arrays of the first weight: 1 and 2 for the two halves of its columns, 0 for one array of all columns."""
        return (1, 2) if self.paired else (0,)

    def fc1(self) -> Linear:
        """The first product as a linear operation."""
        return self._linear(0, self.names.wi, self.names.wi_bias, self.names.x, False, self.paired)

    def fc2(self, scale_bias: bool = False) -> Linear:
        """The second product as a linear operation; with `scale_bias` its bias is weighted by the probabilities."""
        return self._linear(1, self.names.wo, self.names.wo_bias, "activated rows", scale_bias)

    def _linear(self, at: int, w: str, bias: str, x: str, scale_bias: bool, paired: bool = False) -> Linear:
        n = self.names
        names = Names(x, w, n.transposed, n.sizes, bias, n.probs, wgrad=n.wgrad, accum=n.accum, out=n.out)
        return Linear(
            names,
            transposed=self.transposed,
            recipe=self.recipe,
            scale_bias=scale_bias,
            wgrad_dtype=self.wgrad_dtype or self.master_dtypes[at],
            rows_hint=self.rows_hint,
            implementation=self.implementation,
            paired=paired,
            few_rows=self.few_rows,
        )


class MlpNeeds(NamedTuple):
    """Which gradients the caller asked for; nothing is computed or saved for the others."""

    x: bool = True
    wi: bool = True
    wo: bool = True
    probs: bool = True
    wi_bias: bool = True
    wo_bias: bool = True


NO_NEEDS = MlpNeeds(*[False] * len(MlpNeeds._fields))


# NOTE: functions, because torch.compile does not see through tuples that have properties.
def needs_dh(needs: MlpNeeds) -> bool:
    """Whether the gradient of h is needed."""
    return needs.x or needs.wi or needs.wi_bias


def needs_dz(needs: MlpNeeds) -> bool:
    """Whether the gradient of z is needed, even if only inside a kernel."""
    return needs_dh(needs) or needs.probs


class Kept(NamedTuple):
    """Which arrays backward reads: rows, weights, probabilities, biases."""

    x: bool
    h: bool
    z: bool
    wi: bool
    wo: bool
    probs: bool
    wi_bias: bool
    wo_bias: bool


def residuals_option(residuals: Residuals | str, *, can_offload: bool = False) -> Residuals:
    """`residuals=` of a public function, the name of a policy or `Residuals`, as `Residuals`.

    Args:
        can_offload: whether the frontend moves saved arrays itself.

    Raises:
        ValueError: the frontend does not move arrays, and `offload` names some.
    """
    option = residuals if isinstance(residuals, Residuals) else Residuals(residuals)
    if option.offload and not can_offload:
        raise ValueError(
            f"`offload` of Residuals: {', '.join(option.offload)}, expected none, because only JAX moves saved arrays "
            "itself; leave it out, and in PyTorch use torch_bridge.offload.cpu_offload."
        )
    return option


class MlpSpecs(NamedTuple):
    """Specs of the operands, saved or not; None where the operation had none."""

    x: OperandSpec
    wi: OperandSpec
    wo: OperandSpec
    probs: ArraySpec | None
    wi_bias: ArraySpec | None
    wo_bias: ArraySpec | None


@lru_cache(maxsize=1024)
def restrict(needs: MlpNeeds, specs: MlpSpecs) -> MlpNeeds:
    """`needs` without the operands that are absent. Raises TypeError if it is something else."""
    if not isinstance(needs, MlpNeeds):
        raise TypeError(f"`needs`: {type(needs).__name__}, expected MlpNeeds or None; pass one of them.")
    return needs._replace(
        probs=needs.probs and specs.probs is not None,
        wi_bias=needs.wi_bias and specs.wi_bias is not None,
        wo_bias=needs.wo_bias and specs.wo_bias is not None,
    )


@lru_cache(maxsize=1024)
def kept(op: Mlp, needs: MlpNeeds, has_probs: bool, has_wi_bias: bool, has_wo_bias: bool) -> Kept:
    """What backward reads for the gradients in `needs` (MLP-9 to MLP-11)."""
    policy = op.residuals.policy
    needs = needs._replace(
        probs=needs.probs and has_probs,
        wi_bias=needs.wi_bias and has_wi_bias,
        wo_bias=needs.wo_bias and has_wo_bias,
    )
    from_input = policy == "save_input" and (needs_dz(needs) or needs.wo)
    # The pass over h that computes dz makes z too.
    z = needs.wo and (policy == "save_all" or (policy == "save_fc1" and not needs_dz(needs)))
    rebuilds_z = needs.wo and not z
    return Kept(
        x=needs.wi or from_input,
        h=needs_dz(needs) and not from_input,
        z=z,
        wi=needs.x or from_input,
        wo=needs_dz(needs),
        probs=has_probs and (needs_dh(needs) or rebuilds_z or needs.wo_bias),
        wi_bias=has_wi_bias and from_input,
        wo_bias=has_wo_bias and needs.probs,
    )


def joins(op: Mlp, x: Any) -> bool:
    """Whether a first weight in two arrays is joined into one: it is where operands are quantised, to share scales.

    Args:
        x: the rows, or their spec.
    """
    quantized = isinstance(x, (QTensor, QuantizedSpec)) or (op.recipe is not None and op.recipe.quantized)
    return op.paired and quantized


def check_join(op: Mlp, accumulates: bool) -> None:
    """Refuses accumulators for a first weight in two arrays that are joined to be quantised.

    Raises:
        NotImplementedError: the weight gradient is added to accumulators.
    """
    if accumulates:
        n, name = op.names, "quantised operands" if op.recipe is None else f"recipe {op.recipe.name}"
        raise NotImplementedError(
            f"`{n.accum}` of `{n.wi}`: given for two arrays beside {name}, expected None; pass one array, or add the "
            "gradients yourself."
        )


@lru_cache(maxsize=1024)
def check_pair(op: Mlp, *halves: ArraySpec) -> None:
    """Refuses several arrays as the first weight unless they are the gate half and the linear half (MAT-3, MLP-5).

    Raises:
        TypeError: dtypes. ValueError: count, shapes, an activation without a linear half or with an interleave.
    """
    n = op.names
    if len(halves) != 2:
        raise ValueError(
            f"`{n.wi}`: {len(halves)} arrays, expected one, or gate and linear half; stack one matrix per group on the "
            "first axis."
        )
    gate, up = halves
    if any(isinstance(half, QuantizedSpec) for half in halves):
        raise TypeError(f"`{n.wi}`: two quantised arrays, expected one, or two plain arrays; pass one array.")
    check_rank("mlp", "half", f"{n.wi}[0]", gate.shape, transposed=op.transposed)
    check_rank("mlp", "half", f"{n.wi}[1]", up.shape, transposed=op.transposed)
    if up.shape != gate.shape:
        raise ValueError(
            f"`{n.wi}[1]`: shape {up.shape}, expected {gate.shape} = shape of `{n.wi}[0]`; pass halves of one shape."
        )
    if up.dtype != gate.dtype:
        raise TypeError(
            f"`{n.wi}[1]`: dtype {up.dtype}, expected {gate.dtype} = dtype of `{n.wi}[0]`; cast one of them."
        )
    if not op.activation.gated:
        raise ValueError(
            f"`{n.wi}`: two arrays, expected one for {op.activation.kind}, which has no linear half; pass one array."
        )
    if op.activation.interleave is not None:
        raise ValueError(
            f"`interleave` of Activation: {op.activation.interleave} beside `{n.wi}` in two arrays, expected None; "
            "each array holds its half in one piece."
        )


def check_ranks(op: Mlp, **shapes: tuple[int, ...] | None) -> None:
    """Refuses operands of the wrong rank.

    Args:
        shapes: the shapes by the names of `MlpNames`; None where an operand is absent.

    Raises:
        ValueError: the number of axes of an operand is wrong.
    """
    for name, shape in shapes.items():
        if shape is not None:
            check_rank("mlp", name, getattr(op.names, name), shape, transposed=op.transposed)


def check_cotangent(x: OperandSpec, dy: ArraySpec, format: Format | None = None, recipe: Recipe | None = None) -> None:
    """Refuses a gradient of y whose shape [M, K] or dtype is not that of y.

    Args:
        format: that of a quantised dy. recipe: the recipe of the second product.

    Raises:
        TypeError: dtype. ValueError: shape; dy is quantised, and the recipe quantises nothing.
    """
    if format is not None and recipe is not None and not recipe.quantized:
        raise ValueError(
            f"`dy`: quantised as {format.name}, expected a plain array, because the recipe of this operation quantises "
            "nothing; dequantise it."
        )
    wanted = ArraySpec(x.shape, wide(x.dtype))
    if dy.shape != wanted.shape:
        raise ValueError(f"`dy`: shape {dy.shape}, expected {wanted.shape} = shape of y; pass the gradient of y.")
    if dy.dtype != wanted.dtype:
        raise TypeError(f"`dy`: dtype {dy.dtype}, expected {wanted.dtype} = dtype of y; cast it first.")


@lru_cache(maxsize=4096)
def check(
    op: Mlp,
    x: OperandSpec,
    wi: OperandSpec,
    wo: OperandSpec,
    sizes: ArraySpec,
    probs: ArraySpec | None = None,
    wi_bias: ArraySpec | None = None,
    wo_bias: ArraySpec | None = None,
    out: ArraySpec | None = None,
) -> ArraySpec:
    """Refuses arguments that the MLP does not accept; returns the spec of y, [M, K].

    Raises:
        TypeError: dtypes. ValueError: ranks, shapes, empty axes, contradictory options.
    """
    n = op.names
    linear_spec.check_sizes(op.fc1().names, sizes)
    shapes = {"x": x, "wi": wi, "wo": wo, "probs": probs, "wi_bias": wi_bias, "wo_bias": wo_bias}
    check_ranks(op, **{name: None if spec is None else spec.shape for name, spec in shapes.items()})
    if isinstance(x, ArraySpec) and x.dtype not in WIDE:
        raise TypeError(f"`{n.x}`: dtype {x.dtype}, expected one of {', '.join(WIDE)}; cast it first.")
    if wi.shape[0] != wo.shape[0]:
        raise ValueError(
            f"`{n.wo}`: {wo.shape[0]} groups, expected {wi.shape[0]} = groups of `{n.wi}`; "
            "pass both weights of the same experts."
        )
    h = linear_spec.check_linear(op.fc1(), x, wi, sizes, wi_bias, None)
    layout = "[G, K, F]" if op.transposed else "[G, F, K]"
    k_axis, n_axis = op.fc2().weight_axes()
    width = wo.shape[k_axis]
    wide_width = op.activation.fc1_width(width)
    if h.shape[1] != wide_width:
        raise ValueError(
            f"`{n.wi}`: {h.shape[1]} columns in front of the activation, expected {wide_width} for "
            f"{op.activation.kind} and F = {width} of `{n.wo}` {layout}; "
            "gated kinds have gate and linear columns side by side."
        )
    if wo.shape[n_axis] != x.shape[1]:
        raise ValueError(
            f"`{n.wo}`: shape {wo.shape}, expected {layout} with K = {x.shape[1]} = columns of `{n.x}`; "
            f"check the operands and `{n.transposed}`."
        )
    if probs is not None and probs.dtype not in WIDE:
        raise TypeError(f"`{n.probs}`: dtype {probs.dtype}, expected one of {', '.join(WIDE)}; cast it first.")
    if probs is not None and probs.shape != x.shape[:1]:
        raise ValueError(
            f"`{n.probs}`: shape {probs.shape}, expected {x.shape[:1]} = all rows of `{n.x}`, tail included; "
            "pass one probability per row."
        )
    z = ArraySpec((x.shape[0], width), h.dtype)
    return linear_spec.check_linear(op.fc2(), z, wo, sizes, wo_bias, None, out)
