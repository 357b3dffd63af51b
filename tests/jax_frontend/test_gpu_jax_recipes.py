"""Recipes in compiled steps of JAX on a GPU: XLA's graphs replayed with other sizes, weights and scales."""

from __future__ import annotations

import pytest

from tests.torch_frontend.gpu_tools import REPLAYED

pytestmark = pytest.mark.gpu

PROGRAM = """
import hashlib, jax, jax.numpy as jnp, numpy as np
import jax_grouped
recipe = jax_grouped.RECIPE
x = jax.random.normal(jax.random.key(0), (1024, 256), jnp.bfloat16)
wi = jax.random.normal(jax.random.key(1), (4, 512, 256), jnp.bfloat16) / 16
wo = jax.random.normal(jax.random.key(2), (4, 256, 256), jnp.bfloat16) / 16
probs = jax.random.uniform(jax.random.key(3), (1024,))

@jax.jit
def step(x, wi, wo, probs, state, key, sizes):
    def loss(x, wi, wo, probs, state):
        bound = recipe.bind(state, key)
        y = jax_grouped.grouped_mlp(x, wi, wo, sizes, rhs_transposed=True, probs=probs, recipe=bound)
        return jnp.mean(y.astype(jnp.float32) ** 2)
    value, (dx, dwi, dwo, dp, state) = jax.value_and_grad(loss, (0, 1, 2, 3, 4))(x, wi, wo, probs, state)
    state = None if state is None else jax_grouped.update_scaling(state)
    return value, dx, wi - dwi, wo - dwo, dp, state

digest = hashlib.sha256()
state = jax_grouped.scaling_state(recipe, 4, products=2) if recipe.delayed else None
for at, sizes in enumerate(SIZES):
    for again in range(3):
        key = jnp.array([at, again], jnp.uint32)
        value, dx, wi, wo, dp, state = step(x, wi, wo, probs, state, key, jnp.array(sizes, jnp.int32))
        assert np.isfinite(value)
        for leaf in jax.tree.leaves((value, dx, wi, wo, dp, state)):
            digest.update(np.asarray(leaf).tobytes())
print(digest.hexdigest())
"""


@pytest.mark.rule("CAP-1", "CAP-5", "CAP-6")
@pytest.mark.parametrize("recipe", ["FP8Delayed", "FP8Current", "FP8Block", "MXFP8", "NVFP4"])
def test_compiled_steps_replay_with_other_sizes_weights_and_scales(python, recipe):
    """The same bits with XLA's graphs and without."""
    program = PROGRAM.replace("RECIPE", recipe).replace("SIZES", repr([list(sizes) for sizes in REPLAYED]))
    settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_NUMPY_DTYPE_PROMOTION": "standard"}
    with_graphs = python(program, XLA_FLAGS="", **settings)
    assert python(program, XLA_FLAGS="--xla_gpu_enable_command_buffer=", **settings) == with_graphs
