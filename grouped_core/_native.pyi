"""
Native calls of jax-grouped, offered as XLA FFI handlers, as plans over addresses and over DLPack arrays.
"""

from collections.abc import Callable, Sequence
from typing import Any


ffi_api_version: tuple = ...

cuda_compiled: bool = ...

cuda_archs: tuple = ...

cuda_compiler: str = ...

default_cuda_arch: str = ...

def handlers() -> dict[str, dict[str, object]]:
    """
    Capsules to register with XLA: platform ("cpu", "CUDA") -> target ("jg_<call>_v1") -> handler.
    """

def kernels() -> dict[str, list[str]]:
    """Every call's kernels, best first."""

def schema() -> dict[str, tuple[dict[str, str], dict[str, str], dict[str, int | float | str]]]:
    """
    Every call's operands and results, name to words, and parameters, name to default, in order. The words are
    those of cc/api/schema.h, behind "optional" where the slot may be absent.
    """

def types() -> dict[str, tuple[str, ...]]:
    """The sets of element types that the words of `schema` name."""

def dtypes() -> list[str]:
    """Names of the element types, as NumPy and ml_dtypes spell them."""

def cpu_threads() -> int:
    """
    Threads of the CPU kernels outside of JAX, which brings its own: one for each processor that affinity and
    cgroup quotas let this process keep busy, found at the first use.
    """

def cpu_isa() -> str:
    """Instruction set that the CPU kernels use on this machine."""

def device_arch(device: int) -> str:
    """
    Arch of a CUDA device, as plans take it: "sm_90a". Raises RuntimeError where there is no such device, or
    no code for it in this build.
    """

def capture_of(stream: int) -> int:
    """
    Number of the CUDA graph's capture that a stream, by its handle, is part of: no two captures of a process have
    the same. 0 where there is none. Raises RuntimeError where the stream cannot be asked.
    """

def arch_built_for(chip: int) -> str:
    """
    Arch of a chip, ten times its compute capability: 90 is "sm_90a". Raises RuntimeError where this build has
    no code for it.
    """

class Plan:
    """
    One call with its shapes, decided: which kernel runs it and what it needs.
    """

    @property
    def kernel(self) -> str:
        """Name of the chosen kernel; empty where none takes the call."""

    @property
    def spare(self) -> str:
        """
        The kernel that runs where addresses are not multiples of 16 bytes; empty: none needed.
        """

    @property
    def refusals(self) -> list[tuple[str, str]]:
        """
        (kernel, reason) of the kernels asked before the chosen one; of all where there is none.
        """

    @property
    def workspace_bytes(self) -> int:
        """
        Bytes of workspace to allocate whatever the addresses, room for alignment included; 0: none.
        """

    @property
    def aligned_workspace_bytes(self) -> int:
        """
        The same where the addresses of operands and results are multiples of 16 bytes.
        """

    def workspace_for(self, addresses: list[int]) -> int:
        """
        The same for these addresses, listed as for `launch`; 0 is a multiple of 16, that of the workspace is not
        looked at.
        """

    def parts_for(self, addresses: list[int]) -> list[list[int]]:
        """
        The slots, operands and then results, that each part of the kernel touches, which a `Launcher` can run one
        at a time; addresses as in `workspace_for`. Empty: the kernel that runs at these addresses has one part.
        """

    def launch(self, addresses: list[int], stream: int) -> None:
        """
        Runs the kernel: addresses of the operands in slot order (0: absent, or read through a table), of the
        results and of the workspace (0: none), which has the bytes that `workspace_for` says of them; `stream` is
        a cudaStream_t, 0 on the CPU.
        Raises ValueError for a null or unshared buffer, RuntimeError where no kernel took the call.
        """

def plan(call_name: str, arch: str, implementation: str, inputs: Sequence[tuple[str, tuple[int, ...]] | None], outputs: Sequence[tuple[str, tuple[int, ...]] | None], params: dict[str, int | float | str]) -> Plan:
    """
    Chooses a kernel by shapes, dtypes and parameters alone; no device is needed.

    `arch` is "cpu" or "sm_90a"; `implementation` is empty, a comma list of kernels, "reference" or
    "composed"; operands are (dtype, shape) in slot order, None where absent. Raises ValueError for what is not
    a call, an arch or a parameter; that no kernel takes it is an answer, Plan.kernel == "".
    """

def call(call_name: str, arch: str, implementation: str, inputs: Sequence[tuple[object, str] | None], outputs: Sequence[tuple[object, str] | None], params: dict[str, int | float | str], make_workspace: Callable[[int], object], stream: int) -> None:
    """
    Runs one call on arrays of any DLPack library: (array, dtype name) in slot order, None where absent.

    An array whose library cannot export its dtype is passed as a view of unsigned integers of the same
    size. Arrays are C-contiguous and on one device. `make_workspace` is asked for an array of as many bytes as
    the kernel for these arrays needs, unless it needs none.
    Raises ValueError for arrays that do not fit, RuntimeError where no kernel takes the call.
    """

