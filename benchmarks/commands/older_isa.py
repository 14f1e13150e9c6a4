"""Measurements on a processor as if it were an older one."""

import os
import sys
from typing import Annotated

import typer

from moe_runtime.config import require_known

# What holds the libraries of torch to an instruction set, from the start of a process.
OLDER = {
    "avx512bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}
Isa = Annotated[
    str | None,
    typer.Option(
        help="Hold all systems to the instructions of an older processor: avx512bf16, avx512, avx2."
    ),
]


def hold_to(isa: str | None) -> None:
    """Selects an instruction set here, and starts the process anew if torch was not held to it.

    Raises:
        ValueError: there is none of that name, or this processor has it not.
        KernelUnavailableError: there is no native library.
    """
    if isa is None:
        return
    require_known("--isa", isa, tuple(OLDER))
    if any(os.environ.get(name) != value for name, value in OLDER[isa].items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | OLDER[isa])
    from moe_runtime.kernels.native import require_native

    require_native().select_isa(isa)
