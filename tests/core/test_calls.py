"""What the linear operation refuses, word by word, and what its native calls look like."""

from __future__ import annotations

import pytest

from grouped_core import calls, linear_spec
from grouped_core.calls import ArraySpec
from grouped_core.linear_spec import Linear, Names
from grouped_core.recipes import BF16, FP32
from tests import asserts
from tests.messages import BAD, GOOD, Bad

FRONTENDS = (
    Names("lhs", "rhs"),
    Names("x", "weight"),
    Names("x", "w", transposed="transposed", result="result_dtype"),
)


def check(names: Names, arguments: dict) -> ArraySpec:
    """The core's check on the arguments of a row of the table."""

    def spec(name: str) -> ArraySpec | None:
        given = arguments[name]
        return None if given is None else ArraySpec(given[1], given[0])

    op = Linear(
        names,
        transposed=arguments["transposed"],
        recipe=arguments["recipe"],
        scale_bias=arguments["scale_bias"],
        result_dtype=arguments["result_dtype"],
        implementation=linear_spec.implementation_names(arguments["implementation"]),
    )
    specs = (spec(name) for name in ("x", "w", "group_sizes", "bias", "row_scale", "out"))
    return linear_spec.check_linear(op, *specs)


@pytest.mark.rule("ERR-1", "GRP-1", "MAT-6", "MAT-7", "MAT-9", "BUF-2")
@pytest.mark.parametrize("names", FRONTENDS, ids=lambda names: f"{names.x}_{names.w}")
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_messages_have_four_parts_in_order(bad: Bad, names: Names):
    with asserts.refused(bad.kind, bad.fragments(names)) as message:
        check(names, bad.arguments())
    places = [message[0].index(part) for part in bad.fragments(names)]
    assert places == sorted(places), f"thing, came, expected, remedy are in another order:\n{message[0]}"
    assert message[0].endswith("."), message[0]


def test_bad_calls_have_names_of_their_own():
    assert len({bad.name for bad in BAD}) == len(BAD)


def test_the_good_call_passes():
    assert check(FRONTENDS[0], GOOD) == ArraySpec((6, 4), "float32")


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize(
    ("x", "w", "result"),
    [("bfloat16", "bfloat16", "bfloat16"), ("float8_e4m3fn", "float8_e5m2", "bfloat16")],
)
def test_dtype_of_the_result(x, w, result):
    good = {**GOOD, "x": (x, (6, 8)), "w": (w, (3, 8, 4))}
    assert check(FRONTENDS[0], good).dtype == result
    assert check(FRONTENDS[0], {**good, "result_dtype": "float32"}).dtype == "float32"


@pytest.mark.rule("GRP-10", "GRP-11")
def test_no_rows_and_the_largest_number_of_groups_are_legal():
    assert check(FRONTENDS[0], {**GOOD, "x": ("float32", (0, 8))}).shape == (0, 4)
    many = {**GOOD, "w": ("float32", (calls.MAX_GROUPS, 8, 4)), "group_sizes": ("int32", (calls.MAX_GROUPS,))}
    assert check(FRONTENDS[0], many).shape == (6, 4)


def test_too_many_rows_are_refused():
    rows = calls.MAX_ROWS + 1
    with asserts.refused(ValueError, ["`lhs`:", f"shape ({rows}, 8)", f"at most {calls.MAX_ROWS} rows", "split"]):
        check(FRONTENDS[0], {**GOOD, "x": ("float32", (rows, 8))})


def test_wgrad_dtype_is_checked():
    op = Linear(FRONTENDS[0], wgrad_dtype="int8")
    with asserts.refused(TypeError, ["`wgrad_dtype`:", "int8", "expected None or one of float32", "choose one"]):
        linear_spec.check_linear(
            op, ArraySpec((6, 8), "float32"), ArraySpec((3, 8, 4), "float32"), ArraySpec((3,), "int32")
        )


