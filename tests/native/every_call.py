"""Calls of every kind, in every form that the frontends ask for, for tests of the whole native edge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grouped_core import calls
from grouped_core import routing_calls as routing
from grouped_core.activations import Activation
from grouped_core.calls import ArraySpec, Call, LowRank, QuantizedResult
from grouped_core.formats import FORMATS, PLAIN, WIDE
from grouped_core.recipes import BF16, FP8Current
from grouped_core.routing_calls import GroupLimit, Scores

RANK = 8
"""Of low-rank products beside others."""


def low_rank(groups: int, rows: int, n: int, dtype: str, axis: int, *, table: bool = False) -> LowRank:
    """Specs of a low-rank product whose result has n columns."""
    weight = (groups, RANK, n) if axis == 1 else (groups, n, RANK)
    return LowRank(ArraySpec((rows, RANK), dtype), ArraySpec(weight, dtype), axis, table)


def products(groups: int, rows: int, k: int, n: int) -> Iterator[Call]:
    """Products of every form, plain and quantised, with every combination of optional operands."""
    sizes, scale = ArraySpec((groups,), "int32"), ArraySpec((rows,), "float32")
    for dtype in PLAIN:
        x, bias = ArraySpec((rows, k), dtype), ArraySpec((groups, n), "float32")
        w, transposed = ArraySpec((groups, k, n), dtype), ArraySpec((groups, n, k), dtype)
        into = ArraySpec((groups, k, n), "float32")
        dy, dtype = ArraySpec((rows, n), dtype), dtype if dtype in WIDE else "bfloat16"
        beside: dict[str, Any] = {"bias": bias, "row_scale": scale}
        yield calls.grouped_matmul(x, w, (1, 1), sizes, dtype, recipe=BF16, **beside, scale_bias=True)
        yield calls.grouped_matmul(
            x, transposed, (1, 2), sizes, dtype, recipe=BF16, **beside, tables=(True, True, False)
        )
        yield calls.grouped_matmul(x, w, (1, 1), sizes, "float32", recipe=BF16, into=ArraySpec((rows, n), "float32"))
        yield calls.grouped_matmul(x, dy, (0, 0), sizes, "float32", recipe=BF16, into=into, accumulate=True)
        yield calls.grouped_matmul(x, dy, (0, 0), sizes, "float32", recipe=BF16, into=into, tables=(False, False, True))
        wide = ArraySpec((rows, 2 * k), x.dtype)
        yield calls.grouped_matmul(wide, transposed, (1, 2), sizes, dtype, recipe=BF16, rhs_up=transposed)
        yield calls.grouped_matmul(wide, dy, (0, 0), sizes, dtype, recipe=BF16, halves=(2, 0))
        yield calls.grouped_matmul(x, w, (1, 1), sizes, dtype, recipe=BF16, result_half=2)
        low: dict[str, Any] = {"low": low_rank(groups, rows, n, dtype, 1), "into": ArraySpec((rows, n), dtype)}
        yield calls.grouped_matmul(x, w, (1, 1), sizes, dtype, recipe=BF16, **beside, scale_bias=True, **low)
        low = {"low": low_rank(groups, rows, n, dtype, 2, table=True), "tables": (True, True, False)}
        yield calls.grouped_matmul(x, transposed, (1, 2), sizes, dtype, recipe=BF16, **beside, **low)
        if x.dtype in WIDE:
            for axis, table in ((1, True), (2, False)):
                of = low_rank(groups, rows, n, dtype, 3 - axis)
                given = (dy, of.weight, axis, of.rows, sizes, ("float32", dtype))
                yield calls.low_rank_grads(*given, recipe=BF16, table=table)
    for name, format in FORMATS.items():
        if format.plain:
            continue
        for dtype in ("bfloat16", "float32"):
            x, dy = ArraySpec((rows, k), dtype), ArraySpec((rows, n), dtype)
            weight = calls.spec_in_format(format, (groups, n, k), 2, dtype)
            yield calls.grouped_matmul(x, weight, (1, 2), sizes, dtype, recipe=BF16)
            low = {"low": low_rank(groups, rows, n, dtype, 2)}
            yield calls.grouped_matmul(x, weight, (1, 2), sizes, dtype, recipe=BF16, row_scale=scale, **low)
            if format.block:  # codes contracted along the axis that they were not quantised for
                other = calls.spec_in_format(format, (groups, k, n), 2, dtype)
                low = {"low": low_rank(groups, rows, n, dtype, 1)}
                yield calls.grouped_matmul(x, other, (1, 1), sizes, dtype, recipe=BF16, **low)
            if format.square or (name.startswith("mxfp4") and dtype == "float32"):
                continue
            quantized_x = calls.spec_in_format(format, (rows, k), 1, dtype, groups)
            for recipe in (BF16, FP8Current.replace(accumulate="fast")):
                yield calls.grouped_matmul(quantized_x, weight, (1, 2), sizes, dtype, recipe=recipe, row_scale=scale)
            if format.segment:
                lhs, rhs = (calls.spec_in_format(format, each.shape, 0, dtype, groups) for each in (x, dy))
                yield calls.grouped_matmul(lhs, rhs, (0, 0), sizes, "float32", recipe=BF16)


def fused(groups: int, rows: int, k: int, n: int) -> Iterator[Call]:
    """Products with an activation, with plain and quantised results."""
    sizes, scale = ArraySpec((groups,), "int32"), ArraySpec((rows,), "float32")
    x, hidden = ArraySpec((rows, k), "bfloat16"), ArraySpec((rows, 2 * n), "bfloat16")
    gated, relu = Activation("swiglu"), Activation("relu")
    w1, w2 = ArraySpec((groups, k, 2 * n), "bfloat16"), ArraySpec((groups, k, n), "bfloat16")
    options: dict[str, Any] = {"recipe": BF16, "row_scale": scale}
    yield calls.grouped_matmul_act(x, w1, 1, sizes, "bfloat16", activation=gated, **options)
    yield calls.grouped_matmul_act(x, w1, 1, sizes, "float32", activation=relu, **options, tables=(True, False))
    yield calls.grouped_matmul_act(x, w2, 1, sizes, "bfloat16", activation=gated, **options, rhs_up=w2)
    given = (x, w2, 1, sizes, hidden, "bfloat16")
    low: dict[str, Any] = {"low": low_rank(groups, rows, 2 * n, "bfloat16", 1), **options}
    yield calls.grouped_matmul_act(x, w1, 1, sizes, "bfloat16", activation=gated, **low)
    low["low"] = low_rank(groups, rows, n, "bfloat16", 2, table=True)
    every: dict[str, Any] = {"activation": gated, "wanted": (True, True, True)}
    yield calls.grouped_matmul_dact(*given, **every, **low, row_base=scale)
    yield calls.grouped_matmul_dact(*given, activation=gated, wanted=(True, True, True), **options, row_base=scale)
    yield calls.grouped_matmul_dact(*given, activation=gated, wanted=(False, False, True), **options, table=True)
    for format in FORMATS.values():
        if format.plain or format.square:
            continue
        quantized = QuantizedResult(format, (True, bool(format.segment)), amax=True, merge=True, scale=format.delayed)
        both: dict[str, Any] = {"quantized": quantized, "hidden": False, **options}
        yield calls.grouped_matmul_act(x, w1, 1, sizes, "bfloat16", activation=gated, **both)
        cross = QuantizedResult(format, (False, True), scale=format.delayed) if format.segment else None
        both = {"quantized": quantized, "quantized_activated": cross, **options}
        yield calls.grouped_matmul_dact(*given, activation=gated, wanted=(False, False, True), **both)
        codes = calls.spec_in_format(format, x.shape, 1, "bfloat16", groups)
        weights = [calls.spec_in_format(format, (groups, width, k), 2, "bfloat16") for width in (2 * n, n)]
        made = quantized._replace(amax=False, merge=False)
        for results in (None, made):
            both = {"activation": gated, "quantized": results, **options}
            yield calls.grouped_matmul_act(codes, weights[0], 2, sizes, "bfloat16", **both, hidden=results is None)
            both |= {"quantized_activated": cross if results else None, "wanted": (results is None, False, False)}
            yield calls.grouped_matmul_dact(codes, weights[1], 2, sizes, hidden, "bfloat16", **both)
        low["low"] = low_rank(groups, rows, 2 * n, "bfloat16", 2)
        yield calls.grouped_matmul_act(x, weights[0], 2, sizes, "bfloat16", activation=gated, **low)
        yield calls.grouped_matmul_act(x, w1, 1, sizes, "bfloat16", activation=gated, quantized=made, **low)
        low["low"] = low_rank(groups, rows, n, "bfloat16", 1)
        if format.block:
            other = calls.spec_in_format(format, (groups, k, n), 2, "bfloat16")
            yield calls.grouped_matmul_dact(x, other, 1, sizes, hidden, "bfloat16", **every, **low)
            yield calls.grouped_matmul_dact(x, other, 1, sizes, hidden, "bfloat16", **every, **options)


def others(groups: int, rows: int, k: int, n: int) -> Iterator[Call]:
    """Everything but products."""
    sizes, scale = ArraySpec((groups,), "int32"), ArraySpec((rows,), "float32")
    x, hidden = ArraySpec((rows, n), "bfloat16"), ArraySpec((rows, 2 * n), "float32")
    yield calls.group_sum(x, sizes, "float32", scale)
    vectors = (x, ArraySpec((groups, n), "bfloat16"))
    yield calls.row_dot(sizes, rows, (x, x), vectors, True)
    yield calls.row_dot(sizes, rows, None, vectors)
    yield calls.scale_rows(x, scale, sizes, "bfloat16", x)
    base = ArraySpec((rows, n), "float32")
    yield calls.add_rows(x, sizes, "bfloat16", base=base, into=x, factor=0.5, rate=0.25, stream=1)
    yield calls.add_rows(x, sizes, "float32", factor=2.0)
    yield calls.activation(
        hidden, sizes, "float16", activation=Activation("swiglu", interleave=n or 1), row_scale=scale
    )
    yield calls.activation(x, sizes, "float32", activation=Activation("gelu_tanh"))
    wanted: dict[str, Any] = {"wanted": (True, True, True), "row_scale": scale, "row_base": scale}
    yield calls.activation_grad(x, hidden, sizes, "float32", activation=Activation("situ_glu"), **wanted)
    state = ArraySpec((n, groups), "float32")
    yield calls.scale_update(state, ArraySpec((n, k, groups), "float32"), "max", reuse=True)


def quantized(groups: int, rows: int, k: int, n: int) -> Iterator[Call]:
    """Everything that makes or reads quantised arrays but multiplies none."""
    sizes, x, w = ArraySpec((groups,), "int32"), ArraySpec((rows, k), "bfloat16"), ArraySpec((groups, n, k), "float32")
    for format in FORMATS.values():
        if format.plain:
            continue
        beside: dict[str, Any] = {"amax": True, "merge": True, "key": format.stochastic, "stream": 3}
        if not format.square:
            for forms in ((True, False), (True, True), (False, False)):
                if format.segment or not forms[1]:
                    yield calls.quantize(x, format, forms, sizes, **beside, scale=format.delayed)
                if forms[0] and (format.segment or not forms[1]):
                    yield calls.quantize(x, format, forms, sizes, key=format.stochastic)
                    yield calls.quantize(x, format, forms, sizes, gather=(2 * rows + 1, 2))
            for axis in (1, 0) if format.segment else (1,):
                rows_spec = calls.spec_in_format(format, x.shape, axis, "bfloat16", groups)
                yield calls.dequantize(rows_spec, sizes, "float32")
        if not format.rotate:
            yield calls.quantize(w, format, (True, True), None, **beside, table=True)
            yield calls.quantize(w, format, (True, True), None, **beside, skip=True, reuse=True)
            for axis in (2, 1):
                yield calls.dequantize(calls.spec_in_format(format, w.shape, axis, "float32"), None, "bfloat16")
        if not format.rotate and not format.stochastic:
            yield calls.shard_amax(w, format)
            yield calls.shard_cast(w, format, (True, True), scale=format.delayed, skip=True)


def routed(experts: int, tokens: int, width: int, bins: int) -> Iterator[Call]:
    """Everything that routes tokens and moves their rows, with two of them per token, or one if there is one."""
    k = 1 if experts == 1 else 2
    logits, chosen = ArraySpec((tokens, experts), "float32"), ArraySpec((tokens, k), "int32")
    weights, mask = ArraySpec((tokens, k), "float32"), ArraySpec((tokens,), "uint8")
    bias, sizes = ArraySpec((experts,), "float32"), ArraySpec((2,), "int32")
    yield routing.split_parts(ArraySpec((tokens, width), "float32"), 1, "112123")
    yield routing.sum_parts(ArraySpec((tokens, 3 * width), "float32"), 1, 3)
    yield routing.jitter(logits, 0.1)
    yield routing.sinkhorn(logits, 2, mask)
    yield routing.router(logits, k, Scores(), GroupLimit(), bias=bias, mask=mask)
    yield routing.router(logits, k, Scores("sigmoid", normalize=True), GroupLimit(), ranking=logits)
    yield routing.router(logits, k, Scores(after_topk=True), GroupLimit(), given=chosen)
    yield routing.router_sums(logits, chosen, sizes, "softmax")
    yield routing.router_sums(logits, chosen, sizes, "sigmoid", mask)
    yield routing.router_grad(logits, k, Scores("sqrt_softplus"), mask=mask, sequence_sizes=sizes)
    yield routing.router_grad(logits, k, Scores(after_topk=True), kept=chosen)
    yield routing.chosen_softmax_grad(ArraySpec((40, k), "float32"), experts, 2.0)
    yield routing.router_losses(ArraySpec((2, experts), "float32"), k, 0.01, 0.001)
    yield routing.router_losses(ArraySpec((40, experts), "float32"), k, 0.01, 0.001, dropped=True)
    yield routing.count_experts(chosen, sizes, experts)
    yield routing.drop_slots(chosen, experts, 2, by_weight=True)
    yield routing.drop_slots(chosen, experts, 2, by_weight=False)
    yield routing.sort_slots(chosen, experts, tokens * k, 1)
    yield routing.sort_slots(chosen, experts, tokens * k, 8, weights=True)
    counts, rows_of = ArraySpec((experts,), "int32"), ArraySpec((tokens * k,), "int32")
    yield routing.send_order(counts, rows_of, chosen, 1, tokens)
    yield routing.send_order(counts, rows_of, chosen, experts, 4, weights=True)
    sent = ArraySpec((experts * 4,), "int32")
    yield routing.rank_slots(chosen, experts, 1)
    yield routing.row_slots(chosen, sent, experts, 1, k)
    yield routing.row_slots(chosen, sent, experts, experts, 1, weights=True)
    for dtype in ("bfloat16", "float32", "uint8"):
        rows, source = ArraySpec((tokens, width), dtype), ArraySpec((tokens * k,), "int32")
        yield routing.gather_rows(rows, source, k)
        if dtype != "uint8":
            yield routing.gather_rows(rows, source, k, weights)
            yield routing.gather_rows(rows, source, k, None, chosen)
            many = ArraySpec((tokens * k, width), dtype)
            yield routing.combine_rows(many, chosen, "bfloat16", weights)
            yield routing.combine_rows(many, chosen, "float32", into=ArraySpec((tokens, width), "float32"))
            yield routing.combine_dot(many, rows, chosen)
    yield routing.gather_rows(ArraySpec((tokens * k,), "float32"), chosen)
    yield routing.gather_rows(ArraySpec((width, tokens), "float32"), ArraySpec((tokens * k,), "int32"), k, axis=1)
    yield routing.pad_groups(ArraySpec((experts,), "int32"), tokens, 16)
    ids = ArraySpec((tokens,), "int32")
    yield routing.hash_experts(ids, k, experts)
    yield routing.hash_experts(ids, k, experts, ArraySpec((width, k), "int32"))
    yield routing.bias_update(bias, 0.001)
    if experts != 1:  # every token has one more, whose score is the bound of margins
        yield routing.margin_histogram(logits, k, "sigmoid", bins, -1.0, 1.0, mask)
    yield routing.quantile_bias(ArraySpec((experts, bins), "int32"), k, -1.0, 1.0)


def every_call(groups: int, rows: int, k: int, n: int) -> list[Call]:
    """All of them, for weights [G, K, N] or the other way round and M rows; not every call has K and N."""
    return [call for make in (products, fused, others, quantized, routed) for call in make(groups, rows, k, n)]
