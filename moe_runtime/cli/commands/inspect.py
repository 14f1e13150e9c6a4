"""``moe-runtime inspect``: what a checkpoint holds, and what a budget buys."""

import dataclasses
import os
from typing import TYPE_CHECKING, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import (
    loading_bar,
    print_json,
    print_rows,
    print_table,
    quiet_transformers,
)
from moe_runtime.config import format_bytes, parse_budget

if TYPE_CHECKING:
    from moe_runtime.inference.inspection import CheckpointSummary
    from moe_runtime.policies.eviction.base import PolicyChoice

_SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Shares of the experts whose budgets the table shows."""


def inspect(
    ctx: typer.Context,
    model: options.Model,
    host_memory: str | None = None,
    dtype: options.Dtype = "auto",
    max_tokens: options.Count | None = None,
    cache_code: options.CacheCode = "none",
    verify: bool = False,
    as_json: options.Json = False,
) -> None:
    """Show a model's layers and experts, its sizes, and what a memory budget buys.

    Args:
        host_memory: Also show what this budget buys, such as 7GiB.
        max_tokens: Tokens to set memory aside for; the model's maximum when omitted, at most 4096.
        verify: Also read every weight of the model, and name the first that is NaN or infinite.
    """
    budget = None if host_memory is None else parse_budget(host_memory, name="--host-memory")
    if budget is not None and budget.num_bytes is None:
        raise ValueError(f"--host-memory must be a size such as 7GiB here, got {host_memory!r}")
    quiet_transformers(ctx.obj)
    if os.path.isdir(os.path.expanduser(model)):
        from moe_runtime.checkpoints.opening import find_checkpoint, read_config

        # a bad one is refused before the seconds that the import of the engine takes
        read_config(find_checkpoint(model))
    from moe_runtime.inference.inspection import inspect_checkpoint

    with loading_bar() as progress:
        summary = inspect_checkpoint(
            model,
            dtype=dtype,
            max_tokens=max_tokens,
            cache_code=cache_code,
            verify=verify,
            progress=progress,
        )
    asked_bytes = budget.num_bytes if budget is not None else None
    purchases = [_buy(summary, size) for size in _budgets(summary, asked_bytes)]
    asked = next((p for p in purchases if p.budget_bytes == asked_bytes), purchases[0])
    choice = summary.choice_for(asked.expert_slots) if asked.expert_slots else None
    if as_json:
        print_json(
            {
                **_as_json(summary, purchases),
                "verified": verify,
                "auto": choice and _choice(asked, choice),
            }
        )
        return
    verified = (
        [("verified", "every weight that the model uses was read, all values are finite")]
        if verify
        else []
    )
    from moe_runtime.serving.http.dividing import server_bytes

    for_server = summary.smallest_budget_bytes + server_bytes(max_tokens)
    size = format_bytes(for_server, up=True)
    others = ("smallest for serve", f"{size}; run needs less for a shorter prompt and answer")
    rows = [*_as_rows(summary), others, *verified]
    print_rows(f"{summary.path}", rows, to_stderr=False)
    _print_purchases(purchases)
    if choice is not None:
        rows = [(name, str(value)) for name, value in _choice(asked, choice).items()]
        print_rows("what --policy auto takes", rows, to_stderr=False)


def _choice(purchase: "Purchase", choice: "PolicyChoice") -> dict[str, str]:
    return {
        "budget": format_bytes(purchase.budget_bytes, up=True),
        "policy": choice.policy,
        "shares": "adaptive" if choice.adaptive else "even",
        "reason": choice.reason,
    }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Purchase:
    """What one budget buys; `expert_slots` is 0 when the budget does not work."""

    budget_bytes: int
    max_tokens: int
    expert_slots: int
    slots_per_layer: float
    resident_share: float


def _budgets(summary: "CheckpointSummary", asked_bytes: int | None) -> list[int]:
    """The smallest budget, those for certain shares of the experts, and the asked one."""
    smallest = summary.smallest_budget_bytes
    first_slots = summary.slots_for(smallest)
    wanted = (max(first_slots, round(summary.total_experts * share)) for share in _SHARES)
    budgets = {smallest + (slots - first_slots) * summary.slot_bytes for slots in wanted}
    budgets |= {smallest} | ({asked_bytes} if asked_bytes is not None else set())
    return sorted(budgets)


def _buy(summary: "CheckpointSummary", budget_bytes: int) -> Purchase:
    works = budget_bytes >= summary.smallest_budget_bytes
    slots = summary.slots_for(budget_bytes) if works else 0
    return Purchase(
        budget_bytes=budget_bytes,
        max_tokens=summary.tokens_for(budget_bytes),
        expert_slots=slots,
        slots_per_layer=slots / summary.num_layers,
        resident_share=slots / summary.total_experts,
    )


def _as_json(summary: "CheckpointSummary", purchases: list[Purchase]) -> dict[str, Any]:
    return {
        **dataclasses.asdict(summary),
        "path": str(summary.path),
        "smallest_budget_bytes": summary.smallest_budget_bytes,
        "budgets": [dataclasses.asdict(purchase) for purchase in purchases],
    }


def _as_rows(summary: "CheckpointSummary") -> list[tuple[str, str]]:
    total_bytes = summary.dense_bytes + summary.expert_bytes
    return [
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
        ("together", format_bytes(total_bytes)),
        (
            "smallest budget",
            f"{format_bytes(summary.smallest_budget_bytes, up=True)}, of which "
            f"{format_bytes(summary.reserve_bytes)} for a context of {summary.max_tokens} tokens",
        ),
    ]


def _too_small(purchase: Purchase) -> str:
    if not purchase.max_tokens:
        return "too small"
    return f"too small; enough with --max-tokens {purchase.max_tokens}"


def _print_purchases(purchases: list[Purchase]) -> None:
    columns = [
        ("--host-memory", "right"),
        ("experts in memory", "right"),
        ("per layer", "right"),
        ("share", "right"),
    ]
    rows = [
        (
            format_bytes(purchase.budget_bytes, up=True),
            str(purchase.expert_slots),
            f"{purchase.slots_per_layer:.1f}",
            f"{purchase.resident_share:.0%}",
        )
        if purchase.expert_slots
        else (format_bytes(purchase.budget_bytes, up=True), _too_small(purchase), "", "")
        for purchase in purchases
    ]
    print_table("what a budget buys", columns, rows)
