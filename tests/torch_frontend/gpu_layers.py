"""A layer on static buffers, which tests of captured graphs replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.torch_frontend.gpu_tools import REPLAYED, ROWS
from torch_bridge import nn

H, F, G = 256, 192, 4


class Step:
    """A module on static buffers, tail rows poisoned."""

    def __init__(self, form: str, listed: bool, **options: Any) -> None:
        torch.manual_seed(0)
        options = {"single_grouped_weight": not listed, "dtype": torch.bfloat16, "bias": False, **options}
        if form == "GroupedLinear":
            self.module: Any = nn.GroupedLinear(G, H, H, **options)
        elif form == "GroupedMLP":
            self.module = nn.GroupedMLP(G, H, F, **options)
        else:
            layers = nn.GroupedLinear(G, H, 2 * F, **options), nn.ScaledSwiGLU(), nn.GroupedLinear(G, F, H, **options)
            self.module = nn.Sequential(*layers, fuse="never" if form == "Sequential_composed" else "always")
        self.form = form
        self.x = torch.randn(ROWS, H).to(torch.bfloat16).requires_grad_()
        self.probs, self.dy = torch.rand(ROWS).requires_grad_(), torch.randn(ROWS, H).to(torch.bfloat16)
        self.sizes = torch.zeros(G, dtype=torch.int32)
        self.rows = (self.x, self.probs, self.dy)
        self.clean = [each.detach().clone() for each in self.rows]
        self.weights: list[Any] = [p for name, p in self.module.named_parameters() if "weight" in name]
        self.load(REPLAYED[0])

    def load(self, sizes: tuple[int, ...]) -> None:
        """Other sizes, in place."""
        valid = min(ROWS, sum(max(size, 0) for size in sizes))
        for tensor, clean in zip(self.rows, self.clean, strict=True):
            tensor.data.copy_(clean)
            tensor.data[valid:] = float("nan")
        self.sizes.copy_(torch.tensor(sizes, dtype=torch.int32))

    def forward(self, x: Tensor, probs: Tensor, sizes: Tensor) -> Tensor:
        """y of rows."""
        extra = {"GroupedLinear": (sizes,), "GroupedMLP": (sizes, probs)}.get(self.form, (sizes, probs, sizes))
        return self.module(x, *extra)

    def run(self) -> list[Tensor]:
        """y, and the gradients of rows and, if they go to autograd, of weights, which are asked for in any case."""
        y = self.forward(self.x, self.probs, self.sizes)
        wanted = [self.x, *([] if self.form == "GroupedLinear" else [self.probs]), *self.weights]
        found = torch.autograd.grad(y, wanted, self.dy, allow_unused=self.delays)
        return [y, *(each for each in found if each is not None)]

    @property
    def delays(self) -> bool:
        """Whether weight gradients are delayed."""
        return any(each.delay_wgrad_compute for each in self.module.modules() if isinstance(each, nn.GroupedLinear))
