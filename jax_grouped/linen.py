"""Flax Linen layers: they hold and initialise parameters; the arithmetic is in `jax_grouped.ops` and `.moe`.

Their fields have the names that the constructors of `jax_grouped.nnx` have. Collections besides `params`:

- `_overwrite_with_gradient`: the states of delayed scaling, whose cotangents are their next values; Flax's `TrainState`
  replaces them, and `jax_grouped.update_scaling` advances each once per step.
- `selection_bias`: the bias with which a router chooses; `jax_grouped.route.update_bias` moves it.
- `lora`: the adapters of layers with `lora_rank`; differentiate with respect to it alone. The weights in `params` have
  no gradient then. `merge` adds the adapters to them.

Random streams: `params`; `rounding` for recipes that round stochastically; `jitter`; `dropout` for adapters.

Letters: G groups (experts), M rows sorted by group, K in, N out, H hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from flax.linen.dtypes import promote_dtype
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import Array, Bool, Float, Int

from grouped_core import lora
from grouped_core.activations import Activation, resolve
from grouped_core.formats import check_flags
from grouped_core.lora import LayerOptions
from grouped_core.mlp_spec import Residuals
from grouped_core.ranks import check_rank
from grouped_core.recipes import BoundRecipe, Recipe
from jax_grouped import _layer_lora, _layer_options, route
from jax_grouped._arguments import as_array
from jax_grouped._layer_options import (
    ADAPTERS,
    Initializer,
    Metadata,
    default_bias_init,
    default_kernel_init,
    default_router_init,
)
from jax_grouped.mlp import grouped_mlp
from jax_grouped.moe import SharedExpert, moe
from jax_grouped.ops import ragged_dot
from jax_grouped.parallel import MeshAxes
from jax_grouped.quantize import scaling_state
from jax_grouped.route import MoEAux

_NO_METADATA: Metadata = FrozenDict()  # hashable, as the defaults of fields have to be
SELECTION_BIAS = "selection_bias"
"""The collection, and the variable in it."""


def _param(
    layer: nn.Module, name: str, init: Initializer, shape: Sequence[int], dtype: Any, metadata: Metadata
) -> Array:
    """A parameter, with the logical names of its axes where `metadata` gives them as `out_sharding`."""
    unknown = set(metadata) - {"out_sharding"}
    if unknown:
        raise ValueError(
            f"metadata of {type(layer).__name__}: {sorted(unknown)}, expected out_sharding alone, the logical names of "
            "the axes; Linen keeps nothing else with a parameter."
        )
    names = metadata.get("out_sharding")
    make: Any = nn.with_logical_partitioning(init, tuple(names)) if names else init
    return layer.param(name, make, tuple(shape), dtype)


def _words(layer: nn.Module, stream: str) -> jax.Array:
    return jax.random.bits(layer.make_rng(stream), (2,), "uint32")


def _bound(layer: nn.Module, recipe: Recipe | None, num_groups: int, products: int) -> Recipe | BoundRecipe | None:
    """The recipe for one call, with the layer's state of delayed scaling and a new key."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise TypeError(
            f"`recipe` of {type(layer).__name__}: {type(recipe).__name__}, expected a Recipe or None; the layer binds "
            "it to its own state and keys, so pass the recipe itself."
        )
    if recipe is None or not recipe.takes_arrays:
        return recipe
    state = None
    if recipe.delayed:
        new = layer.variable(
            OVERWRITE_WITH_GRADIENT, "scaling", lambda: scaling_state(recipe, num_groups, products=products)
        )
        state = new.value
    return recipe.bind(state, _words(layer, "rounding") if recipe.stochastic else None)


LORA = "lora"
"""The collection of adapters."""


def _of_lora(layer: Any) -> LayerOptions:
    name = type(layer).__name__.strip("_")
    return lora.layer_options(name, layer.lora_rank, layer.lora_alpha, layer.lora_dropout)


