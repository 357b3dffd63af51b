"""JAX, PyTorch and NumPy frontends give the same bits, and the same refusals except for names of arguments."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_grouped
import torch_bridge
from grouped_core import arrays, recipes
from grouped_core.gradients import Needs
from grouped_core.linear_spec import Linear
from tests import asserts, bounds, cases
from tests.bounds import ALL_NEEDS
from tests.messages import BAD, Bad
from tests.parity.adapters import ARRAYS, FRONTENDS, JAX, TORCH, Frontend, to_torch

OTHERS = (JAX, TORCH)
CASES = [
    cases.named(name)
    for name in (
        "tail",
        "jagged",
        "clamped",
        "negative",
        "k_n_odd",
        "groups_1_tail",
        "all_empty",
        "no_rows",
        "idle_ends",
    )
]


def operands(p: cases.Problem, *, bias: str | None, row_scale: str | None) -> dict[str, Any]:
    return {
        "x": p.x,
        "w": p.w,
        "group_sizes": p.group_sizes,
        "bias": None if bias is None else p.bias.astype(cases.numpy_dtype(bias)),
        "row_scale": None if row_scale is None else p.row_scale.astype(cases.numpy_dtype(row_scale)),
    }


def present(wanted: Needs, given: dict[str, Any]) -> Needs:
    return Needs(*(need and given[name] is not None for name, need in wanted._asdict().items()))


def label(needs: Needs) -> str:
    return "".join(name[0] for name, need in needs._asdict().items() if need) or "none"


@pytest.mark.rule("ALL-1", "ALL-4", "MAT-1", "MAT-9", "MLP-12")
@pytest.mark.matrix(
    case=CASES,
    dtype=cases.DTYPES,
    transposed=(False, True),
    bias=(None, "float32", "bfloat16"),
    row_scale=(None, "float32", "bfloat16"),
    scale_bias=(False, True),
    needs=ALL_NEEDS,
    valid=lambda bias, row_scale, scale_bias, needs, **_: (
        (not scale_bias or (bias and row_scale)) and (bias or not needs.bias) and (row_scale or not needs.row_scale)
    ),
)
def test_outputs_and_gradients_are_bitwise_equal(case, dtype, transposed, bias, row_scale, scale_bias, needs):
    p = cases.problem(case, dtype, transposed=transposed)
    given = operands(p, bias=bias, row_scale=row_scale)
    options = {"transposed": transposed, "scale_bias": scale_bias}
    y = ARRAYS.forward(given, **options)
    gradients = ARRAYS.gradients(given, p.dy, needs, **options)
    for frontend in OTHERS:
        y_found, found = frontend.passes(given, p.dy, needs, False, **options)
        asserts.bitwise(y_found, y, f"y of {frontend}")
        for name, need, a, b in zip(needs._fields, needs, found, gradients, strict=True):
            assert (a is not None) == need, f"gradient of {name} from {frontend} with needs {needs}"
            if need:
                asserts.bitwise(a, b, f"gradient of {name} from {frontend}")


@pytest.mark.rule("ALL-4")
@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_no_gradient_depends_on_which_others_are_asked_for(dtype, scale_bias):
    """The native kernels round a scaled dx in the same way, whether it is fused or computed in a separate pass."""
    p = cases.problem(cases.named("tail"), dtype)
    given = operands(p, bias="float32", row_scale="float32")
    whole = ARRAYS.gradients(given, p.dy, Needs(), scale_bias=scale_bias)
    for needs in ALL_NEEDS:
        found = ARRAYS.gradients(given, p.dy, needs, scale_bias=scale_bias)
        for name, need, a, b in zip(needs._fields, needs, found, whole, strict=True):
            if need:
                asserts.bitwise(a, b, f"{name} with {label(needs)}")


@pytest.mark.rule("MAT-1", "MAT-9")
@pytest.mark.parametrize("scale_bias", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_whole_operation_is_within_its_bounds(dtype, transposed, scale_bias):
    p = cases.problem(cases.named("tail"), dtype, transposed=transposed)
    given = operands(p, bias=dtype, row_scale="float32")
    options = {"transposed": transposed, "scale_bias": scale_bias}
    op = Linear(ARRAYS.names, **options)
    asserts.within(ARRAYS.forward(given, **options), bounds.expect_linear(op, **given), "y")
    expected = bounds.expect_linear_grads(op, **given, dy=p.dy)
    for name, a, b in zip(Needs._fields, ARRAYS.gradients(given, p.dy, Needs(), **options), expected, strict=True):
        asserts.within(a, b, name)


@pytest.mark.rule("MAT-6", "ERR-5", "ALL-4")
@pytest.mark.parametrize("dtype", cases.FP8)
def test_gradients_beside_fp8_operands_are_not_narrowed_to_them(dtype):
    """The results here are far below the range of E4M3 without a scale."""
    p = cases.problem(cases.named("tail"), dtype)
    dy = (p.dy.astype(np.float32) * 2.0**-14).astype(p.dy.dtype)
    given = operands(p, bias="bfloat16", row_scale="float32")
    found, wanted = (
        ARRAYS.gradients(given, dy, Needs(), transposed=False),
        bounds.expect_linear_grads(Linear(ARRAYS.names), **given, dy=dy),
    )
    for name, of_arrays, of_jax, bound in zip(
        Needs._fields, found, JAX.gradients(given, dy, Needs(), transposed=False), wanted, strict=True
    ):
        asserts.within(of_arrays, bound, name)
        asserts.bitwise(of_jax, of_arrays, name)

    held = {name: to_torch(given[name]).requires_grad_() for name in ("x", "w", "bias", "row_scale")}
    x, w, sizes = held.pop("x"), held.pop("w"), to_torch(given["group_sizes"])
    dx, dw = torch.zeros(x.shape, dtype=torch.bfloat16), torch.zeros(w.shape)  # autograd narrows `.grad` itself
    y = torch_bridge.grouped_linear(x, w, sizes, rhs_transposed=False, grad_input=dx, wgrad_accum=dw, **held)
    y.backward(to_torch(dy))
    asserts.bitwise(held["row_scale"].grad, found.row_scale)
    assert found.x is not None
    asserts.bitwise(dx[: p.case.valid], found.x[: p.case.valid])
    asserts.bitwise(dw.bfloat16(), found.w)


@pytest.mark.rule("GRP-1", "GRP-4")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [
        ("int64", [20, 2**40, 5]),
        ("int64", [20, -(2**40), 5]),
        ("uint32", [20, 2**32 - 1, 5]),
        ("uint64", [20, 2**63, 5]),
        ("uint8", [20, 0, 13]),
        ("int16", [20, -7, 13]),
    ],
)
def test_integers_of_any_type_saturate(frontend, dtype, sizes):
    p = cases.problem(cases.named("tail"), "float32")
    given = operands(p, bias="float32", row_scale=None)
    native = np.clip(np.array(sizes, object), -(2**31), 2**31 - 1).astype(np.int32)
    expected = ARRAYS.forward({**given, "group_sizes": native}, transposed=False)
    found = frontend.forward({**given, "group_sizes": np.array(sizes, dtype)}, transposed=False)
    asserts.bitwise(found, expected)


@pytest.mark.rule("GRP-7", "BUF-2")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_the_callers_buffer_keeps_its_tail(frontend, dtype):
    p = cases.problem(cases.named("tail"), dtype)
    given = operands(p, bias=dtype, row_scale=None)
    out = np.full((p.case.rows, p.case.n), cases.SENTINEL, p.x.dtype)
    found = frontend.forward(given, transposed=False, out=out)
    asserts.filled(found[p.case.valid :], cases.SENTINEL, "tail")
    asserts.bitwise(found[: p.case.valid], ARRAYS.forward(given, transposed=False)[: p.case.valid])


@pytest.mark.rule("MAT-11", "ACC-2")
@pytest.mark.parametrize("accum", ["float32", "bfloat16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_accumulated_weight_gradients_are_bitwise_equal(accum, transposed):
    p = cases.problem(cases.named("tail"), "bfloat16", transposed=transposed)
    before = cases.normal(p.w.shape, accum, "accum")
    given = operands(p, bias=None, row_scale=None)
    needs = Needs(False, True, False, False)
    plain = before.copy()
    ours = arrays.grouped_linear_grads(**given, dy=p.dy, transposed=transposed, needs=needs, wgrad_accum=plain)
    assert ours.w is plain, "the accumulator itself comes back"

    def forward(accum: jax.Array) -> jax.Array:
        x, w, sizes = (jnp.asarray(a) for a in (p.x, p.w, p.group_sizes))
        return jax_grouped.ragged_dot(x, w, sizes, rhs_transposed=transposed, wgrad_accum=accum)

    _, pull = jax.vjp(forward, jnp.asarray(before))
    asserts.bitwise(pull(jnp.asarray(p.dy))[0], plain, "JAX")

    w, sums = to_torch(p.w).requires_grad_(), to_torch(before)
    y = torch_bridge.grouped_linear(
        to_torch(p.x), w, to_torch(p.group_sizes), rhs_transposed=transposed, wgrad_accum=sums
    )
    y.backward(to_torch(p.dy))
    asserts.bitwise(sums, plain, "torch")


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("result", cases.DTYPES)
def test_result_dtype_in_jax_and_arrays(result):
    p = cases.problem(cases.named("tail"), "bfloat16")
    given = operands(p, bias="bfloat16", row_scale="float32")
    options = {"transposed": False, "result_dtype": result}
    asserts.bitwise(JAX.forward(given, **options), ARRAYS.forward(given, **options))
    dy = p.dy.astype(cases.numpy_dtype(result))
    found, expected = (frontend.gradients(given, dy, Needs(), **options) for frontend in (JAX, ARRAYS))
    for name, a, b in zip(Needs._fields, found, expected, strict=True):
        asserts.bitwise(a, b, name)


@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
def test_fp32_subnormals_survive_every_frontend(frontend):
    """XLA calls handlers with flush-to-zero on; the kernels must not inherit it."""
    tiny = np.array([2.0**-149, -(2.0**-149), 3 * 2.0**-140, 2.0**-127, 2.0**-126, 0.0], np.float32)
    # Many columns and rows, so that threads of the pool take part.
    x, w = np.repeat(tiny, 64)[:, None], np.ones((1, 1, 512), np.float32)
    given = {"x": x, "w": w, "group_sizes": np.array([len(x)], np.int32), "bias": None, "row_scale": None}
    asserts.bitwise(frontend.forward(given, transposed=False), np.repeat(x, 512, axis=1))


@pytest.mark.rule("ERR-3")
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
def test_a_pinned_kernel_runs_or_says_why_not(frontend):
    p = cases.problem(cases.named("tail"), "float32")
    given = operands(p, bias=None, row_scale=None)
    y = frontend.forward(given, transposed=False, implementation="reference")
    asserts.within(y, bounds.expect_linear(_linear(), p.x, p.w, p.group_sizes))
    parts = ["grouped_matmul on cpu with implementation='nonsense'", "no kernel takes it: nonsense: ", "Change what"]
    with asserts.refused(NotImplementedError, parts):
        frontend.forward(given, transposed=False, implementation="nonsense")


def _linear():
    return Linear(ARRAYS.names)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals.


def make(frontend: Frontend, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the table as arrays of the frontend; options it does not have are left out."""
    made = {}
    for name, value in arguments.items():
        if name in frontend.absent:
            continue
        is_spec = isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], tuple)
        made[name] = frontend.array(np.zeros(value[1], cases.numpy_dtype(value[0]))) if is_spec else value
    return made


