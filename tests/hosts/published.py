"""Packages that cannot be installed here, as far as their adapters touch them: signatures as published, bodies of ours.

| function | source | version |
| --- | --- | --- |
| `gmm` | AI-Hypercomputer/maxtext, src/maxtext/kernels/megablox/ops.py | 0.2.4, e591f30c |
| `RoutedMoE.sparse_matmul`, what it calls and how | the same, src/maxtext/layers/moe.py | 0.2.4, e591f30c |
| `tokamax.ragged_dot`, `RaggedDotGroupSizes` | openxla/tokamax, tokamax/_src/ops/ragged_dot/api.py | 07ed188b |
| `GMMBackend`, `TransformerFeedForwardDropFreeMoE` | apple/axlearn, axlearn/common/mixture_of_experts.py | 34aed43c |
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp


@contextmanager
def installed(*modules: ModuleType) -> Iterator[None]:
    """Within this context these modules can be imported, and the packages that they are in, but no others of these."""
    names = {module.__name__: module for module in modules}
    for name in list(names):
        while "." in name:
            name = name.rpartition(".")[0]
            names.setdefault(name, ModuleType(name))
    packages = {name.partition(".")[0] for name in names}

    def theirs() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in packages]

    before = {name: sys.modules.pop(name) for name in theirs()}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in theirs():
            del sys.modules[name]
        sys.modules.update(before)


def _theirs(lhs: Any, rhs: Any, group_sizes: Any, preferred_element_type: Any) -> jax.Array:
    return jax.lax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes,
        jax.lax.RaggedDotDimensionNumbers((([1], [1]), ([], [])), [0], [0]),
        preferred_element_type=preferred_element_type,
    )


# ---------------------------------------------------------------------------------------------------------------------
# MaxText and tokamax.


@dataclass(frozen=True)
class RaggedDotGroupSizes:
    """Group sizes with a number that represents them."""

    value: Any
    representative_value: Any


def tokamax_ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    *,
    implementation: Any = None,
) -> jax.Array:
    return _theirs(lhs, rhs, getattr(group_sizes, "value", group_sizes), preferred_element_type)


def gmm(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    preferred_element_type: Any = jnp.float32,
    tiling: Any = (128,) * 9,
    group_offset: Any = None,
    existing_out: Any = None,
    transpose_rhs: bool = False,
    interpret: bool | None = None,
    lhs_quantize_dtype: Any = None,
    rhs_quantize_dtype: Any = None,
    use_qwix_quantization: bool = False,
    use_tokamax_backend: bool = False,
    weight_gather_axes: Any = None,
    lhs_vma_axes: tuple[str, ...] = (),
    rhs_vma_axes: tuple[str, ...] = (),
    qwix_rule: Any = None,
    use_manual_quantization: bool = False,
    use_gmm_v2: bool = False,
    partial_sum: Any = None,
) -> jax.Array:
    return _theirs(lhs, jnp.swapaxes(rhs, 1, 2) if transpose_rhs else rhs, group_sizes, preferred_element_type)


MOE = """
def routed(inputs, kernel, group_sizes, *, megablox, use_tokamax_gmm, dtype, **options):
    if use_tokamax_gmm and not options:
        return tokamax.ragged_dot(
            lhs=inputs,
            rhs=kernel,
            group_sizes=tokamax.RaggedDotGroupSizes(group_sizes, inputs.shape[0]),
            precision=jax.lax.Precision.DEFAULT,
            preferred_element_type=dtype,
            implementation="mosaic",
            group_offset=None,
        )
    if use_tokamax_gmm or megablox:
        published = dict(
            preferred_element_type=dtype,
            tiling=(512,) * 9,
            group_offset=0,
            lhs_quantize_dtype=None,
            rhs_quantize_dtype=None,
            use_qwix_quantization=False,
            use_tokamax_backend=use_tokamax_gmm,
            weight_gather_axes=[],
            lhs_vma_axes=("expert",),
            rhs_vma_axes=(),
            use_gmm_v2=False,
            partial_sum=None,
            interpret=True,
        )
        return mblx.gmm(lhs=inputs, rhs=kernel, group_sizes=group_sizes, **{**published, **options})
    return jax.lax.ragged_dot(lhs=inputs, rhs=kernel, group_sizes=group_sizes, preferred_element_type=dtype)
"""
"""The choice in `sparse_matmul` of MaxText, with the arguments that it passes."""


def maxtext() -> tuple[ModuleType, ModuleType]:
    """`maxtext.layers.moe`, whose `routed` makes the choice, and `maxtext.kernels.megablox`."""
    megablox, moe, tokamax = map(ModuleType, ("maxtext.kernels.megablox", "maxtext.layers.moe", "tokamax"))
    megablox.__dict__["gmm"] = gmm
    tokamax.__dict__.update(ragged_dot=tokamax_ragged_dot, RaggedDotGroupSizes=RaggedDotGroupSizes)
    moe.__dict__.update(jax=jax, tokamax=tokamax, mblx=megablox)
    exec(MOE, moe.__dict__)
    return moe, megablox


# ---------------------------------------------------------------------------------------------------------------------
# AXLearn.


class GMMBackend(enum.Enum):
    PALLAS = "PALLAS"
    RAGGED_DOT = "RAGGED_DOT"
    TOKAMAX = "TOKAMAX"


class TransformerFeedForwardDropFreeMoE:
    def __init__(self, **config: Any) -> None:
        given = {"gmm_backend": None, "preferred_element_type": None, "tiling": (128, 128, 128), "interpret": False}
        self.config = SimpleNamespace(**{**given, "tokamax_implementation": None, **config})

    def _padded_gmm(self, lhs: Any, rhs: Any, tokens_per_expert: Any) -> jax.Array:
        return _theirs(lhs, rhs, tokens_per_expert, self.config.preferred_element_type or jnp.bfloat16)

    def forward(self, lhs: Any, rhs: Any, tokens_per_expert: Any) -> jax.Array:
        return self._padded_gmm(lhs, rhs, tokens_per_expert)


def axlearn() -> ModuleType:
    """`axlearn.common.mixture_of_experts`."""
    found = ModuleType("axlearn.common.mixture_of_experts")
    layer = type("TransformerFeedForwardDropFreeMoE", (), dict(vars(TransformerFeedForwardDropFreeMoE)))
    found.__dict__.update(TransformerFeedForwardDropFreeMoE=layer, GMMBackend=GMMBackend)
    return found
