"""Rules of the experts' MLP: forward, backward, and what is kept in between (contracts.md, section 3).

    h = x W1 + b1, rounded;  z = p act(h), rounded;  y = z W2 + p b2

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of h: 2F for gated activations, else F.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from grouped_core import calls, gradients
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, Linear, Names
from grouped_core.gradients import Needs
from grouped_core.products import Array, Listed, Runner, all_aligned, operand_spec, product, split, wide
from grouped_core.recipes import Recipe

POLICIES = ("save_all", "save_fc1", "save_input")
"""What forward keeps beside weights and sizes, of the rows: x, h and z; x and h; x alone."""

Operand = Array | Listed


@dataclass(frozen=True)
class Residuals:
    """What a differentiated MLP keeps between forward and backward.

    `save_all` keeps x, h and z, `save_fc1` x and h, `save_input` x alone: M (K + W + F), M (K + W) and M K elements.
    What no gradient reads is never kept. All three give the same bits.

    Attributes:
        policy: one of `POLICIES`.
        names: pairs (ours, another), names of kept arrays that `jax.checkpoint` policies see: `grouped_x`,
            `grouped_fc1`, `grouped_act`. A mapping is taken too.

    Raises:
        ValueError: an unknown policy or name.
    """

    policy: str = "save_fc1"
    names: Any = ()

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(
                f"`residuals`: {self.policy!r}, expected one of {', '.join(POLICIES)}; choose what backward may keep."
            )
        pairs = tuple(sorted(dict(self.names).items()))
        unknown = [name for name, _ in pairs if name not in ROW_NAMES]
        if unknown:
            raise ValueError(
                f"`names` of Residuals: {unknown[0]!r}, expected one of {', '.join(ROW_NAMES)}; rename one of these."
            )
        object.__setattr__(self, "names", pairs)

    def name(self, ours: str) -> str:
        """The name that a kept array carries."""
        return dict(self.names).get(ours, ours)


ROW_NAMES = ("grouped_x", "grouped_fc1", "grouped_act")
"""Names of x, h and z where they are kept."""


class MlpNames(NamedTuple):
    """What a face calls the arguments; the only difference between the two faces' messages."""

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


@dataclass(frozen=True)
class Mlp:
    """Static facts of one MLP: frozen, hashable, free of arrays.

    Attributes:
        activation: between the two products.
        names: the face's argument names, for messages.
        transposed: weights are [G, W, K] and [G, K, F] instead of [G, K, W] and [G, F, K].
        recipe: of both products; None computes with the operands as they stand.
        residuals: what is kept for backward.
        wgrad_dtype: dtype of new weight gradients; None: that of the weights.
        rows_hint: usual rows a group, for tile choice only; 0 is unknown.
        implementation: pinned kernels, a comma list; "" lets dispatch choose. A name concerns its own call alone.
        clear_residuals: tail rows of what is kept are zero instead of undefined.
    """

    activation: Activation
    names: MlpNames = MlpNames()
    transposed: bool = False
    recipe: Recipe | None = None
    residuals: Residuals = Residuals()
    wgrad_dtype: str | None = None
    rows_hint: int = 0
    implementation: str = ""
    clear_residuals: bool = False

    def fc1(self) -> Linear:
        """The first product as a linear operation."""
        return self._linear(self.names.wi, self.names.wi_bias, self.names.x, False)

    def fc2(self, scale_bias: bool = False) -> Linear:
        """The second product as a linear operation; with `scale_bias` its bias is weighted by the probabilities."""
        return self._linear(self.names.wo, self.names.wo_bias, "activated rows", scale_bias)

    def _linear(self, w: str, bias: str, x: str, scale_bias: bool) -> Linear:
        n = self.names
        names = Names(x, w, n.transposed, n.sizes, bias, n.probs, wgrad=n.wgrad, accum=n.accum, out=n.out)
        return Linear(
            names,
            transposed=self.transposed,
            recipe=self.recipe,
            scale_bias=scale_bias,
            wgrad_dtype=self.wgrad_dtype,
            rows_hint=self.rows_hint,
            implementation=self.implementation,
        )


class MlpNeeds(NamedTuple):
    """Which gradients somebody asked for; the others are neither computed nor prepared for."""

    x: bool = True
    wi: bool = True
    wo: bool = True
    probs: bool = True
    wi_bias: bool = True
    wo_bias: bool = True

    @property
    def dh(self) -> bool:
        """Whether the gradient of h is needed."""
        return self.x or self.wi or self.wi_bias

    @property
    def dz(self) -> bool:
        """Whether the gradient of z is needed, if only inside a kernel."""
        return self.dh or self.probs


class Kept(NamedTuple):
    """What backward reads, True or False of each: rows, weights, probabilities, biases."""

    x: bool
    h: bool
    z: bool
    wi: bool
    wo: bool
    probs: bool
    wi_bias: bool
    wo_bias: bool


