"""The native CPU library: its C sources, and the code that finds, loads and describes the built
file.

It is plain C behind ctypes and optional at installation; calls release the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from moe_runtime.errors import MoERuntimeError, MoERuntimeWarning

LIBRARY_PATH = Path(__file__).with_name("moe_kernels.so")
ABI_VERSION = 31
SPIN_S = 300e-6  # bridges the small operations between two products of a model's layer
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CACHED_CODES = {**DTYPE_CODES, torch.uint8: 3}  # keys and values may be rounded to int8
ACTIVATION_CODES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}
STATUS_OK, STATUS_NO_MEMORY, STATUS_BAD_ROW, STATUS_DAMAGED = 0, 1, 2, 3

# a letter for each result and argument
_TYPES = {
    **{"p": ctypes.c_void_p, "q": ctypes.c_int64, "i": ctypes.c_int},
    **{"f": ctypes.c_float, "s": ctypes.c_char_p, "v": None},
}
_CONTROLS = {
    "moe_abi_version": "i",
    "moe_isa_name": "s i",
    "moe_built_isas": "s",
    "moe_current_isa": "s",
    "moe_select_isa": "i s",
    "moe_cpu_has_amx": "i",
    "moe_cpu_is_amd": "i",
    "moe_set_num_threads": "v i",
    "moe_set_parallel": "v p",
    "moe_set_spin_ns": "v q",
    "moe_read": "f pqi",
}
# Attributes of `NativeLibrary` without the prefix `moe_`; the C sources name the arguments.
_KERNELS = {
    "moe_linear": "i pqqpqppqqqiii",
    "moe_linear_transposed": "i pqqpqppqqqiii",
    "moe_outer": "i pqpqqpqqqiii",
    "moe_quantized_linear": "i pqqppipqqqiii",
    "moe_put_in_order": "v pqpp",
    "moe_dequantize": "v pqqpqii",
    "moe_combine_slots": "i pppqqqiii",
    "moe_attention_step": "i ppqppqqpqpppi",
    "moe_attention_heads": "i pppqqppqqppi",
    "moe_single_query_attention": "i pqpqqqpqqqppipqqqqqqfiii",
    "moe_latent_attention": "i p",
    "moe_prompt_attention": "i p",
    "moe_delta_rule_step": "v p",
    "moe_conv_step": "v p",
    "moe_rms_norm": "v pqqppqfiii",
    "moe_gate": "v pqqqiiiiiippippppi",
    "moe_gather_rows": "v pqqipqpii",
    "moe_add_rows": "v pqppqpii",
    "moe_planes_count": "v pqqqp",
    "moe_planes_encode": "q pqqqpppp",
    "moe_planes_decode": "i pppqpqqpqi",
    "moe_rank_experts": "i ppp",
    "moe_look_ahead": "q pqpqpq",
    "moe_look_ahead_anew": "v p",
    "moe_reads_open": "p i",
    "moe_reads_close": "v p",
    "moe_reads_events": "p p",
    "moe_reads_stop": "v p",
    "moe_reads_submit": "i pqpqpqpi",
    "moe_reads_start": "v p",
    "moe_reads_promote": "v pq",
    "moe_reads_cancel": "i pq",
    "moe_reads_ended": "q ppq",
    "moe_reads_forget": "v pq",
    "moe_reads_wait": "v pq",
    "moe_reads_kick": "v p",
    "moe_expert_ffn": "i pqppqqpppqqqqqiiiipppii",
    "moe_expert_step": "i pqppqqqppqqqiiiiipi",
}


class NativeUnavailableError(MoERuntimeError):
    """The native library was requested and cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeDescription:
    """What this machine can use; `problem` says why there is no library and what to do.

    Attributes:
        isa: Instruction set in use (`amx`, `avx512bf16`, `avx512`, `avx2` or `portable`), or None.
        isas: Those that this machine and this build can run, best first.
        built: All that were compiled, best first.
        num_threads: Threads per call, or 0.
    """

    path: Path
    isa: str | None
    isas: tuple[str, ...]
    built: tuple[str, ...]
    num_threads: int
    problem: str | None


