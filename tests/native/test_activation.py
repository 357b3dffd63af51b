"""Activations and their gradients, alone and behind a grouped product: values, special values, what is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from grouped_core import _native, calls, plans
from grouped_core.activations import GATED_KINDS, KINDS, Activation, half_columns
from grouped_core.calls import ArraySpec, spec_of
from grouped_core.recipes import plain
from tests import asserts, cases
from tests.bounds import Bounded, Expected
from tests.native.activation_tools import Product, Rows, maybe, product_gradients, product_of, rows_of, values
from tests.native.runner import Native, kernels

CASES = [cases.named(name) for name in ("tail", "idle_ends", "n_2880")]
EDGES = [case for case in cases.select() if case.k <= 100 and case.n <= 100]
INTERLEAVES = (None, 1, 2, 8, 32, 64)
WANTED = ((True, True, True), (True, False, True), (False, True, False), (False, False, True), (True, False, False))
LIMIT = 7.0


def fits(case: cases.Case, kind: str, interleave: int | None, **_: Any) -> bool:
    return interleave is None or (kind in GATED_KINDS and case.n % interleave == 0)


def gradients(
    run: Native,
    r: Rows,
    result: str,
    *,
    scaled: bool,
    based: bool,
    wanted: tuple[bool, bool, bool] = (True, True, True),
    zero_tail: bool = True,
) -> tuple[Any, ...]:
    scale, base = r.row_scale if scaled else None, r.row_base if based else None
    call = calls.activation_grad(
        spec_of(r.grad),
        spec_of(r.hidden),
        spec_of(r.group_sizes),
        result,
        activation=r.activation,
        wanted=wanted,
        row_scale=maybe(scale),
        row_base=maybe(base),
        zero_tail=zero_tail,
    )
    return run(call, (r.grad, r.hidden, r.group_sizes, scale, base))


@pytest.mark.rule("MLP-1", "MLP-3", "MLP-5", "GRP-6")
@pytest.mark.matrix(
    kernel=kernels("activation"),
    kind=tuple(KINDS),
    case=CASES,
    dtype=cases.DTYPES,
    result=cases.DTYPES,
    interleave=INTERLEAVES,
    scaled=(False, True),
    valid=fits,
)
def test_values(kernel, kind, case, dtype, result, interleave, scaled):
    r = rows_of(case, Activation(kind, interleave=interleave), dtype)
    found = values(Native(kernel), r, result, scaled=scaled)
    asserts.zero(found[case.valid :], "tail")


@pytest.mark.rule("MLP-1", "MLP-3", "MLP-5", "MLP-7", "GRP-6")
@pytest.mark.matrix(
    kernel=kernels("activation_grad"),
    kind=tuple(KINDS),
    case=CASES,
    dtype=cases.DTYPES,
    result=cases.DTYPES,
    interleave=INTERLEAVES,
    scaled=(False, True),
    based=(False, True),
    wanted=WANTED,
    valid=fits,
)
def test_gradients(kernel, kind, case, dtype, result, interleave, scaled, based, wanted):
    r = rows_of(case, Activation(kind, interleave=interleave), dtype)
    found = gradients(Native(kernel), r, result, scaled=scaled, based=based, wanted=wanted)
    for name, want, array in zip(("result", "activated", "row_sum"), wanted, found, strict=True):
        assert (array is not None) == want, name
        if want:
            asserts.zero(array[case.valid :], f"tail of {name}")


@pytest.mark.rule("GRP-4", "GRP-5", "GRP-6", "MAT-7")
@pytest.mark.parametrize("kernel", [*kernels("activation"), *kernels("activation_grad")])
@pytest.mark.matrix(case=EDGES, kind=("swiglu", "relu"), zero_tail=(False, True))
def test_groups(kernel, case, kind, zero_tail):
    r = rows_of(case, Activation(kind), "bfloat16")
    if "grad" in kernel:
        *_, row_sum = gradients(Native(kernel), r, "bfloat16", scaled=True, based=True, zero_tail=zero_tail)
        asserts.zero(row_sum[case.valid :], "tail of row_sum")
    else:
        values(Native(kernel), r, "bfloat16", scaled=True, zero_tail=zero_tail)


def special(activation: Activation) -> Rows:
    """Every pair of special numbers as a and u, a row each; a column of ones beside them."""
    numbers = [0.0, 1.0, LIMIT, np.nextafter(np.float32(LIMIT), np.float32(8)), 0.6, 1e-3, 1e-20, 1e-42, 1e18, np.inf]
    tails = [-12.0, -13.5, -20.0, -40.0, -80.0, -88.5, -95.0, -103.0, -120.0, np.nan]
    signed = np.array([*numbers, *(-n for n in numbers), *tails], np.float32)
    a, u = (grid.reshape(-1) for grid in np.meshgrid(signed, signed))
    known = np.isfinite(u) | (np.abs(a) <= LIMIT)  # a function that vanishes in fp32, times infinity, is NaN
    a, u = a[known], u[known]
    if not activation.gated:
        a = signed
    rows = len(a)
    hidden = np.ones((rows, activation.fc1_width(2)), np.float32)
    gate, linear = half_columns(2, None)
    hidden[:, gate[0]] = a
    if activation.gated:
        hidden[:, linear[0]] = u
    case = cases.Case("special", (rows,), rows, 1, 2, frozenset())
    one = np.ones(rows, np.float32)
    return Rows(case, activation, hidden, np.ones((rows, 2), np.float32), np.array([rows], np.int32), one, one)


@pytest.mark.rule("MLP-3", "MLP-4")
@pytest.mark.parametrize("kind", tuple(KINDS))
@pytest.mark.parametrize("kernel", [*kernels("activation"), *kernels("activation_grad")])
def test_special_values(kernel, kind):
    """Infinities, NaN, subnormals, limits and far tails are where the oracle has them, within the relative bound."""
    r = special(Activation(kind))
    with np.errstate(all="ignore"):
        if "grad" in kernel:
            gradients(Native(kernel), r, "float32", scaled=False, based=False)
        else:
            values(Native(kernel), r, "float32", scaled=False)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "relu" not in kind])
def test_the_bound_of_far_tails_is_relative(kind):
    """Where 1 + tanh(x) cancels, a sloppy tanh is off by more than the value: no bound may let that through."""
    a = np.linspace(-8, -2, 100, dtype=np.float32)
    activation = Activation(kind)
    hidden = np.concatenate([a[:, None], np.ones((100, activation.fc1_width(1) - 1), np.float32)], axis=1)
    sizes = np.array([100], np.int32)
    call = calls.activation(spec_of(hidden), spec_of(sizes), "float32", activation=activation)
    (expected,) = Expected()(call, (Bounded.of(hidden), sizes, None))
    assert (expected.error < 2.0**-20 * np.abs(expected.value)).all()


@pytest.mark.rule("prime-rl #2365")
@pytest.mark.rule("MLP-3")
@pytest.mark.parametrize("kernel", kernels("activation_grad"))
def test_boundaries_keep_their_gradient(kernel):
    above = np.nextafter(np.float32(LIMIT), np.float32(8))
    hidden = np.array([[LIMIT, LIMIT], [above, -LIMIT], [LIMIT, above], [-above, -above]], np.float32)
    case = cases.Case("limits", (4,), 4, 1, 1, frozenset())
    one = np.ones(4, np.float32)
    activation = Activation("clamped_qgeglu", limit=LIMIT)
    r = Rows(case, activation, hidden, one[:, None], np.array([4], np.int32), one, one)
    da, du = gradients(Native(kernel), r, "float32", scaled=False, based=False, wanted=WANTED[4])[0].T
    assert ((da != 0) == [True, False, True, True]).all()
    assert ((du != 0) == [True, True, False, False]).all()


@pytest.mark.rule("MLP-3")
@pytest.mark.parametrize("kernel", kernels("activation_grad"))
@pytest.mark.parametrize("kind", ["quick_gelu", "quick_geglu", "clamped_qgeglu"])
def test_gates_that_alpha_takes_to_infinity_have_a_derivative(kernel, kind):
    """Infinity times a slope of 0 would be NaN."""
    activation = Activation(kind)
    far = np.array([-3e38, 3e38], np.float32)
    hidden = np.stack([far, np.ones(2, np.float32)][: activation.fc1_width(1)], axis=1)
    case = cases.Case("far", (2,), 2, 1, 1, frozenset())
    one = np.ones(2, np.float32)
    r = Rows(case, activation, hidden, one[:, None], np.array([2], np.int32), one, one)
    da = gradients(Native(kernel), r, "float32", scaled=False, based=False, wanted=WANTED[4])[0][:, 0]
    asserts.bitwise(da, np.array([0, kind != "clamped_qgeglu"], np.float32))  # the last one is beyond its limit


@pytest.mark.rule("prime-rl #2365")
@pytest.mark.rule("MLP-3")
@pytest.mark.parametrize("kernel", kernels("activation_grad"))
def test_a_clamp_behind_silu_keeps_the_gradient_of_its_limit(kernel):
    """The limit is a value that the kernel itself computes, and its neighbours."""
    hidden = np.array([[5.25, 1.0], [5.25, 5.0], [5.25, 6.0]], np.float32)
    case = cases.Case("limits", (3,), 3, 1, 1, frozenset())
    one = np.ones(3, np.float32)

    def found(limit: float | None) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        activation = Activation("silu_clamped_glu", limit=limit)
        r = Rows(case, activation, hidden, one[:, None], np.array([3], np.int32), one, one)
        result, activated, _ = gradients(Native(kernel), r, "float32", scaled=False, based=False)
        return *result.T, activated[:, 0]

    (da, du, t), value = found(None), float(found(None)[2][0])  # u is 1 there
    assert 5 < value < 5.25
    for got, wanted in zip(found(value), (da, du, t), strict=True):
        asserts.bitwise(got[:2], wanted[:2])  # 5 is no more than that limit
    assert found(value)[0][2] != 0
    assert found(value)[1][2] == 0  # 6 is more
    below = np.nextafter(np.float32(value), np.float32(0))
    assert not found(float(below))[0].any()
    asserts.bitwise(found(float(below))[2], below * np.minimum(hidden[:, 1], below))


@pytest.mark.rule("MLP-3")
@pytest.mark.parametrize("kernel", [*kernels("activation"), *kernels("activation_grad")])
@pytest.mark.parametrize("limit", [None, 1.5])
def test_a_case_of_a_kind_has_the_bits_of_that_kind(kernel, limit):
    case = cases.named("tail")
    options: dict[str, Any] = {"scaled": True, **({"based": True} if "grad" in kernel else {})}
    compute = gradients if "grad" in kernel else values
    case_of = compute(
        Native(kernel), rows_of(case, Activation("clamped_swiglu", limit=limit), "bfloat16"), "float32", **options
    )
    general = Activation("clamped_qgeglu", alpha=1.0, limit=limit, offset=0.0)
    for a, b in zip(
        case_of, compute(Native(kernel), rows_of(case, general, "bfloat16"), "float32", **options), strict=True
    ):
        asserts.bitwise(a, b)


@pytest.mark.rule("MLP-2")
@pytest.mark.parametrize("kind", tuple(KINDS))
@pytest.mark.matrix(dtype=cases.DTYPES, scaled=(False, True))
@pytest.mark.parametrize(
    ("value", "grad"),
    [
        pytest.param(a, a.replace("activation_", "activation_grad_"), marks=getattr(param, "marks", ()), id=a)
        for param in kernels("activation")
        for a in [getattr(param, "values", (param,))[0]]
    ],
)
def test_gradients_recompute_the_very_values(value, grad, kind, dtype, scaled):
    r = rows_of(cases.named("jagged"), Activation(kind), dtype)
    _, again, _ = gradients(Native(grad, check=False), r, dtype, scaled=scaled, based=False)
    asserts.bitwise(again, values(Native(value, check=False), r, dtype, scaled=scaled))


@pytest.mark.rule("ALL-2", "MLP-10")
@pytest.mark.parametrize("kernel", kernels("activation_grad"))
@pytest.mark.parametrize("interleave", INTERLEAVES)
def test_the_same_twice_at_any_address_and_through_both_entries(kernel, interleave):
    r = rows_of(cases.named("n_2880"), Activation("swiglu", interleave=interleave), "bfloat16")
    options: dict[str, Any] = {"scaled": True, "based": True}
    first = gradients(Native(kernel), r, "bfloat16", **options)
    for run in (Native(kernel), Native(kernel, unaligned=True), Native(kernel, check=False, dlpack=True)):
        for a, b in zip(gradients(run, r, "bfloat16", **options), first, strict=True):
            asserts.bitwise(a, b)


@pytest.mark.rule("MLP-7")
@pytest.mark.parametrize("kernel", kernels("activation_grad"))
def test_a_row_does_not_depend_on_its_neighbours(kernel):
    r = rows_of(cases.named("n_2880"), Activation("swiglu"), "bfloat16")
    bad = r._replace(hidden=r.hidden.copy(), grad=r.grad.copy())
    bad.hidden[3] = np.nan
    bad.grad[5] = np.inf
    run = Native(kernel, check=False)
    good, found = (gradients(run, each, "float32", scaled=True, based=True) for each in (r, bad))
    others = ~np.isin(np.arange(r.case.rows), (3, 5))
    for a, b in zip(found, good, strict=True):
        asserts.bitwise(a[others], b[others])
        assert np.isnan(a[3]).all()


# ---------------------------------------------------------------------------------------------------------------------
# Behind a grouped product.


def activated_product(
    run: Native,
    p: Product,
    result: str,
    *,
    bias: bool,
    scaled: bool,
    hidden: bool,
    table: Any = None,
    halves: bool = False,
) -> tuple[Any, ...]:
    r, scale, b = p.rows, p.rows.row_scale if scaled else None, p.bias if bias else None
    w, up = p.w, None
    if halves:
        w, up = (np.ascontiguousarray(half) for half in np.split(p.w, 2, axis=3 - p.rhs_axis))
    call = calls.grouped_matmul_act(
        spec_of(p.x),
        spec_of(w),
        p.rhs_axis,
        spec_of(r.group_sizes),
        result,
        activation=r.activation,
        recipe=plain(p.x.dtype.name),
        bias=maybe(b),
        row_scale=maybe(scale),
        tables=(table is not None, False),
        rhs_up=maybe(up),
        hidden=hidden,
    )
    return run(
        call,
        call.arrange(
            lhs=p.x,
            rhs=w if table is None else None,
            group_sizes=r.group_sizes,
            bias=b,
            row_scale=scale,
            rhs_table=table,
            rhs_up=up,
        ),
    )[:2]


def plain_kernel(fused: str) -> str:
    """The activation's own kernel where `fused` runs."""
    return "activation_any_cpu" if "_cpu" in fused else "activation_any_cuda"


