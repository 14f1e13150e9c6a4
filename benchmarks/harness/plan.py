"""What to run: settings, the runs in their order, and which of them cannot work and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from moe_runtime.bench.synthetic.model_shapes import GroupedShape, ModelShape, Qwen3Fp8Shape
from moe_runtime.config import parse_bytes

GIB = 1 << 30
OURS_PACKED = "ours:planes"
OURS_INT8 = "ours:int8"
NEEDED_PACKAGES = {
    "ours": "moe_runtime",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "llama.cpp": "llama_cpp",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the user asked for."""

    shape: ModelShape
    systems: tuple[str, ...]
    caps: tuple[int | None, ...]
    repeats: int
    prompt_tokens: int
    new_tokens: int
    warmup_tokens: int
    max_decode_s: float
    timeout_s: float
    num_threads: int
    greedy: bool
    host_memory: str
    tokenizer: str
    seed: int
    disk_s: float
    trace: bool
    cold: bool
    data: Path

    def describe(self) -> dict[str, Any]:
        """What a results file says of them."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name != "shape"}
        return json.loads(json.dumps({**plain, "data": self.data.name}))

    @property
    def checkpoint(self) -> Path:
        return self.data / self.shape.name

    @property
    def packed(self) -> Path:
        """The checkpoint in the lossless code of `moe-runtime pack --code planes`."""
        return self.data / f"{self.shape.name}-planes"

    @property
    def gguf(self) -> Path:
        return self.data / f"{self.shape.name}.gguf"

    @property
    def trace_file(self) -> Path:
        return self.data / f"{self.shape.name}-trace.npz"

    @property
    def offload_folder(self) -> Path:
        return self.data / f"{self.shape.name}-offload"


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of one system under one cap (None: no cap)."""

    system: str
    cap_bytes: int | None
    repeat: int


def planned_runs(settings: Settings, caps: tuple[int | None, ...]) -> Iterator[PlannedRun]:
    """The systems in turn (A B C, A B C), so that a drift of the machine falls on all alike."""
    for cap in caps:
        for repeat in range(settings.repeats):
            for system in settings.systems:
                if cannot_work(system, cap, settings.shape) is None:
                    yield PlannedRun(system, cap, repeat)


def cannot_work(system: str, cap_bytes: int | None, shape: ModelShape) -> str | None:
    """Why a system is not run under a cap, in a few words; None when it is."""
    name = system.partition(":")[0]
    if find_spec(NEEDED_PACKAGES[name]) is None:
        extra = "-e ." if name == "ours" else "'.[peers]'"
        return f"{NEEDED_PACKAGES[name]} is not installed (pip install {extra})"
    if system == OURS_PACKED and isinstance(shape, GroupedShape | Qwen3Fp8Shape):
        return "packs experts in bf16 alone"
    if system == OURS_INT8 and not isinstance(shape, GroupedShape):
        return "rounds rows for MXFP4 and integers alone"
    if name in ("transformers", "accelerate") and isinstance(shape, GroupedShape):
        return "has no code for these quantised experts on a CPU"
    if name == "accelerate" and cap_bytes is None:
        return "offloads to disk only under a cap"
    if name == "transformers" and cap_bytes is not None and cap_bytes < shape.total_bytes:
        return "its weights exceed the cap"
    return None


def parse_cap(text: str) -> int | None:
    """The bytes of a memory cap; None for ``none``.

    Raises:
        ValueError: it is no size.
    """
    return None if text == "none" else parse_bytes(text)


def cap_label(cap_bytes: int | None) -> str:
    """A cap as people say it."""
    if cap_bytes is None:
        return "none"
    return f"{cap_bytes / GIB:.3g} GiB"