class NativeLibrary:
    """The loaded library, one per process: kernels as C functions, instruction sets and threads.

    `linear` is `moe_linear` of the C sources, which document it.

    Attributes:
        num_threads: Threads per call, including the calling one; see `set_num_threads`.
        cpu_is_amd: Whether AMD made the processor; there MKL, torch's fp32 products, uses AVX2.
    """

    def __init__(self, path: Path) -> None:
        """Loads `path` (OSError, NativeUnavailableError) with as many threads as torch has."""
        library = ctypes.CDLL(str(path))
        self.path = path
        try:
            for name, signature in {**_CONTROLS, **_KERNELS}.items():
                function, (result, _, arguments) = getattr(library, name), signature.partition(" ")
                function.restype = _TYPES[result]
                function.argtypes = [_TYPES[argument] for argument in arguments]
            version = library.moe_abi_version()
        except AttributeError as error:
            raise NativeUnavailableError(f"{path} lacks a function: {error}") from error
        if version != ABI_VERSION:
            raise NativeUnavailableError(
                f"{path} has interface version {version}, expected {ABI_VERSION}"
            )
        for name in _KERNELS:
            setattr(self, name.removeprefix("moe_"), getattr(library, name))
        self.cpu_is_amd = bool(library.moe_cpu_is_amd())
        self._library = library
        self._isa: str = library.moe_current_isa().decode()
        self._units_of_torch = bool(library.moe_cpu_has_amx()) and self._isa != "amx"
        self.set_num_threads(torch.get_num_threads())
        self.set_spin_s(SPIN_S)
        library.moe_set_parallel(_openmp_parallel())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def isas(self) -> tuple[str, ...]:
        """Instruction sets that this machine and this build can run, best first."""
        names: list[str] = []
        while (name := self._library.moe_isa_name(len(names))) is not None:
            names.append(name.decode())
        return tuple(names)

    def built_isas(self) -> tuple[str, ...]:
        """Instruction sets of this build, best first."""
        return tuple(self._library.moe_built_isas().decode().split())

    @property
    def isa(self) -> str:
        return self._isa

    @property
    def has_matrix_units(self) -> bool:
        """Whether these kernels or torch multiply bf16 in matrix units."""
        return self._isa == "amx" or self._units_of_torch

    def select_isa(self, name: str) -> None:
        """Uses another instruction set from the next call on; ValueError if it cannot run."""
        if not self._library.moe_select_isa(name.encode()):
            raise ValueError(f"isa must be one of {', '.join(self.isas())}, got {name!r}")
        self._isa = name

    def set_num_threads(self, num_threads: int) -> None:
        """Changes the number of threads, at least 1. Results do not depend on it."""
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads}")
        self._library.moe_set_num_threads(num_threads)
        self.num_threads = num_threads

    def shares_threads(self) -> bool:
        """Whether calls run on torch's threads instead of the library's.

        They do while both have as many: torch's threads spin for milliseconds after each operation,
        and others would compete with them.
        """
        return torch.get_num_threads() == self.num_threads

    def set_spin_s(self, spin_s: float) -> None:
        """Sets how long an idle worker polls for the next call before it sleeps."""
        self._library.moe_set_spin_ns(round(spin_s * 1e9))

    def read(self, buffer: torch.Tensor) -> float:
        """Reads every byte of a contiguous CPU tensor with all threads, to measure bandwidth."""
        return self._library.moe_read(buffer.data_ptr(), buffer.nbytes, self.shares_threads())


def _openmp_parallel() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP library that torch has loaded, or None."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except AttributeError:
        return None


@functools.cache
def _load() -> tuple[NativeLibrary | None, str | None]:
    if not LIBRARY_PATH.exists():
        return None, (
            "the native library was not built (no C compiler at installation?); install gcc or "
            "clang and run `pip install` again"
        )
    try:
        return NativeLibrary(LIBRARY_PATH), None
    except OSError as error:
        return None, f"the native library cannot be loaded ({error}); run `pip install` again"
    except NativeUnavailableError as error:
        return None, f"the native library is out of date ({error}); run `pip install` again"


@functools.cache
def native_library() -> NativeLibrary | None:
    """The library of this process, loaded once, or None if it cannot be used.

    An outdated one causes a warning, since torch is slower.
    """
    library, problem = _load()
    if problem is not None and LIBRARY_PATH.exists():
        warnings.warn(f"{problem}; until then torch computes, slower", MoERuntimeWarning, 2)
    return library


def require_native() -> NativeLibrary:
    """The library of this process; NativeUnavailableError says why there is none."""
    library, problem = _load()
    if library is None:
        raise NativeUnavailableError(f"impl='native' was asked for, but {problem}")
    return library


def chosen_library(impl: str, unable: str | None) -> NativeLibrary | None:
    """The library if a native kernel is wanted and possible; None for the reference.

    Args:
        impl: `auto`, `native` or `reference`.
        unable: Why the kernel cannot take the arguments, or None.

    Raises:
        ValueError: `impl` is unknown, or `native` and the kernel cannot take the arguments.
        NativeUnavailableError: `impl` is `native` and there is no library.
    """
    if impl not in ("auto", "native", "reference"):
        raise ValueError(f"impl must be one of auto, native, reference, got {impl!r}")
    if impl == "native":
        library = require_native()
        if unable:
            raise ValueError(f"impl='native' cannot compute this: {unable}")
        return library
    return None if impl == "reference" or unable else native_library()


def describe() -> NativeDescription:
    """What this machine can use, for `doctor` and reports of measurements."""
    library, problem = _load()
    return NativeDescription(
        path=LIBRARY_PATH,
        isa=library.isa if library else None,
        isas=library.isas() if library else (),
        built=library.built_isas() if library else (),
        num_threads=library.num_threads if library else 0,
        problem=problem,
    )


NEEDS_TORCH = "it has no backward pass and takes no fake tensors; a gradient or these are wanted"


def needs_torch(*tensors: Tensor | None) -> bool:
    """Whether the result needs a derivative, or the tensors are fake."""
    records = torch.is_grad_enabled()
    for one in tensors:
        if isinstance(one, FakeTensor) or (records and one is not None and one.requires_grad):
            return True
    return forward_ad._current_level >= 0


def kernel_problem(*tensors: Tensor | None) -> str | None:
    """Why no C kernel can read these tensors, or None."""
    for one in tensors:
        if one is not None and not (one.is_cpu and one.dtype in DTYPE_CODES):
            return f"it takes fp32, bf16 and fp16 on the CPU, got {one.dtype} on {one.device}"
    return NEEDS_TORCH if needs_torch(*tensors) else None
