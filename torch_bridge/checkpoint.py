"""Checkpoints of PyTorch modules: saving, loading, and converting between the layouts of the field.

What the layouts are and how tensors move between them is in `grouped_core.layouts`; here the moves are executed. Files
are in the safetensors format and are the same for `jax_grouped.checkpoint`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module

from grouped_core import checkpoint_tensors, lora_layout, safetensors_file
from grouped_core.checkpoint_files import Model, loading, opened, part_file, twins, unused_message
from grouped_core.checkpoint_fp8 import dequantized
from grouped_core.checkpoint_metadata import NAME, Other, Spec, beside
from grouped_core.checkpoint_plan import fixed_or, interleave_option, plan, shard_option
from grouped_core.checkpoint_tensors import executed, formats_of
from grouped_core.formats import QTensor
from grouped_core.layout_steps import run_steps
from grouped_core.layouts import LAYOUTS, join, layout_option, unwrapped, unwrapped_paths
from grouped_core.safetensors_file import DTYPES, Facts
from torch_bridge._checkpoint_layers import activated, blocks_of, of_linears, of_mlps, placed
from torch_bridge._checks import is_distributed, is_freed
from torch_bridge._layout_arrays import TORCH, from_numpy, name_of, to_numpy
from torch_bridge._optimizer_state import convert_optimizer as convert_optimizer
from torch_bridge.nn._scaling_state import BUFFERS, ScaledModule
from torch_bridge.nn._state import CONVERTED, check_hooked
from torch_bridge.nn.linear import GroupedLinear
from torch_bridge.nn.mlp import GroupedMLP
from torch_bridge.quantized_weight import QuantizedWeight

_Tree = TypeVar("_Tree")
Interleave = int | tuple[int | None, int | None] | None
"""The block in which gate and linear columns alternate, None for halves, or that of the source and of the target."""

_LAYOUT = "torch_bridge"


def save(
    path: str | os.PathLike[str],
    tree_or_module: Module | Mapping[str, Any],
    spec: Spec = None,
    *,
    shard: tuple[int, int] | None = None,
) -> None:
    """Writes a module, or a tree of tensors and modules, to a safetensors file, tensor by tensor.

    The file is complete or not there. It records the order of axes and columns, so `load` can check them.

    Args:
        path: the path of the file; with `shard` that of a folder, in which each rank writes its own file.
        tree_or_module: a module, or mappings of names to tensors, `QTensor`s, modules and further mappings.
        spec: the activation of experts that are plain tensors: an `Activation`, the name of a kind, or a mapping of
            paths of layers to these. Modules know theirs.
        shard: (rank, ranks): the experts are those of one rank, in order, and are named by their numbers among all.
            Other tensors are the same on all ranks, and rank 0 writes them. Leave it out if experts are DTensors over a
            mesh of one axis, as `parallel.shard_experts` makes them: it follows from these. Every rank then calls this.

    Raises:
        ValueError: the activation of experts with a gate is not known, or `spec` has another one than their module; a
            tensor is not local; several ranks save adapters, states of delayed scaling, or grouped layers outside of an
            MLP. TypeError: an entry is not a tensor. OSError: the file cannot be written.
    """
    flat, modules = _flattened(tree_or_module)
    if meta := [key for key, value in flat.items() if isinstance(value, Tensor) and value.is_meta]:
        raise ValueError(f"`{meta[0]}` of save: on the meta device, expected values; load or initialise it first.")
    flat, shard = _own_experts(flat, modules, shard)
    given = beside(spec, {**of_mlps(modules), **of_linears(modules)})
    ranks = shard_option(shard)
    if ranks.ranks > 1:
        _check_numbered(modules)
    formats = {name: formats_of(weight.q) for name, weight in _quantised(modules).items()}
    made = checkpoint_tensors.saving(flat, _LAYOUT, given, _facts, formats, ranks, _recorded_linears(modules))
    entries = {key: facts for move in made.plan.moves for key, facts in zip(move.targets, move.facts, strict=True)}
    values = ((each.key, to_numpy(each.value)) for each in executed(made.plan, made.flat.__getitem__, TORCH))
    safetensors_file.write(part_file(path, ranks), entries, {NAME: made.metadata}, values)


def load(
    path: str | os.PathLike[str],
    like: _Tree,
    *,
    layout: str | None = None,
    interleave: Interleave = None,
    convert: bool = False,
    prefix: str = "",
    shard: tuple[int, int] | None = None,
) -> _Tree:
    """Loads a checkpoint into a module, or into the tensors of a tree, in place; its parameters are packed or indexed.

    Everything is checked before the first tensor changes. Tensors are read one layer at a time. A warning lists those
    of the checkpoint that have no place in the model. A checkpoint without adapters leaves those of the model as they
    are.

    Args:
        path: a safetensors file, or a folder of such files.
        like: a module, or mappings of names to tensors, `QTensor`s, modules and further mappings.
        layout: for a checkpoint that another library wrote, a name of `grouped_core.layouts.LAYOUTS`; checkpoints of
            this library record their layout.
        interleave: for a checkpoint that another library wrote, the block in which gate and linear columns alternate. A
            tree of tensors does not record its block either: a pair has that of the checkpoint and that of the tree.
        convert: whether a checkpoint of this library may be converted to the order of axes and of columns in the model,
            and FP8 weights with `weight_scale_inv`, as DeepSeek and Qwen publish them, may be read as bfloat16.
        prefix: the path below which the model is in the checkpoint, with or without a dot at its end.
        shard: (rank, ranks): the model has the experts of one rank, and takes them from those of all ranks. Leave it
            out if experts are DTensors, as in `save`.

    Returns:
        `like`.

    Raises:
        ValueError: the checkpoint is damaged, ambiguous, or does not fit. KeyError: it lacks tensors of the model.
    """
    flat, modules = _flattened(like)
    flat, shard = _own_experts(flat, modules, shard)
    ranks = shard_option(shard)
    target, quantised = checkpoint_tensors.flatten(flat)
    reader = dequantized(opened(path, prefix), convert=convert)
    weights = _quantised(modules)
    entries = {key: _facts(value) for key, value in target.items()}
    plain = _taken_plain(weights, reader.entries)
    entries, target = _with_plain(entries, plain), {**target, **plain}
    formats = {key: formats_of(q) for key, q in quantised.items()}
    formats |= {key: formats_of(weight.q) for key, weight in weights.items()}
    activations = {**of_mlps(modules), **of_linears(modules)}
    optional = frozenset(key for key in entries if key.rpartition(".")[2] in BUFFERS)  # may be missing
    model = Model(LAYOUTS[_LAYOUT], entries, activations, optional, formats)
    made = loading(reader, model, layout, interleave, convert, ranks)
    if meta := [key for key in entries if target[key].is_meta]:
        raise ValueError(
            f"`like` of load: `{meta[0]}` on the meta device, expected storage to load into; call "
            "`to_empty(device=...)` first."
        )
    for key in entries:
        _check_target(key, target[key])
    with torch.no_grad():
        for each in executed(made, lambda key: from_numpy(reader.read(key)), TORCH):
            target[each.key].copy_(each.value)
    for _, scaled in placed(modules, ScaledModule):
        scaled.refit_state()
    for _, layer in placed(modules, GroupedLinear):
        layer._settle()
    if message := unused_message(made, reader.where):
        warnings.warn(message, stacklevel=2)
    return like


def _check_target(key: str, tensor: Tensor) -> None:
    """Refuses a tensor that cannot be loaded into in place. Raises ValueError."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        came, remedy = "made in inference mode", "load inside of `torch.inference_mode()`, or make it outside"
    elif any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        came, remedy = f"strides {tuple(tensor.stride())}, so that elements share memory", "pass a `.clone()` of it"
    elif is_freed(tensor):
        came, remedy = "its storage is empty", "gather or restore a sharded parameter first"
    else:
        return
    raise ValueError(f"`{key}` of `like` of load: {came}, expected a tensor that can be written; {remedy}.")