class Forward(NamedTuple):
    """y [M, K]; h [M, W] and z [M, F] where they are kept."""

    y: Array
    h: Array | None
    z: Array | None


class MainGrads(NamedTuple):
    """Gradients of everything but the weights, None where not needed, and the rows that those of the weights read."""

    x: Array | None
    probs: Array | None
    wi_bias: Array | None
    wo_bias: Array | None
    dh: Array | None  # [M, W], with x gives dW1
    z: Array | None  # [M, F], with dy gives dW2


class MlpSpecs(NamedTuple):
    """Specs of the operands, kept or not; None where the operation had none."""

    x: ArraySpec
    wi: ArraySpec
    wo: ArraySpec
    probs: ArraySpec | None
    wi_bias: ArraySpec | None
    wo_bias: ArraySpec | None


@lru_cache(maxsize=1024)
def restrict(needs: MlpNeeds, specs: MlpSpecs) -> MlpNeeds:
    """The needs, without those of operands that there are not."""
    return needs._replace(
        probs=needs.probs and specs.probs is not None,
        wi_bias=needs.wi_bias and specs.wi_bias is not None,
        wo_bias=needs.wo_bias and specs.wo_bias is not None,
    )


@lru_cache(maxsize=1024)
def kept(op: Mlp, needs: MlpNeeds, has_probs: bool, has_wi_bias: bool, has_wo_bias: bool) -> Kept:
    """What the backward of these gradients reads (MLP-9 to MLP-11)."""
    policy = op.residuals.policy
    needs = needs._replace(
        probs=needs.probs and has_probs,
        wi_bias=needs.wi_bias and has_wi_bias,
        wo_bias=needs.wo_bias and has_wo_bias,
    )
    from_input = policy == "save_input" and (needs.dz or needs.wo)
    # Where dz is computed, z comes from the same pass over h.
    z = needs.wo and (policy == "save_all" or (policy == "save_fc1" and not needs.dz))
    rebuilds_z = needs.wo and not z
    return Kept(
        x=needs.wi or from_input,
        h=needs.dz and not from_input,
        z=z,
        wi=needs.x or from_input,
        wo=needs.dz,
        probs=has_probs and (needs.dh or rebuilds_z or needs.wo_bias),
        wi_bias=has_wi_bias and from_input,
        wo_bias=has_wo_bias and needs.probs,
    )


@lru_cache(maxsize=4096)
def check(
    op: Mlp,
    x: ArraySpec,
    wi: ArraySpec,
    wo: ArraySpec,
    sizes: ArraySpec,
    probs: ArraySpec | None = None,
    wi_bias: ArraySpec | None = None,
    wo_bias: ArraySpec | None = None,
    out: ArraySpec | None = None,
) -> ArraySpec:
    """Refuses what the MLP does not take, in words; returns the spec of y, [M, K].

    Raises:
        TypeError: dtypes. ValueError: ranks, shapes, empty axes, contradictory options.
    """
    n = op.names
    h = calls.check_linear(op.fc1(), x, wi, sizes, wi_bias, None)
    layout = "[G, K, F]" if op.transposed else "[G, F, K]"
    if len(wo.shape) != 3:
        raise ValueError(
            f"`{n.wo}`: shape {wo.shape}, expected three axes {layout}; stack one matrix a group on the first axis."
        )
    k_axis, n_axis = op.fc2().weight_axes()
    width = wo.shape[k_axis]
    wide_width = op.activation.fc1_width(width)
    if h.shape[1] != wide_width:
        raise ValueError(
            f"`{n.wi}`: {h.shape[1]} columns in front of the activation, expected {wide_width} for {op.activation.kind} "
            f"and F = {width} of `{n.wo}` {layout}; gated kinds have gate and linear columns side by side."
        )
    if wo.shape[n_axis] != x.shape[1]:
        raise ValueError(
            f"`{n.wo}`: shape {wo.shape}, expected {layout} with K = {x.shape[1]} = columns of `{n.x}`; "
            f"check the operands and `{n.transposed}`."
        )
    if probs is not None and probs.dtype not in calls.WIDE:
        raise TypeError(f"`{n.probs}`: dtype {probs.dtype}, expected one of {', '.join(calls.WIDE)}; cast it first.")
    if probs is not None and probs.shape != x.shape[:1]:
        raise ValueError(
            f"`{n.probs}`: shape {probs.shape}, expected {x.shape[:1]} = all rows of `{n.x}`, tail included; "
            "pass one probability a row."
        )
    z = ArraySpec((x.shape[0], width), h.dtype)
    return calls.check_linear(op.fc2(), z, wo, sizes, wo_bias, None, out)


# ---------------------------------------------------------------------------------------------------------------------
# Rules