class Exchange:
    """Reads tensors of one type through DLPack's C exchange interface."""

    def __init__(self, tensor_type: type, plain_subclass: type | None = None, threads: Callable[[], int] | None = None) -> None:
        """
        `plain_subclass`: a subclass without a `__torch_dispatch__` of its own, recognised without asking for it.
        `threads`: asked before each launch on the CPU, which then uses at most so many threads.
        Raises TypeError for a type that does not offer the interface.
        """

    def describe(self, operands: tuple[object, ...]) -> bytes | None:
        """
        Device, dtypes and shapes of tensors, None and lists of equal specs (None: skipped), and of each tensor
        and list whether its addresses are multiples of 16 bytes: equal bytes mean equal plans and workspaces.
        None where an operand is something else, is not contiguous, or is on another device than the first.
        """

    def addresses(self, members: Sequence[object | None]) -> bytes:
        """The address of each tensor as a native 64-bit integer, 0 for None."""

class Launcher:
    """A plan that finds its operands in a list of tensors."""

    def __init__(self, exchange: Exchange, plan: Plan, registers: Sequence[int], offsets: Sequence[int] = (), part: int = -1) -> None:
        """
        `registers`: for the operands in slot order, the results and the workspace, the position in the list; -1
        where absent, or read through a table. `offsets`: for each, the bytes from the start of the tensor to the
        operand; none: 0 for all. `part`: of those of the plan, whose other slots are absent; -1: the whole. Parts
        run in order, and nothing else writes to the workspace between them.
        """

    @property
    def continues(self) -> bool:
        """Whether the workspace holds what an earlier part left in it."""

    @property
    def workspace(self) -> int:
        """The register of the workspace, -1 without one."""

    def launch(self, values: list, stream: int) -> None:
        """
        Runs the kernel; otherwise as `Plan.launch`. Raises ValueError for a workspace that is too small.
        """

class Program:
    """The planned steps of a rule, which run on the tensors of a list."""

    def __init__(self, exchange: Exchange, steps: list[tuple], results: Sequence[int | tuple[object, Sequence[int]]], released: Sequence[int], registers: int, empty: Callable[..., object], table_of: Callable[[bytes], object], flat: type | None = None, place: tuple[int, Callable[[], int], Callable[[int], int], object] | None = None) -> None:
        """
        A new tensor is given by the arguments of `empty`, (shape, strides, dtype).

        `steps`: launches (name, launcher, ((register, new tensor), ...), (register, new workspace) or None,
        registers that no later step uses) and casts (register, register of the result, dtype). `results`: of each
        a register, -1 for None, or leaf n as -2 - n; or (layout, several of these), of which `flat` makes one
        result. `released`: leaves that are taken out of the list. `registers`: their number; those of the leaves
        that are there come first. `table_of` makes a tensor of a leaf that is a list, from its
        `Exchange.addresses`. `place`: the CUDA device, what tells the current one, what tells the current
        stream of a device, and the dtype of bytes; None: the CPU.
        """

    def run(self, leaves: list, stream: int, watch: Callable[[str, Launcher, list, tuple[int, ...], int], None] | None = None) -> list:
        """
        Runs all steps on `stream` and returns the results. `watch` runs in place of each launch, with the name of
        its call, its launcher, all registers, those of its new results, and the stream.
        """

class FactsCache:
    """Objects by `Exchange.describe` of operands, and a number."""

    def __init__(self, exchange: Exchange, most: int, flat: type) -> None:
        """
        `most`: number of entries at which the cache is emptied. `flat`: the class, a tuple of a layout and a tuple
        of leaves, of operands that are several leaves. Layouts count by their identity.
        """

    def find(self, operands: tuple[object, ...], number: int = 0, leaves: list | None = None) -> Any:
        """
        The object that was kept for these facts; None where there is none, or `describe` has no answer. The leaves
        of the operands are appended to `leaves`.
        """

    def run(self, operands: tuple[object, ...] | list[tuple[object, ...]], number: int, watch: Callable[[str, Launcher, list, tuple[int, ...], int], None] | None = None) -> list | None:
        """
        What `find` and `Program.run` do, where the object that was kept is a tuple that starts with a program: the
        results on the current stream. None where `find` has no answer or another device is current.
        `operands`: or a list with only them, from which they are taken, so that they are freed after their last use.
        """

    def keep(self, operands: tuple[object, ...], number: int, value: object) -> None:
        """Keeps `value`, unless `describe` has no answer."""

    def __len__(self) -> int: ...