def convert(
    tree: Mapping[str, Any] | Module, source: str, target: str, *, interleave: Interleave = None
) -> dict[str, Any]:
    """A state dict in another layout: names, shapes and the order of columns change, values never do.

    FP8 weights with `weight_scale_inv`, as DeepSeek and Qwen publish them, become bfloat16 as in `load`, in experts and
    outside: the same values where scales are powers of two, else rounded once.

    Args:
        tree: a state dict, or a module, whose state dict is taken.
        source, target: names of `grouped_core.layouts.LAYOUTS`. Experts are found by their names; all other entries
            stay as they are.
        interleave: the block in which gate and linear columns alternate, of each side whose layout leaves it open; None
            for halves; or a pair, of the source and of the target. The MLPs of a module have that of their activation.

    Returns:
        A flat dict; tensors may be views. MXFP4 blocks and scales of gpt-oss become a `QTensor` with the same bits.

    Raises:
        ValueError: a tensor is ambiguous, incomplete or does not fit, or the experts have another layout than `source`.
        TypeError: an argument has another type.
    """
    flat, modules = _flattened(tree)
    _check_kinds(flat)
    own, linears = blocks_of(of_mlps(modules)), blocks_of(of_linears(modules))
    return checkpoint_tensors.converted(flat, source, target, interleave, _facts, TORCH, own, linears)