def _factors(layer: Any, names: Sequence[str], weights: Sequence[Array]) -> list[Array]:
    """A and B of each weight, `{name}_a` and `{name}_b` of the collection `lora`; [] without adapters."""
    options, found = _of_lora(layer), []
    for name, weight in zip(names, weights, strict=True):
        if not options.rank:
            continue
        groups, depth, columns = weight.shape
        of_a, of_b = _layer_lora.shapes((groups, depth, columns), options.rank)

        def drawn(shape: Any = of_a) -> Array:
            return _layer_lora.default_a_init(layer.make_rng("params"), shape, layer.param_dtype)

        found.append(layer.variable(LORA, f"{name}_a", drawn).value)
        found.append(layer.variable(LORA, f"{name}_b", jnp.zeros, of_b, layer.param_dtype).value)
    return found


def _lora_arguments(layer: Any, factors: Sequence[Array]) -> dict[str, Any]:
    """The keywords of the operation; `factors`: A, B, or those of both weights."""
    options = _of_lora(layer)
    options = options._replace(dropout=0.0) if layer.deterministic else options
    adapter = tuple(factors) if len(factors) < 4 else (tuple(factors[:2]), tuple(factors[2:]))
    return _layer_lora.arguments(options, adapter, lambda: _words(layer, "dropout"))


def merge(layer: nn.Module, variables: Mapping[str, Any]) -> dict[str, Any]:
    """`variables` with the adapters of the collection `lora` added to the weights, and without them.

    What other modules keep in that collection stays in it.

    Args:
        layer: a layer with adapters. variables: those of `layer`, or of a model that contains it and whose adapters all
            have its options. `nn.scan` may have stacked layers, if it stacked adapters and weights along the same axis,
            0 or 1. Weights over a mesh are merged where they are; under `jit` on an Auto mesh they are taken to be
            split by experts as the `mesh_axes` of `layer` say.

    Raises:
        TypeError: `layer` is none of these layers, `variables` no mapping, or a weight is quantised. ValueError: there
            are no adapters or no weights, or the adapters are not those of `layer` or do not fit the weights.
    """
    if not isinstance(layer, GroupedLinear | GroupedMLP | MoE):
        raise TypeError(
            f"`layer` of merge: {type(layer).__name__}, expected a GroupedLinear, GroupedMLP or MoE; pass the layer "
            "that has the adapters, and the variables of the model around it."
        )
    if not isinstance(variables, Mapping):
        raise TypeError(
            f"`variables` of merge: {type(variables).__name__}, expected collections by name; pass those of `init`, or "
            "of training."
        )
    if LORA not in variables:
        raise ValueError("`variables` of merge: no collection `lora`, expected one; make the layers with `lora_rank`.")
    if "params" not in variables:
        raise ValueError("`variables` of merge: no collection `params`, expected one; pass the weights too.")
    rank, scaling, _ = _of_lora(layer)
    if not rank:
        raise ValueError(
            "`layer` of merge: no `lora_rank`, expected that of the adapters in `variables`; pass the layer with the "
            "options that they were trained with."
        )
    axes = getattr(layer, "mesh_axes", None)

    def one(path: str, name: str, params: Mapping[str, Any], a: Any, b: Any) -> tuple[str, Any]:
        weight = "kernel" if name == "lora" else name.removesuffix("_lora")
        if weight not in params:
            raise ValueError(
                f"`{path}{name}_a` of merge: no weight `{weight}` beside it in `params`, expected one; pass the "
                "weights that the adapters were trained with."
            )
        if a.shape[-1] != rank:
            raise ValueError(
                f"`{path}{name}_a` of merge: rank {a.shape[-1]}, expected {rank}, the `lora_rank` of `layer`, which "
                "scales it; merge layers of other options with a layer of these. Layers may be stacked along axis 0 or "
                "1 alone."
            )
        value = params[weight]
        boxed = isinstance(value, nn.meta.AxisMetadata)
        new = _layer_lora.merged(f"`{path}{weight}` of merge", axes, nn.meta.unbox(value), a, b, scaling)
        return weight, nn.meta.replace_boxed(value, new) if boxed else new

    def merged(path: str, params: Any, adapters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], int]:
        """The weights with the adapters added, what is left of the collection, and how many adapters there were."""
        found, left, count = dict(params), {}, 0
        for name, each in adapters.items():
            base = name[:-2]
            if isinstance(each, Mapping):
                below = params.get(name, {})
                new, kept, more = merged(f"{path}{name}.", below if isinstance(below, Mapping) else {}, each)
                count += more
                left |= {name: kept} if kept else {}
                found |= {name: new} if more else {}
            elif name[-2:] not in ("_a", "_b") or not (base == "lora" or base.endswith("_lora")):
                left[name] = each
            elif (other := base + {"_a": "_b", "_b": "_a"}[name[-2:]]) not in adapters:
                raise ValueError(
                    f"`{path}{name}` of merge: no `{other}` beside it, expected both factors; pass the whole adapter."
                )
            elif name.endswith("_a"):
                weight, found[weight] = one(path, base, params, each, adapters[other])
                count += 1
        return found, left, count

    params, left, count = merged("", variables["params"], variables[LORA])
    if not count:
        raise ValueError(
            "`variables` of merge: no adapter in the collection `lora`, expected that of a GroupedLinear, GroupedMLP "
            "or MoE; pass the variables that were trained."
        )
    rest = {name: each for name, each in variables.items() if name != LORA}
    return rest | {"params": params} | ({LORA: left} if left else {})


