"""Rows of formats and recipes."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from grouped_core import arrays, formats, recipes
from grouped_core.reference import numpy_dtype
from grouped_core.sizes import GroupSizes, unwrap
from tests import asserts


def test_plain_formats_are_keyed_by_their_element_type():
    for values, row in formats.PLAIN.items():
        assert row.values == values
        assert numpy_dtype(values).name == values
    assert len({row.name for row in formats.PLAIN.values()}) == len(formats.PLAIN)
    assert set(formats.WIDE) <= set(formats.PLAIN)
    assert all(ml_dtypes.finfo(numpy_dtype(name)).bits >= 16 for name in formats.WIDE)


@pytest.mark.parametrize(
    ("recipe", "values"),
    [(recipes.BF16, "bfloat16"), (recipes.FP16, "float16"), (recipes.FP32, "float32")],
    ids=lambda part: getattr(part, "name", part),
)
def test_named_recipes_have_one_format_for_every_operand(recipe, values):
    assert {fmt.values for fmt in recipe.formats()} == {values}
    assert recipe == recipes.plain(values)
    assert hash(recipe) == hash(recipes.plain(values))


def test_mixed_operands_name_both_formats_and_dy_is_wide():
    recipe = recipes.plain("float8_e5m2", "float8_e4m3fn")
    assert recipe.name == "e5m2 x e4m3fn"
    assert [fmt.name for fmt in recipe.dgrad] == ["bf16", "e4m3fn"]
    assert [fmt.name for fmt in recipe.wgrad] == ["e5m2", "bf16"]


def test_replace_makes_a_variant_and_leaves_the_original():
    variant = recipes.BF16.replace(batch_invariant=True)
    assert variant.batch_invariant
    assert not recipes.BF16.batch_invariant
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(variant, "name", "other")  # noqa: B010 (a checker sees that it is frozen)


@pytest.mark.rule("ERR-1")
@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("row", [recipes.MXFP8, formats.FORMATS["mxfp8"]], ids=["recipe", "format"])
def test_replace_names_the_fields_that_there_are(row):
    with asserts.refused(TypeError, ["`epsilon` of", "replace", "no such field", "name", "choose one"]):
        row.replace(epsilon=1)


def test_fast_accumulation_is_for_forward_products_of_scales_of_groups():
    fast = recipes.FP8Current.replace(accumulate="fast")
    assert fast.of_gradients == recipes.FP8Current
    assert recipes.MXFP8.of_gradients is recipes.MXFP8
    with asserts.refused(ValueError, ["`accumulate` of Recipe:", "'never'", "'promote', 'fast'", "choose"]):
        recipes.FP8Current.replace(accumulate="never")
    with asserts.refused(
        ValueError, ["`forward` of recipe MXFP8:", "accumulate='fast'", "one scale per tensor", "change"]
    ):
        recipes.MXFP8.replace(accumulate="fast")


@pytest.mark.rule("ERR-1")
def test_options_of_a_recipe_have_types_and_ranges():
    mxfp8 = recipes.MXFP8.forward
    with asserts.refused(TypeError, ["`forward` of Recipe:", "'bf16'", "two Formats", "FORMATS"]):
        recipes.Recipe(("bf16", "mxfp4"), mxfp8, mxfp8)
    with asserts.refused(TypeError, ["`margin` of Recipe:", "'a'", "an integer", "pass"]):
        recipes.FP8Delayed.replace(margin="a")
    with asserts.refused(TypeError, ["`history` of Recipe:", "True", "an integer", "pass"]):
        recipes.FP8Delayed.replace(history=True)
    with asserts.refused(TypeError, ["`batch_invariant` of Recipe:", "'no'", "True or False", "pass one"]):
        recipes.MXFP8.replace(batch_invariant="no")
    with asserts.refused(ValueError, ["`margin` of Recipe:", "200", "at most 100", "pass"]):
        recipes.FP8Delayed.replace(margin=200)


_WRONG_FIELDS: list[tuple[str, dict[str, Any], type[Exception], list[str]]] = [
    ("mxfp8", {"segment": 16}, ValueError, ["`segment` of format mxfp8: 16", "a multiple of its block 32", "pass one"]),
    ("fp8_tensor", {"segment": 96}, ValueError, ["`segment` of format fp8_tensor: 96", "64, 128", "choose"]),
    ("bf16", {"segment": 32}, ValueError, ["`segment` of format bf16: 32", "0 with values that", "leave it out"]),
    ("mxfp8", {"rule": "foo"}, ValueError, ["`rule` of format mxfp8: 'foo'", "'fp32', 'e8m0', 'nvfp4'", "choose"]),
    ("mxfp8", {"block": -1}, ValueError, ["`block` of format mxfp8: -1", "0, 16, 32, 64, 128", "choose"]),
    ("mxfp8", {"block": 48}, ValueError, ["`block` of format mxfp8: 48", "0, 16, 32, 64, 128", "choose"]),
    ("nvfp4", {"block": 32}, ValueError, ["`block` of format nvfp4: 32", "16 with rule 'nvfp4'", "change one"]),
    ("mxfp8", {"block": 0}, ValueError, ["`block` of format mxfp8: 0", "with rule 'e8m0'", "change one"]),
    ("fp8_tensor", {"values": "float7"}, ValueError, ["`values` of format fp8_tensor: 'float7'", "float8_e4m3fn"]),
    (
        "fp8_tensor",
        {"values": "uint8"},
        ValueError,
        ["`values` of format", "'uint8'", "with rule 'fp32'", "change one"],
    ),
    ("mxfp8", {"scales": "float32"}, ValueError, ["`scales` of format mxfp8", "'float8_e8m0fnu' with", "pass that"]),
    ("fp8_tensor", {"square": True}, ValueError, ["`square` of format fp8_tensor: True", "without blocks", "leave it"]),
    ("nvfp4", {"turned": True}, ValueError, ["`turned` of format nvfp4: True", "codes of four bits", "leave it out"]),
    ("fp8_tensor", {"eps": 1e39}, ValueError, ["`eps` of format fp8_tensor: 1e+39", "finite as float32", "pass one"]),
    ("fp8_tensor", {"eps": "a"}, TypeError, ["`eps` of format fp8_tensor: 'a'", "a number", "pass"]),
    ("mxfp8", {"block": True}, TypeError, ["`block` of format mxfp8: True", "an integer", "pass"]),
    ("mxfp8", {"block": 32.0}, TypeError, ["`block` of format mxfp8: 32.0", "an integer", "pass"]),
    ("fp8_1x128", {"pow2": "no"}, TypeError, ["`pow2` of format fp8_1x128: 'no'", "True or False", "pass"]),
    ("mxfp8", {"rule": ["e8m0"]}, TypeError, ["`rule` of format mxfp8: ['e8m0']", "text", "pass"]),
]


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(("name", "changes", "kind", "words"), _WRONG_FIELDS, ids=lambda part: str(part)[:20])
def test_fields_of_a_format_fit_each_other(name, changes, kind, words):
    with asserts.refused(kind, [*words, "expected"]):
        formats.FORMATS[name].replace(**changes)


@pytest.mark.rule("ERR-1")
def test_rows_are_not_contracted_in_a_format_without_a_segment():
    x, sizes, without = np.ones((6, 128), np.float32), np.array([6], np.int32), formats.FORMATS["mxfp8"]
    without = without.replace(segment=0)
    arrays.quantize(x, without, axis=1, group_sizes=sizes)
    with asserts.refused(ValueError, ["`segment` of the format: 0", "expected the length", "pass one"]):
        arrays.quantize(x, without, axis=0, group_sizes=sizes)


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize("rule", ["fp32", "e8m0"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_blocks_and_segments_of_other_lengths_are_formats(rule, block):
    scales = {"fp32": "float32", "e8m0": "float8_e8m0fnu"}[rule]
    options = {"rule": rule, "scales": scales, "block": block, "segment": 128, "pow2": rule == "fp32"}
    fmt = formats.Format("mine", "float8_e4m3fn", **options)
    x = np.exp2(np.arange(5 * 128) % 7 - 3).astype(np.float32).reshape(5, 128)  # exact with scales of powers of two
    sizes = np.array([2, 3], np.int32)
    asserts.bitwise(arrays.dequantize(arrays.quantize(x, fmt, axis=(1, 0), group_sizes=sizes)), x)
    assert fmt.replace(eps=np.float32(3e38) if rule == "fp32" else 0).eps in (0, float(np.float32(3e38)))


@pytest.mark.rule("ERR-1")
@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (("foo",), ValueError, ["`format` of weight_only: 'foo'", "mxfp4", "choose"]),
        ((["mxfp4"],), TypeError, ["`format` of weight_only: ['mxfp4']", "mxfp4", "as text", "choose"]),
        (("mxfp4", "float7"), ValueError, ["`dtype` of weight_only: 'float7'", "float32, bfloat16", "choose"]),
        (("mxfp4", np.float32), TypeError, ["`dtype` of weight_only: <class", "float32, bfloat16", "as text"]),
    ],
)
def test_weights_alone_have_a_format_and_rows_a_dtype(given, kind, words):
    with asserts.refused(kind, words):
        recipes.weight_only(*given)


@pytest.mark.rule("ERR-1")
def test_a_quantised_array_has_a_format():
    with asserts.refused(TypeError, ["`format` of a QTensor:", "str", "a Format", "FORMATS"]):
        formats.QTensor(None, None, None, "mxfp8", 1, (4, 4), "float32")


@pytest.mark.parametrize("name", [name for name, row in formats.FORMATS.items() if not row.plain])
def test_scales_are_those_of_blocks_or_where_there_are_none_of_groups(name):
    format = formats.FORMATS[name]
    slots = ("codes", "blocks" if format.scales else None, "groups" if format.per_group else None)
    q = formats.QTensor(*slots, format, 1, (4, 4), "float32")
    assert (q.scales, q.group_scales) == (("groups", None) if name.startswith("fp8_tensor") else slots[1:])
    assert q.slots == dataclasses.replace(q, axis=0).slots == slots


@pytest.mark.rule("MAT-6")
def test_a_plain_operand_goes_with_a_quantised_one_but_fp16_rows_with_mxfp4():
    plain, coded = formats.FORMATS["bf16"], formats.FORMATS["mxfp8"]
    for forward in ((plain, coded), (coded, plain)):
        assert recipes.BF16.replace(forward=forward).forward == forward
    for name in ("mxfp4", "four bits"):  # what a format is called decides nothing
        half = (formats.FORMATS["fp16"], formats.FORMATS["mxfp4"].replace(name=name))
        for product in ("forward", "dgrad"):
            with asserts.refused(
                ValueError, [f"`{product}` of recipe FP16:", f"fp16 against {name}", "whose range", "change"]
            ):
                recipes.FP16.replace(**{product: half})


@pytest.mark.rule("MAT-6")
@pytest.mark.parametrize("name", [name for name, row in formats.FORMATS.items() if row.for_weights])
def test_formats_for_weights_are_refused_for_rows(name):
    fmt = formats.FORMATS[name].replace(name="mine")
    for product, pair in (("forward", (fmt, fmt)), ("dgrad", (fmt, fmt)), ("wgrad", (fmt, fmt))):
        with asserts.refused(ValueError, [f"`{product}` of recipe BF16:", "mine", "rows", "change"]):
            recipes.BF16.replace(**{product: pair})


@pytest.mark.rule("ERR-1")
def test_random_rounding_is_for_gradients():
    fmt = formats.FORMATS["nvfp4"]
    words = ["nvfp4 with random rounding of x", "random rounding of dy only", "change"]
    with asserts.refused(ValueError, ["`forward` of recipe NVFP4:", *words]):
        recipes.NVFP4.replace(forward=(fmt.replace(stochastic=True), fmt))
    with asserts.refused(ValueError, ["`wgrad` of recipe NVFP4:", *words]):
        recipes.NVFP4.replace(wgrad=(fmt.replace(stochastic=True), fmt))


def test_a_recipe_without_a_name_has_that_of_its_formats():
    bf16, mxfp8, plain = formats.FORMATS["bf16"], formats.FORMATS["mxfp8"], recipes.BF16
    found = recipes.Recipe(forward=(bf16, mxfp8), dgrad=plain.dgrad, wgrad=plain.wgrad)
    assert found.name == found.replace(saved="input").name == "bf16 x mxfp8"
    assert found.replace(forward=plain.forward).name == "bf16 x bf16"
    assert found.replace(name="own", forward=plain.forward).name == "own"
    assert recipes.MXFP8.replace(forward=plain.forward).name == "MXFP8"


@pytest.mark.rule("ERR-1")
def test_an_unknown_fp32_mode_is_refused():
    with asserts.refused(ValueError, ["`fp32` of Recipe:", "'fast'", "'tf32', 'tf32x3', 'ieee'", "choose"]):
        recipes.FP32.replace(fp32="fast")


def test_group_sizes_carry_a_hint():
    sizes = np.array([3, 4])
    assert unwrap(sizes) == (sizes, 0) or unwrap(sizes)[0] is sizes
    value, hint = unwrap(GroupSizes(sizes, representative=16))
    assert value is sizes
    assert hint == 16
    assert unwrap(GroupSizes(sizes))[1] == 0
    with asserts.refused(ValueError, ["`representative` of GroupSizes:", "0", "at least 1", "pass the usual number"]):
        GroupSizes(sizes, representative=0)


@pytest.mark.parametrize("package", ["grouped_core", "jax_grouped", "torch_bridge"])
def test_every_package_offers_every_recipe(package: str) -> None:
    assert set(recipes.__all__) == {*recipes.RECIPES, "Recipe", "weight_only"}
    module = importlib.import_module(package)
    for name, row in recipes.RECIPES.items():
        assert getattr(module, name) is row
        assert row.name == name