def load_hook(layout: str, *, interleave: Interleave = None) -> Callable[..., None]:
    """A hook for `module.register_load_state_dict_pre_hook`: `load_state_dict` then takes that layout.

    Args:
        layout: the layout of the state dicts, a name of `grouped_core.layouts.LAYOUTS`. interleave: as in `load`.

    Raises:
        ValueError, TypeError: an argument is none of the possible ones; `load_state_dict` raises what `load` raises.
    """
    source, given = layout_option(layout), interleave_option(interleave)

    def hook(module: Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any) -> None:
        inside = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        held = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
        if spread := [key for key, value in held.items() if is_distributed(value)]:
            raise ValueError(
                f"`{prefix}{spread[0]}` beside `load_hook`: a DTensor, expected a plain parameter; load before the "
                "module is sharded, or convert the checkpoint first and use torch.distributed.checkpoint."
            )
        targets = {key: _facts(value) for key, value in held.items()}
        known = unwrapped_paths({**of_mlps({"": module}), **of_linears({"": module})})
        linears = known if interleave is not None else {}  # else taken as they are, as in `load`
        asked: dict[str, int | None] = {}

        def pair(place: str) -> tuple[int | None, int | None]:
            act = known.get(place)
            if act is not None and not act.gated:
                return None, None
            asked[place] = fixed_or(source, given[0])
            return asked[place], given[1] if act is None else act.interleave

        facts = {key: _facts(value) for key, value in inside.items() if isinstance(value, Tensor)}
        weights = _quantised({"": module})
        targets = _with_plain(targets, _taken_plain(weights, facts))
        both = twins({key: formats_of(weight.q) for key, weight in weights.items()})
        own = plan(facts, source, LAYOUTS[_LAYOUT], pair, targets=targets, linears=linears, twins=both)
        moves = [move for move in own.moves if move.role or move.steps]
        made = {}
        for move in moves:
            values = run_steps(move.steps, [inside[key] for key in move.sources], TORCH)
            made |= {prefix + key: value for key, value in zip(move.targets, values, strict=True)}
        for key in {key for move in moves for key in move.sources}:
            del state[prefix + key]
        state.update(made)
        _tell_layers(module, asked, state, prefix, local_metadata)

    return hook