@pytest.mark.rule("ERR-1", "ALL-1")
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_refusals_are_the_same_but_for_names(bad: Bad):
    texts = {}
    for frontend in FRONTENDS:
        if set(bad.change) & frontend.absent:
            continue
        with asserts.refused(bad.kind, bad.fragments(frontend.names)) as message:
            frontend.call(**make(frontend, bad.arguments()))
        text = message[0]
        for key, own in frontend.names._asdict().items():
            text = text.replace(f"`{own}`", f"<{key}>")
        texts[frontend.name] = text
    assert len(set(texts.values())) == 1, texts


GRID = {
    "x": ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32"),
    "w": ("float32", "bfloat16", "float8_e5m2"),
    "transposed": (False, True),
    "bias": (None, "float32", "int32"),
    "row_scale": (None, "float32"),
    "scale_bias": (False, True),
    "implementation": (None, "reference", "composed", "grouped_matmul_any_cpu", "nonsense"),
    "integer": ("int32", "int64", "uint8", "bool"),
}


@pytest.mark.rule("ERR-2", "ERR-3")
@pytest.mark.matrix(**GRID)
def test_why_unsupported_tells_what_happens(x, w, transposed, bias, row_scale, scale_bias, implementation, integer):
    case = cases.named("tail")
    dtype = cases.numpy_dtype
    shape = (case.groups, case.n, case.k) if transposed else (case.groups, case.k, case.n)
    given: dict[str, Any] = {
        "x": np.ones((case.rows, case.k), dtype(x)),
        "w": np.ones(shape, dtype(w)),
        "bias": None if bias is None else np.ones((case.groups, case.n), dtype(bias)),
        "row_scale": None if row_scale is None else np.ones(case.rows, dtype(row_scale)),
    }
    sizes = np.array(case.sizes, integer)
    options = {"scale_bias": scale_bias, "rhs_transposed": transposed, "implementation": implementation}

    held = {name: None if a is None else jnp.asarray(a) for name, a in given.items()}
    extra = {"bias": held["bias"], "row_scale": held["row_scale"], **options}
    reason = jax_grouped.why_unsupported(jax_grouped.ragged_dot, held["x"], held["w"], sizes, arch="cpu", **extra)

    def forward(some: dict[str, Any]) -> jax.Array:
        return jax_grouped.ragged_dot(
            some["x"], some["w"], sizes, bias=some["bias"], row_scale=some["row_scale"], **options
        )

    def both() -> None:
        live = {name: a for name, a in held.items() if a is not None and jnp.issubdtype(a.dtype, jnp.floating)}
        y, pull = jax.vjp(lambda some: forward({**held, **some}), live)
        pull(jnp.ones_like(y))

    _agree(reason, both, "jax")

    tensors = {name: None if a is None else to_torch(a) for name, a in given.items()}
    for tensor in tensors.values():
        if tensor is not None and tensor.is_floating_point():
            tensor.requires_grad_()
    extra = {"bias": tensors["bias"], "row_scale": tensors["row_scale"], **options}
    reason = torch_bridge.why_unsupported(
        torch_bridge.grouped_linear, tensors["x"], tensors["w"], to_torch(sizes), arch="cpu", **extra
    )

    def backward() -> None:
        y = torch_bridge.grouped_linear(tensors["x"], tensors["w"], to_torch(sizes), **extra)
        y.backward(torch.ones_like(y))

    _agree(reason, backward, "torch")


