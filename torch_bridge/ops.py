"""Public grouped operations: arguments checked and put in order, gradients attached. The mathematics is grouped_core's.

Letters: G groups, M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core import calls
from grouped_core.calls import ArraySpec, Call
from grouped_core.debug import explain_calls, why_not
from grouped_core.gradients import Needs, linear_saved
from grouped_core.recipes import Recipe
from grouped_core.sizes import GroupSizes
from torch_bridge import _library, main_grad
from torch_bridge._library import NAMES
from torch_bridge._run import TORCH_DTYPES, arch_of, dtype_name, spec_of
from torch_bridge.exchange import is_foreign
from torch_bridge.params import check_operand, members_of
from torch_bridge.sizes import prepare_sizes

Members = Tensor | Sequence[Tensor]
"""One packed tensor, or a list of one tensor a group."""


def grouped_linear(
    x: Tensor,
    weight: Members,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    *,
    rhs_transposed: bool = True,
    bias: Members | None = None,
    row_scale: Tensor | None = None,
    scale_bias: bool = False,
    recipe: Recipe | None = None,
    wgrad_accum: str | Tensor | Sequence[Tensor | None] | None = None,
    out: Tensor | None = None,
    grad_input: Tensor | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Tensor:
    """The product [M, N] of grouped rows: `row_scale[r] * (x[r] @ weight[g].T + bias[g])` for row r of group g.

    Rows past the groups are zero. Differentiable in x, weight, bias and row_scale; what needs no gradient is neither
    computed nor saved. A weight given as a list has the same bits as a packed one, nothing is stacked, and frozen
    members get no gradient.

    Args:
        x: [M, K] fp32, bf16, fp16, e4m3fn or e5m2. Nothing is cast, autocast included.
        weight: [G, N, K], or [G, K, N] with `rhs_transposed=False`; or a list of G such matrices.
        group_sizes: G integers on the device of x; a list or CPU tensor is copied there without a synchronisation.
            A sum above M is clamped, a negative size counts as 0.
        bias: [G, N] or a list of G vectors, added before the one rounding.
        row_scale: [M]; with `scale_bias` it multiplies the bias alone.
        recipe: formats of the three products; None takes the operands as they stand.
        wgrad_accum: None returns the weight's gradient. A tensor of the weight's shape (a list of them for a list, None
            for frozen members) is added to in backward instead, "main_grad" means the attribute of that name: see
            `torch_bridge.main_grad`. The weight's gradient is then None (with "main_grad" perhaps a zero dummy), also
            from `torch.autograd.grad`.
        out, grad_input: the caller's buffers for y [M, N] and the gradient of x [M, K]; the results share their
            storage, and rows past the groups keep what they hold.
        implementation: a kernel's name, or several; see `explain`.

    Raises:
        TypeError: dtypes, or an argument that is no tensor. ValueError: shapes, devices, layouts, buffers, options.
        NotImplementedError: no kernel takes it. RuntimeError: in backward, `main_grad` cannot be written, or it is
            differentiated again.
    """
    given = _arguments(
        x, weight, group_sizes, rhs_transposed, bias, row_scale, scale_bias, recipe, wgrad_accum, implementation
    )
    if out is not None or grad_input is not None:
        _check_buffers(out, grad_input, given)
    if not given.differentiates():
        return _forward(given, out)
    if wgrad_accum is None or not torch.compiler.is_compiling():
        return _attach(given, out, grad_input, None)
    if given.to_main_grad and main_grad.needs_python(given.weights):
        return _attach_uncompiled(given, out, grad_input, None)
    # A graph holds tensors, not the state of Parameters: both are looked up while it is traced.
    overwrite = tuple(main_grad.overwrites(each) for each in given.weights)
    if given.to_main_grad:
        given = given._replace(accumulators=_destinations(given.weights))
    return _attach(given, out, grad_input, overwrite)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


class _Arguments(NamedTuple):
    """What a user passed, checked and in the order of the operators."""

    x: Tensor
    weights: list[Tensor]
    sizes: Tensor
    biases: list[Tensor]
    row_scale: Tensor | None
    text: str
    to_main_grad: bool
    accumulators: Sequence[Tensor | None]

    def differentiates(self) -> bool:
        """Whether anybody needs a gradient."""
        if not torch.is_grad_enabled():
            return False
        inputs = (self.x, self.row_scale, *self.weights, *self.biases)
        return any(each is not None and each.requires_grad for each in inputs)


def _arguments(
    x: Tensor,
    weight: Members,
    group_sizes: Tensor | Sequence[int] | GroupSizes,
    rhs_transposed: bool = True,
    bias: Members | None = None,
    row_scale: Tensor | None = None,
    scale_bias: bool = False,
    recipe: Recipe | None = None,
    wgrad_accum: str | Tensor | Sequence[Tensor | None] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> _Arguments:
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            "grouped_linear under torch.func.vmap, grad or jvp: expected plain tensors; fold a mapped axis into rows "
            "or groups, and differentiate with torch.autograd."
        )
    check_operand(NAMES.x, x, x)
    sizes, rows_hint = prepare_sizes(group_sizes, x, NAMES)
    weights = members_of(NAMES.w, weight, 3, x)
    biases = [] if bias is None else members_of(NAMES.bias, bias, 2, x)
    if row_scale is not None:
        check_operand(NAMES.row_scale, row_scale, x)
    text = _text(rhs_transposed, recipe, scale_bias, rows_hint, implementation)
    for operand, rank in ((weight, 3), (bias, 2)):
        if isinstance(operand, Tensor) and operand.dim() == rank - 1:
            _refuse_unpacked(text, x, weight, sizes, bias, row_scale)
    to_main_grad = isinstance(wgrad_accum, str)
    accumulators: Sequence[Tensor | None] = ()
    if wgrad_accum is not None and wgrad_accum != "main_grad":
        accumulators = _accumulators(wgrad_accum, weights)
    return _Arguments(x, weights, sizes, biases, row_scale, text, to_main_grad, accumulators)


def _refuse_unpacked(
    text: str, x: Tensor, weight: Members, sizes: Tensor, bias: Members | None, row_scale: Tensor | None
) -> None:
    """The operators would take a packed operand that lacks an axis for a list of one; the core refuses it in words."""
    weight_spec, bias_spec = (
        each if each is None else spec_of(each) if isinstance(each, Tensor) else _stacked(each)
        for each in (weight, bias)
    )
    assert weight_spec is not None, "a weight is always given"
    scale_spec = None if row_scale is None else spec_of(row_scale)
    calls.check_linear(_library.decode(text), spec_of(x), weight_spec, spec_of(sizes), bias_spec, scale_spec)


def _stacked(members: Sequence[Tensor]) -> ArraySpec:
    one = spec_of(members[0])
    return ArraySpec((len(members), *one.shape), one.dtype)


@torch.compiler.assume_constant_result
def _text(
    rhs_transposed: bool,
    recipe: Recipe | None,
    scale_bias: bool,
    rows_hint: int,
    implementation: str | Sequence[str] | None,
) -> str:
    names = "" if implementation is None else calls.implementation_names(implementation)
    return _library.encode(bool(rhs_transposed), recipe, bool(scale_bias), rows_hint, names)


def _weight_names(weights: Sequence[Tensor]) -> list[str]:
    """How messages name each weight."""
    return [NAMES.w] if weights[0].dim() == 3 else [f"{NAMES.w}[{at}]" for at in range(len(weights))]


def _accumulators(given: str | Tensor | Sequence[Tensor | None], weights: list[Tensor]) -> list[Tensor | None]:
    """`wgrad_accum` as one destination a weight."""
    found = [given] if isinstance(given, Tensor) else list(given) if isinstance(given, (list, tuple)) else None
    if found is None:
        raise ValueError(
            f"`{NAMES.accum}`: {given!r}, expected None, 'main_grad', a tensor for a packed weight or a list of "
            "tensors for a list of weights; pass one of them."
        )
    if len(found) != len(weights) or (weights[0].dim() == 3) != isinstance(given, Tensor):
        raise ValueError(
            f"`{NAMES.accum}`: {len(found)} tensors, expected one for each of the {len(weights)} weights, in the same "
            "form (a tensor for a packed weight, a list for a list); pass None for a frozen member of a list."
        )
    for at, (accumulator, weight, owner) in enumerate(zip(found, weights, _weight_names(weights), strict=True)):
        name = NAMES.accum if isinstance(given, Tensor) else f"{NAMES.accum}[{at}]"
        if accumulator is None:
            if weight.requires_grad:
                raise ValueError(
                    f"`{name}`: None, expected a tensor, because `{owner}` needs a gradient; pass one or freeze it."
                )
            continue
        check_operand(name, accumulator, weight)
        calls.check_accumulator(name, spec_of(accumulator), spec_of(weight))
        _check_writable(name, accumulator)
    return found


def _destinations(weights: Sequence[Tensor]) -> list[Tensor | None]:
    """`main_grad` of every weight that needs a gradient."""
    pairs = zip(weights, _weight_names(weights), strict=True)
    return [main_grad.destination(each, name) if each.requires_grad else None for each, name in pairs]


def _check_writable(name: str, buffer: Tensor) -> None:
    if buffer.requires_grad:
        raise ValueError(f"`{name}`: requires_grad is True, expected False; pass `{name}.detach()`.")
    if is_foreign(buffer):
        raise ValueError(
            f"`{name}`: memory of another framework (it came by `exchange`), expected memory of torch; "
            "allocate it with torch, nobody else may see it change."
        )


def _check_buffers(out: Tensor | None, grad_input: Tensor | None, given: _Arguments) -> None:
    """BUF-2 for what the operators do not check themselves; the shape and dtype of `out` are theirs."""
    x = given.x
    inputs = [
        *((NAMES.x, x), (NAMES.sizes, given.sizes), (NAMES.row_scale, given.row_scale)),
        *((name, each) for name, each in zip(_weight_names(given.weights), given.weights, strict=True)),
        *((NAMES.bias, each) for each in given.biases),
    ]
    for name, buffer in ((NAMES.out, out), (NAMES.grad_input, grad_input)):
        if buffer is None:
            continue
        check_operand(name, buffer, x)
        _check_writable(name, buffer)
        if not torch.compiler.is_compiling():  # where there are no addresses yet
            _check_overlap(name, buffer, inputs)
        inputs.append((name, buffer))
    if grad_input is not None:
        calls.check_buffer(NAMES.grad_input, spec_of(grad_input), ArraySpec(tuple(x.shape), _gradient_dtype(x)))
        if not x.requires_grad:
            raise ValueError(
                f"`{NAMES.grad_input}`: given, but `x` needs no gradient; expected None, or an x with requires_grad; "
                "leave it out."
            )


def _gradient_dtype(x: Tensor) -> str:
    name = dtype_name(x.dtype)
    return "bfloat16" if name.startswith("float8") else name


def _check_overlap(name: str, buffer: Tensor, others: Sequence[tuple[str, Tensor | None]]) -> None:
    start, end = _span(buffer)
    for other_name, other in others:
        if other is None:
            continue
        other_start, other_end = _span(other)
        if max(start, other_start) < min(end, other_end):
            raise ValueError(
                f"`{name}`: overlaps `{other_name}` in memory, expected a buffer of its own; allocate one."
            )


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def _forward(given: _Arguments, out: Tensor | None) -> Tensor:
    x, weights, sizes, biases, row_scale, text, *_ = given
    if out is None:
        return _library.linear(x, weights, sizes, biases, row_scale, text)
    _library.linear_into(x, weights, sizes, biases, row_scale, text, out)
    return out.detach()  # of the same storage, but with a history of its own: the caller's tensor stays without


def _attach(
    given: _Arguments, out: Tensor | None, grad_input: Tensor | None, overwrite: tuple[bool, ...] | None
) -> Tensor:
    """The result with its gradients; `overwrite` stands for the attributes of that name if they were read already."""
    counts = (len(given.weights), len(given.biases))
    return _Linear.apply(
        *(given.text, counts, given.to_main_grad, overwrite, given.sizes, out, grad_input),
        *(given.x, given.row_scale, *given.weights, *given.biases, *given.accumulators),
    )


@torch.compiler.assume_constant_result
def _kept(text: str, x: bool, w: bool, bias: bool, row_scale: bool, has_bias: bool, has_scale: bool) -> Needs:
    """Which inputs backward reads, given the gradients that are needed."""
    return linear_saved(_library.decode(text), Needs(x, w, bias, row_scale), has_bias, has_scale)


_attach_uncompiled = torch.compiler.disable(_attach)

_PLAIN_ARGUMENTS = 7  # of `_Linear` that have no gradient and stand first


class _Linear(torch.autograd.Function):
    """Gradients around the operators. What backward reads is saved, results never."""

    @staticmethod
    def forward(
        ctx: Any,
        text: str,
        counts: tuple[int, int],
        to_main_grad: bool,
        overwrite: tuple[bool, ...] | None,
        sizes: Tensor,
        out: Tensor | None,
        grad_input: Tensor | None,
        x: Tensor,
        row_scale: Tensor | None,
        *members: Tensor | None,
    ) -> Tensor:
        """`members`: weights and biases, as many as `counts` says, then destinations of weight gradients, if any."""
        first_bias, first_accumulator = counts[0], counts[0] + counts[1]
        weights, biases = list(members[:first_bias]), list(members[first_bias:first_accumulator])
        accumulators = members[first_accumulator:]
        needs_x, needs_scale, *needs_members = ctx.needs_input_grad[_PLAIN_ARGUMENTS:]
        live = [at for at in range(first_bias) if needs_members[at]]
        live_biases = [at for at in range(counts[1]) if needs_members[first_bias + at]]
        needs = Needs(needs_x, bool(live), bool(live_biases), needs_scale)
        kept = _kept(text, *needs, bool(biases), row_scale is not None)
        ctx.save_for_backward(
            sizes,
            x if kept.x else None,
            row_scale if kept.row_scale else None,
            *(weights if kept.w else ()),
            *(biases if kept.bias else ()),
        )
        dtypes = _library.dtypes_text(x, weights[0], biases[0] if biases else None, row_scale)
        packed = (weights[0].dim() == 3, bool(biases) and biases[0].dim() == 2)
        ctx.facts = (
            text,
            dtypes,
            x.shape[1],
            counts,
            packed,
            needs,
            live,
            live_biases,
            kept.w,
            to_main_grad,
            overwrite,
        )
        # NOTE: no saved tensors: destinations change between forward and backward, Parameters are asked for attributes.
        ctx.grad_input = grad_input
        ctx.accumulators = accumulators
        ctx.owners = weights if to_main_grad or accumulators else ()
        return _forward(_Arguments(x, weights, sizes, biases, row_scale, text, to_main_grad, accumulators), out)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of forward's arguments; dy [M, N]."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return _backward(ctx, dy)
        with torch.no_grad():
            gradients = _backward(ctx, dy)
        return _Once.apply(*(None if each is None else each.detach().requires_grad_() for each in gradients))


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    text, dtypes, k, counts, packed, needs, live, live_biases, kept_w, to_main_grad, overwrite = ctx.facts
    sizes, x, row_scale, *members = ctx.saved_tensors
    weights, biases = (members[: counts[0]], members[counts[0] :]) if kept_w else ([], members)
    dy = dy.contiguous()
    operands = (x, weights, sizes, biases, row_scale, dy, k, text, dtypes)
    elsewhere = bool(ctx.owners) and needs.w
    buffered = ctx.grad_input is not None and needs.x
    # The gradient of the row scale is a by-product of that of x.
    new = needs._replace(
        x=needs.x and not buffered, row_scale=needs.row_scale and not buffered, w=needs.w and not elsewhere
    )
    dx = dw = db = dc = None
    if letters := _library.needs_text(new):
        results = iter(_library.linear_grads(*operands, letters, _library.subset(live, counts[0])))
        dx, dw, db, dc = (next(results) if needed else None for needed in new)
    if buffered:
        if needs.row_scale:
            name = dtypes.split(",")[3]
            dc = dy.new_empty(dy.shape[:1], dtype=TORCH_DTYPES[name])
        letters = _library.needs_text(Needs(True, False, False, needs.row_scale))
        _library.linear_grads_into(*operands, letters, [], False, ctx.grad_input, [], dc)
        dx = ctx.grad_input.detach()
    weight_gradients: list[Tensor | None] = [None] * counts[0]
    bias_gradients: list[Tensor | None] = [None] * counts[1]
    if elsewhere:

        def launch(destinations: list[Tensor], groups: list[int], accumulate: bool) -> None:
            some = _library.subset(groups, counts[0])
            _library.linear_grads_into(*operands, "w", some, accumulate, None, destinations, None)

        main_grad.write(_weight_names(ctx.owners), ctx.owners, ctx.accumulators or None, overwrite, live, launch)
        if to_main_grad and overwrite is None:
            for at in live:
                weight_gradients[at] = main_grad.returned(ctx.owners[at])
    if dw is not None:  # of a list: [live, N, K]
        for at, gradient in zip(live, [dw] if packed[0] else dw.unbind(), strict=True):
            weight_gradients[at] = gradient
    if db is not None:
        members_db = [db] if packed[1] else db.unbind()
        for at in live_biases:
            bias_gradients[at] = members_db[at]
    return (*[None] * _PLAIN_ARGUMENTS, dx, dc, *weight_gradients, *bias_gradients, *[None] * len(ctx.accumulators))


class _Once(torch.autograd.Function):
    """Lets gradients through and refuses to differentiate them again."""

    @staticmethod
    def forward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else each.view_as(each) for each in gradients)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "grouped_linear: differentiated twice, expected once; its gradients have no derivative of their own, "
            "compose it of differentiable torch operations where second derivatives are needed."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Looking from outside


def _linear_calls(*args: Any, **kwargs: Any) -> list[Call]:
    """Native calls of `grouped_linear(*args, **kwargs)` and of the gradients that its arguments need."""
    out, grad_input = kwargs.pop("out", None), kwargs.pop("grad_input", None)
    given = _arguments(*args, **kwargs)
    if out is not None or grad_input is not None:
        _check_buffers(out, grad_input, given)
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
        into_dtype = "float32" if to_main_grad else into and dtype_name(into.dtype)
        found += _library.backward_calls(x, weights, sizes, biases, row_scale, text, needs, into_dtype, grad_input)
    return found


_CALLS: dict[Callable[..., Any], Callable[..., list[Call]]] = {grouped_linear: _linear_calls}


def _planned(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Call]:
    if op not in _CALLS:
        names = ", ".join(sorted(each.__name__ for each in _CALLS))
        raise TypeError(f"`op`: {op!r}, expected one of {names}; pass the public function itself.")
    return _CALLS[op](*args, **kwargs)


def _arch(arch: str | None, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    if arch is not None:
        return arch
    x = args[0] if args else kwargs.get("x")
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
    """
    return why_not(lambda: _planned(op, args, kwargs), _arch(arch, args, kwargs))


def explain(op: Callable[..., Any], *args: Any, arch: str | None = None, **kwargs: Any) -> str:
    """One line for each native call of `op(*args, **kwargs)` and of its gradients: its kernel, and who declined.

    Arguments are those of `why_unsupported`.

    Raises:
        TypeError, ValueError: what `op` itself would raise.
    """
    return explain_calls(_planned(op, args, kwargs), _arch(arch, args, kwargs))