def _act(
    run: Runner,
    op: Mlp,
    x: Array,
    wi: Operand,
    group_sizes: Array,
    wi_bias: Operand | None,
    p: Array | None,
    hidden: bool,
) -> tuple[Array, Array | None]:
    """(z, h or None): the first product and the activation in one call."""
    linear = op.fc1()
    recipe = linear.resolve(run.spec(x), operand_spec(run, wi))
    rows = run.cast(x, recipe.forward[0].values)
    right = wi if isinstance(wi, Listed) else run.cast(wi, recipe.forward[1].values)
    (w, w_table), (b, b_table) = split(right), split(wi_bias)
    call = calls.grouped_matmul_act(
        run.spec(rows),
        operand_spec(run, right),
        linear.weight_axes()[0],
        run.spec(group_sizes),
        wide(run.spec(x).dtype),
        activation=op.activation,
        recipe=recipe,
        bias=operand_spec(run, wi_bias),
        row_scale=operand_spec(run, p),
        tables=(w_table is not None, b_table is not None),
        aligned_tables=all_aligned(right),
        hidden=hidden,
        zero_tail=op.clear_residuals,
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    z, h = run(call, (rows, w, group_sizes, b, p, w_table, b_table))
    return z, h


def mlp(
    run: Runner,
    op: Mlp,
    x: Array,
    wi: Operand,
    wo: Operand,
    group_sizes: Array,
    probs: Array | None = None,
    wi_bias: Operand | None = None,
    wo_bias: Operand | None = None,
    out: Array | None = None,
    *,
    keep_h: bool = False,
    keep_z: bool = False,
) -> Forward:
    """y[r] = (p[r] act(x[r] W1[g] + b1[g])) W2[g] + p[r] b2[g], p = probs or 1, and the rows that are kept.

    Args:
        x: [M, K]. wi: [G, K, W], wo: [G, F, K], or both with the last two axes swapped when transposed; one array or
            `Listed` each. group_sizes: int32 [G]. probs: [M]. wi_bias: [G, W]. wo_bias: [G, K].
        out: the caller's [M, K] buffer; its tail rows are left alone.
    """
    specs = [operand_spec(run, each) for each in (x, wi, wo, group_sizes, probs, wi_bias, wo_bias, out)]
    result = check(op, *specs)
    p = None if probs is None else run.cast(probs, "float32")
    z, h = _act(run, op, x, wi, group_sizes, wi_bias, p, keep_h)
    scaled = p if wo_bias is not None else None  # z carries p already, so it multiplies the bias alone
    linear = op.fc2(scale_bias=scaled is not None)
    recipe = linear.resolve(run.spec(z), operand_spec(run, wo))
    y = product(
        run,
        linear,
        recipe,
        recipe.forward,
        (z, 1),
        (wo, linear.weight_axes()[0]),
        group_sizes,
        result.dtype,
        bias=wo_bias,
        row_scale=scaled,
        into=out,
    )
    return Forward(y, h, z if keep_z else None)


def main_grads(
    run: Runner,
    op: Mlp,
    specs: MlpSpecs,
    x: Array | None,
    h: Array | None,
    z: Array | None,
    wi: Operand | None,
    wo: Operand | None,
    group_sizes: Array,
    probs: Array | None,
    wi_bias: Operand | None,
    wo_bias: Operand | None,
    dy: Array,
    needs: MlpNeeds,
    *,
    grad_input: Array | None = None,
) -> MainGrads:
    """Gradients that `needs` asks for but those of the weights; operands that `kept` does not name are None.

        dz = dy W2^T;  dh = p dz act'(h);  dx = dh W1^T;  dp = <dz, act(h)> + <dy, b2>
        db1_g = sum dh;  db2_g = sum p dy

    Args:
        dy: [M, K]. grad_input: the caller's [M, K] buffer for dx; its tail rows are left alone.
    """
    needs = restrict(needs, specs)
    p = None if probs is None else run.cast(probs, "float32")
    sizes = run.spec(group_sizes)
    dx = dp = db1 = db2 = dh = row_sum = None
    if needs.dz:
        if h is None:
            h = gradients.linear(run, op.fc1(), x, wi, group_sizes, wi_bias)
        base = _bias_dots(run, dy, wo_bias, group_sizes) if needs.probs and wo_bias is not None else None
        dh, rebuilt, row_sum = _dact(
            run, op, dy, wo, group_sizes, h, p, base, (needs.dh, needs.wo and z is None, needs.probs)
        )
        z = rebuilt if z is None else z
    elif needs.wo and z is None:
        z, _ = _act(run, op, x, wi, group_sizes, wi_bias, p, hidden=False)
    if needs.probs and specs.probs is not None:
        dp = run.cast(row_sum, specs.probs.dtype)
    if needs.x:
        linear = op.fc1()
        recipe = linear.resolve(specs.x, specs.wi)
        dx = product(
            run,
            linear,
            recipe,
            recipe.dgrad,
            (dh, 1),
            (wi, linear.weight_axes()[1]),
            group_sizes,
            wide(specs.x.dtype),
            into=grad_input,
        )
    if needs.wi_bias and specs.wi_bias is not None:
        (db1,) = run(calls.group_sum(run.spec(dh), sizes, specs.wi_bias.dtype), (dh, group_sizes, None))
    if needs.wo_bias and specs.wo_bias is not None:
        call = calls.group_sum(run.spec(dy), sizes, specs.wo_bias.dtype, operand_spec(run, p))
        (db2,) = run(call, (dy, group_sizes, p))
    return MainGrads(dx, dp, db1, db2, dh if needs.wi else None, z if needs.wo else None)


def _bias_dots(run: Runner, dy: Array, bias: Operand, group_sizes: Array) -> Array:
    """[M] float32 = <dy[r], bias[g(r)]>."""
    b, table = split(bias)
    spec = run.spec(dy)
    pair = (spec, operand_spec(run, bias))
    call = calls.row_dot(run.spec(group_sizes), spec.shape[0], None, pair, table is not None)
    return run(call, (group_sizes, None, None, dy, b, table))[0]


def _dact(
    run: Runner,
    op: Mlp,
    dy: Array,
    wo: Operand | None,
    group_sizes: Array,
    h: Array,
    p: Array | None,
    base: Array | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Array | None, Array | None, Array | None]:
    """(dh, z, dp), each None unless wanted: dgrad of the second product and the activation's in one call."""
    linear = op.fc2()
    recipe = linear.resolve(run.spec(h), operand_spec(run, wo))
    rows = run.cast(dy, recipe.dgrad[0].values)
    right = wo if isinstance(wo, Listed) else run.cast(wo, recipe.dgrad[1].values)
    w, table = split(right)
    call = calls.grouped_matmul_dact(
        run.spec(rows),
        operand_spec(run, right),
        linear.weight_axes()[1],
        run.spec(group_sizes),
        run.spec(h),
        run.spec(h).dtype,
        activation=op.activation,
        recipe=recipe,
        wanted=wanted,
        row_scale=operand_spec(run, p),
        row_base=operand_spec(run, base),
        table=table is not None,
        aligned_tables=all_aligned(right),
        zero_tail=op.clear_residuals,
        rows_hint=op.rows_hint,
        implementation=op.implementation,
    )
    dh, z, row_sum = run(call, (rows, w, group_sizes, h, p, base, table))
    return dh, z, row_sum


def weight_grad(
    run: Runner,
    linear: Linear,
    weight: ArraySpec,
    rows: Array,
    dy: Array,
    group_sizes: Array,
    *,
    into: Operand | None = None,
    accumulate: bool = False,
) -> Array:
    """dW_g = sum rows^T dy in the weight's layout: of W1 with `op.fc1()`, x and dh; of W2 with `op.fc2()`, z and dy.

    Args:
        into: destination; with `accumulate` the gradient is added to it.
    """
    specs = (run.spec(rows), weight, None, None)
    needs = Needs(x=False, bias=False, row_scale=False)
    return gradients.linear_grads(
        run, linear, specs, rows, None, group_sizes, None, None, dy, needs, into_w=into, accumulate=accumulate
    ).w


def plan(op: Mlp, specs: MlpSpecs, sizes: ArraySpec, run: Any, *, accumulators: tuple[Any, Any] = (None, None)) -> None:
    """Runs forward and backward on specs, for a runner that notes calls (`grouped_core.plans.Planner`)."""
    x, wi, wo, probs, wi_bias, wo_bias = specs
    needs = restrict(MlpNeeds(), specs)
    keep = kept(op, needs, probs is not None, wi_bias is not None, wo_bias is not None)
    y, h, z = mlp(run, op, x, wi, wo, sizes, probs, wi_bias, wo_bias, keep_h=keep.h, keep_z=keep.z)
    main = main_grads(run, op, specs, x, h, z, wi, wo, sizes, probs, wi_bias, wo_bias, y, needs)
    for linear, weight, rows, dy, into in (
        (op.fc1(), wi, x, main.dh, accumulators[0]),
        (op.fc2(), wo, main.z, y, accumulators[1]),
    ):
        weight_grad(run, linear, weight, rows, dy, sizes, into=into, accumulate=into is not None)


def with_policy(op: Mlp, residuals: Residuals | str) -> Mlp:
    """The MLP with another policy."""
    return dataclasses.replace(op, residuals=resolve(residuals))


def resolve(residuals: Residuals | str) -> Residuals:
    """`residuals=` of a public function: a policy's name, or `Residuals` as they stand."""
    return residuals if isinstance(residuals, Residuals) else Residuals(residuals)
