"""Hardware and versions that a measurement depends on."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# An installed package has no checkout of its own there.
_CHECKOUT = Path(__file__).resolve().parents[2]
_BUILD_FACTS = Path(__file__).resolve().parents[1] / "build.json"
"""``setup.py`` writes it into a wheel."""
PACKAGES = (
    "moe-runtime",
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "llama-cpp-python",
    "gguf",
    "safetensors",
    "numpy",
)
CPU_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory and system of this machine; nothing that names its owner."""
    name, flags = processor()
    return {
        "cpu": name,
        "cpu_features": [name for name in CPU_FEATURES if name in flags],
        "num_cores": num_usable_cores(),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "architecture": platform.machine(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter; absent ones are left out."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def package_commit() -> str:
    """The commit of this package: of its checkout or of its wheel, or ``unknown``."""
    if (_CHECKOUT / ".git").exists():
        return commit(_CHECKOUT)
    if _BUILD_FACTS.is_file():
        return json.loads(_BUILD_FACTS.read_text(encoding="utf-8"))["commit"]
    return "unknown"


def commit(checkout: Path) -> str:
    """The commit that a checkout is at, with ``+changes`` where files other than results differ."""
    own = (":/", ":(top,exclude)benchmarks/results")
    try:
        head = _git(checkout, "rev-parse", "--short=12", "HEAD")
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no", "--", *own)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def _git(checkout: Path, *words: str) -> str:
    command = ["git", "-C", str(checkout), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def processor() -> tuple[str, set[str]]:
    """The processor's name, and its features as the system calls them."""
    facts: dict[str, str] = {}
    file = Path("/proc/cpuinfo")
    for line in file.read_text().splitlines() if file.is_file() else ():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    model = facts.get("model name", platform.processor() or platform.machine())
    return model, set(facts.get("flags", facts.get("Features", "")).split())