def _tell_layers(
    module: Module,
    taken: Mapping[str, int | None],
    state: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    """Tells the layers inside of `module`, which check it, the order that a hook took columns for, by place.

    Raises:
        ValueError: the metadata of the state dict say another order.
    """
    readers = {path: (path, act) for path, act in of_mlps({"": module}).items()}
    readers |= {path: (each.reader, each.activation) for path, each in activated({"": module}).items()}
    for path, (reader, act) in readers.items():
        if (place := unwrapped(path)) not in taken:
            continue
        check_hooked(reader, act.interleave, taken[place], prefix, local_metadata)
        if reader:  # else it is the module itself, which does not check after its hooks
            state[prefix + join(reader, CONVERTED)] = taken[place]


def from_peft(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """An adapter (A, B) for `lora=` from the two matrices of PEFT's `target_parameters`.

    Args:
        a: `lora_A.weight`, [G r, K]. b: `lora_B.weight`, [N, r G]. num_experts: G.

    Returns:
        A [G, r, K] and B [G, N, r], contiguous, without gradient. PEFT's scaling is not part of them.

    Raises:
        TypeError: `num_experts` is not an integer, or one is no tensor. ValueError: shapes do not fit each other or
            G experts.
    """
    made = lora_layout.from_peft(a, b, num_experts, transposed=True)
    return made[0].detach().contiguous(), made[1].detach().contiguous()


def to_peft(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `from_peft`: PEFT's two matrices, contiguous, from A [G, r, K] and B [G, N, r].

    Raises:
        TypeError: one is no tensor. ValueError: the shapes are not those of one adapter.
    """
    made = lora_layout.to_peft(a, b, transposed=True)
    return made[0].detach().contiguous(), made[1].detach().contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# Trees


def _flattened(tree: Any) -> tuple[dict[str, Any], dict[str, Module]]:
    """Tensors and `QTensor`s by their paths, and the modules of the tree by theirs."""
    flat: dict[str, Any] = {}
    modules: dict[str, Module] = {}
    for key, value in _leaves("", tree):
        if isinstance(value, Module):
            modules[key] = value
            entries = {join(key, name): each for name, each in value.state_dict().items() if isinstance(each, Tensor)}
        else:
            entries = {key: value}
        for name, each in entries.items():
            if name in flat:
                raise ValueError(
                    f"`{name}` of a checkpoint: two tensors of that path, expected one; rename a part of the tree."
                )
            flat[name] = each
    return flat, modules


def _leaves(path: str, tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for name, each in tree.items():
            yield from _leaves(join(path, str(name)), each)
    elif isinstance(tree, (Module, QTensor, Tensor)):
        yield path, tree
    else:
        raise TypeError(
            f"`{path or 'tree'}` of a checkpoint: {type(tree).__name__}, expected a tensor, a QTensor, a module, or a "
            "mapping of names to these; leave it out, or convert it."
        )


def _recorded_linears(modules: Mapping[str, Module]) -> dict[str, Other]:
    """What a file records of grouped linear layers outside of an MLP."""
    return {
        path: Other("linear", layer.num_groups, "grouped" if layer.weight_names == ("weight",) else "indexed")
        for path, (_, layer, _, _) in activated(modules).items()
    }


def _check_numbered(modules: Mapping[str, Module]) -> None:
    """Refuses grouped layers outside of an MLP: their experts are not numbered, so only rank 0 would write its own."""
    parts = {id(layer) for _, mlp in placed(modules, GroupedMLP) for layer in mlp.modules()}
    for path, each in placed(modules, GroupedLinear):
        if id(each) not in parts:
            raise ValueError(
                f"`{path or 'GroupedLinear'}` of save by several ranks: a grouped layer outside of "
                "an MLP, expected GroupedMLP or MoE, whose experts are numbered among all; save it on each rank "
                "apart, or use torch.distributed.checkpoint."
            )


def _own_experts(
    flat: dict[str, Any], modules: Mapping[str, Module], shard: tuple[int, int] | None
) -> tuple[dict[str, Any], tuple[int, int] | None]:
    """Experts that are DTensors as the local tensors of this rank, and (rank, ranks).

    Raises:
        ValueError: experts are placed otherwise, or not over the ranks of `shard`.
    """
    layers = {path for path, _ in placed(modules, GroupedLinear)}
    found = dict(flat)
    for key, value in flat.items():
        if not is_distributed(value) or key.rpartition(".")[0] not in layers:
            continue  # `_facts` refuses other DTensors
        mesh, place = value.device_mesh, value.placements[0]
        axis = value.dim() - 1 if key.rpartition(".")[2] in BUFFERS else 0
        given = (mesh.get_local_rank(), mesh.size()) if mesh.ndim == 1 else None
        of_one = mesh.size() > 1 and key[-1].isdigit()  # a parameter per expert, cut by FSDP2
        if given is None or of_one or not place.is_shard(axis) or value.shape[axis] % mesh.size():
            raise ValueError(
                f"`{key}` of the model beside a checkpoint: a DTensor placed {value.placements} over {mesh.ndim} axes "
                f"of {mesh.size()} ranks, shape {tuple(value.shape)}, expected experts in equal parts over one axis; "
                "redistribute it, or use torch.distributed.checkpoint."
            )
        if shard not in (None, given):
            raise ValueError(
                f"`shard` of a checkpoint: {shard} beside `{key}` on rank {given[0]} of {given[1]}, expected None or "
                "these numbers; leave it out."
            )
        shard, found[key] = given, value.to_local()
    _check_kinds(found)
    return found, shard


def _check_kinds(flat: Mapping[str, Any]) -> None:
    for key, value in flat.items():
        if isinstance(value, Tensor) and not isinstance(value, QuantizedWeight):
            _facts(value, f"`{key}`")


def _quantised(modules: Mapping[str, Module]) -> dict[str, QuantizedWeight]:
    return {
        join(path, name): each
        for path, module in modules.items()
        for name, each in module.named_parameters(remove_duplicate=False)
        if isinstance(each, QuantizedWeight)
    }


def _taken_plain(weights: Mapping[str, QuantizedWeight], entries: Mapping[str, Facts]) -> dict[str, QuantizedWeight]:
    """Quantised weights of the model, if the checkpoint has plain ones, which are quantised as they are loaded."""
    quantised = any(key.endswith((".values", "_blocks")) for key in entries)
    return {} if quantised else dict(weights)


def _with_plain(entries: Mapping[str, Facts], plain: Mapping[str, QuantizedWeight]) -> dict[str, Facts]:
    """Returns `entries` with one entry for each weight of `plain` instead of those of its parts."""
    parts = tuple(f"{key}." for key in plain)
    found = {key: facts for key, facts in entries.items() if not key.startswith(parts)}
    return found | {key: Facts(tuple(each.shape), name_of(each.dtype)) for key, each in plain.items()}


def _facts(value: Any, name: str = "tensor") -> Facts:
    """The facts of a tensor; `name` is for messages.

    Raises:
        ValueError: it is a DTensor, not dense, or of a dtype that files do not have.
    """
    if is_distributed(value):
        raise ValueError(
            f"{name} of a checkpoint: a DTensor of shape {tuple(value.shape)}, expected local tensors; pass those of "
            "`to_local()` with `shard=(rank, ranks)`, or use torch.distributed.checkpoint."
        )
    if value.layout is not torch.strided:
        raise ValueError(
            f"{name} of a checkpoint: {value.layout}, expected a dense one; convert it with `.to_dense()`."
        )
    dtype = name_of(value.dtype)
    if dtype not in DTYPES:
        raise ValueError(f"{name} of a checkpoint: dtype {dtype}, expected one of {', '.join(DTYPES)}; convert it.")
    return Facts(tuple(value.shape), dtype)
