"""Looking from outside: what an operation would launch, and why it would not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grouped_core import mlp as rules
from grouped_core.calls import ArraySpec, Call
from grouped_core.debug import Planned, bound_arguments, explain_calls, why_not
from grouped_core.gradients import Needs
from grouped_core.mlp_spec import MlpNeeds
from grouped_core.plans import Planner
from grouped_core.products import Listed, in_form
from torch_bridge import _library, _mlp_library, mlp
from torch_bridge import _mlp_arguments as mlp_arguments
from torch_bridge._arguments import check_arguments, check_buffers
from torch_bridge._run import arch_of, dtype_name, spec_of
from torch_bridge.ops import grouped_linear


def _linear_calls(*, out: Tensor | None, grad_input: Tensor | None, **arguments: Any) -> list[Call]:
    """Native calls of `grouped_linear` with these arguments, and of the gradients that they need."""
    given = check_arguments(**arguments)
    if out is not None or grad_input is not None:
        check_buffers(out, grad_input, given)
    x, weights, sizes, biases, row_scale, text, to_main_grad, accumulators = given
    found = _library.forward_calls(x, weights, sizes, biases, row_scale, text, out)
    needs = Needs(
        *(
            any(each is not None and each.requires_grad for each in group)
            for group in ([x], weights, biases, [row_scale])
        )
    )
    if torch.is_grad_enabled() and any(needs):
        into = next((each for each in accumulators if each is not None), None)
        into_dtype = "float32" if to_main_grad else None if into is None else dtype_name(into.dtype)
        found += _library.backward_calls(x, weights, sizes, biases, row_scale, text, needs, into_dtype, grad_input)
    return found


def _mlp_calls(*, out: Tensor | None, grad_input: Tensor | None, **arguments: Any) -> list[Call]:
    """Native calls of `grouped_mlp` with these arguments, and of the gradients that they need."""
    given = mlp_arguments.check_arguments(**arguments)
    specs: Any
    specs, sizes = mlp_arguments.specs_of(given)
    if out is not None or grad_input is not None:
        mlp_arguments.check_buffers(out, grad_input, given)
    lists = ([given.x], given.wi, given.wo, [given.probs], given.wi_bias, given.wo_bias)
    needs = MlpNeeds(*(any(each is not None and each.requires_grad for each in group) for group in lists))
    table = ArraySpec(sizes.shape, "int64")
    listed = (False, len(given.wi[0].shape) == 2, len(given.wo[0].shape) == 2, False)
    listed += tuple(bool(each) and each[0].dim() == 1 for each in (given.wi_bias, given.wo_bias))
    operands: list[Any] = [
        Listed(spec, table) if apart and spec is not None else spec for spec, apart in zip(specs, listed, strict=True)
    ]
    op = _mlp_library.decode(given.text)
    if op.paired:
        operands[1] = in_form(op.fc1(), tuple(spec_of(half) for half in given.wi))
    accumulators: Any = []
    weights = (spec_of(given.wi[0]) if op.paired else specs.wi, specs.wo)
    for weight, apart, given_to in zip(weights, listed[1:3], given[-2:], strict=True):
        one = next((each for each in given_to if each is not None), None)
        dtype = "float32" if given.to_main_grad else None if one is None else dtype_name(one.dtype)
        into = None if dtype is None else weight._replace(dtype=dtype)
        accumulators.append(Listed(into, table) if apart and into is not None else into)
    if op.paired and accumulators[0] is not None:
        accumulators[0] = (accumulators[0], accumulators[0])
    run = Planner()
    rules.plan(
        op,
        operands,
        sizes,
        run,
        needs=needs if torch.is_grad_enabled() else MlpNeeds(*[False] * 6),
        accumulators=tuple(accumulators),
        halves=[at for at, half in enumerate(given.wi, 1) if half.requires_grad],
        out=None if out is None else spec_of(out),
        grad_input=None if grad_input is None else spec_of(grad_input),
    )
    return run.calls


_PLANS: dict[Callable[..., Any], Planned] = {grouped_linear: _linear_calls, mlp.grouped_mlp: _mlp_calls}


def _arch(arch: str | None, x: Any) -> str:
    if arch is not None:
        return arch
    if isinstance(x, Tensor) and x.device.type != "meta":
        return arch_of(x.device)
    return arch_of(
        torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    )


def why_unsupported(op: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> str | None:
    """None where `op(*args, **kwargs)` and the gradients that its arguments need run, else the reason in one text.

    Args:
        op: a public function such as `grouped_linear`. args, kwargs: its arguments; meta tensors do.
        arch: "cpu", "sm_80", "sm_90a"; None: the device of the arguments, of meta tensors the default one.

    Raises:
        TypeError: `op` is not an operation of this package, or takes no such arguments.
    """
    planner, arguments = bound_arguments(_PLANS, op, args, kwargs)
    return why_not(lambda: planner(**arguments), _arch(arch, arguments["x"]))


def explain(op: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> str:
    """One line for each native call of `op(*args, **kwargs)` and of its gradients: its kernel, and who declined.

    Arguments are those of `why_unsupported`.

    Raises:
        TypeError, ValueError: what `op` itself would raise.
    """
    planner, arguments = bound_arguments(_PLANS, op, args, kwargs)
    return explain_calls(planner(**arguments), _arch(arch, arguments["x"]))
