"""The experts' MLP of rows sorted by group, as one operation.

Letters: G groups, M rows, K hidden size of the model, F expert width, W columns of the hidden rows: 2F for gated
activations, else F.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

from grouped_core.activations import Activation
from grouped_core.calls import Call
from grouped_core.formats import QTensor
from grouped_core.lora import check_absent
from grouped_core.mlp_spec import Residuals
from grouped_core.recipes import BoundRecipe, Recipe
from grouped_core.sizes import GroupSizes
from jax_grouped._arguments import AnyArray, as_array, as_operand, as_operand_spec
from jax_grouped._mlp_arguments import on_device, prepare
from jax_grouped._mlp_gradients import NAMES, Accumulators, MlpResiduals
from jax_grouped._mlp_operation import all_needs, planned_calls, run_prepared, save
from jax_grouped.quantize import StraightThrough


def grouped_mlp(
    x: Float[AnyArray, "M K"] | QTensor[Array] | StraightThrough,
    wi: Float[AnyArray, "G K W"] | Float[AnyArray, "G W K"] | Sequence[Any] | QTensor[Array] | StraightThrough,
    wo: Float[AnyArray, "G F K"] | Float[AnyArray, "G K F"] | QTensor[Array] | StraightThrough,
    group_sizes: Int[AnyArray, " G"] | GroupSizes,
    *,
    rhs_transposed: bool = False,
    activation: str | Activation = "swiglu",
    probs: Float[AnyArray, " M"] | None = None,
    wi_bias: Float[AnyArray, "G W"] | None = None,
    wo_bias: Float[AnyArray, "G K"] | None = None,
    recipe: Recipe | BoundRecipe | None = None,
    residuals: str | Residuals = "save_fc1",
    wgrad_accum: Accumulators | None = None,
    wgrad_dtype: DTypeLike | None = None,
    out: Float[Array, "M K"] | None = None,
    implementation: str | Sequence[str] | None = None,
    lora: Sequence[Any] | None = None,
    lora_scaling: float = 1.0,
    lora_dropout: float = 0.0,
    lora_key: UInt32[AnyArray, 2] | None = None,
    lora_wgrad_accum: Sequence[Any] | None = None,
) -> Float[Array, "M K"]:
    """y[r] = (p[r] act(x[r] wi[g] + wi_bias[g])) wo[g] + p[r] wo_bias[g], g being the group of row r, p = probs or 1.

    One differentiable operation: the kernel of the first product applies the activation and the probability, and in
    backward the kernel of the product with `wo` applies their gradients. The hidden rows are rounded to the dtype of x
    before the activation reads them. Rows past the groups are never read; they are zero in y and in every gradient.

    Args:
        x: [M, K]; float32, bfloat16 or float16.
        wi: [G, K, W], gate columns first or interleaved as the `Activation` says; [G, W, K] with `rhs_transposed`. Or
            a pair of gate and linear half, [G, K, F] each ([G, F, K] with `rhs_transposed`). A pair gives the same bits
            and a pair of gradients; it is concatenated only to be quantised.
        wo: [G, F, K], with `rhs_transposed` [G, K, F].
        group_sizes: [G], any integer dtype, as in `ragged_dot`.
        activation: a kind with its defaults, or an `Activation`.
        probs: [M], the router's probability of each row, fp32 inside.
        wi_bias: [G, W]. wo_bias: [G, K].
        recipe: formats of both products; default: the operands as given. Bind it to a state of delayed scaling from
            `scaling_state(..., products=2)`; the state and quantised operands are as in `ragged_dot`.
        residuals: what forward saves for backward: "save_all" the rows x [M, K], hidden [M, W] and activated [M, F],
            "save_fc1" x and hidden, "save_input" x; or `Residuals`. All give the same bits.
        wgrad_accum: accumulators of `wi` and `wo`, each as in `ragged_dot`, or None; both arrays or both Refs. For a
            `wi` that is a pair, the first is a pair too. With a Ref, every gradient is computed.
        wgrad_dtype: dtype of the weight gradients; default that of the weights.
        out: [M, K], the buffer of the result, as in `ragged_dot`.
        implementation: names of the kernels allowed, each for its own call; "composed" for the unfused ones.
        lora: adapters of both weights, ((A, B) of wi, (A, B) of wo), either pair or None; the weights are then frozen
            (docs/lora.md). A [G, K, r] and B [G, r, W] of wi, A [G, F, r] and B [G, r, K] of wo, as in `ragged_dot`;
            with `rhs_transposed` the last two axes are swapped.
        lora_scaling, lora_dropout, lora_key: as in `ragged_dot`, for both; the masks of the second differ.
        lora_wgrad_accum: accumulators in the structure of `lora`, each as in `ragged_dot` or None.

    Returns:
        y [M, K], in the dtype of x.

    Raises:
        TypeError: an argument is not an array, or its dtype is not supported.
        ValueError: shapes that do not fit, options that contradict each other.
        NotImplementedError: no kernel supports the operands (`why_unsupported` tells beforehand); `jax.vmap`.
    """
    return run_prepared(as_operand, as_array, locals())  # the arguments, by name


def plan_grouped_mlp(**arguments: Any) -> list[Call]:
    """Every native call of `grouped_mlp` and of all its gradients; arrays may be `jax.ShapeDtypeStruct`."""
    return planned_calls(as_operand_spec, as_operand_spec, arguments)


_SIGNATURE = signature(grouped_mlp)


def grouped_mlp_fwd(*args: Any, **kwargs: Any) -> tuple[Array, MlpResiduals]:
    """y [M, K] of `grouped_mlp`, and what its gradients read. Takes the arguments of `grouped_mlp` but `wgrad_accum`
    and adapters.

    Operands that are quantised without a master have no gradient. Not differentiable itself: `grouped_mlp_bwd_dx` and
    `grouped_mlp_bwd_dw` are its gradients. Raises what `grouped_mlp` raises.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments["wgrad_accum"] is not None:
        raise ValueError(
            f"`{NAMES.accum}` of grouped_mlp_fwd: given, expected None; hand the accumulators to grouped_mlp_bwd_dw."
        )
    if bound.arguments["lora"] is not None:
        raise ValueError(
            "`lora` of grouped_mlp_fwd: given, expected None; differentiate grouped_mlp, whose gradients of A and B "
            "are small."
        )
    of_lora = {name: each for name, each in bound.arguments.items() if name.startswith("lora_")}
    check_absent(*[of_lora[f"lora_{each}"] for each in ("scaling", "dropout", "key", "wgrad_accum")])
    own = {name: each for name, each in bound.arguments.items() if not name.startswith("lora")}
    op, o = prepare(as_operand, as_array, **own, join=False)
    return save(op, *all_needs(op, o), on_device(o))
