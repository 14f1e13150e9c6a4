"""``moe-runtime inspect``: what a checkpoint holds, and what a budget buys."""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import typer

from moe_runtime.cli import console, options
from moe_runtime.config import STAND_IN, format_bytes, parse_budget

if TYPE_CHECKING:
    from moe_runtime.inference.inspection import CheckpointSummary

_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Shares of the experts whose budgets the table shows."""


def inspect(
    ctx: typer.Context,
    model: options.Model,
    host_memory: str | None = None,
    dtype: options.Dtype = "auto",
    max_tokens: options.Count | None = None,
    cache_code: options.CacheCode = "none",
    misses: options.Misses = "device",
    kv_cache: options.KVCache = "exact",
    verify: bool = False,
    as_json: options.Json = False,
) -> None:
    """Show a model's layers and experts, its sizes, and what a memory budget buys.

    Args:
        host_memory: Also show what this budget buys, such as 7GiB.
        max_tokens: Tokens to set memory aside for; when omitted 4096, or more where experts leave
            it.
        verify: Also read every weight of the model, and name the first that is NaN or infinite.
    """
    budget = None if host_memory is None else parse_budget(host_memory, name="--host-memory")
    if budget is not None and budget.num_bytes is None:
        raise ValueError(f"--host-memory must be a size such as 7GiB here, got {host_memory!r}")
    if misses not in ("device", STAND_IN):
        raise ValueError(f"--misses {misses} changes nothing here: expected {STAND_IN}")
    console.quiet_transformers(ctx.obj)
    if os.path.isdir(os.path.expanduser(model)):
        from moe_runtime.checkpoints.opening import find_checkpoint, read_config

        # a bad one is refused before the seconds that the import of the engine takes
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
            verify=verify,
            progress=progress,
        )
    asked_bytes = None if budget is None else budget.num_bytes
    smallest = summary.smallest_budget_bytes
    first_slots = summary.slots_for(smallest)
    wanted = (max(first_slots, round(summary.total_experts * share)) for share in _SHARES)
    budgets = {smallest + (slots - first_slots) * summary.slot_bytes for slots in wanted}
    budgets |= {smallest} | ({asked_bytes} if asked_bytes is not None else set())
    purchases = [_purchase(summary, size) for size in sorted(budgets)]
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
        (
            "smallest budget",
            f"{format_bytes(smallest, up=True)}, of which {format_bytes(summary.reserve_bytes)} "
            f"for a context of {summary.max_tokens} tokens",
        ),
        ("smallest for serve", f"{for_server}; run needs less for a shorter prompt and answer"),
    ]
    if verify:
        read = "every weight that the model uses was read, all values are finite"
        rows.append(("verified", read))
    console.print_rows(f"{summary.path}", rows, to_stderr=False)
    names = ("--host-memory", "context", "experts in memory", "per layer", "share")
    columns = [(name, "right") for name in names]
    console.print_table("what a budget buys", columns, [_purchase_row(one) for one in purchases])
    if auto is not None:
        console.print_rows("what --policy auto takes", list(auto.items()), to_stderr=False)


def _purchase(summary: "CheckpointSummary", budget_bytes: int) -> dict[str, Any]:
    """What a budget buys; no slots of experts when it does not work."""
    works = budget_bytes >= summary.smallest_budget_bytes
    slots = summary.slots_for(budget_bytes) if works else 0
    return {
        "budget_bytes": budget_bytes,
        "max_tokens": summary.context_for(budget_bytes).max_tokens
        if works
        else summary.tokens_for(budget_bytes),
        "expert_slots": slots,
        "slots_per_layer": slots / summary.num_layers,
        "resident_share": slots / summary.total_experts,
    }


def _purchase_row(bought: dict[str, Any]) -> tuple[str, ...]:
    size = format_bytes(bought["budget_bytes"], up=True)
    if not bought["expert_slots"]:
        tokens = bought["max_tokens"]
        enough = f"; enough with --max-tokens {tokens}" if tokens else ""
        return size, "", f"too small{enough}", "", ""
    per_layer, share = bought["slots_per_layer"], bought["resident_share"]
    return (
        size,
        str(bought["max_tokens"]),
        str(bought["expert_slots"]),
        f"{per_layer:.1f}",
        f"{share:.0%}",
    )
