"""Measurements on a processor as if it were an older one."""

from __future__ import annotations

import argparse
import os
import sys

from moe_runtime.kernels.native import require_native

# What holds the libraries of torch to an instruction set, from the start of the process.
OLDER = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}


def add_isa(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--isa`."""
    parser.add_argument("--isa", choices=OLDER, help="the instructions of an older processor")


def hold_to(isa: str) -> None:
    """Selects our instruction set, and starts the process anew if torch was not held to it."""
    if any(os.environ.get(name) != value for name, value in OLDER[isa].items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | OLDER[isa])
    require_native().select_isa(isa)
