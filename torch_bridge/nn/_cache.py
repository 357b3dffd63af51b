"""Quantised weights of a layer that outlive a forward pass, in buffers that keep their addresses.

Captured graphs hold these addresses, so new buffers are made only if the weights move to another device or get another
shape, as experts do that are sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grouped_core.formats import Format, QTensor
from torch_bridge._checks import local
from torch_bridge._memory import capture_on
from torch_bridge._quantizing import Wanted, quantize_into
from torch_bridge._tensors import dtype_name, members, parts_of
from torch_bridge.quantized_weight import empty_form

_Key = tuple[int, Format, torch.dtype]  # contracted axis, format, dtype of the weights before quantisation


def _mark(parameters: Sequence[Any]) -> tuple[Any, ...]:
    """Returns (address, version) of each weight, which identify its content; None in inference or with FSDP."""
    parts = [None if hasattr(each, "__fsdp_param__") else local(each) for each in parameters]
    return tuple([None if each is None or each.is_inference() else (each.data_ptr(), each._version) for each in parts])


class WeightCache:
    """The quantised weights of one layer.

    There are two ways to choose when they are updated (QNT-5, QNT-6): `first` of each forward pass, or a flag on the
    device, which captured graphs read at each replay. A copy, including an unpickled one, starts empty.

    No Python runs when a graph is replayed, and graphs are replayed in any order. So a captured pass whose `first` is
    False relies on nothing but what all captured updates write, and later updates write all forms, of weights of the
    same dtype, that captured passes read. Under a flag all captured passes write the same forms.

    Attributes:
        update: the flag of the last call of `set_update`; None if there was no call, so that there is no flag.
        exchanges: how often the layer was given other Parameters for its weights. FSDP2 does so whenever it gathers
            them, often at the same address, and always with their previous version.
    """

    def __init__(self) -> None:
        self._forms: dict[_Key, QTensor[Tensor]] = {}
        self._marks: dict[_Key, tuple[Any, Any]] = {}  # identify the weights and scales from which a form was made
        self._measured: set[_Key] = set()  # forms whose amax was merged when they were made
        self._seen: tuple[Any, Any] | None = None  # mark of the weights and scales at the last requested update
        self._fresh: set[_Key] = set()  # forms that were written by that update, or since
        # By the captures that update: the forms that each of them writes, and those whose amax it merges.
        self._captured: dict[int, tuple[set[_Key], set[_Key]]] = {}
        self._read: set[_Key] = set()  # forms that captured passes read
        self._skip: Tensor | None = None  # int32 [1]: if it is not zero, the forms are not written
        self.update: bool | None = None
        self.exchanges = 0

    def __reduce__(self) -> tuple[type[WeightCache], tuple[()]]:
        return WeightCache, ()

    def set_update(self, flag: bool, device: torch.device) -> None:
        """Sets whether forward passes whose `first` is None, and replays of such captured passes, update the forms.

        Raises:
            RuntimeError: a graph is being captured, which would hold the value.
        """
        if capture_on(device):
            raise RuntimeError(
                "set_weight_update: a CUDA graph is captured, expected a call outside, because graphs read the flag at "
                "each replay; call it before the replay."
            )
        if self._skip is None or self._skip.device != device:
            with torch.inference_mode(mode=False):  # later calls write it
                self._skip = torch.zeros(1, dtype=torch.int32, device=device)
        self._skip.fill_(int(not flag))
        self.update = flag

    def bind(self, name: str, parameters: Sequence[Any], first: bool | None) -> Any:
        """Returns the function that gives a pass its forms; None if the pass quantises the weights and keeps nothing.

        Args:
            name: the layer's name in messages. parameters: the Parameters whose versions count. first:
                `is_first_microbatch`.
        """
        if first is None and self.update is None:
            return None
        return partial(self._get, name=name, parameters=parameters, first=first)

    def _get(
        self,
        weight: Tensor | list[Tensor],
        wanted: Wanted,
        scale: Tensor | None,
        amax: Tensor | None,
        scale_mark: tuple[Any, ...],
        *,
        name: str,
        parameters: Sequence[Any],
        first: bool | None,
    ) -> list[QTensor[Tensor]]:
        """Returns the requested forms of `weight`, updated if they are due (`_weight_forms.WeightForms`)."""
        source = members(weight)[0]
        shape = tuple(source.shape) if isinstance(weight, Tensor) else (len(weight), *source.shape)
        if any(each.values.device != source.device or each.shape != shape for each in self._forms.values()):
            self._forms.clear()  # the layer was moved, or its experts were sharded
            self._marks.clear()
            self._measured.clear()
            self._fresh.clear()
            self._captured.clear()
            self._read.clear()
        if self._skip is not None and self._skip.device != source.device:
            self.set_update(bool(self.update), source.device)
        keys: list[_Key] = [(axis, fmt, source.dtype) for axis, fmt in wanted]
        writes = self.update if first is None else first
        capture = capture_on(source.device)
        if not keys and not writes and not (capture and first is None and self._forms):
            return []
        replayed = self._replayed(source.dtype)
        before = replayed if capture else None  # done by updates that are replayed before this pass
        if not writes and before is None and (reason := self._stale(keys, parameters, by_flag=first is None)):
            raise RuntimeError(
                f"weight cache of {name}: {reason}, expected forms of the current weights; run the first "
                "microbatch after each change of the weights with is_first_microbatch=True, or after "
                "set_weight_update(True); where FSDP2 gathers them for each pass, leave `is_first_microbatch` out."
            )
        if first is None and replayed is not None and not replayed[0].issuperset(keys):
            raise RuntimeError(
                f"weight cache of {name}: a pass that reads another form than captured graphs update, expected all "
                "forms from before the first capture; run a pass of each kind before it, in a copy of the layer, whose "
                "cache is empty."
            )
        fresh, measured = (None if first is None else before) or (self._fresh, self._measured)
        unmeasured = amax is not None and not measured.issuperset(keys)
        held = [key for key in self._forms if key[2] == source.dtype]
        skip = self._skip if first is None else None
        if first is None:  # all existing forms, so that no pass finds two forms of different weights
            due = [*dict.fromkeys([*held, *keys])]
        elif first:
            due = [*dict.fromkeys([*keys, *(key for key in held if key in self._read)])]
        else:
            due = keys if unmeasured else [key for key in keys if key not in fresh]
        mark = ((self.exchanges, *_mark(parameters)), scale_mark)
        known = None not in mark[0]
        # A pass that does not train finds no amax. Forms that it made are written again, with the same content.
        same = known and not capture and all(self._marks.get(key) == mark for key in keys)
        if first is None and unmeasured and not writes and same:
            due, skip = keys, None
        # A pending backward must not silently read changed forms. Several passes may be pending while weights and
        # scales do not change, because each writes the same content. Under a flag that also holds for weights that are
        # gathered again, whose changes cannot be detected.
        unknown = first is not None and not known
        others = [key for key in due if unknown or self._marks.get(key) != mark]
        if first is None and (not writes or self._seen is None or mark[0][0] != self._seen[0][0] or capture):
            others = []
        with torch.inference_mode(False), torch.no_grad():  # buffers made here may be saved for backward later
            self._write(weight, due, scale, amax, skip, others, capture)
        if capture:
            self._read |= set(keys)
            if first is not False:
                written, merged = self._captured.setdefault(capture, (set(), set()))
                written |= set(due)
                merged |= set(due) if amax is not None else set()
            if first is not None:
                self._marks |= dict.fromkeys(due, mark)
            return [self._forms[key] for key in keys]
        if amax is not None:
            self._measured |= set(due)
        elif writes:
            self._measured -= {key for key in due if self._marks.get(key) != mark}
        if writes:  # even where marks are equal: not all writes of weights count as versions
            self._fresh.clear()
            self._seen = mark
        if writes or first is False:
            self._marks |= dict.fromkeys(due, mark)
            self._fresh |= set(due)
        return [self._forms[key] for key in keys]

    def _replayed(self, dtype: torch.dtype) -> tuple[set[_Key], set[_Key]] | None:
        """Returns what all captures do that update forms of weights of this dtype: the forms that each of them writes,
        and those whose amax each merges. None where there is no such capture.
        """
        found = [each for each in self._captured.values() if any(key[2] == dtype for key in each[0])]
        if not found:
            return None
        written, merged = (set.intersection(*each) for each in zip(*found, strict=True))
        return written, merged

    def _stale(self, keys: Sequence[_Key], parameters: Sequence[Any], *, by_flag: bool) -> str | None:
        """Returns why the forms cannot be reused, or None. With `by_flag` versions are not compared, as in replays."""
        if self._seen is None or not self._forms:
            return "empty"
        if by_flag:
            return None if all(key in self._forms for key in keys) else "without the form that this pass reads"
        if (self.exchanges, *_mark(parameters)) == self._seen[0]:
            return None
        return "older than the weights, which were written since, or gathered again, as FSDP2 does after resharding"

    def _write(
        self,
        weight: Tensor | list[Tensor],
        keys: Sequence[_Key],
        scale: Tensor | None,
        amax: Tensor | None,
        skip: Tensor | None,
        others: Sequence[_Key],
        capture: int,
    ) -> None:
        """Quantises `weight` in the forms `keys`: it overwrites those that exist and makes the others.

        Args:
            skip: int32 [1]; existing forms are not overwritten if it is not zero on the device.
            others: the keys of forms whose new content may differ from what earlier passes saved. Their versions are
                incremented, so that autograd refuses a pending backward that would read them.
            capture: as `capture_on` says.
        """
        missing = [key for key in keys if key not in self._forms]
        if missing and capture:
            raise RuntimeError(
                "weight cache: a CUDA graph is captured and there are no buffers yet, expected ones from before the "
                "capture; run a forward pass of the same kind first, as warm-up."
            )
        first = members(weight)[0]
        shape = tuple(first.shape) if isinstance(weight, Tensor) else (len(weight), *first.shape)
        for key in missing:
            axis, fmt, dtype = key
            self._forms[key] = empty_form(shape, axis, fmt, dtype_name(dtype), first.device)
        held = [key for key in keys if key not in missing]
        # Selective checkpointing expects the operators of the first pass when it computes them again.
        for part, flag in ((held, skip), (missing, None)):
            if part:
                quantize_into(weight, [self._forms[key] for key in part], scale=scale, amax=amax, skip=flag)
        if changed := [self._forms[key] for key in others if key in held]:
            torch.autograd.graph.increment_version([part for form in changed for part in parts_of(form)])
