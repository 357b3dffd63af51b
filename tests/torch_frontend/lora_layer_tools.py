"""Layers with adapters whose B is not zero, in the forms that tests of `torch_bridge.nn` loop over."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.formats import FORMATS, PLAIN
from grouped_core.recipes import Recipe
from torch_bridge import grouped_linear, grouped_mlp, nn, routed_mlp

G, H, F, R = 3, 32, 64, 4
SIZES = [7, 0, 9]
ROWS = 20
ALPHA = 2.0
SCALING = ALPHA / R
OPTIONS: dict[str, Any] = {"lora_rank": R, "lora_alpha": ALPHA}
LAYERS = ("GroupedLinear", "GroupedMLP", "Sequential")
WEIGHT_ONLY = Recipe(
    (PLAIN["bfloat16"], FORMATS["mxfp4"]),
    (PLAIN["bfloat16"], FORMATS["mxfp4"]),
    (PLAIN["bfloat16"], PLAIN["bfloat16"]),
)
"""Frozen weights of four bits beside plain rows."""


def made(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Standard normal values."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Problem(NamedTuple):
    """A layer, and what it is called with.

    Attributes:
        extra: what it takes besides rows. linears: its grouped layers in order.
    """

    module: Any
    x: Tensor
    dy: Tensor
    extra: tuple[Tensor, ...]
    linears: list[Any]

    def __call__(self, x: Tensor | None = None) -> Tensor:
        return self.module(self.x if x is None else x, *self.extra)

    def factors(self) -> list[Any]:
        """A and B of each layer in turn."""
        return [each for layer in self.linears for each in (layer.lora_A, layer.lora_B)]

    def weights(self, layer: Any) -> Any:
        """The frozen weights as an operand of the functions."""
        members = [each.detach() for each in layer.weight_parameters()]
        return members[0] if members[0].dim() == 3 else members

    def lora(self) -> Any:
        """The argument of the functions."""
        pairs = [(layer.lora_A, layer.lora_B) for layer in self.linears]
        return pairs[0] if len(pairs) == 1 else tuple(pairs)

    def function(self, x: Tensor | None = None, **options: Any) -> Tensor:
        """The function that the layer is documented to call."""
        x = self.x if x is None else x
        sizes, options = self.extra[0], {"lora": self.lora(), "lora_scaling": SCALING} | options
        first = self.linears[0]
        if len(self.linears) == 1:
            bias = first.biases()
            return grouped_linear(x, self.weights(first), sizes, bias=bias, **options)
        biases: Any = {"wi_bias": first.biases(), "wo_bias": self.linears[1].biases()}
        wi, wo = (self.weights(each) for each in self.linears)
        return grouped_mlp(x, wi, wo, sizes, probs=self.extra[1], **biases, **options)

    def backward(self) -> Tensor:
        """One pass of fresh rows; returns y."""
        y = self(self.x.detach().clone().requires_grad_())
        y.backward(self.dy)
        return y


def build(form: str, *, listed: bool = False, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Problem:
    """A layer of a form; its B has random values."""
    torch.manual_seed(0)
    given: dict[str, Any] = {**OPTIONS, "dtype": dtype, "single_grouped_weight": not listed, "bias": False, **options}
    sizes, probs = torch.tensor(SIZES, dtype=torch.int32), made(ROWS, dtype=torch.float32, seed=5).abs()
    if form == "GroupedLinear":
        module: Any = nn.GroupedLinear(G, H, 2 * F, **given)
        extra: tuple[Tensor, ...] = (sizes,)
    elif form == "GroupedMLP":
        module, extra = nn.GroupedMLP(G, H, F, **given), (sizes, probs)
    else:
        second = {**given, "scale_bias": given["bias"]}
        module = nn.Sequential(
            nn.GroupedLinear(G, H, 2 * F, **given),
            nn.ScaledSwiGLU(),
            nn.GroupedLinear(G, F, H, **second),
            fuse="always",
        )
        extra = (sizes, probs, sizes, probs) if given["bias"] else (sizes, probs, sizes)
    linears = [each for each in module.modules() if isinstance(each, nn.GroupedLinear)]
    fill(linears)
    width = 2 * F if form == "GroupedLinear" else H
    return Problem(module, made(ROWS, H, dtype=dtype, seed=3), made(ROWS, width, dtype=dtype, seed=4), extra, linears)


def fill(linears: Any) -> None:
    """Gives each adapter a B that is not zero."""
    with torch.no_grad():
        for at, layer in enumerate(linears):
            if layer.lora.rank:
                layer.lora_B.copy_(made(*layer.lora_B.shape, dtype=torch.float32, seed=10 + at) / R**0.5)


def tokens_of(moe: Any, x: Tensor, experts: Tensor, weights: Tensor, **options: Any) -> Tensor:
    """The experts of a MoE layer as a function of their tokens."""
    fc1, fc2 = moe.experts.linear_fc1, moe.experts.linear_fc2
    lora = ((fc1.lora_A, fc1.lora_B), (fc2.lora_A, fc2.lora_B))
    return routed_mlp(x, experts, weights, fc1.weight, fc2.weight, lora=lora, lora_scaling=SCALING, **options)
