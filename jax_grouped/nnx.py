"""Flax NNX layers: they hold and initialise parameters; the arithmetic is in `jax_grouped.ops` and `.moe`.

With delayed scaling, a layer also has a `Scaling` variable; with stochastic rounding, a stream of keys, `rounding`,
forked from the stream of that name. Both change in training, and neither is a parameter.

Letters: G groups (experts), M rows sorted by group, K in, N out, H hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jaxtyping import Array, Float

from grouped_core.activations import Activation, resolve
from grouped_core.ranks import check_rank
from grouped_core.recipes import Recipe
from grouped_core.routing_spec import router_option
from jax_grouped import moe
from jax_grouped._layer_recipes import Keys, RecipeLayer
from jax_grouped._layer_recipes import Scaling as Scaling
from jax_grouped._layer_recipes import update_scalings as update_scalings
from jax_grouped.mlp import grouped_mlp
from jax_grouped.ops import ragged_dot
from jax_grouped.route import MoEAux

Initializer = Callable[..., Array]
Metadata = Mapping[str, Any]

# NOTE: the first axis counts the experts and is not part of the fan-in.
default_kernel_init: Initializer = jax.nn.initializers.lecun_normal(batch_axis=(0,))
default_router_init: Initializer = jax.nn.initializers.lecun_normal()
default_bias_init: Initializer = jax.nn.initializers.zeros

_NO_METADATA: Metadata = MappingProxyType({})


def _positive(layer: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, (int, np.integer)):
            raise TypeError(f"`{name}` of {layer}: {size!r}, expected an integer; give the size of that axis.")
        if size < 1:
            raise ValueError(f"`{name}` of {layer}: {size}, expected 1 or more; give the size of that axis.")


def _value(param: nnx.Param | None) -> Array | None:
    return None if param is None else param[...]


def _cast(dtype: Any, *arrays: Array | None) -> tuple[Any, ...]:
    """The arrays in the dtype of the computation: `dtype`, or the dtype that they promote to."""
    return promote_dtype(arrays, dtype=dtype)


class GroupedLinear(RecipeLayer):
    """y[r] = x[r] kernel[g] + bias[g], g being the group of row r.

    Args:
        num_groups: G. in_features: K. out_features: N.
        use_bias: whether there is a `bias` [G, N] beside `kernel` [G, K, N].
        dtype: of the computation; None: what input and parameters promote to.
        param_dtype: of the parameters.
        kernel_init, bias_init: initialisers; the default of the kernel does not count G in its fan-in.
        recipe: formats of the products, any `Recipe`; None: as the operands stand.
        rngs: key.
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
        rngs: nnx.Rngs,
        kernel_metadata: Metadata = _NO_METADATA,
        bias_metadata: Metadata = _NO_METADATA,
    ) -> None:
        _positive("GroupedLinear", num_groups=num_groups, in_features=in_features, out_features=out_features)
        shape = (num_groups, in_features, out_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype), **kernel_metadata)
        self.bias: nnx.Param | None = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (num_groups, out_features), param_dtype), **bias_metadata)
        self.dtype = dtype
        self._hold_recipe(recipe, num_groups, 1, rngs)

    def __call__(self, x: Float[Array, "M K"], group_sizes: Any, *, rngs: Keys = None) -> Float[Array, "M N"]:
        """Applies the group's kernel to each row.

        Args:
            x: [M, K]. group_sizes: integers [G]; rows past their sum give zero.
            rngs: of stochastic rounding, in place of the layer's own: `nnx.Rngs`, a stream, or a key.
        """
        check_rank("linear", "x", "x", x.shape)
        x, kernel, bias = _cast(self.dtype, x, self.kernel[...], _value(self.bias))
        return ragged_dot(x, kernel, group_sizes, bias=bias, recipe=self._bound_recipe(rngs))


class _Experts(RecipeLayer):
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
        rngs: nnx.Rngs,
        wi_metadata: Metadata = _NO_METADATA,
        wo_metadata: Metadata = _NO_METADATA,
        bias_metadata: Metadata = _NO_METADATA,
    ) -> None:
        _positive(type(self).__name__, num_groups=num_groups, hidden=hidden, mlp_dim=mlp_dim)
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
        self._hold_recipe(recipe, num_groups, 2, rngs)

    def _weights(self, x: Array) -> tuple[Any, ...]:
        """x, wi, wo, wi_bias, wo_bias in the dtype of the computation."""
        biases = (_value(self.wi_bias), _value(self.wo_bias))
        return _cast(self.dtype, x, self.wi[...], self.wo[...], *biases)


