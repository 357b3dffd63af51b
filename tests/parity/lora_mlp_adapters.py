"""The experts' MLP with adapters, of rows and of tokens, of both frontends with one signature over NumPy arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jax_grouped
import torch_bridge
from grouped_core.activations import Activation
from tests import cases
from tests.asserts import as_numpy
from tests.parity.adapters import to_torch
from tests.parity.mlp_adapters import problem as mlp_problem

Operands = dict[str, Any]
"""x, probs (of tokens: the weights of their places), the biases and the factors, of which some are None; besides these
wi, wo and group_sizes or, of tokens, experts [T, k]. In NumPy."""

FACTORS = ("a_wi", "b_wi", "a_wo", "b_wo")
NAMES = ("x", *FACTORS, "probs", "wi_bias", "wo_bias")
"""Operands that have gradients."""
PAIRS = {"wi": FACTORS[:2], "wo": FACTORS[2:]}


def problem(
    case: cases.Case,
    dtype: str,
    *,
    kind: str = "swiglu",
    transposed: bool = True,
    probs: bool = True,
    bias: bool = True,
    rank: int = 4,
    absent: str = "",
) -> tuple[Operands, Any]:
    """(operands, dy) of rows; `absent`: the weight without an adapter."""
    given = {"probs": "float32" if probs else None, "bias": dtype if bias else None}
    held, dy = mlp_problem(case, dtype, Activation(kind), transposed=transposed, **given)
    wide = Activation(kind).fc1_width(case.n)
    shapes = {"a_wi": (case.k, rank), "b_wi": (rank, wide), "a_wo": (case.n, rank), "b_wo": (rank, case.k)}
    for name, shape in shapes.items():
        factor = (cases.normal((case.groups, *shape), "float32", name) / np.float32(np.sqrt(shape[0]))).astype(dy.dtype)
        held[name] = np.ascontiguousarray(factor.swapaxes(1, 2)) if transposed else factor
    return held | dict.fromkeys(PAIRS.get(absent, ())), dy


def of_tokens(held: Operands, dy: Any, tokens: int, k: int = 2) -> tuple[Operands, Any]:
    """The same weights with tokens: some of their places have no expert, and one expert gets no row."""
    groups, rng = len(held["group_sizes"]), np.random.default_rng(tokens)
    experts = rng.integers(0, groups - 1, (tokens, k)).astype(np.int32)
    experts[1, 0], experts[2, :] = -1, groups
    x = cases.normal((tokens, held["x"].shape[1]), "float32", "tokens").astype(dy.dtype)
    weights = np.abs(cases.normal((tokens, k), "float32", "weights"))
    tokens_dy = cases.normal(x.shape, "float32", "dy of tokens").astype(dy.dtype)
    return {**held, "x": x, "probs": weights, "experts": experts}, tokens_dy


def lora_of(held: Operands) -> tuple[Any, Any]:
    """The argument of the public functions."""
    first, second = (tuple(held[name] for name in pair) for pair in PAIRS.values())
    return (None if first[0] is None else first, None if second[0] is None else second)


def _call(library: Any, held: Operands, options: dict[str, Any]) -> Any:
    """One of the public functions, by what is given: rows, tokens, or tokens whose rows are made by `route`."""
    options = {**options, "lora": lora_of(held), "wi_bias": held["wi_bias"], "wo_bias": held["wo_bias"]}
    weights = held["wi"], held["wo"]
    if held.get("experts") is None:
        return library.grouped_mlp(held["x"], *weights, held["group_sizes"], probs=held["probs"], **options)
    if not options.pop("by_rows", False):
        return library.routed_mlp(held["x"], held["experts"], held["probs"], *weights, **options)
    groups = len(held["group_sizes"])
    rows, sizes, permutation = library.route.permute(held["x"], held["experts"], groups, probs=held["probs"])
    y = library.grouped_mlp(rows, *weights, sizes, probs=permutation.probs, **options)
    return library.route.unpermute(y, permutation)


def _held(library: Any, given: Operands, base: str | None, transposed: bool, array: Any) -> Operands:
    held = {name: None if each is None else array(each) for name, each in given.items()}
    if base is not None:
        for name in ("wi", "wo"):
            held[name] = library.quantize(held[name], base, axis=2 if transposed else 1)
    return held


def _options(options: dict[str, Any], array: Any) -> tuple[str | None, dict[str, Any]]:
    base, key = options.pop("base", None), options.pop("key", None)
    return base, {**options, "lora_key": None if key is None else array(key)}


def by_jax(given: Operands, dy: Any, needs: set[str], **options: Any) -> dict[str, Any]:
    """y and the gradients that `needs` names, None where they are not asked for.

    Args:
        options: those of the public functions; `base`: the format of both weights; `key`: of dropout; `by_rows`: tokens
            are permuted and summed outside of the MLP, and every call is launched for itself, not as one program.
    """
    base, options = _options(options, jnp.asarray)
    held = _held(jax_grouped, given, base, options["rhs_transposed"], jnp.asarray)
    live = [name for name in NAMES if name in needs and held[name] is not None]

    def function(*some: Any) -> Any:
        return _call(jax_grouped, held | dict(zip(live, some, strict=True)), options)

    def run(dy: Any, *some: Any) -> tuple[Any, Any]:
        y, pull = jax.vjp(function, *some)
        return y, pull(dy)

    run = run if options.get("by_rows") else jax.jit(run)
    y, gradients = run(jnp.asarray(dy), *(held[name] for name in live))
    found = dict(zip(live, gradients, strict=True))
    return {"y": as_numpy(y), **{name: as_numpy(found[name]) if name in found else None for name in NAMES}}


def by_torch(given: Operands, dy: Any, needs: set[str], **options: Any) -> dict[str, Any]:
    """The same in PyTorch."""
    base, options = _options(options, to_torch)
    held = _held(torch_bridge, given, base, options["rhs_transposed"], to_torch)
    for name in NAMES:
        if name in needs and held[name] is not None:
            held[name].requires_grad_()
    y = _call(torch_bridge, held, options)
    if y.requires_grad:
        y.backward(to_torch(dy))
    grads = {name: None if held[name] is None else held[name].grad for name in NAMES}
    return {"y": as_numpy(y.detach()), **{n: None if g is None else as_numpy(g) for n, g in grads.items()}}