class GroupedLinear(nn.Module):
    """y[r] = x[r] kernel[g] + bias[g], g being the group of row r.

    Attributes:
        num_groups: G. in_features: K. out_features: N.
        use_bias: whether there is a `bias` [G, N] beside `kernel` [G, K, N].
        dtype: that of the computation; None: what input and parameters promote to. param_dtype: that of parameters.
        kernel_init, bias_init: initialisers; the default of the kernel does not count G in its fan-in.
        recipe: formats of the products, any `Recipe`; None uses the operands without quantising them.
        lora_rank: r; the layer then has an adapter (docs/lora.md) in the collection `lora`, `lora_a` [G, K, r] and
            `lora_b` [G, r, N]; kernel and bias have no gradient. None: no adapter.
        lora_alpha: the adapter is scaled by lora_alpha / r; None: r. lora_dropout: the probability with which elements
            of x are dropped on their way to `lora_a`. deterministic: without dropout.
        kernel_metadata, bias_metadata: {"out_sharding": logical names of the axes}, e.g. ("expert", "embed", "mlp").
    """

    num_groups: int
    in_features: int
    out_features: int
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    recipe: Recipe | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    deterministic: bool = False
    kernel_metadata: Metadata = _NO_METADATA
    bias_metadata: Metadata = _NO_METADATA

    operation = staticmethod(ragged_dot)

    @nn.compact
    def __call__(self, x: Float[Array, "M K"], group_sizes: Any) -> Float[Array, "M N"]:
        """Applies the group's kernel to each row.

        Args:
            x: [M, K]. group_sizes: integers [G]; rows past their sum give zero.
        """
        groups, columns = self.num_groups, self.out_features
        sizes = {"num_groups": groups, "in_features": self.in_features, "out_features": columns}
        _layer_options.check_positive("GroupedLinear", **sizes)
        _layer_options.check_dtypes("GroupedLinear", self.dtype, self.param_dtype)
        check_flags("GroupedLinear", use_bias=self.use_bias, deterministic=self.deterministic)
        x = as_array("x", x, "[M, K]")
        check_rank("linear", "x", "x", x.shape)
        shape, of = (groups, self.in_features, columns), self.param_dtype
        _layer_options.check_width("GroupedLinear", x, "in_features", "kernel", shape)
        kernel = _param(self, "kernel", self.kernel_init, shape, of, self.kernel_metadata)
        bias = None
        if self.use_bias:
            bias = _param(self, "bias", self.bias_init, (groups, columns), of, self.bias_metadata)
        factors = _factors(self, ("lora",), (kernel,))
        kernel, bias = _layer_lora.frozen(_of_lora(self), kernel, bias)
        x, kernel, bias, *factors = promote_dtype(x, kernel, bias, *factors, dtype=self.dtype)
        how = _lora_arguments(self, factors)
        return ragged_dot(x, kernel, group_sizes, bias=bias, recipe=_bound(self, self.recipe, groups, 1), **how)


