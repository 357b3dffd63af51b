"""Random mutations of checkpoint files, and small checkpoints of every layout as NumPy arrays."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

E, F, H = 4, 32, 64
Arrays = dict[str, NDArray[Any]]


def drawn(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def expert_parts(seed: int = 0) -> Arrays:
    """Gate, linear half and second weight [E, out, in], and their biases, of which every layout is made by hand."""
    return {
        "gate": drawn(E, F, H, seed=seed),
        "up": drawn(E, F, H, seed=seed + 1),
        "down": drawn(E, H, F, seed=seed + 2),
        "gate_bias": drawn(E, F, seed=seed + 3),
        "up_bias": drawn(E, F, seed=seed + 4),
        "down_bias": drawn(E, H, seed=seed + 5),
        "router": drawn(E, H, seed=seed + 6),
    }


def _alternating(gate: NDArray[Any], up: NDArray[Any], block: int | None, axis: int) -> NDArray[Any]:
    """Both halves in blocks, written as a loop over columns, apart from the library's reshapes."""
    width = gate.shape[axis]
    length = block or width
    columns = []
    for start in range(0, width, length):
        for half in (gate, up):
            columns += [np.take(half, at, axis) for at in range(start, start + length)]
    return np.stack(columns, axis)


def written(layout: str, parts: Arrays, *, path: str = "", block: int | None = None) -> Arrays:
    """The checkpoint of `parts` in a layout, made by hand, for an MoE layer at `path`."""
    wi, bias = (
        _alternating(parts["gate"], parts["up"], block, 1),
        _alternating(parts["gate_bias"], parts["up_bias"], block, 1),
    )
    down, down_bias, router = parts["down"], parts["down_bias"], parts["router"]
    turn = {"wi": wi.swapaxes(1, 2), "wo": down.swapaxes(1, 2)}
    gate, up = parts["gate"], parts["up"]
    at = f"{path}." if path else ""
    made: dict[str, Any] = {}
    if layout in ("torch_bridge", "megatron_grouped"):
        made = {"experts.linear_fc1.weight": wi, "experts.linear_fc2.weight": down, "router.weight": router}
        made |= {"experts.linear_fc1.bias": bias, "experts.linear_fc2.bias": down_bias}
    elif layout == "megatron_indexed":
        made = {"router.weight": router}
        for i in range(E):
            made |= {f"experts.linear_fc1.weight{i}": wi[i], f"experts.linear_fc2.weight{i}": down[i]}
            made |= {f"experts.linear_fc1.bias{i}": bias[i], f"experts.linear_fc2.bias{i}": down_bias[i]}
    elif layout == "jax_grouped":
        made = {**turn, "wi_bias": bias, "wo_bias": down_bias, "router.kernel": router.T}
    elif layout == "flax":
        made = {"wi_0": gate.swapaxes(1, 2), "wi_1": up.swapaxes(1, 2), "wo": turn["wo"], "router.kernel": router.T}
        made |= {"wi_bias": bias, "wo_bias": down_bias}
    elif layout in ("hugging_face", "hugging_face_mixtral"):
        names = ("gate_proj", "up_proj", "down_proj") if layout == "hugging_face" else ("w1", "w3", "w2")
        made = {"gate.weight": router}
        for i in range(E):
            for name, each in zip(names, ("gate", "up", "down"), strict=True):
                made[f"experts.{i}.{name}.weight"] = parts[each][i]
                made[f"experts.{i}.{name}.bias"] = parts[f"{each}_bias"][i]
    elif layout == "hugging_face_grouped":
        made = {"gate.weight": router, "experts.gate_up_proj": wi, "experts.down_proj": down}
        made |= {"experts.gate_up_proj_bias": bias, "experts.down_proj_bias": down_bias}
    elif layout == "gpt_oss":
        wi, bias = _alternating(gate, up, 1, 1), _alternating(parts["gate_bias"], parts["up_bias"], 1, 1)
        made = {"router.weight": router, "experts.gate_up_proj": wi.swapaxes(1, 2), "experts.down_proj": turn["wo"]}
        made |= {"experts.gate_up_proj_bias": bias, "experts.down_proj_bias": down_bias}
    else:
        raise LookupError(layout)
    return {at + key: np.ascontiguousarray(value) for key, value in made.items()}


