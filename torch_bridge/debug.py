"""Reports which kernels an operation would launch, and why it would not run.

The operation runs on meta tensors, forward and backward, and the calls of its operators are recorded: so the report
shows what is really launched, including quantisers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grouped_core import lora, lora_mlp
from grouped_core.calls import Call
from grouped_core.debug import Planned, bound_arguments, check_arch, explain_calls, why_not
from grouped_core.lora import LORA
from torch_bridge import _autocast, _codec, _fake, linear, mlp, route, routed
from torch_bridge._args import check_buffers, linear_arguments, mlp_arguments
from torch_bridge._lora_args import adapted_arguments, adapted_mlp_arguments, adapted_routed_arguments
from torch_bridge._record import arch_of
from torch_bridge._routed_args import routed_arguments
from torch_bridge._tensors import home, master_of
from torch_bridge.moe import moe
from torch_bridge.quantize import check_dequantize, check_quantize, dequantize, quantize


def _parts(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """(the arguments of the base, the options of its adapter)."""
    own = {name: each for name, each in arguments.items() if not name.startswith(LORA)}
    options = [arguments[name] for name in lora.OPTIONS[1:]]
    if arguments[LORA] is None:
        lora.check_absent(*options)
    else:
        lora.check_no_weight_gradient(wgrad_accum=own.pop("wgrad_accum"))
    return own, options


def _check_linear(arguments: dict[str, Any], out: Tensor | None, grad_input: Tensor | None) -> None:
    own, options = _parts(arguments)
    if arguments[LORA] is None:
        return check_buffers(linear_arguments(**own), out, grad_input)
    names = own.pop("implementation")
    factors = lora.pair_option(arguments[LORA])
    given: Any = (*own.values(), *factors, *options, names)
    return check_buffers(adapted_arguments(*given), out, grad_input)


def _check_mlp(arguments: dict[str, Any], out: Tensor | None, grad_input: Tensor | None) -> None:
    _check_both(mlp_arguments, adapted_mlp_arguments, arguments, out, grad_input)


def _check_routed(arguments: dict[str, Any], out: Tensor | None, grad_input: Tensor | None) -> None:
    _check_both(routed_arguments, adapted_routed_arguments, arguments, out, grad_input)


def _check_both(
    plain: Callable[..., Any],
    adapted: Callable[..., Any],
    arguments: dict[str, Any],
    out: Tensor | None,
    grad_input: Tensor | None,
) -> None:
    own, (*options, accums) = _parts(arguments)
    if arguments[LORA] is None:
        return check_buffers(plain(**own), out, grad_input)
    names = own.pop("implementation")
    factors = lora_mlp.option(arguments[LORA], *options)[1]
    accums = lora_mlp.accumulators_option(accums)
    return check_buffers(adapted(*own.values(), *factors, *options, accums, names), out, grad_input)


def _planner(operation: Callable[..., Tensor], check: Callable[..., None], weights: tuple[str, ...]) -> Planned:
    """Native calls of an operation and of the gradients that its arguments need; `weights`: names of its weights."""

    def calls(*, out: Tensor | None, grad_input: Tensor | None, **arguments: Any) -> list[Call]:
        cast = _autocast.cast_named(arguments)
        check(cast, out, grad_input)  # checks devices and memory, which meta tensors do not have
        if isinstance(arguments.get(f"{LORA}_wgrad_accum"), str):
            pairs = arguments[LORA] if len(weights) > 1 else [arguments[LORA]]
            found = [None if pair is None else tuple(map(_main_grads, pair)) for pair in pairs]
            arguments[f"{LORA}_wgrad_accum"] = tuple(found) if len(weights) > 1 else found[0]
        if isinstance(arguments["wgrad_accum"], str):
            found = [_main_grads(master_of(arguments[name])) for name in weights]
            arguments["wgrad_accum"] = found[0] if len(weights) == 1 else tuple(found)
        arguments = _autocast.cast_named(arguments)  # here, because autocast does not support meta tensors
        given, leaves = _on_meta({**arguments, "out": out, "grad_input": grad_input})

        def step() -> None:
            y = operation(**given)
            if y.requires_grad:
                needed = [each for each in leaves if each.requires_grad]
                torch.autograd.grad(y, needed, torch.empty_like(y), allow_unused=True)

        return _noted(step)

    return calls


def _planner_of_forms(operation: Callable[..., Any], check: Callable[..., Any]) -> Planned:
    """Native calls of an operation without gradients."""

    def calls(**arguments: Any) -> list[Call]:
        check(*arguments.values())
        given, _ = _on_meta(arguments)
        return _noted(lambda: operation(**given))

    return calls


def _on_meta(arguments: dict[str, Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """(the arguments with meta tensors instead of tensors, these meta tensors)."""
    leaves: list[Tensor] = []

    def meta(value: Any) -> Any:
        if isinstance(value, Tensor):
            stand_in = torch.empty_like(value, device="meta").requires_grad_(value.requires_grad)
            leaves.append(stand_in)
            return stand_in
        return type(value)(map(meta, value)) if isinstance(value, (list, tuple)) else value

    return dict(_codec.from_tuples(meta(_codec.to_tuples([*arguments.items()])))), leaves


def _noted(run: Callable[[], Any]) -> list[Call]:
    """The native calls that `run` would make."""
    noted: list[Call] = []
    _fake.planned.append(noted)
    try:
        run()
    finally:
        _fake.planned.pop()
    return noted


def _main_grads(weight: Any) -> Any:
    """Meta tensors like the `main_grad` of a weight, float32 if there is none yet."""
    if isinstance(weight, (list, tuple)):
        return [_main_grads(each) for each in weight]
    if weight is None or not weight.requires_grad:
        return None
    held = getattr(weight, "main_grad", None)
    return torch.empty(weight.shape, dtype=torch.float32 if held is None else held.dtype, device="meta")


def _planner_of_routing(operation: Callable[..., Any]) -> Planned:
    """Native calls of a function that returns several tensors, and of the gradients that its arguments need."""

    def calls(**arguments: Any) -> list[Call]:
        routing = arguments.pop("routing", {})  # further keywords of `moe`
        given, leaves = _on_meta(arguments | routing)

        def step() -> None:
            results = operation(**given)
            flat = [each for each in _flattened(results) if each.requires_grad]
            needed = [each for each in leaves if each.requires_grad]
            if flat:
                torch.autograd.grad(flat, needed, [torch.empty_like(each) for each in flat], allow_unused=True)

        return _noted(step)

    return calls


def _flattened(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in _flattened(part)] if isinstance(value, (tuple, list)) else []


_PLANS: dict[Callable[..., Any], Planned] = {
    linear.grouped_linear: _planner(linear.grouped_linear, _check_linear, ("weight",)),
    mlp.grouped_mlp: _planner(mlp.grouped_mlp, _check_mlp, ("wi", "wo")),
    routed.routed_mlp: _planner(routed.routed_mlp, _check_routed, ("wi", "wo")),
    moe: _planner_of_routing(moe),
    **{
        each: _planner_of_routing(each)
        for each in (
            *(route.topk_router, route.permute, route.unpermute, route.pad_groups, route.unpad_groups),
            *(route.hash_experts, route.update_bias, route.balance_quantile),
        )
    },
    quantize: _planner_of_forms(quantize, check_quantize),
    dequantize: _planner_of_forms(dequantize, check_dequantize),
}


def _arch(arch: str | None, x: Any) -> str:
    check_arch(arch)
    if arch is not None:
        return arch
    first = home(x)
    if isinstance(first, Tensor) and first.device.type != "meta":
        return arch_of(first.device)
    return arch_of(
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )


def why_unsupported(op: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> str | None:
    """None if `op(*args, **kwargs)` and the gradients that its arguments need can run, otherwise the reason.

    Args:
        op: a public function such as `grouped_linear`, or the class of its layer. args, kwargs: the function's
            arguments; meta tensors are allowed.
        arch: "cpu", "sm_80", "sm_90a"; None: the device of the arguments, for meta tensors the default device.

    Raises:
        TypeError: `op` is not an operation of this package, or does not take these arguments.
    """
    planner, arguments = bound_arguments(_PLANS, op, args, kwargs)
    return why_not(lambda: planner(**arguments), _arch(arch, next(iter(arguments.values()))))


def explain(op: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> str:
    """One line per native call of `op(*args, **kwargs)` and of its gradients: its kernel, and those that declined.

    The arguments are those of `why_unsupported`.

    Raises:
        TypeError, ValueError: those that `op` itself would raise.
    """
    planner, arguments = bound_arguments(_PLANS, op, args, kwargs)
    return explain_calls(planner(**arguments), _arch(arch, next(iter(arguments.values()))))