class GroupedMLP(nn.Module):
    """y[r] = (p[r] act(x[r] wi[g] + wi_bias[g])) wo[g] + p[r] wo_bias[g], g being the group of row r.

    Attributes:
        num_groups: G. hidden: H. mlp_dim: F.
        activation: a kind, or an `Activation`. Gated kinds make `wi` [G, H, 2F], gate columns first; others [G, H, F].
        use_bias: whether there are `wi_bias` and `wo_bias` [G, H].
        dtype: that of the computation; None: what input and parameters promote to. param_dtype: that of parameters.
        kernel_init, bias_init: initialisers; the default of the kernels does not count G in their fan-in.
        recipe: formats of the products, any `Recipe`; None uses the operands without quantising them.
        residuals: what is saved for backward, as in `jax_grouped.grouped_mlp`.
        lora_rank, lora_alpha, lora_dropout, deterministic: as in `GroupedLinear`, for both weights: `wi_lora_a`,
            `wi_lora_b`, `wo_lora_a`, `wo_lora_b`.
        wi_metadata, wo_metadata, bias_metadata: {"out_sharding": logical names of the axes}.
    """

    num_groups: int
    hidden: int
    mlp_dim: int
    activation: str | Activation = "swiglu"
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    recipe: Recipe | None = None
    residuals: str | Residuals = "save_fc1"
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    deterministic: bool = False
    wi_metadata: Metadata = _NO_METADATA
    wo_metadata: Metadata = _NO_METADATA
    bias_metadata: Metadata = _NO_METADATA

    operation = staticmethod(grouped_mlp)

    @nn.compact
    def __call__(
        self, x: Float[Array, "M H"], group_sizes: Any, probs: Float[Array, " M"] | None = None
    ) -> Float[Array, "M H"]:
        """Applies the group's MLP to each row, weighted by `probs`.

        Args:
            x: [M, H]. group_sizes: integers [G]. probs: [M]; None: 1.
        """
        x, wi, wo, wi_bias, wo_bias, *factors = _experts(
            self, self.num_groups, self.mlp_dim, as_array("x", x, "[M, H]")
        )
        return grouped_mlp(
            x,
            wi,
            wo,
            group_sizes,
            activation=self.activation,
            probs=probs,
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            recipe=_bound(self, self.recipe, self.num_groups, 2),
            residuals=self.residuals,
            **_lora_arguments(self, factors),
        )


def _experts(layer: Any, num_groups: int, mlp_dim: int, x: Array) -> tuple[Any, ...]:
    """x, wi, wo, wi_bias, wo_bias, and A and B of both adapters, in the dtype of the computation; makes them."""
    hidden = layer.hidden
    sizes = {"num_groups": num_groups, "hidden": hidden, "mlp_dim": mlp_dim}
    name = type(layer).__name__.strip("_")
    _layer_options.check_positive(name, **sizes)
    _layer_options.check_dtypes(name, layer.dtype, layer.param_dtype)
    check_flags(name, use_bias=layer.use_bias, deterministic=layer.deterministic)
    wide, of = resolve(layer.activation).fc1_width(mlp_dim), layer.param_dtype
    _layer_options.check_width(name, x, "hidden", "wi", (num_groups, hidden, wide))
    wi = _param(layer, "wi", layer.kernel_init, (num_groups, hidden, wide), of, layer.wi_metadata)
    wo = _param(layer, "wo", layer.kernel_init, (num_groups, mlp_dim, hidden), of, layer.wo_metadata)
    biases: list[Any] = [None, None]
    if layer.use_bias:
        widths = {"wi_bias": wide, "wo_bias": hidden}
        biases = [
            _param(layer, name, layer.bias_init, (num_groups, width), of, layer.bias_metadata)
            for name, width in widths.items()
        ]
    factors = _factors(layer, ADAPTERS, (wi, wo))
    frozen = _layer_lora.frozen(_of_lora(layer), wi, wo, *biases)
    return (*promote_dtype(x, *frozen, *factors, dtype=layer.dtype),)


