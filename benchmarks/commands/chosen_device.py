"""Where all systems of a run compute, chosen without starting CUDA in this process."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import typer

from moe_runtime.cli.strict import refuse_given
from moe_runtime.config import parse_budget

if TYPE_CHECKING:
    from moe_runtime.benchmarks.suite.peer_process import PeerProgram


class ChosenDevice(NamedTuple):
    """A device, and how much of its memory is asked for.

    Attributes:
        name: ``cpu``, or as torch counts GPUs here, ``cuda:1``.
        gpus: which GPUs a system's process sees: that one alone, or none.
        memory: bytes, a share of what is free, or ``auto``.
    """

    name: str
    gpus: str
    memory: int | float | str = "auto"

    @property
    def setting(self) -> str:
        """What systems are told: a GPU is the first one that they see."""
        return "cpu" if self.name == "cpu" else "cuda:0"

    def seen_by(self, programs: "Sequence[PeerProgram]") -> "list[PeerProgram]":
        """Systems that see this device alone."""
        return [replace(one, gpus=self.gpus) for one in programs]


def choose_device(ctx: typer.Context, device: str, device_memory: str) -> ChosenDevice:
    """What ``--device``, which is here, and ``--device-memory`` name, ``auto`` as for ``run``.

    Raises:
        ValueError: options of a GPU are given without one.
    """
    budget = parse_budget(device_memory, name="--device-memory")
    kind, _, number = device.partition(":")
    count = 0 if kind == "cpu" else _num_gpus()
    if not count:
        why = f"is about a GPU, and this run is on the CPU (--device {device})"
        refuse_given(ctx, {"device_memory", "misses"}, why)
        return ChosenDevice("cpu", "")
    index = int(number or 0)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = str(index) if seen is None else seen.split(",")[index]
    return ChosenDevice(f"cuda:{index}", gpus, budget.num_bytes or budget.share or "auto")


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()  # NVML's, which needs no context on any of them
