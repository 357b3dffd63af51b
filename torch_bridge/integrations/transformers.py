"""Experts of Hugging Face transformers 5 and later: `register()`, then `experts_implementation="jax_grouped"`.

It maps names, layouts and the activation of an experts module of the host onto `routed_mlp`; weights stay the host's
Parameters and are read in place. What it does not recognise, it refuses when the module runs.

Letters: T tokens, H hidden size, E experts, k experts per token, F expert width, W columns of the hidden rows.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.nn import Module

from grouped_core.activations import Activation
from grouped_core.linear_spec import implementation_names
from grouped_core.mlp_spec import Residuals, residuals_option
from grouped_core.recipes import SAVED, BoundRecipe, Recipe
from torch_bridge.integrations._activations import facts_of, recognised
from torch_bridge.mlp import grouped_mlp
from torch_bridge.nn._checks import check_recipe
from torch_bridge.nn._scaling_state import ScaledModule, bound
from torch_bridge.quantize import update_scaling as next_step
from torch_bridge.route import permute, unpermute
from torch_bridge.routed import routed_mlp

__all__ = ["NAME", "prepare", "register", "update_scaling"]

NAME = "jax_grouped"
"""The implementation's name in the host, and that of the submodule of an experts module that `prepare` adds."""

FLAGS = {
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_gate": True,
    "has_post_expert_norm": False,
}
"""What the host's decorator says of an experts module, with its defaults."""

_PARAMETERS = tuple([part + end for part in ("gate_up_proj", "up_proj", "down_proj") for end in ("", "_bias")])


@dataclass(frozen=True)
class _Options:
    recipe: Recipe | None
    residuals: str | Residuals
    implementation: str | Sequence[str] | None
    saved_weights: str | None
    lighter: Recipe | None  # the recipe, saving weights as they are


class Registration:
    """One call of `register`; as a context manager it is undone at the end of the block.

    Attributes:
        replaced: what it replaced in the host, in words.
    """

    def __init__(self, function: Callable[..., Tensor], options: _Options) -> None:
        self._function, self._options = function, options
        place = f'transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS["{NAME}"]'
        self.replaced = (f"{place}: {_came()}", *_HOST.allow())
        _ACTIVE.append(self)
        _HOST.settle()

    def undo(self) -> None:
        """Undoes this registration; the latest remaining one is then in force, or else what was there before all."""
        if self in _ACTIVE:
            _ACTIVE.remove(self)
            _HOST.settle()

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()


_ACTIVE: list[Registration] = []
"""Registrations that are in force; the last one wins."""


def _came() -> str:
    """What a registration replaces in the registry, in words."""
    if _ACTIVE:
        options = [each for each in vars(_ACTIVE[-1]._options).items() if each[0] != "lighter"]
        return f"register({', '.join([f'{name}={value!r}' for name, value in options if value is not None])})"
    theirs = _host().ALL_EXPERTS_FUNCTIONS.get(NAME)
    return "nothing" if theirs is None else f"{theirs.__module__}.{theirs.__name__}"


class _Host:
    """What the host had in the places that registrations replace, while there are any."""

    theirs: Any = None
    check: Any = None

    def allow(self) -> tuple[str, ...]:
        """Makes older releases, which accept only a fixed list of names, accept ours; returns what it replaced."""
        model = importlib.import_module("transformers.modeling_utils").PreTrainedModel
        if not _ACTIVE:
            self.theirs = _host().ALL_EXPERTS_FUNCTIONS.get(NAME)
            check = model.get_correct_experts_implementation
            if "ALL_EXPERTS_FUNCTIONS" not in check.__code__.co_names:
                self.check = check

                @functools.wraps(check)
                def get_correct_experts_implementation(self: Any, requested_experts: str | None) -> str:
                    return NAME if requested_experts == NAME else check(self, requested_experts)

                model.get_correct_experts_implementation = get_correct_experts_implementation
        if self.check is None:
            return ()
        return ("transformers.PreTrainedModel.get_correct_experts_implementation: its check of names",)

    def settle(self) -> None:
        """Puts the function of the latest registration in force, or what was there before all."""
        table = _host().ALL_EXPERTS_FUNCTIONS
        function = _ACTIVE[-1]._function if _ACTIVE else self.theirs
        if function is not None:
            table[NAME] = function
        elif NAME in table:
            del table[NAME]
        if not _ACTIVE and self.check is not None:
            model = importlib.import_module("transformers.modeling_utils").PreTrainedModel
            model.get_correct_experts_implementation, self.check = self.check, None


_HOST = _Host()