class _Router(nn.Module):
    """Holds `kernel` [H, E], the router's only parameter."""

    hidden: int
    num_experts: int
    param_dtype: Any
    init_fn: Initializer
    metadata: Metadata

    @nn.compact
    def __call__(self) -> Array:
        shape = (self.hidden, self.num_experts)
        return _param(self, "kernel", self.init_fn, shape, self.param_dtype, self.metadata)


class _Shared(nn.Module):
    """The expert that every token goes to: `wi` and `wo` of one group, and perhaps `gate` [H, 1]."""

    hidden: int
    mlp_dim: int
    gate: bool
    gate_init: Initializer
    gate_metadata: Metadata
    activation: str | Activation
    dtype: Any
    param_dtype: Any
    kernel_init: Initializer
    recipe: Recipe | None
    lora_rank: int | None
    lora_alpha: float | None
    lora_dropout: float
    deterministic: bool
    wi_metadata: Metadata
    wo_metadata: Metadata
    use_bias: bool = False

    @nn.compact
    def weights(self, x: Float[Array, "T H"]) -> SharedExpert:
        """Its weights in the dtype of the computation, for `jax_grouped.moe`.

        NOTE: not `__call__`, whose results `capture_intermediates=True` returns: a recipe is no result of `jax.jit`.
        """
        _, wi, wo, _, _, *factors = _experts(self, 1, self.mlp_dim, x)
        gate = None
        if self.gate:
            gate = _param(self, "gate", self.gate_init, (self.hidden, 1), self.param_dtype, self.gate_metadata)
        adapters = (tuple(factors[:2]), tuple(factors[2:])) if factors else None
        return SharedExpert(wi, wo, gate, _bound(self, self.recipe, 1, 2), adapters)