class GroupedMLP(_Experts):
    """y[r] = (p[r] act(x[r] wi[g] + wi_bias[g])) wo[g] + p[r] wo_bias[g], g being the group of row r.

    Args:
        num_groups: G. hidden: H. mlp_dim: F.
        activation: a kind, or an `Activation`. Gated kinds make `wi` [G, H, 2F], gate columns first; others [G, H, F].
        use_bias: whether there are `wi_bias` and `wo_bias` [G, H].
        dtype: of the computation; None: what input and parameters promote to.
        param_dtype: of the parameters.
        kernel_init, bias_init: initialisers; the default of the kernels does not count G in their fan-in.
        recipe: formats of the products, any `Recipe`; None: as the operands stand.
        rngs: key.
        wi_metadata, wo_metadata, bias_metadata: for the `nnx.Param`s, such as sharding names.
    """

    operation = staticmethod(grouped_mlp)

    def __call__(
        self, x: Float[Array, "M H"], group_sizes: Any, probs: Float[Array, " M"] | None = None, *, rngs: Keys = None
    ) -> Float[Array, "M H"]:
        """Applies the group's MLP to each row, weighted by `probs`.

        Args:
            x: [M, H]. group_sizes: integers [G]. probs: [M]; None: 1.
            rngs: of stochastic rounding, in place of the layer's own: `nnx.Rngs`, a stream, or a key.
        """
        x, wi, wo, wi_bias, wo_bias = self._weights(x)
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
        )


class Router(nnx.Module):
    """Holds `kernel` [H, E], the router's only parameter."""

    def __init__(
        self, hidden: int, num_experts: int, param_dtype: Any, init: Initializer, rngs: nnx.Rngs, metadata: Metadata
    ) -> None:
        self.kernel = nnx.Param(init(rngs.params(), (hidden, num_experts), param_dtype), **metadata)


class MoE(_Experts):
    """A mixture of experts: a router chooses k of E experts for each token; their weighted results are summed.

    Its parameters are `router.kernel` [H, E] and those of `GroupedMLP`.

    Args:
        hidden: H. mlp_dim: F. num_experts: E. num_experts_per_tok: k.
        score, after_topk, scale, aux_coeff, z_coeff: of the router, see `jax_grouped.route.topk_router`.
        router_init: initialiser of the router's kernel. router_metadata: for its `nnx.Param`.
        options: keywords of `GroupedMLP`.
    """

    mlp = staticmethod(grouped_mlp)
    """The function of the experts; a subclass may replace it by another one with the same arguments."""

    def __init__(
        self,
        hidden: int,
        mlp_dim: int,
        num_experts: int,
        num_experts_per_tok: int,
        *,
        score: str = "softmax",
        after_topk: bool = False,
        scale: float = 1.0,
        aux_coeff: float = 0.0,
        z_coeff: float = 0.0,
        param_dtype: Any = jnp.float32,
        router_init: Initializer = default_router_init,
        router_metadata: Metadata = _NO_METADATA,
        rngs: nnx.Rngs,
        **options: Any,
    ) -> None:
        _positive("MoE", num_experts=num_experts, num_experts_per_tok=num_experts_per_tok)
        if num_experts_per_tok > num_experts:
            raise ValueError(
                f"`num_experts_per_tok` of MoE: {num_experts_per_tok}, expected 1 to {num_experts}, the number of "
                "experts; choose fewer."
            )
        router_option(num_experts, num_experts_per_tok, score=score, after_topk=after_topk)
        super().__init__(num_experts, hidden, mlp_dim, param_dtype=param_dtype, rngs=rngs, **options)
        self.router = Router(hidden, num_experts, param_dtype, router_init, rngs, router_metadata)
        self.num_experts_per_tok = num_experts_per_tok
        self.score = score
        self.after_topk = after_topk
        self.scale = scale
        self.aux_coeff = aux_coeff
        self.z_coeff = z_coeff

    def __call__(self, x: Float[Array, "... H"], *, rngs: Keys = None) -> tuple[Float[Array, "... H"], MoEAux]:
        """Applies its experts to each token of x. Returns y in the shape of x, and `MoEAux`.

        Args:
            x: [..., H].
            rngs: of stochastic rounding, in place of the layer's own: `nnx.Rngs`, a stream, or a key.
        """
        if not x.ndim:
            raise ValueError("`x` of MoE: shape (), expected at least one axis [..., H]; pass tokens of H columns.")
        rows, wi, wo, wi_bias, wo_bias = self._weights(x.reshape(-1, x.shape[-1]))
        y, aux = moe.moe(
            rows,
            self.router.kernel[...],
            wi,
            wo,
            self.num_experts_per_tok,
            activation=self.activation,
            wi_bias=wi_bias,
            wo_bias=wo_bias,
            recipe=self._bound_recipe(rngs),
            mlp=self.mlp,
            score=self.score,
            after_topk=self.after_topk,
            scale=self.scale,
            aux_coeff=self.aux_coeff,
            z_coeff=self.z_coeff,
        )
        return y.reshape(x.shape), aux
