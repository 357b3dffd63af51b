"""Flax NNX layers: they hold and initialise parameters; the arithmetic is in `jax_grouped.ops` and `.moe`.

With delayed scaling, a layer also has a `Scaling` variable; with stochastic rounding, a stream of keys, `rounding`,
forked from the stream of that name. Both change in training, and neither is a parameter.

Letters: G groups (experts), M rows sorted by group, K in, N out, H hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Bool, Float, Int

from grouped_core import lora
from grouped_core.activations import Activation, resolve
from grouped_core.formats import QTensor, check_flags
from grouped_core.linear_spec import check_keywords
from grouped_core.lora import LayerOptions
from grouped_core.mlp_spec import Residuals, residuals_option
from grouped_core.ranks import check_rank
from grouped_core.recipes import Recipe
from jax_grouped import _layer_lora, _layer_options, route
from jax_grouped._arguments import as_array
from jax_grouped._layer_options import (
    ADAPTERS,
    NO_METADATA,
    Initializer,
    Metadata,
    default_bias_init,
    default_kernel_init,
    default_router_init,
)
from jax_grouped._layer_recipes import Keys, RecipeLayer, check_rngs, key_words, stream_of
from jax_grouped._layer_recipes import Scaling as Scaling
from jax_grouped._layer_recipes import update_scalings as update_scalings
from jax_grouped.mlp import grouped_mlp
from jax_grouped.moe import SharedExpert, moe
from jax_grouped.ops import ragged_dot
from jax_grouped.parallel import MeshAxes
from jax_grouped.route import MoEAux

_OF_DROPOUT = "the dropout of its adapters"
_OF_JITTER = "the jitter of its logits"


def _value(param: nnx.Variable[Any] | None) -> Any:
    """The array of a parameter, or None. Raises TypeError: it was replaced by a `QTensor`."""
    if param is not None and isinstance(param.get_value(), QTensor):
        raise TypeError(
            "a parameter of a layer of jax_grouped.nnx: a QTensor, expected an array; layers hold plain weights and "
            "quantise them by their recipe, and the functions (ragged_dot, grouped_mlp, moe) take quantised ones."
        )
    return None if param is None else param[...]


def _cast(dtype: Any, *arrays: Array | None) -> tuple[Any, ...]:
    """The arrays in the dtype of the computation: `dtype`, or the dtype that they promote to."""
    return promote_dtype(arrays, dtype=dtype)


class _LoraLayer(RecipeLayer):
    """A layer that may have adapters.

    Attributes:
        lora: their options. deterministic: without dropout, as after `layer.eval()`.
        mesh_axes: those that a `MoE` is spread over, else None.
        dropout: the layer's own stream of keys, where elements are dropped, else None.
    """

    lora: LayerOptions
    deterministic: bool
    mesh_axes: MeshAxes | None = None

    def _hold_lora(
        self, names: tuple[str, ...], weights: Any, given: tuple[Any, ...], dtype: Any, rngs: nnx.Rngs
    ) -> None:
        """Makes `{name}_a` and `{name}_b` for each weight, after all other parameters."""
        self.lora = nnx.static(lora.layer_options(type(self).__name__, *given))
        self.dropout: nnx.RngStream | None = nnx.data(None)
        if not self.lora.rank:
            return
        for name, shape in zip(names, weights, strict=True):
            a, b = _layer_lora.initial(rngs.params(), shape, self.lora.rank, dtype)
            setattr(self, f"{name}_a", nnx.LoRAParam(a))
            setattr(self, f"{name}_b", nnx.LoRAParam(b))
        if self.lora.dropout:
            self.dropout = stream_of(rngs, "dropout", type(self).__name__, _OF_DROPOUT).fork()

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the mode of this layer; `nnx.view` calls it."""
        if deterministic is not None:
            self.deterministic = deterministic

    def _factors(self, names: tuple[str, ...]) -> list[Array]:
        """A and B of each name; [] without adapters."""
        return [getattr(self, f"{name}_{part}")[...] for name in names for part in "ab" if self.lora.rank]

    def _frozen(self, *arrays: Array | None) -> tuple[Any, ...]:
        return _layer_lora.frozen(self.lora, *arrays)

    def _lora_arguments(self, factors: tuple[Any, ...], rngs: Keys, index: int = 0) -> dict[str, Any]:
        """The keywords of the operation; `factors`: A, B, or those of both weights."""
        options = self.lora._replace(dropout=0.0) if self.deterministic else self.lora
        adapter = factors if len(factors) < 4 else (factors[:2], factors[2:])

        def key() -> Array:
            return key_words(type(self).__name__, self.dropout, "dropout", _OF_DROPOUT, rngs, index=3 + index)

        return _layer_lora.arguments(options, adapter, key)

    def _adapted(self) -> dict[str, nnx.Param[Any]]:
        """The weights that may have adapters, by the names of these."""
        raise NotImplementedError

    def _merged(self) -> dict[str, Array]:
        """The weights with the adapters added, by the names of these; the layer stays as it is."""
        if not self.lora.rank:
            raise ValueError(
                f"`merge` of {type(self).__name__}: no adapter, expected one; make the layer with `lora_rank`."
            )
        found = {}
        for name, weight in self._adapted().items():
            a, b = self._factors((name,))
            what = f"`{'kernel' if name == 'lora' else name.removesuffix('_lora')}` of {type(self).__name__}.merge"
            value = weight.get_value()  # as `[...]`, which a quantised one does not have
            found[name] = _layer_lora.merged(what, self.mesh_axes, value, a, b, self.lora.scaling)
        return found

    def _take_merged(self, found: dict[str, Array]) -> None:
        for name, weight in self._adapted().items():
            weight.set_value(found[name])
            delattr(self, f"{name}_a")
            delattr(self, f"{name}_b")
        self.lora = nnx.static(LayerOptions())

    def merge(self) -> None:
        """Adds the adapters to the weights, rounded once to their dtype, and removes them.

        Raises:
            ValueError: the layer has none, or a weight cannot be merged as it is sharded. The layer stays as it was.
        """
        _merge(self)


