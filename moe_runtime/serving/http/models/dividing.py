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
from moe_runtime.serving.adapter_folder import AdapterFolder
from moe_runtime.serving.adapters import resident_bytes

_OWN_BYTES = 6 * 2**20
"""Set aside for connections, requests and their texts: 15 minutes with 8 clients took 4 MiB.

The bodies that are held at a time have at most 4 MiB unless ``--max-body`` says otherwise. One of
1 MiB takes 2 to 8 MiB more while it is read where it is text or token ids, and 35 MiB at worst."""

_TOKEN_BYTES = 64
"""Set aside for each token of a KV cache: what finds a kept prefix again, and its tensor's own."""


def server_bytes(max_tokens: int | None, num_models: int = 1) -> int:
    """What a server needs beside its models, of whose budget they get the rest."""
    return _OWN_BYTES + _TOKEN_BYTES * (max_tokens or 0) * num_models


def is_on_cpu(loading: Mapping[str, Any]) -> bool:
    """Whether models that are loaded with such options compute on the CPU."""
    device = loading["device"]
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def rest_for_model(loading: Mapping[str, Any]) -> int:
    """The budget of a model that has the server to itself, in bytes; at least one.

    Args:
        loading: options of ``moe_runtime.load``.

    Raises:
        CapacityError: the budget is more than is free.
    """
    return max(1, _host_budget(loading) - server_bytes(loading["max_tokens"]))


def with_server(error: CapacityError, loading: Mapping[str, Any]) -> CapacityError:
    """The error of a model whose budget is too small, for somebody who gave the server's.

    With a device it may speak of either budget, and stays as it is.

    Args:
        error: of ``moe_runtime.load`` with the budget that ``rest_for_model`` gave.
        loading: options as the caller gave them.
    """
    if error.smallest_bytes is None or not is_on_cpu(loading):
        return error
    own = server_bytes(loading["max_tokens"])
    smallest = error.smallest_bytes + own
    return CapacityError(
        f"--host-memory: a budget of {format_bytes(_host_budget(loading))} is too small: the "
        f"smallest that works is {format_bytes(smallest, up=True)} ({smallest} bytes): "
        f"{format_bytes(error.smallest_bytes, up=True)} for the model, "
        f"{format_bytes(own, up=True)} for the server",
        smallest_bytes=smallest,
    )


def _host_budget(loading: Mapping[str, Any]) -> int:
    return resolve_budget(
        parse_budget(loading["host_memory"], name="--host-memory"),
        available_host_bytes(),
        "this machine",
    )


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
    adapter_bytes: int | None = None,
) -> list[int]:
    """The share of each model in the budget of all, without that of its adapters.

    Args:
        names: of the models, for messages.
        folders: their checkpoints.
        adapters: of each model, by name.
        loading: options of ``moe_runtime.load``.
        adapter_bytes: of a model's adapters that are in memory at a time; that of all when omitted.

    Returns:
        Bytes for each model; at most the budget in all.

    Raises:
        CapacityError: the budget is less than the models need at least, or more than is free.
        UnsupportedModelError: they are to compute on a GPU.
        ValueError: ``adapter_bytes`` is less than an adapter needs.
    """
    if not is_on_cpu(loading):
        raise UnsupportedModelError(
            "several models, and adapters, are served from the CPU, got --device "
            f"{loading['device']}; give --device cpu, or one model without adapters"
        )
    budget = _host_budget(loading)
    options = {option: loading[option] for option in ("dtype", "max_tokens", "cache_code")}
    needs, aside = {}, []
    for name, folder, own in zip(names, folders, adapters, strict=True):
        found = inspect_checkpoint(folder, **options)
        smallest = found.smallest_budget_bytes
        whole = found.dense_bytes + found.reserve_bytes + found.total_experts * found.slot_bytes
        workspace = max((one.workspace_bytes(found.max_tokens) for one in own.values()), default=0)
        aside.append(workspace + resident_bytes(own, adapter_bytes))
        needs[name] = Need(smallest + aside[-1], max(0, whole - smallest))
    shares = divide(budget, needs, server_bytes(loading["max_tokens"], len(names)))
    return [share - taken for share, taken in zip(shares, aside, strict=True)]


def divide(budget_bytes: int, needs: Mapping[str, Need], own_bytes: int = 0) -> list[int]:
    """Gives each model the least that it runs with, and experts of all the same share of the rest.

    The server has ``own_bytes`` before.

    Raises:
        CapacityError: the budget is less than the models need at least.
    """
    smallest = own_bytes + sum(need.smallest_bytes for need in needs.values())
    if budget_bytes < smallest:
        each = ", ".join(
            f"{format_bytes(need.smallest_bytes, up=True)} for {name}"
            for name, need in needs.items()
        )
        raise CapacityError(
            f"--host-memory: a budget of {format_bytes(budget_bytes)} is too small for all models "
            f"and their adapters: the smallest that works is {format_bytes(smallest, up=True)} "
            f"({smallest} bytes): {each}, {format_bytes(own_bytes, up=True)} for the server",
            smallest_bytes=smallest,
        )
    wanted = sum(need.experts_bytes for need in needs.values())
    rest = min(budget_bytes - smallest, wanted)
    return [
        need.smallest_bytes + (rest * need.experts_bytes // wanted if wanted else 0)
        for need in needs.values()
    ]