def _agree(reason: str | None, run: Callable[[], None], frontend: str) -> None:
    raised = None
    try:
        run()
    except (TypeError, ValueError, NotImplementedError) as error:
        raised = str(error)
    assert reason == raised, f"{frontend} raised {raised!r}, why_unsupported said {reason!r}"


# ---------------------------------------------------------------------------------------------------------------------
# NumPy frontend only: errors that only this frontend can make.


def _array_operands() -> dict[str, Any]:
    x, w = np.ones((6, 8), np.float32), np.ones((3, 8, 8), np.float32)
    return {"x": x, "w": w, "group_sizes": np.array([2, 1, 2], np.int32)}


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


@pytest.mark.rule("ERR-1", "ERR-5", "BUF-2")
@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        (lambda o: {"x": [[1.0]]}, TypeError, ["`x`: list", "NumPy or CuPy array", "convert"]),
        (lambda o: {"w": None}, TypeError, ["`w`: NoneType", "NumPy or CuPy array", "convert"]),
        (lambda o: {"w": np.ma.array(o["w"], mask=True)}, TypeError, ["`w`: a masked", "without a mask", "filled"]),
        (lambda o: {"x": o["x"].astype(">f4")}, TypeError, ["`x`: dtype >f4", "expected one of float32", "cast it"]),
        (lambda o: {"out": o["x"]}, ValueError, ["`out`: overlaps `x`", "of its own", "allocate"]),
        (lambda o: {"out": _read_only(np.ones_like(o["x"]))}, ValueError, ["`out`", "read-only", "written", "copy"]),
        (lambda o: {"recipe": "BF16"}, TypeError, ["`recipe`: str", "expected None or a Recipe", "pass one"]),
    ],
    ids=["list", "none", "masked", "byte_order", "overlap", "read_only", "recipe"],
)
def test_arrays_that_do_not_fit(change, kind, parts):
    operands = _array_operands()
    with asserts.refused(kind, parts):
        arrays.grouped_linear(**{**operands, **change(operands)})