def _merge(*layers: _LoraLayer) -> None:
    """Merges the adapters of all these layers, or changes none: every weight is made before the first is replaced."""
    found = [layer._merged() for layer in layers]
    for layer, weights in zip(layers, found, strict=True):
        layer._take_merged(weights)


class GroupedLinear(_LoraLayer):
    """y[r] = x[r] kernel[g] + bias[g], g being the group of row r.

    Args:
        num_groups: G. in_features: K. out_features: N.
        use_bias: whether there is a `bias` [G, N] beside `kernel` [G, K, N].
        dtype: the dtype of the computation; None: what input and parameters promote to.
        param_dtype: the dtype of the parameters.
        kernel_init, bias_init: initialisers; the default of the kernel does not count G in its fan-in.
        recipe: formats of the products, any `Recipe`; None uses the operands without quantising them.
        lora_rank: r; the layer then has an adapter (docs/lora.md), `lora_a` [G, K, r] and `lora_b` [G, r, N], both
            `nnx.LoRAParam`; kernel and bias have no gradient. None: no adapter.
        lora_alpha: the adapter is scaled by lora_alpha / r; None: r. lora_dropout: the probability with which elements
            of x are dropped on their way to `lora_a`, with keys of the stream `dropout`.
        deterministic: without dropout, as after `layer.eval()`.
        rngs: an `nnx.Rngs`, whose stream `params` gives the keys of the initialisers.
        kernel_metadata, bias_metadata: for the `nnx.Param`s, such as sharding names ("expert", "embed", "mlp").
    """

    operation = staticmethod(ragged_dot)

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        recipe: Recipe | None = None,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        deterministic: bool = False,
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        _layer_options.check_positive(
            "GroupedLinear", num_groups=num_groups, in_features=in_features, out_features=out_features
        )
        _layer_options.check_dtypes("GroupedLinear", dtype, param_dtype)
        check_flags("GroupedLinear", use_bias=use_bias, deterministic=deterministic)
        check_rngs("GroupedLinear", rngs)
        shape = (num_groups, in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **kernel_metadata)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (num_groups, out_features), param_dtype), **bias_metadata)
        self.dtype = dtype
        self.deterministic = bool(deterministic)
        self._hold_recipe(recipe, num_groups, 1, rngs)
        self._hold_lora(("lora",), (shape,), (lora_rank, lora_alpha, lora_dropout), param_dtype, rngs)

    def __call__(self, x: Float[Array, "M K"], group_sizes: Any, *, rngs: Keys = None) -> Float[Array, "M N"]:
        """Applies the group's kernel to each row.

        Args:
            x: [M, K]. group_sizes: integers [G]; rows past their sum give zero.
            rngs: random numbers for stochastic rounding, in place of the layer's own: `nnx.Rngs`, a stream, or a key.
        """
        x = as_array("x", x, "[M, K]")
        check_rank("linear", "x", "x", x.shape)
        _layer_options.check_width("GroupedLinear", x, "in_features", "kernel", _value(self.kernel).shape)
        x, kernel, bias, *factors = _cast(
            self.dtype, x, *self._frozen(_value(self.kernel), _value(self.bias)), *self._factors(("lora",))
        )
        how = self._lora_arguments(tuple(factors), rngs)
        return ragged_dot(x, kernel, group_sizes, bias=bias, recipe=self._bound_recipe(rngs), **how)

    def _adapted(self) -> dict[str, nnx.Param[Any]]:
        return {"lora": self.kernel}


