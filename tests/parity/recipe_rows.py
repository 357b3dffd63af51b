"""Recipes that tests run in both frameworks: the public ones, and mixtures of operand formats."""

from __future__ import annotations

from grouped_core import recipes
from grouped_core.formats import FORMATS
from tests.quantized import QUANTIZING

RECIPES = QUANTIZING
MIXED = (
    recipes.FP8Block.replace(name="plain wgrad", wgrad=recipes.BF16.wgrad),
    recipes.MXFP8.replace(name="weights alone", forward=(FORMATS["bf16"], FORMATS["mxfp8"]), dgrad=recipes.BF16.dgrad,
                          wgrad=recipes.BF16.wgrad),
    recipes.MXFP8.replace(name="rows alone", forward=(FORMATS["mxfp8"], FORMATS["bf16"]), dgrad=recipes.BF16.dgrad),
    recipes.FP8Current.replace(name="fast", accumulate="fast"),
    recipes.MXFP8.replace(name="kept as it came", saved="input"),
    recipes.FP8Block.replace(name="weights as they came", saved_weights="input"),
    recipes.FP8Current.replace(name="one form of weights", saved_weights="forward"),
    recipes.FP8Delayed.replace(name="delayed, all as it came", saved="input", saved_weights="input"),
    recipes.NVFP4.replace(name="nvfp4, plain wgrad", wgrad=recipes.BF16.wgrad),
    recipes.NVFP4.replace(name="nvfp4, plain dgrad", dgrad=recipes.BF16.dgrad),
)  # fmt: skip
PARTLY_DELAYED = (
    recipes.FP8Delayed.replace(name="delayed, plain wgrad", wgrad=recipes.BF16.wgrad),
    recipes.FP8Delayed.replace(name="delayed, plain dgrad", dgrad=recipes.BF16.dgrad),
    recipes.FP8Delayed.replace(name="delayed, plain dgrad, kept as it came", dgrad=recipes.BF16.dgrad, saved="input"),
    recipes.FP8Delayed.replace(name="delayed gradients", forward=recipes.BF16.forward),
    recipes.FP8Delayed.replace(name="delayed gradients, kept as it came", forward=recipes.BF16.forward, saved="input"),
)  # fmt: skip
MIXED = (*MIXED, *PARTLY_DELAYED)
