"""``moe-runtime doctor``: examine this machine, and advise where it falls short."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import typer

import moe_runtime
from moe_runtime.cli import options
from moe_runtime.cli.console import print_json, print_table
from moe_runtime.cli.disk import measure_disk
from moe_runtime.config import format_bytes
from moe_runtime.errors import text_of

_REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "numpy")
_OPTIONAL = ("accelerate", "llama-cpp-python", "gguf")
_VECTOR_FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "sve")
_IN_REGISTERS = MappingProxyType({"amx": 8, "avx512bf16": 8, "avx512": 8, "avx2": 16})
"""Least columns of a group of codes that an instruction set decodes in registers."""
_SLOW_DISK_BYTES_PER_S = 500e6
_LITTLE_MEMORY_BYTES = 2 << 30


class Finding(NamedTuple):
    """One examined property. A note works but could be better; a problem does not work."""

    name: str
    status: Literal["ok", "note", "problem"]
    value: str
    advice: str = ""


def doctor(
    path: Annotated[Path, typer.Argument(metavar="[PATH]")] = Path("."),
    read_size: str = "12MiB",
    as_json: options.Json = False,
) -> None:
    """Look at processor, kernels, GPU, memory and disk, and say what to do where they fall short.

    Takes a few seconds. Exit code 2 when something does not work at all.

    Args:
        path: File or folder whose disk is measured.
        read_size: Size of one read, such as the size of an expert.
    """
    read_bytes = options.bytes_of(read_size, "--read-size")
    if not 4096 <= read_bytes <= 1 << 30:
        raise ValueError(f"--read-size must lie between 4KiB and 1GiB, got {read_size!r}")
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    findings = examine(path, read_bytes)
    healthy = all(finding.status != "problem" for finding in findings)
    version = moe_runtime.__version__
    if as_json:
        found = [finding._asdict() for finding in findings]
        print_json({"version": version, "healthy": healthy, "findings": found})
    else:
        rows = [
            (
                status.upper() if status == "problem" else status,
                name,
                f"{value}\n→ {advice}" if advice else value,
            )
            for name, status, value, advice in findings
        ]
        print_table(f"moe-runtime {version}", [("", "left")] * 3, rows)
    if not healthy:
        raise typer.Exit(2)


def examine(path: Path, read_bytes: int) -> list[Finding]:
    """Examines all that decides whether models run here, and how fast."""
    system = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    python = _finding("python", system, "" if sys.platform == "linux" else "only Linux is tested")
    names = (*_REQUIRED, *_OPTIONAL)
    versions = {name: _version(name) for name in names}
    missing = [name for name in _REQUIRED if versions[name] is None]
    packages = _finding("packages", ", ".join(f"{n} {v}" for n, v in versions.items() if v))
    if missing:
        advice = f"pip install {' '.join(missing)}"
        packages = _finding("packages", f"missing: {', '.join(missing)}", advice, is_problem=True)
    found = [python, packages, _processor(), _native_kernel(), _quantised_kernels()]
    return [*found, *_accelerators(), _memory(), _disk(path, read_bytes)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _finding(name: str, value: str, advice: str = "", *, is_problem: bool = False) -> Finding:
    """A finding; with advice it is a note."""
    return Finding(name, "problem" if is_problem else "note" if advice else "ok", value, advice)


def _processor() -> Finding:
    from moe_runtime.lab.this_machine import num_usable_cores, processor

    model, flags = processor()
    vectors = " ".join(flag for flag in _VECTOR_FLAGS if flag in flags)
    cores = f"{num_usable_cores()} of {os.cpu_count()} threads usable"
    is_slow = flags and not flags & {"avx2", "asimd"}
    advice = "without AVX2 the portable kernel runs; decoding will be slow" if is_slow else ""
    value = f"{model}; {cores}; {vectors or 'no vector extensions known'}"
    return _finding("processor", value, advice)


def _native_kernel() -> Finding:
    from moe_runtime.kernels.native import describe

    found = describe()
    if found.problem is not None:
        return _finding("native kernel", "not usable; torch is used, slower", found.problem)
    others = [isa for isa in found.isas if isa != found.isa]
    value = f"{found.isa}, {found.num_threads} threads"
    if others:
        value += f" (also built: {', '.join(others)})"
    return _finding("native kernel", value)


def _quantised_kernels() -> Finding:
    """How the native kernel multiplies quantised experts of each format."""
    from moe_runtime.checkpoints.formats import FORMATS
    from moe_runtime.kernels.native import describe

    isa = describe().isa
    if isa is None:
        how = "by torch, from their values, written out for every product"
    elif isa not in _IN_REGISTERS:
        how = (
            f"from their codes, decoded a few rows at a time ({isa}); AVX2 is several times as fast"
        )
    else:
        least = _IN_REGISTERS[isa]
        what = f"groups of {least}, {2 * least}, {4 * least}... or all columns, and GGUF's blocks"
        how = f"from their codes; {isa} decodes {what} in registers, all else a few rows at a time"
    names = ", ".join([*FORMATS, "gguf", "planes"])
    return _finding("quantised experts", f"{names}: {how}")


def _accelerators() -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    triton = _version("triton")
    if not torch.cuda.is_available():
        advice = "torch sees no GPU; check that nvidia-smi works and CUDA_VISIBLE_DEVICES is right"
        if torch.version.cuda is None:
            advice = "this torch is built without CUDA; install a CUDA build from pytorch.org"
        gpu = _finding("gpu", "none; everything runs on the processor")
        if shutil.which("nvidia-smi") is not None:
            gpu = _finding("gpu", "installed, but not usable", advice)
        return [gpu, _finding("triton", triton or "absent; only used with a GPU")]
    names = []
    for index in range(torch.cuda.device_count()):
        name = torch.cuda.get_device_properties(index).name
        free, total = map(format_bytes, torch.cuda.mem_get_info(index))
        names.append(f"{name}, {free} of {total} free")
    advice = "GPU experts run through torch; pip install triton for faster kernels"
    found = _finding("triton", triton or "absent", "" if triton else advice)
    return [_finding("gpu", "; ".join(names)), found]


def _memory() -> Finding:
    import psutil

    from moe_runtime.inference.budget import (
        AUTO_SHARE,
        available_host_bytes,
        control_group_free_bytes,
    )

    machine = psutil.virtual_memory()
    value = f"{format_bytes(machine.available)} of {format_bytes(machine.total)} free"
    group_bytes = control_group_free_bytes()
    if group_bytes is not None:
        value += f", {format_bytes(group_bytes)} free in the control group"
    budget_bytes = int(available_host_bytes() * AUTO_SHARE)
    value += f"; --host-memory auto takes {format_bytes(budget_bytes)}"
    is_little = budget_bytes < _LITTLE_MEMORY_BYTES
    advice = "close other programs, or raise the limit of the control group" if is_little else ""
    return _finding("memory", value, advice)


def _disk(path: Path, read_bytes: int) -> Finding:
    try:
        speed = measure_disk(path, read_bytes=read_bytes)
    except (OSError, ValueError) as error:
        advice = "name a readable file, or a folder that a scratch file may be written to"
        return _finding("disk", text_of(error), advice, is_problem=True)
    direct, buffered = speed.direct_bytes_per_s, speed.buffered_bytes_per_s
    direct_text = "not possible" if direct is None else f"{direct / 1e9:.2f} GB/s"
    value = (
        f"{path}: random reads of {format_bytes(speed.read_bytes)}, {speed.in_flight} at once: "
        f"direct {direct_text}, buffered {buffered / 1e9:.2f} GB/s"
    )
    advice = ""
    if max(direct or 0, buffered) < _SLOW_DISK_BYTES_PER_S:
        advice = "slow for experts on disk; put the checkpoint on a local NVMe drive"
    elif direct is None:
        advice = "this file system has no direct reads; reads go through the page cache"
    return _finding("disk", value, advice)