class _Experts(_LoraLayer):
    """The parameters of `GroupedMLP`, which `MoE` has too."""

    def __init__(
        self,
        num_groups: int,
        hidden: int,
        mlp_dim: int,
        *,
        activation: str | Activation = "swiglu",
        use_bias: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        recipe: Recipe | None = None,
        residuals: str | Residuals = "save_fc1",
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        deterministic: bool = False,
        rngs: nnx.Rngs,
        wi_metadata: Metadata = NO_METADATA,
        wo_metadata: Metadata = NO_METADATA,
        bias_metadata: Metadata = NO_METADATA,
    ) -> None:
        _layer_options.check_positive(type(self).__name__, num_groups=num_groups, hidden=hidden, mlp_dim=mlp_dim)
        _layer_options.check_dtypes(type(self).__name__, dtype, param_dtype)
        check_flags(type(self).__name__, use_bias=use_bias, deterministic=deterministic)
        check_rngs(type(self).__name__, rngs)
        self.activation = resolve(activation)
        wide = self.activation.fc1_width(mlp_dim)
        self.wi = nnx.Param(kernel_init(rngs.params(), (num_groups, hidden, wide), param_dtype), **wi_metadata)
        self.wo = nnx.Param(kernel_init(rngs.params(), (num_groups, mlp_dim, hidden), param_dtype), **wo_metadata)
        self.wi_bias: nnx.Param | None = nnx.data(None)
        self.wo_bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.wi_bias = nnx.Param(bias_init(rngs.params(), (num_groups, wide), param_dtype), **bias_metadata)
            self.wo_bias = nnx.Param(bias_init(rngs.params(), (num_groups, hidden), param_dtype), **bias_metadata)
        self.dtype = dtype
        self.residuals = residuals_option(residuals, can_offload=True)
        self.deterministic = bool(deterministic)
        self._hold_recipe(recipe, num_groups, 2, rngs)
        self._hold_adapters(lora_rank, lora_alpha, lora_dropout, param_dtype=param_dtype, rngs=rngs)

    def _hold_adapters(
        self,
        lora_rank: int | None = None,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        *,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ) -> None:
        shapes = (self.wi[...].shape, self.wo[...].shape)
        self._hold_lora(ADAPTERS, shapes, (lora_rank, lora_alpha, lora_dropout), param_dtype, rngs)

    def _weights(self, x: Array, *, whole: bool = True) -> tuple[Any, ...]:
        """x, wi, wo, wi_bias, wo_bias, and A and B of both adapters, in the dtype of the computation.

        Args:
            whole: whether H of the weights is that of x; inside of shard_map, with `fsdp`, it is that of a shard.
        """
        if whole:
            _layer_options.check_width(type(self).__name__, x, "hidden", "wi", _value(self.wi).shape)
        frozen = self._frozen(*map(_value, (self.wi, self.wo, self.wi_bias, self.wo_bias)))
        return _cast(self.dtype, x, *frozen, *self._factors(ADAPTERS))

    def _adapted(self) -> dict[str, nnx.Param[Any]]:
        return dict(zip(ADAPTERS, (self.wi, self.wo), strict=True))


