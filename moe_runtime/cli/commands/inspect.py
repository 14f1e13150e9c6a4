"""``moe-runtime inspect``: the sizes of a checkpoint, and what a budget buys."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.disk import measure_disk, measure_memory
from moe_runtime.config import STAND_IN, format_bytes, parse_budget

if TYPE_CHECKING:
    from moe_runtime.inference.inspection import CheckpointSummary

_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Shares of resident experts for whose budgets the table has rows."""


def inspect(
    ctx: typer.Context,
    model: options.Model,
    host_memory: str | None = None,
    dtype: options.Dtype = "auto",
    max_tokens: options.Count | None = None,
    cache_code: options.CacheCode = "none",
    misses: options.Misses = "device",
    kv_cache: options.KVCache = "exact",
    draft: options.Draft = "none",
    verify: bool = False,
    speed: bool = False,
    as_json: options.Json = False,
) -> None:
    """Show a model's layers and experts, its sizes, and what a memory budget buys.

    Args:
        host_memory: Also show what this budget buys, such as 7GiB.
        max_tokens: Tokens to set memory aside for. [4096, or more if all experts fit anyway]
        verify: Also read every weight of the model, and name the first that is NaN or infinite.
        speed: Also measure memory and disk for three seconds, and show the tokens/s that they
            allow where experts are used evenly.
    """
    budget = None if host_memory is None else parse_budget(host_memory, name="--host-memory")
    if budget is not None and budget.num_bytes is None:
        raise ValueError(f"--host-memory must be a size such as 7GiB here, got {host_memory!r}")
    if misses not in ("device", STAND_IN):
        raise ValueError(f"--misses {misses} changes nothing here: expected {STAND_IN}")
    console.quiet_transformers(ctx.obj)
    if os.path.isdir(os.path.expanduser(model)):
        from moe_runtime.checkpoints.opening import find_checkpoint, read_config

        # a bad checkpoint is refused before the slow import of the engine
        read_config(find_checkpoint(model))
    from moe_runtime.inference.inspection import inspect_checkpoint

    with console.loading_bar() as progress:
        summary = inspect_checkpoint(
            model,
            dtype=dtype,
            max_tokens=max_tokens,
            cache_code=cache_code,
            misses=misses,
            kv_cache=kv_cache,
            draft=draft,
            verify=verify,
            progress=progress,
        )
    asked_bytes = None if budget is None else budget.num_bytes
    smallest = summary.smallest_budget_bytes
    first_slots = summary.slots_for(smallest)
    wanted = (max(first_slots, round(summary.total_experts * share)) for share in _SHARES)
    budgets = {smallest + (slots - first_slots) * summary.slot_bytes for slots in wanted}
    budgets |= {smallest} | ({asked_bytes} if asked_bytes is not None else set())
    from moe_runtime.inference.budget import available_host_bytes, resolve_budget

    free_bytes = resolve_budget(
        parse_budget("auto", name=""), available_host_bytes(), "this machine"
    )
    speeds = _measured(summary) if speed else None
    purchases = [_purchase(summary, size, speeds) for size in sorted(budgets)]
    here = _purchase(summary, free_bytes, speeds)
    on_hub = {} if summary.path.exists() else _quantisations(model)
    asked = next((one for one in purchases if one["budget_bytes"] == asked_bytes), purchases[0])
    auto = None
    if asked["expert_slots"]:
        choice = summary.choice_for(asked["expert_slots"])
        auto = {
            "budget": format_bytes(asked["budget_bytes"], up=True),
            "policy": choice.policy,
            "shares": "adaptive" if choice.adaptive else "even",
            "reason": choice.reason,
        }
    if as_json:
        console.print_json(
            {
                **dataclasses.asdict(summary),
                "path": str(summary.path),
                "smallest_budget_bytes": smallest,
                "budgets": purchases,
                "verified": verify,
                "this_machine": here,
                "token_expert_bytes": summary.token_expert_bytes,
                "speeds": speeds,
                "quantisations": on_hub,
                "auto": auto,
            }
        )
        return
    from moe_runtime.serving.http.dividing import server_bytes

    for_server = format_bytes(smallest + server_bytes(max_tokens), up=True)
    copies = format_bytes(summary.stand_in_bytes)
    rows = [
        ("model", f"{summary.architecture} ({summary.model_type})"),
        (
            "experts",
            f"{summary.num_layers} layers of {summary.num_experts}, "
            f"{summary.top_k} of them for each token",
        ),
        (
            "each expert",
            f"{format_bytes(summary.bytes_per_expert)} as {summary.expert_dtype}: "
            f"{summary.bits_per_weight:.4g} bits a weight",
        ),
        ("all experts", format_bytes(summary.expert_bytes)),
        ("everything else", format_bytes(summary.dense_bytes)),
        ("together", format_bytes(summary.dense_bytes + summary.expert_bytes)),
        *([("int4 stand-ins", copies)] if summary.stand_in_bytes else []),
        *([("drafts", format_bytes(summary.draft_bytes))] if summary.draft_bytes else []),
        (
            "smallest budget",
            f"{format_bytes(smallest, up=True)}, of which {format_bytes(summary.reserve_bytes)} "
            f"for a context of {summary.max_tokens} tokens",
        ),
        ("smallest for serve", f"{for_server}; run needs less for a shorter prompt and answer"),
    ]
    share = min(here["resident_share"], 1)
    fits = f"{share:.0%} of the experts fit" if here["expert_slots"] else "too little"
    rows += [
        ("on this machine", f"--host-memory auto takes {format_bytes(free_bytes)} now: {fits}"),
        ("experts for a token", format_bytes(summary.token_expert_bytes)),
    ]
    if speeds is not None:
        memory, disk = speeds["memory_bytes_per_s"] / 1e9, speeds["disk_bytes_per_s"] / 1e9
        rows.append(("measured", f"memory {memory:.3g} GB/s, disk {disk:.3g} GB/s"))
    if verify:
        read = "every weight that the model uses was read, all values are finite"
        rows.append(("verified", read))
    console.print_rows(f"{summary.path}", rows, to_stderr=False)
    names = ("--host-memory", "context", "experts in memory", "per layer", "share")
    names += ("tokens/s if used evenly",) if speeds else ()
    columns = [(name, "right") for name in names]
    console.print_table(
        "what a budget buys", columns, [_purchase_row(one, len(names)) for one in purchases]
    )
    if on_hub:
        columns = [("quantisation", "left"), ("size", "right"), ("fits in memory here", "right")]
        sizes = sorted(on_hub.items(), key=lambda one: one[1])
        cells = [
            (label, format_bytes(size), f"{min(1, free_bytes / size):.0%}") for label, size in sizes
        ]
        console.print_table(
            "other files of the repository, to be named as :QUANTISATION", columns, cells
        )
    if auto is not None:
        console.print_rows("what --policy auto takes", list(auto.items()), to_stderr=False)


