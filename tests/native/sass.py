"""What the compiled Hopper kernels are made of: instructions counted in the built module.

python -m tests.native.sass              # prints the table
make sass                                # renews tests/native/sass_sm90.txt, which test_sass.py compares with
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from grouped_core import _native

GOLDEN = Path(__file__).with_name("sass_sm90.txt")
MODULE = Path(str(_native.__file__))
ARCH = "sm_90a"
COUNTED = {
    "HGMMA": "wgmma",
    "QGMMA": "wgmma of 8-bit operands",
    "WARPGROUP": "its fences and waits: more of them means that the compiler serialised it",
    "UTMALDG": "tensor loads",
    "UTMASTG": "tensor stores",
    "SYNCS": "barrier operations in shared memory",
    "USETMAXREG": "registers handed from the producers to the consumers",
    "ATOMG": "draws of items",
    "MEMBAR": "memory barriers",
    "HMMA": "tensor-core products of the older kind",
    "LDL": "reloads of spilled registers",
    "STL": "spills",
}
"""Instructions of interest, and what they are."""

_FUNCTION = re.compile(r"\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_]+)")


def missing() -> str | None:
    """Why nothing can be counted here, or None."""
    if not _native.cuda_compiled:
        return "this build has no CUDA kernels"
    return None if shutil.which("cuobjdump") else "cuobjdump, of the CUDA toolkit, is not on PATH"


def counts() -> dict[str, Counter[str]]:
    """Instructions by kernel."""
    command = ["cuobjdump", "-sass", "-arch", ARCH, str(MODULE)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, Counter[str]] = {}
    target, current = "", Counter[str]()
    for line in listing.splitlines():
        if line.strip().startswith("code for "):
            target = line.split()[-1]
        elif function := _FUNCTION.match(line):
            # `-arch sm_90a` lists code of sm_90 as well: that of the portable kernels.
            name = _readable(function[1])
            current = found.setdefault(name, Counter()) if target == ARCH else Counter()
        elif instruction := _INSTRUCTION.match(line):
            current[instruction[1]] += 1
    return found


def _readable(mangled: str) -> str:
    """`product<RowsProduct<bf16, ...>>` without namespaces and arguments, so without the build's hashes."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p
    name = demangle(mangled.encode(), None, None, None).decode()
    name = name.replace("(anonymous namespace)::", "").replace("__nv_bfloat16", "bf16").replace("__half", "fp16")
    name = re.sub(r"\((?:\w+::)*Major\)(\d)", lambda major: ("k_major", "mn_major", "mn32_major")[int(major[1])], name)
    name = re.sub(r"\((?:\w+::)*Pairs\)(\d)", lambda pairs: ("unpaired", "blocks", "columns")[int(pairs[1])], name)
    name = re.sub(r"^void |\b\w+::|\(.*$", "", name)
    return name.replace(" >", ">").replace(", ", ",")


def table() -> str:
    """The counts as text, one kernel a line."""
    rows = [f"# nvcc {_native.cuda_compiler}; renew with `make sass`", " ".join(["kernel", *COUNTED])]
    rows += [" ".join([name, *(str(found[i]) for i in COUNTED)]) for name, found in sorted(counts().items())]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    if reason := missing():
        sys.exit(reason)
    sys.stdout.write(table())
