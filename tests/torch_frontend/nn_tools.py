"""One problem for the functions and the modules of the PyTorch frontend, with the same weights in each.

The contract on weight gradients holds for each of them, so tests loop over `FORMS` and both ways to hold
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from grouped_core.activations import Activation
from grouped_core.recipes import Recipe
from tests import cases
from tests.parity.adapters import to_torch
from tests.parity.mlp_adapters import problem
from tests.torch_frontend.torch_tools import leaf
from torch_bridge import grouped_linear, grouped_mlp, nn, scaling_state

FUNCTIONS = ("grouped_linear", "grouped_mlp")
MODULES = ("GroupedLinear", "GroupedMLP", "Sequential_fused", "Sequential_composed")
FORMS = (*FUNCTIONS, *MODULES)
LINEAR = ("grouped_linear", "GroupedLinear")
CASE = "idle_ends"  # groups 0, 2 and 4 are empty
EMPTY = (0, 2, 4)


@dataclass
class Setup:
    """One form, ready to run.

    Attributes:
        form: of `FORMS`. weights: its weights, each product's in turn. run: x -> y.
        x, dy: rows and the gradient of y. groups: of each weight, those that it holds.
        module: None for functions. linears: the grouped linear layers of the module, in order.
        sizes, probs: of the rows. state: of delayed scaling, of a function.
    """

    form: str
    weights: list[Any]
    run: Callable[..., Tensor]
    x: Tensor
    dy: Tensor
    groups: list[list[int]]
    module: Any
    linears: list[Any]
    sizes: Tensor
    probs: Tensor
    state: Any = None

    def backward(self, **keywords: Any) -> Any:
        """One forward and backward of fresh rows; returns these, with their gradient."""
        x = leaf(self.x)
        self.run(x, **keywords).backward(self.dy)
        return x


def _members(packed: Tensor, listed: bool) -> list[Any]:
    return [Parameter(each.clone()) for each in (packed if listed else [packed])]


def _argument(members: list[Any], listed: bool) -> Any:
    return members if listed else members[0]


def fill(linear: nn.GroupedLinear, weight: Tensor | None, bias: Tensor | None = None) -> None:
    """Gives a layer the values of packed tensors."""
    with torch.no_grad():
        for names, packed in ((linear.weight_names, weight), (linear.bias_names, bias)):
            if packed is not None:
                for at, name in enumerate(names):
                    getattr(linear, name).copy_(
                        packed if len(names) == 1 and name in ("weight", "bias") else packed[at]
                    )


def parameters_of(linear: nn.GroupedLinear) -> list[Any]:
    """Its weights."""
    return [getattr(linear, name) for name in linear.weight_names]


def drawn_key() -> Tensor:
    """The key that a layer draws for one forward pass, from the default generator."""
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32).view(torch.uint32)


def setup(
    form: str,
    listed: bool,
    *,
    accumulate: bool = False,
    delay: bool = False,
    dtype: str = "float32",
    case: str = CASE,
    recipe: Recipe | None = None,
    quantized: bool = False,
) -> Setup:
    """The problem in one form: an MLP, or its first product for the linear forms.

    Functions are bound to a state of their own (`Setup.state`), and to a key that they draw as layers do. `quantized`:
    modules hold quantised weights.
    """
    of = cases.named(case)
    operands, dy = problem(of, dtype, Activation("swiglu"), transposed=True)
    held: dict[str, Any] = {name: None if value is None else to_torch(value) for name, value in operands.items()}
    sizes, probs = held["group_sizes"], held["probs"]
    single = form in LINEAR
    packed = [held["wi"]] if single else [held["wi"], held["wo"]]
    x, dy = held["x"], to_torch(dy)
    if single:
        dy = to_torch(cases.normal((of.rows, held["wi"].shape[1]), dtype, "dy"))
    groups = [[g] for g in range(of.groups)] * len(packed) if listed else [list(range(of.groups))] * len(packed)
    accum = "main_grad" if accumulate else None
    if form in FUNCTIONS:
        assert not delay, "functions delay nothing"
        lists = [_members(each, listed) for each in packed]
        arguments: Any = [_argument(each, listed) for each in lists]
        options = {"wgrad_accum": accum}
        state = scaling_state(recipe, of.groups, products=len(packed)) if recipe and recipe.delayed else None

        def bound() -> Any:
            return recipe and recipe.bind(state, drawn_key() if recipe.stochastic else None)

        if single:

            def run(x: Tensor, **keywords: Any) -> Tensor:
                return grouped_linear(x, arguments[0], sizes, recipe=bound(), **options, **keywords)
        else:

            def run(x: Tensor, **keywords: Any) -> Tensor:
                wi, wo = arguments
                return grouped_mlp(x, wi, wo, sizes, probs=probs, recipe=bound(), **options, **keywords)

        weights = [each for part in lists for each in part]
        return Setup(form, weights, run, x, dy, groups, None, [], sizes, probs, state)
    options = {"accumulate_into_main_grad": accumulate, "delay_wgrad_compute": delay, "recipe": recipe}
    options["quantized_weights"] = quantized
    module = build(form, of, dtype, listed, **options)
    linears = [each for each in module.modules() if isinstance(each, nn.GroupedLinear)]
    for linear, weight in zip(linears, packed, strict=True):
        fill(linear, weight)
    extra = (sizes,) if single else (sizes, probs) if form == "GroupedMLP" else (sizes, probs, sizes)

    def run(x: Tensor, **keywords: Any) -> Tensor:
        return module(x, *extra, **keywords)

    weights = [each for linear in linears for each in parameters_of(linear)]
    return Setup(form, weights, run, x, dy, groups, module, linears, sizes, probs)


def build(form: str, of: cases.Case, dtype: str, listed: bool, **options: Any) -> Any:
    """The module of a form: K features, N expert width."""
    options = {"bias": False, "dtype": getattr(torch, dtype), "single_grouped_weight": not listed, **options}
    wide = 2 * of.n
    if form == "GroupedLinear":
        return nn.GroupedLinear(of.groups, of.k, wide, **options)
    if form == "GroupedMLP":
        return nn.GroupedMLP(of.groups, of.k, of.n, **options)
    first = nn.GroupedLinear(of.groups, of.k, wide, **options)
    second = nn.GroupedLinear(of.groups, of.n, of.k, **options)
    fuse = "always" if form == "Sequential_fused" else "never"
    return nn.Sequential(first, nn.ScaledSwiGLU(), second, fuse=fuse)


def main_grads(weights: Sequence[Any], start: float) -> list[Tensor]:
    """A flat fp32 `main_grad` for each weight, as Megatron's buffers are, filled with `start`."""
    buffers = [torch.full((each.numel(),), start, device=each.device) for each in weights]
    for weight, buffer in zip(weights, buffers, strict=True):
        weight.main_grad = buffer
    return buffers
