"""The operators of `torch.library`: each runs one whole rule, so that the dispatcher's cost is paid once per rule.

`call` is the only way from a rule to its kernels. For plain tensors without tracing it replays the rule's recorded
program directly. In all other cases (torch.compile, fake and meta tensors, dispatch modes, profilers) it calls an
operator. An operator takes the leaves of all operands in two lists, of tensors to read and of tensors to write, and a
text that describes them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grouped_core.debug import debug_flags
from torch_bridge import _codec, _fake, _record
from torch_bridge._checks import check_gradients
from torch_bridge._compiling import is_compiling
from torch_bridge._memory import EXCHANGE
from torch_bridge._record import Prepared, Rule, prepare, results_of
from torch_bridge._tensors import Flat, Layout, Leaf, flatten_all, unflatten, written_leaves


class _Facts(NamedTuple):
    """The content of an operator's text argument.

    Attributes:
        static: the static facts of the rule. layouts: the layouts of its operands.
        kinds: for each leaf, whether there is a tensor; for a list, (number of tensors, positions without a tensor).
    """

    static: Any
    layouts: tuple[Layout, ...]
    kinds: tuple[Any, ...]


_codec.register(_Facts)
_LIBRARY = torch.library.Library("torch_bridge", "DEF")
_NAMES: dict[str, list[str]] = {}
"""The names of each rule's operators, by the name of the rule."""


def define(
    name: str,
    run: Callable[[Any, Any, Any], Sequence[Any]],
    operands: type[Any],
    *statics: type[Any],
    rows: Sequence[str] = (),
    written: Sequence[str] = (),
    most_results: int = 0,
    notes_sizes: bool = False,
    derived: Sequence[str] = (),
) -> Rule:
    """Defines a rule and its operators: one that makes new tensors, and per number of results one that also writes.

    The latter are needed because functionalisation does not support a mutating operator that returns a list.

    Args:
        name, run, operands, rows, written, notes_sizes, derived: the fields of the `Rule`.
        statics: the classes in its static facts.
        most_results: how many tensors a call that writes makes at most; a quantised form has up to three.
    """
    rule = Rule(name, run, operands, frozenset(rows), frozenset(written), notes_sizes, frozenset(derived))
    _codec.register(*statics)
    _define(name, f"({_READ}, {_STATIC}) -> Tensor[]", rule)
    for count in range(most_results + 1) if written or "extras" in operands._fields else ():
        results = ", ".join(["Tensor"] * count)
        _define(f"{name}_into{count}", f"({_READ}, Tensor(a!)[] written, {_STATIC}) -> ({results})", rule)
    return rule


_READ, _STATIC = "Tensor[] read", "str facts, SymInt rows"


def operators_of(*rules: Rule) -> set[Any]:
    """Returns all operators of rules, as dispatch modes see them."""
    return {getattr(torch.ops.torch_bridge, name).default for rule in rules for name in _NAMES[rule.name]}


def _define(name: str, schema: str, rule: Rule) -> None:
    _NAMES.setdefault(rule.name, []).append(name)
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(name, partial(_execute, rule), device)
    torch.library.register_fake(f"torch_bridge::{name}", partial(_fake_results, rule), lib=_LIBRARY)
    _LIBRARY.impl(name, partial(_without_backward, name), "Autograd")