FREE = ("torch_bridge", "jax_grouped", "megatron_indexed", "megatron_grouped")
"""Layouts whose columns may alternate in any block (those of `flax` too, if its first weight is one array)."""
WRITTEN = (*FREE, "flax", "hugging_face", "hugging_face_mixtral", "hugging_face_grouped", "gpt_oss")


# ---- mutations of files

WORDS = (
    *("F32", "BF16", "I64", "U8", "wi", "wo", "router.kernel", "gkn", "gnk", "swiglu", "geglu_tanh", "null", "version"),
    *("interleave", "layers", "grouped", "indexed", "shape", "dtype", "data_offsets", "__metadata__", "jax_grouped"),
)


def mutated(data: bytes, rng: random.Random) -> tuple[bytes, bool]:
    """A random change of a safetensors file. Returns it, and whether only data, not the header, may have changed."""
    (length,) = struct.unpack("<Q", data[:8])
    kind = rng.randrange(10)
    if kind == 0:
        return data[: rng.randrange(len(data))], False
    if kind == 1:
        return data + rng.randbytes(rng.randint(1, 9)), False
    if kind == 2:
        return struct.pack(
            "<Q", rng.choice([0, 1, length - 1, length + 1, 1 << 63, len(data), rng.randrange(1 << 20)])
        ) + (data[8:]), False
    if kind == 3:
        at = rng.randrange(8 + length, len(data))
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :], True
    head = bytearray(data[8 : 8 + length])
    if kind in (4, 5):
        for _ in range(rng.randint(1, 4)):
            head[rng.randrange(len(head))] = (
                rng.randrange(256) if rng.random() < 0.5 else rng.choice(b'0123456789"{}[],:.')
            )
    elif kind == 6:
        old, new = rng.choice(WORDS).encode(), rng.choice(WORDS).encode()
        head = bytearray(bytes(head).replace(old, new, 1))
    elif kind == 7:
        return _edited(data, length, rng), False
    else:
        start = rng.randrange(len(head))
        end = min(len(head), start + rng.randint(1, 40))
        head = head[:start] + (head[start:end] * 2 if kind == 8 else b"") + head[end:]
    text = bytes(head)
    if rng.random() < 0.8:
        return struct.pack("<Q", len(text)) + text + data[8 + length :], text == data[8 : 8 + length]
    return data[:8] + text + data[8 + length :], text == data[8 : 8 + length]


def _edited(data: bytes, length: int, rng: random.Random) -> bytes:
    """One field of the header replaced by another value."""
    header = json.loads(data[8 : 8 + length])
    strange = [None, -1, 0, 1, 2**31, 2**63, 1e300, "", "F64", [], [0], [1 << 40, 1 << 40], {}, True, [0, 0], "9" * 400]
    name = rng.choice(list(header))
    if name == "__metadata__" and "jax_grouped" in header[name] and rng.random() < 0.9:
        notes = json.loads(header[name]["jax_grouped"])
        holder: Any = rng.choice(
            [notes, *notes["layers"].values(), *[x["activation"] for x in notes["layers"].values()]]
        )
        field = rng.choice(list(holder))
        if rng.random() < 0.3:
            del holder[field]
        else:
            holder[field] = rng.choice(strange)
        header[name]["jax_grouped"] = json.dumps(notes)
    elif rng.random() < 0.3:
        header[rng.choice(["", "wi.0", "wi_0", "module.wi", "x" * 300, "wi.values", "selection_bias"])] = header.pop(
            name
        )
    else:
        field = rng.choice(list(header[name]) or ["x"])
        header[name][field] = rng.choice(strange)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]
