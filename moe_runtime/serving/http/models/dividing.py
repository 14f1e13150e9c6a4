"""One budget for several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_runtime.config import format_bytes, parse_budget
from moe_runtime.errors import CapacityError, UnsupportedModelError
from moe_runtime.inference.budget import available_host_bytes, resolve_budget
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.serving.adapters import AdapterFolder


@dataclass(frozen=True, slots=True)
class Need:
    """What a model needs of a budget, in bytes.

    Attributes:
        smallest_bytes: without which it does not run.
        experts_bytes: beyond that, until all experts fit.
    """

    smallest_bytes: int
    experts_bytes: int


def divide_host_memory(
    names: Sequence[str],
    folders: Sequence[Path],
    adapters: Sequence[Mapping[str, AdapterFolder]],
    loading: Mapping[str, Any],
) -> list[int]:
    """The share of each model in the budget of all, without that of its adapters.

    Args:
        names: of the models, for messages.
        folders: their checkpoints.
        adapters: of each model, by name.
        loading: options of ``moe_runtime.load``.

    Returns:
        Bytes for each model; at most the budget in all.

    Raises:
        CapacityError: the budget is less than the models need at least, or more than is free.
        UnsupportedModelError: they are to compute on a GPU.
    """
    device = loading["device"]
    if device != "cpu" and (device != "auto" or torch.cuda.is_available()):
        raise UnsupportedModelError(
            f"several models, and adapters, are served from the CPU, got --device {device}; give "
            "--device cpu, or one model without adapters"
        )
    budget = resolve_budget(
        parse_budget(loading["host_memory"], name="--host-memory"),
        available_host_bytes(),
        "this machine",
    )
    options = {option: loading[option] for option in ("dtype", "max_tokens", "cache_code")}
    needs, aside = {}, []
    for name, folder, own in zip(names, folders, adapters, strict=True):
        found = inspect_checkpoint(folder, **options)
        smallest = found.smallest_budget_bytes
        whole = found.dense_bytes + found.reserve_bytes + found.total_experts * found.slot_bytes
        workspace = max((one.workspace_bytes(found.max_tokens) for one in own.values()), default=0)
        aside.append(workspace + sum(one.num_bytes for one in own.values()))
        needs[name] = Need(smallest + aside[-1], max(0, whole - smallest))
    return [share - taken for share, taken in zip(divide(budget, needs), aside, strict=True)]


def divide(budget_bytes: int, needs: Mapping[str, Need]) -> list[int]:
    """Gives each model the least that it runs with, and experts of all the same share of the rest.

    Raises:
        CapacityError: the budget is less than the models need at least.
    """
    smallest = sum(need.smallest_bytes for need in needs.values())
    if budget_bytes < smallest:
        each = ", ".join(
            f"{format_bytes(need.smallest_bytes, up=True)} for {name}"
            for name, need in needs.items()
        )
        raise CapacityError(
            f"--host-memory: a budget of {format_bytes(budget_bytes)} is too small for all models "
            f"and their adapters: the smallest that works is {format_bytes(smallest, up=True)} "
            f"({smallest} bytes): {each}",
            smallest_bytes=smallest,
        )
    wanted = sum(need.experts_bytes for need in needs.values())
    rest = min(budget_bytes - smallest, wanted)
    return [
        need.smallest_bytes + (rest * need.experts_bytes // wanted if wanted else 0)
        for need in needs.values()
    ]