def _without_backward(name: str, *arguments: Any) -> Any:
    """Runs an operator where autograd sees it, as in programs of torch.export: gradients must not end there unseen."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in arguments[0]):
        return _Ends.apply(name, arguments, *arguments[0])
    return _below_autograd(name, arguments)


def _below_autograd(name: str, arguments: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.torch_bridge, name).default(*arguments)


class _Ends(torch.autograd.Function):
    """An operator whose backward is refused. Its tensors are given once more, because autograd looks into no list."""

    @staticmethod
    def forward(ctx: Any, name: str, arguments: tuple[Any, ...], *_: Tensor) -> Any:
        ctx.name = name
        found = _below_autograd(name, arguments)
        return tuple(found) if isinstance(found, list) else found

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        _refuse_backward(ctx.name)


def _refuse_backward(name: str) -> None:
    raise NotImplementedError(
        f"backward of the operator torch_bridge::{name}: expected none, because derivatives belong to functions and "
        "layers, not to their operators; programs of torch.export hold operators alone, so train the module itself, or "
        "compile it with torch.compile."
    )


def call(rule: Rule, static: Hashable, operands: Any, rows: Any) -> list[Any]:
    """Runs `rule` and returns its results: new tensors, and operands that it returns unchanged.

    Args:
        static: the rule's static facts. operands: an instance of its operand class. rows: M.
    """
    results = call_prepared(prepare(rule, static), operands, rows)
    return [unflatten(each.layout, iter(each.leaves), rows) if type(each) is Flat else each for each in results]


def call_prepared(prepared: Prepared, operands: tuple[Any, ...] | list[tuple[Any, ...]], rows: Any) -> list[Any]:
    """Runs a prepared rule, as `call` does, but results of several leaves are `Flat`, and operands may be.

    Args:
        rows: M.
        operands: a tuple in the order of the rule's operand class, because making an instance of that class takes
            longer; or a list that holds only this tuple. The list is emptied, so that operands are freed as soon as no
            launch reads them. A tuple may live until the call returns: the caller's frame holds its arguments under the
            frame evaluation hook that Dynamo leaves after a failed compilation.
    """
    is_plain = _modes() == 0 and not _profiling()
    if is_plain and not debug_flags():
        results = prepared.run(operands, rows, _record.observer)
        if results is not None:
            return results
    layouts, leaves = flatten_all(operands.pop() if isinstance(operands, list) else operands)
    del operands  # so that they are freed as soon as no launch reads them
    if is_plain and EXCHANGE.describe(tuple(leaves)) is not None:
        return _record.execute(_record.program_for(prepared, layouts, leaves, rows), leaves, rows)
    rule, static = prepared.rule, prepared.static
    if not is_compiling():
        check_gradients(rule.name, leaves)
    read, written, text = _taken(rule, static, layouts, leaves)
    found = _fake.fake(rule, static, layouts, leaves, rows)
    made = found.recording.made()
    if written:
        operator = getattr(torch.ops.torch_bridge, f"{rule.name}_into{len(made)}").default
        tensors = operator(read, written, text, rows)
        tensors = [tensors] if isinstance(tensors, Tensor) else tensors or ()
    else:
        tensors = getattr(torch.ops.torch_bridge, rule.name).default(read, text, rows)
    return results_of(found.recording.outputs, leaves, dict(zip(made, tensors, strict=True)))


_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled  # pyrefly: ignore[implicit-import]


def _taken(
    rule: Rule, static: Any, layouts: tuple[Layout, ...], leaves: Sequence[Leaf]
) -> tuple[list[Tensor], list[Tensor], str]:
    """Converts leaves to an operator's arguments: the tensors to read, the tensors to write, and the text."""
    read: list[Tensor] = []
    written: list[Tensor] = []
    kinds: list[Any] = []
    for is_written, leaf in zip(_written(rule, layouts), leaves, strict=True):
        parts = [leaf] if leaf is None or isinstance(leaf, Tensor) else leaf
        absent = tuple([at for at, each in enumerate(parts) if each is None])
        kinds.append((len(parts), absent) if parts is leaf else not absent)
        (written if is_written else read).extend([each for each in parts if each is not None])
    return read, written, _codec.to_text(_Facts(static, layouts, tuple(kinds)))


@lru_cache(maxsize=1024)
def _written(rule: Rule, layouts: tuple[Layout, ...]) -> tuple[bool, ...]:
    """Returns for each leaf whether it is written."""
    pairs = zip(rule.operands._fields, layouts, strict=True)
    return tuple([leaf for name, layout in pairs for leaf in written_leaves(layout, written=name in rule.written)])


def _arguments(rule: Rule, *arguments: Any) -> tuple[_Facts, list[Any], Any]:
    """Restores (facts, leaves, M) from the arguments of an operator, which `_taken` made."""
    read, *written, text, rows = arguments
    facts = _codec.from_text(text)
    sources = {False: iter(read), True: iter(written[0] if written else ())}
    leaves: list[Any] = []
    for is_written, kind in zip(_written(rule, facts.layouts), facts.kinds, strict=True):
        source = sources[is_written]
        if isinstance(kind, tuple):
            count, absent = kind
            leaves.append([None if at in absent else next(source) for at in range(count)])
        else:
            leaves.append(next(source) if kind else None)
    return facts, leaves, rows


def _results(tensors: list[Tensor], arguments: Sequence[Any]) -> Any:
    """Returns what an operator returns: a list, or as many tensors as its schema declares."""
    if len(arguments) == 3:
        return tensors
    return tensors[0] if len(tensors) == 1 else tuple(tensors) if tensors else None


def _execute(rule: Rule, *arguments: Any) -> Any:
    facts, leaves, rows = _arguments(rule, *arguments)
    program = _record.program_for(prepare(rule, facts.static), facts.layouts, leaves, int(rows))
    _, results = flatten_all(_record.execute(program, leaves, int(rows)))
    return _results([results[at] for at in program.made], arguments)


def _fake_results(rule: Rule, *arguments: Any) -> Any:
    facts, leaves, rows = _arguments(rule, *arguments)
    found = _fake.fake(rule, facts.static, facts.layouts, leaves, rows)
    if _fake.planned:
        _fake.planned[-1] += found.recording.calls
    sizes = leaves[_record.sizes_at(rule, facts.layouts)] if "sizes" in rule.operands._fields else None
    made = _fake.new_tensors(found, leaves, 1 if sizes is None else sizes.shape[0])
    return _results([made[at] for at in found.recording.made()], arguments)