class GroupedMLP(_Experts):
    """y[r] = (p[r] act(x[r] wi[g] + wi_bias[g])) wo[g] + p[r] wo_bias[g], g being the group of row r.

    Args:
        num_groups: G. hidden: H. mlp_dim: F.
        activation: a kind, or an `Activation`. Gated kinds make `wi` [G, H, 2F], gate columns first; others [G, H, F].
        use_bias: whether there are `wi_bias` and `wo_bias` [G, H].
        dtype: the dtype of the computation; None: what input and parameters promote to.
        param_dtype: the dtype of the parameters.
        kernel_init, bias_init: initialisers; the default of the kernels does not count G in their fan-in.
        recipe: formats of the products, any `Recipe`; None uses the operands without quantising them.
        residuals: what is saved for backward, as in `jax_grouped.grouped_mlp`.
        lora_rank, lora_alpha, lora_dropout, deterministic: as in `GroupedLinear`, for both weights: `wi_lora_a`,
            `wi_lora_b`, `wo_lora_a`, `wo_lora_b`.
        rngs: an `nnx.Rngs`, whose stream `params` gives the keys of the initialisers.
        wi_metadata, wo_metadata, bias_metadata: for the `nnx.Param`s, such as sharding names.
    """

    operation = staticmethod(grouped_mlp)

    def __call__(
        self, x: Float[Array, "M H"], group_sizes: Any, probs: Float[Array, " M"] | None = None, *, rngs: Keys = None
    ) -> Float[Array, "M H"]:
        """Applies the group's MLP to each row, weighted by `probs`.

        Args:
            x: [M, H]. group_sizes: integers [G]. probs: [M]; None: 1.
            rngs: random numbers for stochastic rounding, in place of the layer's own: `nnx.Rngs`, a stream, or a key.
        """
        x, wi, wo, wi_bias, wo_bias, *factors = self._weights(as_array("x", x, "[M, H]"))
        return grouped_mlp(
            x,
            wi,
            wo,
            group_sizes,
            activation=self.activation,
            probs=probs,
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            recipe=self._bound_recipe(rngs),
            residuals=self.residuals,
            **self._lora_arguments(tuple(factors), rngs),
        )


class Router(nnx.Module):
    """Holds `kernel` [H, E], the router's only parameter."""

    def __init__(
        self, hidden: int, num_experts: int, param_dtype: Any, init: Initializer, rngs: nnx.Rngs, metadata: Metadata
    ) -> None:
        self.kernel = nnx.Param(init(rngs.params(), (hidden, num_experts), param_dtype), **metadata)


class Shared(_Experts):
    """The expert that every token goes to: `wi` and `wo` of one group, and perhaps `gate` [H, 1]."""

    def __init__(self, hidden: int, mlp_dim: int, gate: nnx.Param | None, **options: Any) -> None:
        super().__init__(1, hidden, mlp_dim, **options)
        self.gate: nnx.Param | None = nnx.data(gate)

    def _expert(self, x: Array, rngs: Keys, *, whole: bool) -> SharedExpert:
        """Its weights in the dtype of the computation, for `jax_grouped.moe`."""
        _, wi, wo, _, _, *factors = self._weights(x, whole=whole)
        adapters = (factors[:2], factors[2:]) if factors else None
        return SharedExpert(wi, wo, _value(self.gate), self._bound_recipe(rngs, index=2), adapters)


