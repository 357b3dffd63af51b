"""Problems of routing, its rules run on NumPy arrays, and a dense oracle of the whole layer in float64.

Letters: T tokens, E experts, k experts per token, H hidden size, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from grouped_core import reference_routing, routing
from grouped_core.arrays import ArrayRunner
from grouped_core.calls import MAX_ROWS, spec_of
from grouped_core.routing import Chosen, Losses, Sums
from grouped_core.routing_spec import Router, router_option
from tests import bounds, cases
from tests.torch_frontend.torch_tools import leaf, tensor

TOKENS = np.array([MAX_ROWS], np.int32)
"""One sequence of all tokens."""

ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "mixtral": {"normalize": True},
    "gpt_oss": {"after_topk": True},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "deepseek_v3": {"score": "sigmoid", "scale": 2.5, "num_groups": 4, "topk_groups": 2, "group_topk": 2},
    "sqrt_softplus": {"score": "sqrt_softplus"},
    "sinkhorn": {"sinkhorn": 4},
    "capacity_probs": {"capacity_factor": 1.0},
    "capacity_position": {"capacity_factor": 0.75, "drop": "position"},
}
"""Options of `topk_router`, by a name for tests."""


def draw(*shape: int, seed: object = 0, dtype: str = "float32") -> NDArray[Any]:
    """Normal values."""
    return cases.normal(shape, dtype, "torch_routing", seed)


def experts_of(tokens: int, k: int, experts: int, seed: int = 0) -> NDArray[np.int64]:
    """[T, k] distinct experts per token."""
    random = np.random.default_rng(seed)
    return np.argsort(random.random((tokens, experts)), axis=1)[:, :k].astype(np.int64)


def mask_of(tokens: int) -> NDArray[np.bool_]:
    """A mask with padding between and behind tokens."""
    return (np.arange(tokens) % 5 != 3) & (np.arange(tokens) < tokens - 1)


@dataclass(frozen=True)
class Rules:
    """The rules of the router on NumPy arrays: results, then the gradient of the logits."""

    op: Router
    logits: NDArray[Any]
    given: dict[str, Any]

    @staticmethod
    def of(logits: NDArray[Any], k: int, options: dict[str, Any], **given: Any) -> Rules:
        """`given`: the arrays of `routing.choose` besides logits, by name."""
        return Rules(router_option(logits.shape[1], k, **options), logits, given)

    @property
    def run(self) -> ArrayRunner:
        return ArrayRunner(self.logits)

    def choose(self) -> Chosen:
        """The choice and its sums."""
        return routing.choose(self.run, self.op, self.logits, TOKENS, **self.given)

    def losses(self, sums: Sums) -> Losses:
        """The losses, from the sums of one rank or of all."""
        return Losses(*(np.array(each) for each in routing.losses(self.run, self.op, sums)))

    def grad(self, chosen: Chosen, losses: Losses, d_weights: NDArray[Any], d_losses: Sequence[float]) -> NDArray[Any]:
        """The gradient of the logits."""
        slopes = np.array(d_losses, np.float32)
        given = {name: self.given.get(name) for name in ("mask", "key", "sequence_sizes")}
        operands = (chosen.read, chosen.first, chosen.experts, losses, TOKENS, d_weights, slopes, spec_of(self.logits))
        return routing.router_grad(self.run, self.op, *operands, **given)


# ---------------------------------------------------------------------------------------------------------------------
# The layer


@dataclass(frozen=True)
class Layer:
    """Operands of a layer as leaves: x [T, H], router [E, H], wi [E, 2F, H], wo [E, H, F], biases or None."""

    x: Tensor
    router: Tensor
    wi: Tensor
    wo: Tensor
    wi_bias: Tensor | None
    wo_bias: Tensor | None

    def leaves(self) -> dict[str, Tensor]:
        """Those that there are."""
        return {name: each for name, each in vars(self).items() if each is not None}

    def to(self, change: Callable[[Tensor], Tensor]) -> Layer:
        """Other leaves, each made from one of these."""
        return Layer(*(None if each is None else leaf(change(each)) for each in vars(self).values()))


def layer(
    tokens: int = 33, experts: int = 5, hidden: int = 32, width: int = 16, *, dtype: str = "float32", bias: bool = True
) -> Layer:
    """A layer of random values."""

    def made(name: str, *shape: int) -> Tensor:
        scale = np.float32(1 if name == "x" else 1 / np.sqrt(shape[-1]))
        return leaf(tensor((draw(*shape, seed=name) * scale).astype(cases.numpy_dtype(dtype))))

    biases = (made("wi_bias", experts, 2 * width), made("wo_bias", experts, hidden)) if bias else (None, None)
    return Layer(
        made("x", tokens, hidden),
        made("router", experts, hidden),
        made("wi", experts, 2 * width, hidden),
        made("wo", experts, hidden, width),
        *biases,
    )


def dense_mlp(p: Layer, weights: Tensor, experts: Tensor) -> Tensor:
    """y [T, H]: every expert runs on every token, and one-hot matrices of the weights [T, k] choose."""
    count, width = p.wi.shape[0], p.wo.shape[2]
    hot = torch.stack([(experts == e).to(weights.dtype) for e in range(count)])  # [E, T, k]
    share = (hot * weights).sum(dim=2)
    h = torch.einsum("th,ewh->etw", p.x, p.wi)
    h = h if p.wi_bias is None else h + p.wi_bias[:, None]
    z = torch.nn.functional.silu(h[..., :width]) * h[..., width:]
    y = torch.einsum("etf,ehf->eth", z, p.wo)
    y = y if p.wo_bias is None else y + p.wo_bias[:, None]
    return (share[..., None] * y).sum(dim=0)


def dense_router(logits: Tensor, experts: Tensor, op: Router) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, auxiliary loss, z-loss) of a choice, by the formulas; slots without an expert have weight 0."""
    inside = experts >= 0
    at = torch.where(inside, experts, 0).to(torch.int64)
    name = op.scores.score
    scores = {
        "softmax": lambda: logits.softmax(1),
        "sigmoid": logits.sigmoid,
        "sqrt_softplus": lambda: torch.nn.functional.softplus(logits).sqrt(),
    }[name]()
    probs = scores / scores.sum(1, keepdim=True)
    if op.scores.after_topk:
        weights = logits.gather(1, at).masked_fill(~inside, -torch.inf).softmax(1)
    else:
        weights = torch.where(inside, scores.gather(1, at), 0.0)
        weights = weights / (weights.sum(1, keepdim=True) + reference_routing.TINY) if op.scores.normalize else weights
    tokens, count = logits.shape
    load = torch.stack([(experts == e).sum() for e in range(count)]).to(logits.dtype)
    aux = op.aux_coeff * count / (op.k * tokens**2) * (probs.sum(0) * load).sum()
    return op.scores.scale * weights, aux, op.z_coeff * logits.logsumexp(1).square().mean()


def near(actual: Tensor | None, exact: Tensor | None, what: str, bound: float = bounds.LAYER) -> None:
    """Whether a result in float32 is as near to the exact one as `bound` says, norm over norm."""
    assert actual is not None, f"{what}: missing"
    assert exact is not None, f"{what}: missing in the oracle"
    error, norm = (actual.detach().double() - exact.detach()).norm(), exact.detach().norm()
    assert error <= bound * norm, f"{what}: error {error:.3g}, allowed {bound * norm:.3g}"