def _quantisations(model: str) -> dict[str, int]:
    """Bytes of each GGUF model that a repository of the hub has."""
    from moe_runtime.checkpoints.hub import parse_hub_name, quantisations

    name = parse_hub_name(model)
    return {} if name is None else quantisations(name)


def _measured(summary: "CheckpointSummary") -> dict[str, float]:
    """Speeds of memory, and of the disk with the experts or the hub's cache."""
    from huggingface_hub import constants

    path = summary.path
    if not path.exists():
        path = Path(constants.HF_HUB_CACHE)
        path.mkdir(parents=True, exist_ok=True)
    disk = measure_disk(path, read_bytes=summary.bytes_per_expert)
    found = max(disk.direct_bytes_per_s or 0, disk.buffered_bytes_per_s)
    return {"memory_bytes_per_s": measure_memory(), "disk_bytes_per_s": found}


def _purchase(
    summary: "CheckpointSummary", budget_bytes: int, speeds: dict[str, float] | None
) -> dict[str, Any]:
    """What a budget buys; no slots of experts if it is too small."""
    works = budget_bytes >= summary.smallest_budget_bytes
    slots = summary.slots_for(budget_bytes) if works else 0
    share = slots / summary.total_experts
    rate = None
    if works and speeds is not None:
        memory, disk = speeds["memory_bytes_per_s"], speeds["disk_bytes_per_s"]
        rate = summary.tokens_per_s(share, memory, disk)
    tokens = summary.context_for(budget_bytes).max_tokens if works else None
    return {
        "budget_bytes": budget_bytes,
        "max_tokens": summary.tokens_for(budget_bytes) if tokens is None else tokens,
        "expert_slots": slots,
        "slots_per_layer": slots / summary.num_layers,
        "resident_share": share,
        **({} if rate is None else {"even_tokens_per_s": rate}),
    }


def _purchase_row(bought: dict[str, Any], num_columns: int) -> tuple[str, ...]:
    size = format_bytes(bought["budget_bytes"], up=True)
    if not bought["expert_slots"]:
        tokens = bought["max_tokens"]
        enough = f"; enough with --max-tokens {tokens}" if tokens else ""
        return (size, "", f"too small{enough}", "", "", "")[:num_columns]
    per_layer, share = bought["slots_per_layer"], bought["resident_share"]
    return (
        size,
        str(bought["max_tokens"]),
        str(bought["expert_slots"]),
        f"{per_layer:.1f}",
        f"{share:.0%}",
        *([f"{bought['even_tokens_per_s']:,.4g}"] if "even_tokens_per_s" in bought else []),
    )