class SelectionBias(nnx.Variable[Any]):
    """The bias with which a router chooses experts. It is not a parameter: `MoE.update_bias` changes it."""


class MoE(_Experts):
    """A mixture of experts: a router chooses k of E experts for each token; their weighted results are summed.

    Its parameters are `router.kernel` [H, E] and those of `GroupedMLP`; with a shared expert also `shared.wi` and
    `shared.wo`, of one group, and with `shared_gate` also `shared.gate` [H, 1].

    Args:
        hidden: H. mlp_dim: F. num_experts: E, at most 1024. num_experts_per_tok: k, at most 32.
        score, after_topk, normalize, scale, num_groups, topk_groups, group_topk, jitter, sinkhorn, capacity_factor,
            drop, aux_coeff, z_coeff, axis_name: options of the router, see `jax_grouped.route.topk_router`.
        selection_bias: whether there is a `selection_bias` [E], which `update_bias` moves.
        shared_dim: F of an expert that every token goes to; None: there is none. shared_gate: whether its result is
            weighted by the sigmoid of a gate.
        deterministic: without jitter, and without dropout of the adapters, as after `layer.eval()`.
        mesh_axes, transport, budget_factor, once_per_rank, send, fsdp: as in `jax_grouped.parallel.moe`, where the
            layer is spread over the axes of a mesh, a `parallel.MeshAxes`; None: it is not.
        router_init: initialiser of the kernels of router and gate. router_metadata: for their `nnx.Param`s.
        options: keywords of `GroupedMLP`; those of the experts serve the shared one too, which has no biases.
    """

    operation = staticmethod(moe)
    mlp: Callable[..., Array] | None = None
    """The function of the experts in place of `routed_mlp`, with the same arguments: a static method of a subclass."""

    def __init__(
        self,
        hidden: int,
        mlp_dim: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        score: str = "softmax",
        after_topk: bool = False,
        normalize: bool | None = None,
        scale: float = 1.0,
        num_groups: int | None = None,
        topk_groups: int | None = None,
        group_topk: int | None = None,
        jitter: float = 0.0,
        sinkhorn: int = 0,
        capacity_factor: float | None = None,
        drop: str = "probs",
        aux_coeff: float = 0.0,
        z_coeff: float = 0.0,
        axis_name: route.AxisName = None,
        selection_bias: bool = False,
        shared_dim: int | None = None,
        shared_gate: bool = False,
        deterministic: bool = False,
        mesh_axes: MeshAxes | None = None,
        transport: str = "all_to_all",
        budget_factor: float | None = None,
        once_per_rank: bool = False,
        send: str | None = None,
        fsdp: bool = False,
        param_dtype: Any = jnp.float32,
        router_init: Initializer = default_router_init,
        router_metadata: Metadata = NO_METADATA,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        check_keywords("MoE", options, MoE.__init__, GroupedMLP.__init__, _Experts.__init__)
        self.num_experts, self.num_experts_per_tok = num_experts, num_experts_per_tok
        self.score, self.after_topk, self.normalize, self.scale = score, after_topk, normalize, scale
        self.num_groups, self.topk_groups, self.group_topk = num_groups, topk_groups, group_topk
        self.jitter, self.sinkhorn = jitter, sinkhorn
        self.capacity_factor, self.drop = capacity_factor, drop
        self.aux_coeff, self.z_coeff, self.axis_name = aux_coeff, z_coeff, axis_name
        self.shared_dim, self.shared_gate = shared_dim, shared_gate
        self.mesh_axes, self.transport, self.budget_factor = mesh_axes, transport, budget_factor
        self.once_per_rank, self.send, self.fsdp = once_per_rank, send, fsdp
        check_flags("MoE", selection_bias=selection_bias)
        _layer_options.check_moe(self)
        options = {"param_dtype": param_dtype, "deterministic": deterministic, **options}
        adapters = {name: options.pop(name) for name in _layer_options.LORA if name in options}
        super().__init__(num_experts, hidden, mlp_dim, rngs=rngs, **options)
        self.router = Router(hidden, num_experts, param_dtype, router_init, rngs, router_metadata)
        self.selection_bias: SelectionBias | None = nnx.data(None)
        if selection_bias:
            self.selection_bias = SelectionBias(jnp.zeros((num_experts,), jnp.float32))
        self.shared: Shared | None = nnx.data(None)
        if shared_dim is not None:
            plain = {name: value for name, value in options.items() if name not in ("use_bias", "bias_metadata")}
            for name in ("wi_metadata", "wo_metadata"):
                plain[name] = _layer_options.along_one(options.get(name, NO_METADATA), 0)
            of_gate = _layer_options.along_one(router_metadata, 1)
            gate = Router(hidden, 1, param_dtype, router_init, rngs, of_gate).kernel if shared_gate else None
            self.shared = Shared(hidden, shared_dim, gate, rngs=rngs, **plain, **adapters)
        self.noise: nnx.RngStream | None = nnx.data(None)
        if jitter:
            self.noise = stream_of(rngs, "jitter", "MoE", _OF_JITTER).fork()
        self._hold_adapters(**adapters, param_dtype=param_dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "... H"],
        *,
        mask: Bool[Array, ...] | None = None,
        experts: Int[Array, "... k"] | None = None,
        sequence_sizes: Int[Array, " S"] | None = None,
        rngs: Keys = None,
    ) -> tuple[Float[Array, "... H"], MoEAux]:
        """Applies its experts to each token of x. Returns y in the shape of x, and `MoEAux`.

        Args:
            x: [..., H].
            mask: [...], False for padding, which goes to no expert and must be finite. experts: [..., k], chosen
                elsewhere.
            sequence_sizes: [S], as in `jax_grouped.route.topk_router`, of the tokens in the order of memory.
            rngs: random numbers for stochastic rounding and jitter, in place of the layer's own: `nnx.Rngs`, a stream,
                or a key.
        """
        rows, wi, wo, wi_bias, wo_bias, *factors = self._weights(_layer_options.as_tokens(x), whole=not self.fsdp)
        routing = _layer_options.router_options(self) | _layer_options.of_tokens(x, mask, experts)
        if routing["jitter"]:
            routing["key"] = key_words("MoE", self.noise, "jitter", _OF_JITTER, rngs, index=1)
        y, aux = _layer_options.function_of(self)(
            rows,
            self.router.kernel[...],
            wi,
            wo,
            self.num_experts_per_tok,
            shared=None if self.shared is None else self.shared._expert(rows, rngs, whole=not self.fsdp),
            activation=self.activation,
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            recipe=self._bound_recipe(rngs),
            residuals=self.residuals,
            bias=_value(self.selection_bias),
            sequence_sizes=sequence_sizes,
            **self._lora_arguments(tuple(factors), rngs),
            **routing,
        )
        return _layer_options.in_shape_of(x, y), aux

    def merge(self) -> None:
        """Merges the adapters as `GroupedMLP` does, including those of the shared expert."""
        _merge(self, *([] if self.shared is None else [self.shared]))

    def update_bias(self, load: Int[Array, " E"], rate: float, *, axis_name: route.AxisName = None) -> None:
        """Moves `selection_bias` by `rate` towards equal loads. Call it once per step, outside of the loss.

        Args:
            load: `MoEAux.load` of the step, summed over its microbatches. axis_name: mesh axes to sum it over first.

        Raises:
            ValueError: the layer has no selection bias.
        """
        if self.selection_bias is None:
            raise ValueError(
                "`update_bias` of MoE: the layer has no selection bias, expected one; make it with selection_bias=True."
            )
        self.selection_bias[...] = route.update_bias(self.selection_bias[...], load, rate, axis_name=axis_name)