@pytest.mark.rule("MAT-11")
def test_accumulators_have_their_weights_shape_and_a_wide_dtype():
    weight = ArraySpec((3, 8, 4), "bfloat16")
    linear_spec.check_accumulator("main_grad", ArraySpec((3, 8, 4), "float32"), weight)
    with asserts.refused(ValueError, ["`main_grad`:", "(3, 4, 8)", "(3, 8, 4) = shape of the weight", "allocate"]):
        linear_spec.check_accumulator("main_grad", ArraySpec((3, 4, 8), "float32"), weight)
    with asserts.refused(TypeError, ["`main_grad`:", "float8_e5m2", "expected one of float32", "cast it"]):
        linear_spec.check_accumulator("main_grad", ArraySpec((3, 8, 4), "float8_e5m2"), weight)


class TestImplementationNames:
    def test_forms(self):
        assert linear_spec.implementation_names(None) == ""
        assert linear_spec.implementation_names("a") == "a"
        assert linear_spec.implementation_names(("a", "b")) == "a,b"

    @pytest.mark.parametrize("bad", ["", [], [""], ["a", 3]], ids=repr)
    def test_refused(self, bad):
        with asserts.refused(ValueError, ["`implementation`:", repr(bad), "expected None", "`explain`"]):
            linear_spec.implementation_names(bad)


class TestGroupedMatmul:
    X, W, SIZES = ArraySpec((6, 8), "bfloat16"), ArraySpec((3, 8, 4), "bfloat16"), ArraySpec((3,), "int32")

    def call(self, lhs=X, rhs=W, axes=(1, 1), **options):
        return calls.grouped_matmul(lhs, rhs, axes, self.SIZES, "bfloat16", recipe=BF16, **options)

    def test_shapes_follow_the_contracted_axes(self):
        assert self.call().outputs == (ArraySpec((6, 4), "bfloat16"),)
        dy = ArraySpec((6, 4), "bfloat16")
        assert self.call(dy, axes=(1, 2)).outputs == (ArraySpec((6, 8), "bfloat16"),)
        assert self.call(self.X, dy, (0, 0)).outputs == (ArraySpec((3, 8, 4), "bfloat16"),)

    def test_one_entry_per_slot_and_params_in_order(self):
        call = self.call(bias=ArraySpec((3, 4), "float32"))
        assert len(call.inputs) == len(calls.SLOTS["grouped_matmul"])
        assert call.inputs[call.slot("bias")] == ArraySpec((3, 4), "float32")
        assert call.inputs[call.slot("row_scale")] is None
        assert dict(call.params)["rhs_axis"] == 1

    def test_into_is_aliased_and_tables_have_one_address_per_group(self):
        into = ArraySpec((6, 4), "bfloat16")
        assert self.call(into=into).aliases == ((calls.SLOTS["grouped_matmul"].index("into"), 0),)
        assert self.call().aliases == ()
        call = self.call(tables=(True, False, False))
        assert call.inputs[call.slot("rhs_table")] == ArraySpec((3,), "int64")
        assert call.inputs[call.slot("rhs")] == self.W

    def test_recipe_options_become_params(self):
        recipe = FP32.replace(fp32="ieee", batch_invariant=True)
        x, w = (ArraySpec(spec.shape, "float32") for spec in (self.X, self.W))
        call = calls.grouped_matmul(x, w, (1, 1), self.SIZES, "float32", recipe=recipe, rows_hint=5)
        params = dict(call.params)
        assert (params["fp32_mode"], params["batch_invariant"], params["rows_hint"]) == ("ieee", 1, 5)

    def test_calls_are_hashable_and_equal_by_value(self):
        assert self.call() == self.call()
        assert len({self.call(), self.call(), self.call(axes=(1, 2))}) == 2


def test_specs_print_as_dtype_and_shape():
    assert str(ArraySpec((3, 4), "bfloat16")) == "bfloat16[3, 4]"
