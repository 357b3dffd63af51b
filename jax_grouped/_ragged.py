"""`ragged_all_to_all` on every platform, and the exchange of an expert-parallel layer on top of it."""

from __future__ import annotations

import os
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_grouped._mesh import Axis, members, rank_of, size_of, vary_over

FLAGS = (
    "--xla_gpu_experimental_ragged_all_to_all_use_device_kernel=true",
    "--xla_enable_nccl_symmetric_buffers_for_collectives=raggedalltoall",
)
"""Flags of XLA. Without them its ragged all-to-all moved 3 to 20 GB/s on two H200s; its all-to-all moved 265 GB/s."""

UPDATES_PER_PEER = 32
"""The rows for one peer are cut into at least this many updates: one of XLA's kernels runs one block per update."""


def missing_flags() -> list[str]:
    """Returns the flags of `FLAGS` that XLA_FLAGS does not name. The values of flags that it names are not checked."""
    given = os.environ.get("XLA_FLAGS", "")
    return [flag for flag in FLAGS if flag.split("=")[0] not in given]


def warn_about_flags(platform: str) -> None:
    """Warns where the ragged all-to-all would be slow: on a GPU, without the flags."""
    missing = missing_flags()
    if platform != "cpu" and missing:
        warnings.warn(
            "transport 'ragged_all_to_all': XLA_FLAGS lacks "
            + " and ".join(missing)
            + ", expected both, because without them XLA moves a tenth of the bandwidth or less; set them before JAX "
            "starts, or use transport='all_to_all'.",
            RuntimeWarning,
            stacklevel=4,
        )


def ragged_all_to_all(
    operand: Array,
    output: Array,
    input_offsets: Int[Array, " U"],
    send_sizes: Int[Array, " U"],
    output_offsets: Int[Array, " U"],
    recv_sizes: Int[Array, " U"],
    *,
    axis_name: str | tuple[str, ...],
) -> Array:
    """`jax.lax.ragged_all_to_all`, also on a CPU, where XLA has none: there with all_gather and a masked gather.

    Update u of the U = P n, n for each rank of the axis in turn, sends `operand[input_offsets[u]:][:send_sizes[u]]` to
    rank u // n, which writes it at row `output_offsets[u]` of its output.

    Args:
        operand: [N, ...]. output: [M, ...], whose other rows are kept.
        input_offsets, send_sizes, output_offsets, recv_sizes: [U], integers. recv_sizes: rows that come from each rank.
        axis_name: the axis of the mesh, inside `shard_map`.

    Returns:
        [M, ...], in the dtype of `operand`.

    Raises:
        ValueError: U is no multiple of the ranks.
    """
    ranks = size_of(axis_name)
    if input_offsets.shape[0] % ranks:
        raise ValueError(
            f"`input_offsets` of ragged_all_to_all: {input_offsets.shape[0]} updates, expected a multiple of {ranks}, "
            f"the ranks of {axis_name!r}; give every rank equally many, of size 0 where there is nothing."
        )
    arrays = (operand, output, input_offsets, send_sizes, output_offsets, recv_sizes)
    given = tuple(vary_over(each, axis_name) for each in arrays)
    native = partial(jax.lax.ragged_all_to_all, axis_name=axis_name)
    return jax.lax.platform_dependent(*given, cpu=partial(_emulated, axis_name), default=native)


def _emulated(
    axis: Axis, operand: Array, output: Array, inputs: Array, sends: Array, outputs: Array, recvs: Array
) -> Array:
    names, me, ranks = members(axis), rank_of(axis), size_of(axis)
    rows = jax.lax.all_gather(operand, names)  # [P, N, ...]
    of_me = [jax.lax.all_gather(each.reshape(ranks, -1), names)[:, me] for each in (inputs, sends, outputs)]
    first, size, to = (each.reshape(-1, 1) for each in of_me)  # [P n, 1]
    at = jnp.arange(output.shape[0], dtype=first.dtype).reshape(1, -1)
    mine = (at >= to) & (at < to + size)  # [P n, M]
    update = jax.lax.argmax(mine, 0, first.dtype)  # not jnp.argmax, which gives int64 in 64-bit mode
    row = (update // (inputs.shape[0] // ranks)) * operand.shape[0] + at[0] + (first - to)[update, 0]
    flat = rows.reshape(-1, *operand.shape[1:])
    found = flat[jnp.clip(row, 0, flat.shape[0] - 1)]
    taken = mine.any(axis=0).reshape(-1, *(1,) * (operand.ndim - 1))
    return jnp.where(taken, found, output)


# ---------------------------------------------------------------------------------------------------------------------
# The exchange of a layer


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def swap(axis: Axis, rows: Array, sends: Array, recvs: Array) -> Array:
    """[P B, H]: the parts of `rows`, each B rows for a rank, exchanged; rows that are not sent are zero.

    Args:
        sends: int32 [P, L], rows for each local expert of each rank; they follow each other from the first row of the
            part of that rank on. recvs: int32 [P, L], rows that come from each rank.
    """
    budget, ranks = rows.shape[0] // sends.shape[0], sends.shape[0]
    inside, size = _updates(sends)
    starts = jnp.arange(ranks, dtype=jnp.int32)[:, None] * budget
    arrays = (starts + inside, size, rank_of(axis) * budget + inside, _updates(recvs)[1])
    # NOTE: tied to the sizes, so that XLA cannot move the buffer out of a loop over layers: it would copy it in each.
    output, _ = jax.lax.optimization_barrier((jnp.zeros_like(rows), sends))
    return ragged_all_to_all(rows, output, *(each.reshape(-1) for each in arrays), axis_name=members(axis))


def _updates(sizes: Array) -> tuple[Array, Array]:
    """First row in the part of its rank and rows [P, n] of each update: equal pieces of the rows of each expert."""
    pieces = -(-UPDATES_PER_PEER // sizes.shape[1])
    at = jnp.arange(pieces + 1, dtype=jnp.int32).reshape(1, 1, -1)
    piece = (sizes[..., None] + pieces - 1) // pieces
    ends = jnp.minimum(at * piece, sizes[..., None])  # [P, L, pieces + 1]
    begin = (jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes)[..., None]
    flat = (sizes.shape[0], -1)
    return (begin + ends[..., :-1]).reshape(flat), jnp.diff(ends, axis=-1).reshape(flat)


def _swap_fwd(axis: Axis, rows: Array, sends: Array, recvs: Array) -> tuple[Array, tuple[Array, Array]]:
    return swap(axis, rows, sends, recvs), (sends, recvs)


def _swap_bwd(axis: Axis, saved: tuple[Array, Array], cotangent: Any) -> tuple[Array, None, None]:
    sends, recvs = saved
    return swap(axis, cotangent, recvs, sends), None, None


swap.defvjp(_swap_fwd, _swap_bwd)
