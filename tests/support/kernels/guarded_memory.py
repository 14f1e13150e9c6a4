"""Tensors that end where unreadable memory begins, and processes to read them in."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
from pathlib import Path

import torch
from torch import Tensor
from warm_python import warm_python


def assert_runs(code: str) -> None:
    """Runs a program in a process of its own; it can import what the tests of kernels share."""
    folders = [str(folder) for folder in Path(__file__).parents[:2]]
    code = f"import sys\nsys.path[:0] = {folders}\n{code}"
    words = [warm_python(), "-P", "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def at_the_end(values: Tensor | None) -> Tensor | None:
    """A copy whose last byte is the last one that may be read."""
    if values is None:
        return None
    size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    guard = ctypes.c_void_p(address + size)
    assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    first = size - values.nbytes
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=values.nbytes, offset=first)
    flat.copy_(values.contiguous().view(torch.uint8).flatten())
    return flat.view(values.dtype).view(values.shape)