@pytest.mark.rule("MAT-11")
@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        (lambda o: {"dy": [1]}, TypeError, ["`dy`: list", "NumPy or CuPy array", "convert"]),
        (lambda o: {"wgrad_accum": o["w"]}, ValueError, ["`wgrad_accum`: overlaps `w`", "of its own", "allocate"]),
        (lambda o: {"grad_input": o["dy"]}, ValueError, ["`grad_input`: overlaps `dy`", "of its own", "allocate"]),
        (lambda o: {"wgrad_accum": o["dy"]}, ValueError, ["`wgrad_accum`", "shape (6, 8)", "(3, 8, 8)"]),
        (
            lambda o: {"wgrad_accum": np.zeros_like(o["w"]), "wgrad_dtype": "bfloat16"},
            ValueError,
            ["`wgrad_dtype`: bfloat16", "expected None or float32", "the accumulator sets the dtype"],
        ),
    ],
    ids=["dy", "overlap", "overlaps_dy", "shape", "two_dtypes"],
)
def test_gradients_of_arrays_that_do_not_fit(change, kind, parts):
    operands = {**_array_operands(), "dy": np.ones((6, 8), np.float32)}
    with asserts.refused(kind, parts):
        arrays.grouped_linear_grads(**{**operands, **change(operands)})


