"""The experts' MLP of tokens as one operation: it gathers the rows of each expert, and sums the results per token.

Letters: T tokens, k experts per token, G groups (experts), H hidden size of the model, F expert width, W columns of the
hidden rows: 2F for gated activations, else F.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from grouped_core.activations import Activation
from grouped_core.calls import Call
from grouped_core.formats import QTensor
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from jax_grouped._arguments import AnyArray, as_array, as_operand, as_operand_spec
from jax_grouped._mlp_gradients import Accumulators
from jax_grouped._mlp_operation import planned_calls, run_prepared
from jax_grouped.quantize import StraightThrough


def routed_mlp(
    x: Float[AnyArray, "T H"] | QTensor[Array] | StraightThrough,
    experts: Int[AnyArray, "T k"],
    weights: Float[AnyArray, "T k"],
    wi: Float[AnyArray, "G H W"] | Float[AnyArray, "G W H"] | Sequence[Any] | QTensor[Array] | StraightThrough,
    wo: Float[AnyArray, "G F H"] | Float[AnyArray, "G H F"] | QTensor[Array] | StraightThrough,
    *,
    rhs_transposed: bool = False,
    activation: str | Activation = "swiglu",
    wi_bias: Float[AnyArray, "G W"] | None = None,
    wo_bias: Float[AnyArray, "G H"] | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    max_rows: int | None = None,
    wgrad_accum: Accumulators | None = None,
    wgrad_dtype: DTypeLike | None = None,
    out: Float[Array, "T H"] | None = None,
    implementation: str | Sequence[str] | None = None,
    lora: Sequence[Any] | None = None,
    lora_scaling: float = 1.0,
    lora_dropout: float = 0.0,
    lora_key: UInt32[AnyArray, 2] | None = None,
    lora_wgrad_accum: Sequence[Any] | None = None,
) -> Float[Array, "T H"]:
    """y[t] = sum over the slots j of token t of p (act(x[t] wi[g] + wi_bias[g])) wo[g] + p wo_bias[g], where
    g = experts[t, j] and p = weights[t, j].

    It has the bits of `route.permute` with `probs`, `grouped_mlp` and `route.unpermute`, as one differentiable
    operation that keeps the tokens x [T, H] for backward instead of their rows [T k, H], and gathers them again there.

    Args:
        x: [T, H]; float32, bfloat16 or float16. Or quantised along H in a format with scales per row, such as
            "fp8_1x128" or "mxfp8": the gradient of wi then reads the dequantised values, and x has a gradient if it
            is a `straight_through`.
        experts: [T, k], any integer dtype; slots with numbers other than 0 to G - 1 add nothing and have no gradient.
        weights: [T, k], those of the router; fp32 inside.
        wi, wo, rhs_transposed, activation, wi_bias, wo_bias, recipe, wgrad_accum, wgrad_dtype, implementation: as in
            `grouped_mlp`, with K = H.
        residuals: as in `grouped_mlp`; x is kept as tokens, named "grouped_x".
        max_rows: room for rows; slots beyond, the last in the order of experts, then tokens, add nothing and have no
            gradient. None: T k, one for each slot.
        out: [T, H], the buffer of the result; donate it, or XLA copies it first. It has no gradient.
        lora, lora_scaling, lora_dropout, lora_key, lora_wgrad_accum: as in `grouped_mlp`.

    Returns:
        y [T, H], in the dtype of x, of a quantised one its nominal dtype: for each token the sum in the order of its
        slots, in fp32, rounded once.

    Raises:
        TypeError: an argument is not an array, or its dtype is not supported.
        ValueError: shapes that do not fit, options that contradict each other.
        NotImplementedError: no kernel supports the operands (`why_unsupported` tells beforehand); `jax.vmap`.
    """
    return run_prepared(as_operand, as_array, locals())  # the arguments, by name


def plan_routed_mlp(**arguments: Any) -> list[Call]:
    """Every native call of `routed_mlp` and of all its gradients; arrays may be `jax.ShapeDtypeStruct`."""
    return planned_calls(as_operand_spec, as_operand_spec, arguments)