def register(
    *,
    recipe: Recipe | None = None,
    residuals: str | Residuals = "save_fc1",
    implementation: str | Sequence[str] | None = None,
    saved_weights: str | None = None,
) -> Registration:
    """Makes `experts_implementation="jax_grouped"` known to transformers.

    Afterwards `from_pretrained(..., experts_implementation="jax_grouped")`, and for a model that exists
    `model.set_experts_implementation("jax_grouped")`, run the experts with `routed_mlp`. The last call wins, also for
    models that run already; importing this module changes nothing.

    Args:
        recipe: formats of both products, for all models that `prepare` gave none. One with delayed scaling keeps a
            state in each experts module, so `prepare` the model.
        residuals, implementation: as in `routed_mlp`.
        saved_weights: "input" saves weights as they are, "quantized" as the recipe says, which may be "forward"; also
            for the recipe of `prepare`. None: as the recipe says, which is faster, where the codes of the weights need
            no more memory than the library's `grouped_mm` path would keep in rows beyond ours, else "input". The bits
            are the same.

    Returns:
        What was replaced, with `undo()`; also a context manager.

    Raises:
        ImportError: transformers is missing, or has no registry of experts. TypeError, ValueError: an option is
            invalid. When a module runs, NotImplementedError: it does something that is not recognised; ValueError: its
            recipe has delayed scaling and it has no state.
    """
    check_recipe("register", recipe)
    implementation_names(implementation)
    if saved_weights not in (None, *SAVED):
        raise ValueError(
            f"`saved_weights` of register: {saved_weights!r}, expected None or one of {', '.join(SAVED)}; choose one."
        )
    options = _Options(recipe, residuals_option(residuals), implementation, saved_weights, _lighter(recipe))
    moe = _host()
    known = inspect.signature(moe.use_experts_implementation).parameters.values()
    later = tuple([(each.name, each.default) for each in known if each.kind is each.KEYWORD_ONLY])
    later = tuple([each for each in later if each[0] not in (*FLAGS, "experts_interface")])

    def jax_grouped(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return _experts(options, later, self, hidden_states, top_k_index, top_k_weights)

    return Registration(jax_grouped, options)


def _host() -> Any:
    try:
        from transformers.integrations import moe
    except ImportError as error:
        raise ImportError(
            f"transformers.integrations.moe: {error}; expected transformers 5 or later; install it, "
            "e.g. `pip install 'transformers>=5'`."
        ) from error
    return moe


# ---------------------------------------------------------------------------------------------------------------------
# Experts


def _experts(
    options: _Options, later: Sequence[tuple[str, Any]], module: Any, x: Tensor, experts: Tensor, weights: Tensor
) -> Tensor:
    """y [T, H] of an experts module of the host: x [T, H], experts and weights [T, k]."""
    flags = {name: getattr(module, name, default) for name, default in FLAGS.items()}
    _check_layout(module, later)
    first = "gate_up_proj" if flags["has_gate"] else "up_proj"
    wi, wo = getattr(module, first), module.down_proj
    biases = (getattr(module, first + "_bias"), module.down_proj_bias) if flags["has_bias"] else (None, None)
    shared: dict[str, Any] = {
        "rhs_transposed": not flags["is_transposed"],
        "activation": _activation(module, flags["has_gate"]),
        "wi_bias": biases[0],
        "wo_bias": biases[1],
        "recipe": _recipe(module, options, x, experts, wi, wo),
        "residuals": options.residuals,
        "implementation": options.implementation,
    }
    if not flags["has_post_expert_norm"]:
        return routed_mlp(x, experts, weights, wi, wo, **shared).to(x.dtype)
    # The norm is between the products and the probability, so the probability cannot go into the products.
    rows, sizes, permutation = permute(x, experts, wi.shape[0])
    rows = module.post_expert_norm(grouped_mlp(rows, wi, wo, sizes, **shared))
    return unpermute(rows, permutation, weights).to(x.dtype)


def _check_layout(module: Any, later: Sequence[tuple[str, Any]]) -> None:
    """Refuses what a later release of the host may have added."""
    for name, default in later:
        if getattr(module, name, default) != default:
            raise NotImplementedError(
                f"`{name}` of {type(module).__name__}: {getattr(module, name)!r}, expected {default!r}, because this "
                "version does not know the flag; choose another experts implementation for this model."
            )
    for name in module._parameters:
        if name not in _PARAMETERS:
            raise NotImplementedError(
                f"parameters of {type(module).__name__}: `{name}`, expected only {', '.join(_PARAMETERS)}; choose "
                "another experts implementation for this model."
            )


def _activation(module: Any, gated: bool) -> Activation:
    name = type(module).__name__
    found = recognised(name, gated, facts_of(module, gated=gated))
    # Older releases do not have the flag; then the order of columns follows from the code of the gate alone.
    concatenated = getattr(module, "is_concatenated", found.interleave is None)
    if gated and concatenated != (found.interleave is None):
        raise NotImplementedError(
            f"`is_concatenated` of {name}: {concatenated}, but its `_apply_gate` reads gate and linear columns "
            f"{'in turns' if concatenated else 'one half after the other'}, expected one order; correct the decorator "
            "of the class."
        )
    return found


def _lighter(recipe: Recipe | None) -> Recipe | None:
    """The recipe, saving weights as they are."""
    return None if recipe is None else recipe.replace(saved_weights="input")


def _saves_input(asked: str | None, x: Tensor, experts: Tensor, wi: Tensor, wo: Tensor) -> bool:
    """Whether weights are saved as they are, and not as codes of a byte each.

    Args:
        asked: the option of `register`. x: [T, H]. experts: [T, k]. wi, wo: weights of H W and F H elements per expert.
    """
    if asked is not None:
        return asked == "input"
    # Of T k rows the library keeps the gathered tokens, the hidden rows (W elements), what its activation makes of them
    # (W more), and the result before its probability; ours keep the hidden rows and the tokens themselves.
    (tokens, hidden), rows = x.shape, experts.numel()
    width = wi.numel() // (wi.shape[0] * hidden)
    spare = x.element_size() * (rows * (width + 2 * hidden) - tokens * hidden)
    return wi.numel() + wo.numel() > spare


def _recipe(
    module: Any, options: _Options, x: Tensor, experts: Tensor, wi: Tensor, wo: Tensor
) -> Recipe | BoundRecipe | None:
    """The recipe of `prepare`, else that of `register`, with the state of the module; other arguments as above."""
    state = module._modules.get(NAME)
    recipe, lighter = (options.recipe, options.lighter) if state is None else (state.scaling_recipe, state.lighter)
    if state is None and recipe is not None and recipe.delayed:
        raise ValueError(
            f"`recipe` of register: {recipe.name}, but {type(module).__name__} has no state of delayed scaling, "
            "expected one in each experts module; call `prepare(model, recipe=...)` before weights are loaded."
        )
    if recipe is not None and recipe.quantized and _saves_input(options.saved_weights, x, experts, wi, wo):
        recipe = lighter
    return bound(recipe, None if state is None else state.scaling_state, x, training=module.training)


# ---------------------------------------------------------------------------------------------------------------------
# State


class RecipeState(ScaledModule):
    """The recipe of one experts module, and in buffers its state of delayed scaling if the recipe has one.

    It is a submodule `jax_grouped` of the host's module: its buffers are saved, loaded and moved with the model. A cast
    of the model leaves them float32.
    """

    def __init__(self, recipe: Recipe, groups: int, device: Any) -> None:
        super().__init__()
        self.init_state(recipe, groups, 2, device)
        self.lighter = _lighter(recipe)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        self.take_state(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)

    def extra_repr(self) -> str:
        """The recipe."""
        return "" if self.scaling_recipe is None else self.scaling_recipe.name


def prepare(model: Module, *, recipe: Recipe) -> list[str]:
    """Gives each experts module of a model its recipe, and a state if that uses delayed scaling.

    Call it before weights are loaded, so that a state in the checkpoint is loaded too; if the checkpoint has none, the
    state is that before the first step. A module that has a state of the same recipe keeps it, unless that is on the
    meta device: then it is replaced, because a checkpoint without a state would leave it there. The recipe takes
    precedence over that of `register`.

    Returns:
        The names of the experts modules.

    Raises:
        TypeError: not a recipe. ValueError: it is None, or the model has no experts modules of the host.
    """
    check_recipe("prepare", recipe)
    modules = model.named_modules() if isinstance(model, Module) else ()
    found = [(name, each) for name, each in modules if _is_experts(each)]
    if recipe is None or not found:
        came = f"recipe {recipe!r}" if recipe is None else f"{type(model).__name__} without experts"
        raise ValueError(
            f"prepare: {came}, expected a Recipe and a model with modules that `use_experts_implementation` decorates; "
            "pass both."
        )
    for _, module in found:
        before = module._modules.get(NAME)
        same = isinstance(before, RecipeState) and before.scaling_recipe == recipe
        if before is None or not same or any(each.is_meta for each in before.buffers()):
            weight = module.get_parameter("down_proj")
            module.add_module(NAME, RecipeState(recipe, weight.shape[0], weight.device))
    return [name for name, _ in found]


def update_scaling(model: Module, *, process_group: Any = None) -> None:
    """Advances the states of all experts modules of a model to the next step, as `torch_bridge.update_scaling`.

    Call it once per optimizer step.

    Raises:
        ValueError: the model has no state. TypeError: not a process group.
    """
    states = [each.scaling_state for each in _prepared(model)]
    held = [each for each in states if each is not None]
    if not held:
        raise ValueError(
            f"update_scaling: {type(model).__name__} without a state of delayed scaling, expected one in each experts "
            "module; call `prepare(model, recipe=...)` first."
        )
    for state in held:
        next_step(state, process_group=process_group)


def _prepared(model: Module) -> Iterator[RecipeState]:
    modules = model.modules() if isinstance(model, Module) else ()
    return (each for each in modules if isinstance(each, RecipeState))


def _is_experts(module: Module) -> bool:
    """Whether the host's decorator has set its flags on a module."""
    return "is_transposed" in vars(module) and "has_bias" in vars(module)