_DELAYED = recipes.FP8Delayed.replace(history=2)


def _bound(products: int, **changed: Any) -> Any:
    """FP8Delayed bound to a new state, with other arrays of the state or with a key."""
    state = arrays.scaling_state(_DELAYED, 3, products=products)
    key = changed.pop("key", None)
    return _DELAYED.bind(dataclasses.replace(state, **{name: change(state) for name, change in changed.items()}), key)


@pytest.mark.rule("ERR-5", "BUF-2")
@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(
    ("changed", "kind", "parts"),
    [
        (
            {"history": lambda s: _read_only(s.history.copy())},
            ValueError,
            ["`state.history`: a read-only array", "expected one that may be written", "pass a copy"],
        ),
        (
            {"scale": lambda s: jnp.asarray(s.scale)},
            TypeError,
            ["`state.scale`: ArrayImpl", "expected a NumPy or CuPy array", "convert it"],
        ),
        (
            {"scale": lambda s: np.asfortranarray(s.scale)},
            ValueError,
            ["`state.scale`: strides", "expected a C-contiguous array", "copy it"],
        ),
        (
            {"history": lambda s: np.asfortranarray(s.history)},
            ValueError,
            ["`state.history`: strides", "expected a C-contiguous array", "copy it"],
        ),
        (
            {"key": np.zeros((4,), np.uint32)[::2]},
            ValueError,
            ["`key`: strides", "expected a C-contiguous array", "copy it"],
        ),
        ({"key": jnp.zeros((2,), jnp.uint32)}, TypeError, ["`key`: ArrayImpl", "a NumPy or CuPy array", "convert it"]),
    ],
    ids=["read_only", "jax", "fortran_scale", "fortran_history", "strided_key", "jax_key"],
)
def test_arrays_of_a_bound_recipe_that_do_not_fit(gradients, mlp, changed, kind, parts):
    """They are refused before anything is computed: the buffer keeps what it held."""
    given, buffer = _recipe_operands(mlp, gradients)
    with asserts.refused(kind, parts):
        _recipe_call(mlp, gradients)(**given, recipe=_bound(1 + mlp, **changed))
    asserts.filled(buffer, 7.0, "buffer")