class MoE(nn.Module):
    """A mixture of experts: a router chooses k of E experts for each token; their weighted results are summed.

    Its parameters are `router.kernel` [H, E] and those of `GroupedMLP`; with a shared expert also `shared.wi` and
    `shared.wo`, of one group, and with `shared_gate` also `shared.gate` [H, 1].

    Attributes:
        hidden: H. mlp_dim: F. num_experts: E, at most 1024. num_experts_per_tok: k, at most 32.
        score, after_topk, normalize, scale, num_groups, topk_groups, group_topk, jitter, sinkhorn, capacity_factor,
            drop, aux_coeff, z_coeff, axis_name: options of the router, see `jax_grouped.route.topk_router`.
        selection_bias: whether there is a bias [E] in the collection `selection_bias`, with which the router chooses.
        shared_dim: F of an expert that every token goes to; None: there is none. shared_gate: whether its result is
            weighted by the sigmoid of a gate.
        deterministic: without jitter, and without dropout of the adapters.
        mesh_axes, transport, budget_factor, once_per_rank, send, fsdp: as in `jax_grouped.parallel.moe`, where the
            layer is spread over the axes of a mesh, a `parallel.MeshAxes`; None: it is not.
        router_init: initialiser of the kernels of router and gate. router_metadata: as in `GroupedMLP`.
        The others: as in `GroupedMLP`; those of the experts serve the shared one too, which has no biases.
    """

    hidden: int
    mlp_dim: int
    num_experts: int
    num_experts_per_tok: int
    score: str = "softmax"
    after_topk: bool = False
    normalize: bool | None = None
    scale: float = 1.0
    num_groups: int | None = None
    topk_groups: int | None = None
    group_topk: int | None = None
    jitter: float = 0.0
    sinkhorn: int = 0
    capacity_factor: float | None = None
    drop: str = "probs"
    aux_coeff: float = 0.0
    z_coeff: float = 0.0
    axis_name: route.AxisName = None
    selection_bias: bool = False
    shared_dim: int | None = None
    shared_gate: bool = False
    deterministic: bool = False
    mesh_axes: MeshAxes | None = None
    transport: str = "all_to_all"
    budget_factor: float | None = None
    once_per_rank: bool = False
    send: str | None = None
    fsdp: bool = False
    router_init: Initializer = default_router_init
    router_metadata: Metadata = _NO_METADATA
    activation: str | Activation = "swiglu"
    use_bias: bool = False
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Initializer = default_kernel_init
    bias_init: Initializer = default_bias_init
    recipe: Recipe | None = None
    residuals: str | Residuals = "save_fc1"
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    wi_metadata: Metadata = _NO_METADATA
    wo_metadata: Metadata = _NO_METADATA
    bias_metadata: Metadata = _NO_METADATA

    operation = staticmethod(moe)

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "... H"],
        *,
        mask: Bool[Array, ...] | None = None,
        experts: Int[Array, "... k"] | None = None,
        sequence_sizes: Int[Array, " S"] | None = None,
    ) -> tuple[Float[Array, "... H"], MoEAux]:
        """Applies its experts to each token of x. Returns y in the shape of x, and `MoEAux`.

        Args:
            x: [..., H].
            mask: [...], False for padding, which goes to no expert and must be finite. experts: [..., k], chosen
                elsewhere.
            sequence_sizes: [S], as in `jax_grouped.route.topk_router`, of the tokens in the order of memory.
        """
        check_flags("MoE", selection_bias=self.selection_bias)
        _layer_options.check_moe(self)
        tokens = _layer_options.as_tokens(x)
        rows, wi, wo, wi_bias, wo_bias, *factors = _experts(self, self.num_experts, self.mlp_dim, tokens)
        kernel = (self.param_dtype, self.router_init, self.router_metadata)
        router = _Router(self.hidden, self.num_experts, *kernel, name="router")()
        routing = _layer_options.router_options(self) | _layer_options.of_tokens(x, mask, experts)
        if routing["jitter"]:
            routing["key"] = _words(self, "jitter")
        if self.selection_bias:
            zeros = self.variable(SELECTION_BIAS, SELECTION_BIAS, jnp.zeros, (self.num_experts,), jnp.float32)
            routing["bias"] = zeros.value
        y, aux = _layer_options.function_of(self)(
            rows,
            router,
            wi,
            wo,
            self.num_experts_per_tok,
            shared=self._shared_expert(rows),
            activation=self.activation,
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            recipe=_bound(self, self.recipe, self.num_experts, 2),
            residuals=self.residuals,
            sequence_sizes=sequence_sizes,
            **_lora_arguments(self, factors),
            **routing,
        )
        return _layer_options.in_shape_of(x, y), aux

    def _shared_expert(self, x: Array) -> SharedExpert | None:
        if self.shared_dim is None:
            return None
        same = ("activation", "dtype", "param_dtype", "kernel_init", "recipe", *_layer_options.LORA, "deterministic")
        options: dict[str, Any] = {name: getattr(self, name) for name in same}
        options |= {name: _layer_options.along_one(getattr(self, name), 0) for name in ("wi_metadata", "wo_metadata")}
        gate = (self.shared_gate, self.router_init, _layer_options.along_one(self.router_metadata, 1))
        return _Shared(self.hidden, self.shared_dim, *gate, **options, name="shared").weights(x)
