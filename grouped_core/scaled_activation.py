"""An activation without a product, weighted per row: z[r] = p[r] act(h[r]), p = probs or 1.

Letters: M rows, F columns of z, W columns of h: 2F for gated activations, else F.
"""

from __future__ import annotations

from typing import Any

from grouped_core import calls
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec
from grouped_core.formats import WIDE
from grouped_core.products import Array, Runner
from grouped_core.ranks import check_rank


def check(activation: Activation, h: ArraySpec, probs: ArraySpec | None) -> None:
    """Raises for operands that do not fit: TypeError for a dtype, ValueError for a shape."""
    for name, spec in (("h", h), ("probs", probs)):
        if spec is not None and spec.dtype not in WIDE:
            raise TypeError(f"`{name}`: dtype {spec.dtype}, expected one of {', '.join(WIDE)}; cast it first.")
    check_rank("activation", "h", "h", h.shape)
    if probs is not None:
        check_rank("activation", "probs", "probs", probs.shape)
    if activation.gated and h.shape[1] % 2:
        raise ValueError(
            f"`h`: shape {h.shape}, expected an even number of columns for {activation.kind}, gate and linear half; "
            "check the width of the layer in front."
        )
    activation.fc1_width(h.shape[1] // 2 if activation.gated else h.shape[1])  # refuses an interleave that does not fit
    if probs is not None and probs.shape != h.shape[:1]:
        raise ValueError(
            f"`probs`: shape {probs.shape}, expected ({h.shape[0]},) = all rows of `h`; pass one probability per row."
        )


def activate(run: Runner, activation: Activation, h: Array, group_sizes: Array, probs: Array | None) -> Array:
    """z [M, F] in the dtype of h [M, W]; rows past the groups are zero."""
    spec = run.spec(h)
    check(activation, spec, None if probs is None else run.spec(probs))
    p = None if probs is None else run.cast(probs, "float32")
    call = calls.activation(
        spec,
        run.spec(group_sizes),
        spec.dtype,
        activation=activation,
        row_scale=None if p is None else run.spec(p),
    )
    return run(call, (h, group_sizes, p))[0]


def activate_grads(
    run: Runner,
    activation: Activation,
    h: Array,
    group_sizes: Array,
    probs: Array | None,
    dz: Array,
    wanted: tuple[bool, bool],
) -> tuple[Array | None, Array | None]:
    """(dh [M, W] = p dz act'(h), dp [M] float32 = <dz, act(h)>), each if `wanted` asks for it."""
    p = None if probs is None else run.cast(probs, "float32")
    call = calls.activation_grad(
        run.spec(dz),
        run.spec(h),
        run.spec(group_sizes),
        run.spec(h).dtype,
        activation=activation,
        wanted=(wanted[0], False, wanted[1]),
        row_scale=None if p is None else run.spec(p),
    )
    results: Any = run(call, (dz, h, group_sizes, p, None))
    return results[0], results[2]