@pytest.mark.rule("BUF-2")
@pytest.mark.parametrize("mlp", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("field", ["scale", "history"])
def test_a_buffer_that_overlaps_the_state_is_refused(gradients, mlp, field):
    given, buffer = _recipe_operands(mlp, gradients)
    count = buffer.size
    state = arrays.scaling_state(_DELAYED, 3, products=1 + mlp)
    held = getattr(state, field)
    memory = np.zeros(max(count, held.size), np.float32)
    state = dataclasses.replace(state, **{field: memory[: held.size].reshape(held.shape)})
    name = "grad_input" if gradients else "out"
    given[name] = memory[:count].reshape(buffer.shape)
    names = [f"`{name}`", f"`state.{field}`"]
    with asserts.refused(ValueError, [*names, "overlaps", "expected a buffer of its own", "allocate"]):
        _recipe_call(mlp, gradients)(**given, recipe=_DELAYED.bind(state))
    asserts.zero(memory, "the state")


def _recipe_call(mlp: bool, gradients: bool) -> Any:
    if mlp:
        return arrays.grouped_mlp_grads if gradients else arrays.grouped_mlp
    return arrays.grouped_linear_grads if gradients else arrays.grouped_linear


def _recipe_operands(mlp: bool, gradients: bool) -> tuple[dict[str, Any], np.ndarray]:
    """Operands of that call, and among them the buffer that it writes, full of 7."""
    x, w = np.ones((6, 32), np.float32), np.ones((3, 32, 32), np.float32)
    weights = {"wi": w, "wo": w.copy(), "activation": "relu"} if mlp else {"w": w}
    buffer = np.full(x.shape, 7.0, np.float32)
    more = {"dy": np.ones_like(x), "grad_input": buffer} if gradients else {"out": buffer}
    return {"x": x, **weights, "group_sizes": np.array([2, 1, 2], np.int32), **more}, buffer


class TestArrays:
    P = cases.problem(cases.named("tail"), "bfloat16")

    @pytest.mark.rule("ERR-5", "MAT-7")
    @pytest.mark.parametrize("name", ["x", "w", "bias", "row_scale", "out"])
    def test_strided_arrays_are_refused(self, name):
        p = self.P
        given: dict[str, Any] = operands(p, bias="bfloat16", row_scale="float32")
        given["out"] = np.empty((p.case.rows, p.case.n), p.x.dtype)
        wide = np.zeros((*given[name].shape[:-1], 2 * given[name].shape[-1]), given[name].dtype)
        given[name] = wide[..., ::2]
        with asserts.refused(ValueError, [f"`{name}`: strides", "expected a C-contiguous array", "copy it into one"]):
            arrays.grouped_linear(**given)

    @pytest.mark.rule("MAT-7")
    def test_a_strided_cotangent_is_made_contiguous(self):
        p = self.P
        given = operands(p, bias=None, row_scale=None)
        wide = np.repeat(p.dy, 2, axis=1)[:, ::2]
        assert not wide.flags.c_contiguous
        for a, b in zip(
            arrays.grouped_linear_grads(**given, dy=wide), arrays.grouped_linear_grads(**given, dy=p.dy), strict=True
        ):
            if b is not None:
                asserts.bitwise(a, b)

    def test_the_cotangent_is_checked(self):
        p = self.P
        given = operands(p, bias=None, row_scale=None)
        with asserts.refused(ValueError, ["`dy`: bfloat16[50, 39]", "expected bfloat16[50, 40]", "pass the cotangent"]):
            arrays.grouped_linear_grads(**given, dy=p.dy[:, 1:])
        with asserts.refused(ValueError, ["`dy`: float32[50, 40]", "expected bfloat16[50, 40]"]):
            arrays.grouped_linear_grads(**given, dy=p.dy.astype(np.float32))

    @pytest.mark.rule("GRP-7")
    def test_buffers_for_gradients(self):
        p = self.P
        given = operands(p, bias=None, row_scale="float32")
        buffer = np.full(p.x.shape, cases.SENTINEL, p.x.dtype)
        found = arrays.grouped_linear_grads(**given, dy=p.dy, grad_input=buffer)
        assert found.x is buffer
        asserts.filled(buffer[p.case.valid :], cases.SENTINEL, "tail")
        expected: Any = arrays.grouped_linear_grads(**given, dy=p.dy).x
        asserts.bitwise(buffer[: p.case.valid], expected[: p.case.valid])
        with asserts.refused(ValueError, ["`grad_input`: shape (3, 24)", "expected (50, 24)", "allocate"]):
            arrays.grouped_linear_grads(**given, dy=p.dy, grad_input=buffer[:3])
        with asserts.refused(ValueError, ["`wgrad_accum`: shape (50, 24)", "expected (3, 24, 40)", "allocate"]):
            arrays.grouped_linear_grads(**given, dy=p.dy, wgrad_accum=buffer)

    def test_new_weight_gradients_in_a_wider_dtype(self):
        p = self.P
        given = operands(p, bias=None, row_scale=None)
        wide: Any = arrays.grouped_linear_grads(**given, dy=p.dy, wgrad_dtype="float32").w
        narrow: Any = arrays.grouped_linear_grads(**given, dy=p.dy).w
        asserts.bitwise(wide.astype(narrow.dtype), narrow)


# ---------------------------------------------------------------------------------------------------------------------


def digests() -> list[str]:
    """One digest per frontend, of y and all gradients."""
    p = cases.problem(cases.named("tail"), "bfloat16")
    given = operands(p, bias="bfloat16", row_scale="float32")
    found = []
    for frontend in FRONTENDS:
        digest = hashlib.sha256(frontend.forward(given, transposed=False).tobytes())
        for gradient in frontend.gradients(given, p.dy, Needs(), transposed=False):
            assert gradient is not None
            digest.update(gradient.tobytes())
        found.append(digest.hexdigest())
    return found


@pytest.mark.rule("MLM #7495")
@pytest.mark.rule("ERR-4", "ALL-1")
def test_foreign_variables_change_nothing(python):
    foreign = {
        "NVTE_FUSED_ATTN": "0",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1",
        "NVTE_DEBUG": "1",
        "GROUPED_IMPLEMENTATION": "grouped_matmul_any_cpu_plain",
        "GROUPED_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    here = digests()
    assert len(set(here)) == 1, "the frontends differ"
    elsewhere = python("from tests.parity.test_parity import digests; print(*digests())", **foreign)
    assert elsewhere.split() == here


@pytest.mark.rule("ERR-4")
@pytest.mark.parametrize("flags", ["sizes", "poison", "sync", "sizes,poison,sync,ranks"])
@pytest.mark.parametrize("frontend", FRONTENDS, ids=str)
def test_debug_checks_change_no_results(monkeypatch, frontend, flags):
    p = cases.problem(cases.named("tail"), "bfloat16")
    given = operands(p, bias="bfloat16", row_scale="float32")
    expected = ARRAYS.forward(given, transposed=False), ARRAYS.gradients(given, p.dy, Needs(), transposed=False)
    monkeypatch.setenv("GROUPED_DEBUG", flags)
    asserts.bitwise(frontend.forward(given, transposed=False), expected[0])
    for a, b in zip(frontend.gradients(given, p.dy, Needs(), transposed=False), expected[1], strict=True):
        asserts.bitwise(a, b)


def test_the_frontends_cover_the_table_of_bad_calls():
    """Only options that a frontend lacks are left out, and every option is in the table."""
    from tests.messages import GOOD

    for frontend in FRONTENDS:
        assert frontend.absent < set(GOOD)
    assert re.fullmatch(r"\w+", JAX.name)


@pytest.mark.rule("ERR-1", "ERR-5", "GRP-1")
def test_the_functions_of_numpy_name_what_they_cannot_take():
    x, sizes = np.ones((6, 64), np.float32), np.array([2, 4], np.int32)
    q = arrays.quantize(x, "mxfp8", axis=1, group_sizes=sizes)
    foreign = dataclasses.replace(q, values=jnp.asarray(q.values))
    with asserts.refused(TypeError, ["`q.values`", "ArrayImpl", "a NumPy or CuPy array", "convert it"]):
        arrays.dequantize(foreign)
    with asserts.refused(TypeError, ["`group_sizes`", "float64", "an integer dtype"]):
        arrays.dequantize(q, group_sizes=np.array([2.0, 4.0]))
    strided = dataclasses.replace(q, values=np.asfortranarray(q.values))
    with asserts.refused(ValueError, ["`q.values`", "strides", "C-contiguous", "copy it"]):
        arrays.dequantize(strided)
    state = jax_grouped.scaling_state(jax_grouped.FP8Delayed, 2)
    with asserts.refused(TypeError, ["`state.scale`", "ArrayImpl", "a NumPy or CuPy array"]):
        arrays.update_scaling(state)
    w, dy = np.ones((2, 64, 8), np.float32), np.ones((6, 8), np.float32)
    needs: Any = ("x",)
    with asserts.refused(TypeError, ["`needs`", "tuple", "None or Needs", "pass Needs(x=..."]):
        arrays.grouped_linear_grads(x, w, sizes, dy, needs=needs)
    wo, of_y = np.ones((2, 4, 64), np.float32), np.ones((6, 64), np.float32)
    plain, none = (arrays.grouped_mlp_grads(x, w, wo, sizes, of_y, wgrad_accum=accum) for accum in ((None, None), None))
    asserts.bitwise(none.wi, plain.wi)