PRODUCTS = [*(case for case in cases.select("small") if case.k <= 40), cases.named("even_tiles")]


def fits_halves(kind: str, interleave: int | None, halves: bool, case: cases.Case, **_: Any) -> bool:
    in_two = kind in GATED_KINDS and interleave is None
    one_kernel = case.n % 8 == 0 or 2 * case.n % 8 != 0  # else the whole weight may be that of a faster one
    return (not halves or (in_two and one_kernel)) and fits(kind=kind, interleave=interleave, case=case)


@pytest.mark.rule("MAT-3", "MLP-1", "MLP-2", "GRP-4", "GRP-6")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul_act"),
    kind=tuple(KINDS),
    case=PRODUCTS,
    dtype=cases.DTYPES,
    interleave=INTERLEAVES[:4],
    rhs_axis=(1, 2),
    bias=(False, True),
    scaled=(False, True),
    hidden=(False, True),
    halves=(False, True),
    valid=fits_halves,
)
def test_activated_products(kernel, kind, case, dtype, interleave, rhs_axis, bias, scaled, hidden, halves):
    p = product_of(case, Activation(kind, interleave=interleave), dtype, rhs_axis)
    options = {"bias": bias, "scaled": scaled, "hidden": hidden}
    z, h = activated_product(Native(kernel), p, dtype, **options, halves=halves)
    if halves:
        whole = activated_product(Native(kernel), p, dtype, **options)
        asserts.bitwise(z, whole[0], "result of one array")
        if hidden:
            asserts.bitwise(h, whole[1], "hidden rows of one array")
    asserts.zero(z[case.valid :], "tail")
    if hidden:  # what is stored is what the activation read
        h[case.valid :] = cases.TAIL
        again = values(Native(plain_kernel(kernel)), p.rows._replace(hidden=h), dtype, scaled=scaled)
        asserts.bitwise(again, z, "activation of the stored rows")


