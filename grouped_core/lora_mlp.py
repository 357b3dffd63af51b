"""Low-rank adapters of the frozen weights of the experts' MLP (docs/lora.md), with gradients of A and B.

    h = x W1 + u1 B1 + b1, rounded;  z = p act(h), rounded;  y = z W2 + u2 B2 + p b2
    u1 = s1 (drop(x) A1), u2 = s2 (drop(z) A2);  v2 = s2 (dy B2^T), v1 = s1 (dh B1^T); all four rounded
    dz = dy W2^T + drop(v2 A2^T);  dx = dh W1^T + drop(v1 A1^T)
    dA1 = drop(x)^T v1;  dB1 = u1^T dh;  dA2 = drop(z)^T v2;  dB2 = u2^T dy

It runs `grouped_core.mlp`, or `grouped_core.routed` for tokens, adds these terms to their products, and returns the
operands of the gradients of A and B instead of those of the weight gradients. Letters: G groups, M rows, K hidden size
of the model, F expert width, W columns of h, r rank.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any, NamedTuple

from grouped_core import lora, mlp, mlp_spec, routed
from grouped_core.calls import ArraySpec
from grouped_core.formats import wide
from grouped_core.gradients import MainGrads, Term, plain_rows, weight_grad
from grouped_core.linear_spec import Linear
from grouped_core.lora import Adapter
from grouped_core.mlp import AtHidden, Beside
from grouped_core.mlp_spec import Mlp, MlpNeeds, MlpSpecs, needs_dh, needs_dz
from grouped_core.products import Array, Low, Runner
from grouped_core.quantizing import Extras
from grouped_core.recipes import plain

PLACES = (f"{lora.LORA}[0]", f"{lora.LORA}[1]")
"""Names of the two adapters in messages."""


class Adapters(NamedTuple):
    """The adapters of both weights, or None; static parameters."""

    wi: Adapter | None = None
    wo: Adapter | None = None


class Factors(NamedTuple):
    """A and B of both adapters: arrays, specs or any other thing that each has; None where there is no adapter."""

    a_wi: Any = None
    b_wi: Any = None
    a_wo: Any = None
    b_wo: Any = None


def option(given: Any, scaling: Any, dropout: Any, key: Any) -> tuple[Adapters, Factors]:
    """`lora=` of a public function of an MLP, with its options.

    Raises:
        ValueError: not a pair of pairs or None, or an option does not fit (`lora.option`).
    """
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(
            f"`{lora.LORA}`: {type(given).__name__}, expected a pair ((A, B) of wi, (A, B) of wo); put None where a "
            "weight has no adapter."
        )
    static: list[Adapter | None] = []
    factors: list[Any] = []
    shared = lora.option(lora.LORA, scaling, dropout, key)
    for stream, (place, pair) in enumerate(zip(PLACES, given, strict=True)):
        static.append(None if pair is None else dataclasses.replace(shared, name=place, stream=stream))
        factors += (None, None) if pair is None else lora.pair_option(pair, place)
    if static == [None, None]:
        raise ValueError(f"`{lora.LORA}`: (None, None), expected an adapter of a weight; leave it out, or pass one.")
    return Adapters(*static), Factors(*factors)


def accumulators_option(given: Any) -> Factors | str | None:
    """`lora_wgrad_accum=` of a public function of an MLP as those of the four factors; text and None as they are.

    Raises:
        ValueError: it has not the structure of `lora`.
    """
    name = f"{lora.LORA}_wgrad_accum"
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"`{name}`: {type(given).__name__}, expected None, or two pairs as `{lora.LORA}` has them.")
    found: list[Any] = []
    for at, each in enumerate(given):
        found += lora.accumulators_option(each, f"{name}[{at}]")
    return Factors(*found)


@lru_cache(maxsize=1024)
def check(op: Mlp, adapters: Adapters, specs: MlpSpecs, factors: Factors, key: ArraySpec | None) -> None:
    """Refuses adapters that do not fit an MLP, which is checked already. Raises what `lora.check` raises."""
    first, second = op.fc1(), op.fc2()
    if adapters.wi is not None:
        lora.check(first, adapters.wi, specs.x, specs.wi, factors.a_wi, factors.b_wi, key)
    if op.paired:
        lora.check_whole(op.names.wi, lora.LORA)
    if adapters.wo is not None:
        z = ArraySpec((specs.x.shape[0], specs.wo.shape[second.weight_axes()[0]]), wide(specs.x.dtype))
        lora.check(second, adapters.wo, z, specs.wo, factors.a_wo, factors.b_wo, key)


@lru_cache(maxsize=1024)
def of_base(op: Mlp, dtype: str) -> Mlp:
    """`op` with rows and gradients in plain formats where the gradients of A and B read them.

    Args:
        dtype: the dtype of x.
    """
    if op.recipe is None or not op.recipe.quantized:
        return op
    return dataclasses.replace(op, recipe=op.recipe.replace(wgrad=plain(wide(dtype)).wgrad))


NOTHING = Factors()


class LoraMlpNeeds(NamedTuple):
    """Which gradients the caller asked for. The weights are frozen, so they have none."""

    x: bool = True
    a_wi: bool = True
    b_wi: bool = True
    a_wo: bool = True
    b_wo: bool = True
    probs: bool = True
    wi_bias: bool = True
    wo_bias: bool = True


NO_NEEDS = LoraMlpNeeds(*[False] * len(LoraMlpNeeds._fields))


@lru_cache(maxsize=1024)
def base_needs(adapters: Adapters, needs: LoraMlpNeeds) -> MlpNeeds:
    """The gradients to request from an MLP without adapters, so that it makes all rows that those of A and B read.

    `wi` asks for the unquantised gradient of the hidden rows, `wo` for the activated rows.
    """
    of_wi = needs.a_wi or needs.b_wi or (adapters.wi is not None and needs.x)
    return MlpNeeds(needs.x, of_wi, needs.a_wo, needs.probs, needs.wi_bias, needs.wo_bias)


class Kept(NamedTuple):
    """Which arrays backward reads: those of an MLP; the rows of both A [M, r]; the four factors."""

    base: mlp_spec.Kept
    u_wi: bool
    u_wo: bool
    factors: Factors


@lru_cache(maxsize=1024)
def kept(
    op: Mlp, adapters: Adapters, needs: LoraMlpNeeds, has_probs: bool, has_wi_bias: bool, has_wo_bias: bool
) -> Kept:
    """What backward reads for the gradients in `needs`; nothing is kept for weight gradients of the base."""
    of_base = base_needs(adapters, needs)
    base = mlp_spec.kept(op, of_base, has_probs, has_wi_bias, has_wo_bias)
    again = base.x and op.residuals.policy == "save_input"
    dz, dh = needs_dz(of_base), needs_dh(of_base)
    of_wi, of_wo = adapters.wi is not None, adapters.wo is not None
    return Kept(
        base=base._replace(x=needs.a_wi or again),
        u_wi=of_wi and (needs.b_wi or again),
        u_wo=needs.b_wo,
        factors=Factors(
            a_wi=of_wi and needs.x,
            b_wi=of_wi and ((dh and (needs.x or needs.a_wi)) or again),
            a_wo=of_wo and dz,
            b_wo=of_wo and (dz or needs.a_wo),
        ),
    )


class Adapted(Beside):
    """The terms of the adapters in one pass of an MLP.

    Attributes:
        u: the products with A of both adapters, [M, r]: made in forward, given in backward where it reads them.
        v: their gradients. dy: the unquantised gradient of y [M, K]. None until they are made.
        new_b: whether the gradients of B are new arrays now, so that they may be made along with v.
        b: those that were made so.
    """

    def __init__(
        self,
        run: Runner,
        op: Mlp,
        adapters: Adapters,
        factors: Factors,
        key: Array | None,
        needs: LoraMlpNeeds = NO_NEEDS,
        u: tuple[Array | None, Array | None] = (None, None),
        new_b: tuple[bool, bool] = (False, False),
    ) -> None:
        self.run, self.adapters, self.factors, self.key, self.needs = run, adapters, factors, key, needs
        self.linears: tuple[Linear, Linear] = (op.fc1(), op.fc2())
        self.reads_x, self.reads_z = adapters.wi is not None, adapters.wo is not None
        self.u: list[Array | None] = list(u)
        self.v: list[Array | None] = [None, None]
        self.b: list[Array | None] = [None, None]
        self.new_b = (new_b[0] and needs.b_wi, new_b[1] and needs.b_wo)
        self.dy: Array | None = None

    def _pair(self, at: int) -> tuple[Any, Any]:
        """A and B of product `at`."""
        return self.factors[2 * at], self.factors[2 * at + 1]

    def _forward(self, at: int, rows: Array, group_sizes: Array) -> Low | None:
        adapter, linear, (a, b) = self.adapters[at], self.linears[at], self._pair(at)
        if adapter is None:
            return None
        if self.u[at] is not None:
            return Low(self.u[at], b, linear.weight_axes()[0])
        low = lora.beside_forward(self.run, linear, adapter, rows, a, b, group_sizes, self.key)
        self.u[at] = low.rows
        return low

    def _backward(self, at: int, dy: Array, group_sizes: Array, *, asked: bool, through: bool) -> Low | Term | None:
        """Makes v, if `asked` or needed to go `through` A; returns the term drop(v A^T) with `through`, else None."""
        adapter, linear, (a, b) = self.adapters[at], self.linears[at], self._pair(at)
        if adapter is None or not (asked or through):
            return None
        rows_b = self.u[at] if self.new_b[at] else None
        v, self.b[at] = lora.low_gradients(self.run, linear, adapter, dy, b, group_sizes, rows_b)
        self.v[at] = v
        return lora.beside_backward(self.run, linear, adapter, v, a, group_sizes, self.key) if through else None

    def first(self, x: Array, group_sizes: Array) -> Low | None:
        """Returns u1 B1."""
        return self._forward(0, x, group_sizes)

    def second(self, z: Array, group_sizes: Array) -> Low | None:
        """Returns u2 B2."""
        return self._forward(1, z, group_sizes)

    def hidden(self, dy: Array, group_sizes: Array) -> Low | Term | None:
        """Returns drop(v2 A2^T)."""
        through = needs_dz(base_needs(self.adapters, self.needs))
        if self.adapters.wo is not None and (through or self.needs.a_wo or self.needs.b_wo):
            self.dy = plain_rows(self.run, dy, group_sizes)
        return self._backward(1, self.dy, group_sizes, asked=self.needs.a_wo, through=through)

    def input(self, dh: Array, group_sizes: Array) -> Low | Term | None:
        """drop(v1 A1^T)."""
        return self._backward(0, dh, group_sizes, asked=self.needs.a_wi, through=self.needs.x)

    def rows_of_a(self, at: int, rows: Array | None, group_sizes: Array) -> Array | None:
        """The rows that A of product `at` multiplies: `rows`, with elements dropped."""
        adapter = self.adapters[at]
        if adapter is None or rows is None:
            return None
        return lora.dropped(self.run, adapter, rows, group_sizes, self.key)

    def grads(self, at: int, rows: Array | None, dy: Array | None, group_sizes: Array) -> PairGrads:
        """What the gradients of A and B of product `at` are made from.

        Args:
            rows: those that A multiplies, before elements are dropped. dy: the unquantised gradient of the product.
        """
        needs_a, needs_b = self.needs[1 + 2 * at : 3 + 2 * at]
        later = needs_b and self.b[at] is None
        return PairGrads(
            rows_a=self.rows_of_a(at, rows, group_sizes) if needs_a else None,
            dy_a=self.v[at] if needs_a else None,
            rows_b=self.u[at] if later else None,
            dy_b=dy if later else None,
            b=self.b[at],
        )


class PairGrads(NamedTuple):
    """The operands of the gradients of A and B of one adapter (`gradients.weight_grad`), None where not needed.

    The gradient of B is here where it was made along with v; then it has no operands.
    """

    rows_a: Array | None = None
    dy_a: Array | None = None  # [M, r]
    rows_b: Array | None = None  # [M, r]
    dy_b: Array | None = None
    b: Array | None = None


class Forward(NamedTuple):
    """What the rule of an MLP found, and the rows u of both adapters [M, r] where backward reads them."""

    base: Any
    u_wi: Array | None
    u_wo: Array | None


def forward(
    run: Runner,
    op: Mlp,
    adapters: Adapters,
    factors: Factors,
    key: Array | None,
    operands: tuple[Any, ...],
    *,
    needs: LoraMlpNeeds = NO_NEEDS,
    extras: tuple[Extras, Extras] = mlp.NO_EXTRAS,
) -> Forward:
    """The MLP with adapters.

    Args:
        factors: A [G, K, r] and B [G, r, W] of wi, A [G, F, r] and B [G, r, K] of wo; all with the last two axes
            swapped when transposed; arrays or `Listed`. key: uint32 [2], the key of the dropout.
        operands: those of `mlp.mlp` from x to out, or of `routed.forward` where the rows are those of tokens.
    """
    rule = mlp.mlp if op.keeps_rows else routed.forward
    x, of_bias = run.spec(operands[0]), operands[5:7] if op.keeps_rows else operands[6:8]
    probs = operands[4] is not None if op.keeps_rows else True
    op = of_base(op, x.dtype)
    beside = Adapted(run, op, adapters, factors, key)
    found = rule(run, op, *operands, needs=base_needs(adapters, needs), extras=extras, beside=beside)
    keep = kept(op, adapters, needs, probs, *[each is not None for each in of_bias])
    if isinstance(found, mlp.Forward) and not keep.base.x:
        found = found._replace(x=None)
    u_wi, u_wo = beside.u
    return Forward(found, u_wi if keep.u_wi else None, u_wo if keep.u_wo else None)


def at_hidden(
    run: Runner,
    op: Mlp,
    adapters: Adapters,
    specs: MlpSpecs,
    factors: Factors,
    key: Array | None,
    u: tuple[Array | None, Array | None],
    operands: tuple[Any, ...],
    needs: LoraMlpNeeds,
    *,
    new_b: bool = False,
    **options: Any,
) -> tuple[AtHidden, PairGrads]:
    """The first stage of backward, and the operands of the gradients of A and B of wo.

    Args:
        new_b: the gradient of B of wo is a new array now, so it may be made along with v.
        factors, u: as `kept` names them. operands: those of `mlp.at_hidden` or `routed.at_hidden`, from x to dy.
        options: the keywords of these.
    """
    rule: Any = mlp.at_hidden if op.keeps_rows else routed.at_hidden
    sizes = operands[5] if op.keeps_rows else operands[5].sizes
    op = of_base(op, specs.x.dtype)
    beside = Adapted(run, op, adapters, factors, key, needs, u, (False, new_b))
    found = rule(run, op, specs, *operands, base_needs(adapters, needs), beside=beside, **options)
    return found, beside.grads(1, found.z, beside.dy, sizes)


def first_product(
    run: Runner,
    op: Mlp,
    adapters: Adapters,
    specs: MlpSpecs,
    factors: Factors,
    key: Array | None,
    u_wi: Array | None,
    operands: tuple[Any, ...],
    needs: LoraMlpNeeds,
    *,
    new_b: bool = False,
    **options: Any,
) -> tuple[MainGrads, PairGrads]:
    """The second stage of backward, and the operands of the gradients of A and B of wi.

    Args:
        new_b: the gradient of B of wi is a new array now, so it may be made along with v.
        operands: those of `mlp.first_product` or `routed.first_product`, from x to of_dh. options: their keywords.
    """
    rule: Any = mlp.first_product if op.keeps_rows else routed.first_product
    sizes = operands[2] if op.keeps_rows else operands[2].sizes
    op = of_base(op, specs.x.dtype)
    x, *others = operands
    beside = Adapted(run, op, adapters, factors, key, needs, (u_wi, None), (new_b, False))
    given = (x if needs.a_wi else None, *others)
    found = rule(run, op, specs, *given, base_needs(adapters, needs), beside=beside, **options)
    return found, beside.grads(0, found.rows, found.dy, sizes)


def products(op: Mlp, adapters: Adapters) -> tuple[Linear | None, ...]:
    """The products with A and B of both adapters, in the order of `Factors`."""
    found: list[Linear | None] = []
    for linear, adapter in zip((op.fc1(), op.fc2()), adapters, strict=True):
        found += (None, None) if adapter is None else (adapter.down(linear), adapter.up(linear))
    return tuple(found)


def grads_of_factors(
    run: Runner,
    op: Mlp,
    adapters: Adapters,
    specs: Factors,
    grads: tuple[PairGrads, PairGrads],
    group_sizes: Array,
    into: Factors = NOTHING,
) -> Factors:
    """The gradients of the four factors, None where not needed; they are added to the accumulators `into`."""
    found: list[Array | None] = []
    rows = [part for each in grads for part in ((each.rows_a, each.dy_a, None), (each.rows_b, each.dy_b, each.b))]
    for product, spec, (of, dy, made), accum in zip(products(op, adapters), specs, rows, into, strict=True):
        if product is None or of is None:
            found.append(made)
            continue
        work = (run, product, spec, of, dy, group_sizes)
        found.append(weight_grad(*work, into=accum, accumulate=accum is not None))
    return Factors(*found)


def kept_operands(keep: Kept, factors: Factors) -> Factors:
    """The factors that backward reads; None for the others."""
    return Factors(*[each if wanted else None for each, wanted in zip(factors, keep.factors, strict=True)])