@pytest.mark.rule("MLP-1", "MLP-2", "MLP-7", "GRP-4", "GRP-6")
@pytest.mark.matrix(
    kernel=kernels("grouped_matmul_dact"),
    kind=tuple(KINDS),
    case=PRODUCTS[::2],
    dtype=cases.DTYPES,
    interleave=INTERLEAVES[:4],
    rhs_axis=(1, 2),
    scaled=(False, True),
    based=(False, True),
    wanted=WANTED[:3],
    valid=fits,
)
def test_gradients_behind_products(kernel, kind, case, dtype, interleave, rhs_axis, scaled, based, wanted):
    p = product_of(case, Activation(kind, interleave=interleave), dtype, rhs_axis)
    found = product_gradients(Native(kernel), p, dtype, scaled=scaled, based=based, wanted=wanted)
    for name, want, array in zip(("result", "activated", "row_sum"), wanted, found, strict=True):
        assert (array is not None) == want, name
        if want:
            asserts.zero(array[case.valid :], f"tail of {name}")
    if wanted[1]:
        asserts.bitwise(found[1], values(Native(plain_kernel(kernel)), p.rows, dtype, scaled=scaled), "activated")


@pytest.mark.rule("ALL-2", "GRP-11")
@pytest.mark.parametrize("kernel", [*kernels("grouped_matmul_act"), *kernels("grouped_matmul_dact")])
@pytest.mark.parametrize("rhs_axis", [1, 2])
@pytest.mark.parametrize("name", ["tail", "even_tiles"])
def test_listed_weights_and_any_address_give_the_same_bits(kernel, rhs_axis, name):
    p = product_of(cases.named(name), Activation("swiglu"), "bfloat16", rhs_axis)
    run = Native(kernel)
    if "_dact_" in kernel:
        members, table = run.hold(list(p.wo))
        options: dict[str, Any] = {"scaled": True, "based": True}
        first = product_gradients(run, p, "bfloat16", **options)
        others = [product_gradients(run, p, "bfloat16", table=table, **options)]
        if "_sm90" not in kernel:  # pinned, these want aligned addresses
            others += [product_gradients(Native(kernel, unaligned=True), p, "bfloat16", **options)]
    else:
        members, table = run.hold(list(p.w))
        options = {"bias": True, "scaled": True, "hidden": True}
        first = activated_product(run, p, "bfloat16", **options)
        others = [activated_product(run, p, "bfloat16", table=table, **options)]
        if "_sm90" not in kernel:  # pinned, these want aligned addresses
            others += [activated_product(Native(kernel, unaligned=True), p, "bfloat16", **options)]
    for found in others:
        for a, b in zip(found, first, strict=True):
            asserts.bitwise(a, b)
    assert len(members) == p.rows.case.groups  # alive until here


@pytest.mark.skipif(not _native.cuda_compiled, reason="this build has no CUDA kernels")
@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("kind", ["relu", "swiglu"])
def test_hidden_rows_of_more_columns_than_32_bits_count_are_refused(kind):
    sizes, activation = ArraySpec((1,), "int32"), Activation(kind)
    for wide in (2**31 - 4096, 2**31 - 2048, 2**31, 2**33):
        rows = ArraySpec((1, wide), "bfloat16")
        grad = ArraySpec((1, wide // 2 if activation.gated else wide), "bfloat16")
        wanted = {"activation": activation, "wanted": (True, True, True)}
        for call in (
            calls.activation(rows, sizes, "bfloat16", activation=activation),
            calls.activation_grad(grad, rows, sizes, "bfloat16", **wanted),
        ):
            plan = plans.attempt(call, "sm_90a")
            if wide <= 2**31 - 4096:
                assert plan.kernel, plan.refusals
            else:
                assert not plan.kernel
                assert (
                    f"up to 2^31 - 4096 columns, got bfloat16[1, {wide}]"
                    in dict(plan.refusals)[f"{call.name}_any_cuda"]
                )
