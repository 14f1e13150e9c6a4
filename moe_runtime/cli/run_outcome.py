"""What `moe-runtime run` says when it is done: a table, or an object of JSON."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moe_runtime.config import format_bytes

if TYPE_CHECKING:
    from moe_runtime.inference.generation import GenerationResult
    from moe_runtime.types import RuntimeStats

_OF_A_TEXT = (
    "text",
    "finish_reason",
    "prompt_tokens",
    "new_tokens",
    "ttft_s",
    "decode_tokens_per_s",
)


def outcome_json(
    model: str, results: "Sequence[GenerationResult]", stats: "RuntimeStats", *, is_list: bool
) -> dict[str, Any]:
    """The object that `--json` prints.

    Args:
        model: as given.
        results: of each prompt.
        stats: of all of them together.
        is_list: whether each prompt gets an object of its own under `results`, and what they add up
            to stands where the only one's values would.
    """
    of_each = [{name: getattr(result, name) for name in _OF_A_TEXT} for result in results]
    if not is_list:
        return {"model": model, **of_each[0], **dataclasses.asdict(stats)}
    return {"model": model, "results": of_each, **_sums(results), **dataclasses.asdict(stats)}


def _sums(results: "Sequence[GenerationResult]") -> dict[str, Any]:
    waits = [result.ttft_s for result in results if result.ttft_s is not None]
    rated = [(r.new_tokens - 1, r.decode_tokens_per_s) for r in results if r.decode_tokens_per_s]
    decode_s = sum(tokens / rate for tokens, rate in rated)
    return {
        "prompt_tokens": sum(result.prompt_tokens for result in results),
        "new_tokens": sum(result.new_tokens for result in results),
        "ttft_s": sum(waits) if waits else None,
        "decode_tokens_per_s": sum(tokens for tokens, _ in rated) / decode_s if rated else None,
    }


def outcome_rows(
    results: "Sequence[GenerationResult]", stats: "RuntimeStats", *, verbose: bool = False
) -> list[tuple[str, str]]:
    """The rows of the table for people.

    Args:
        results: of each prompt.
        stats: of all of them together.
        verbose: with the reasons for the policy and the prefetch mode, and what prefetch did.
    """
    sums = _sums(results)
    prompts = "the prompt" if len(results) == 1 else f"{len(results)} prompts"
    rows = [
        ("tokens", f"{sums['prompt_tokens']} in {prompts}, {sums['new_tokens']} new"),
        ("loading", f"{stats.load_s:.2f} s"),
    ]
    num_begun = sum(result.ttft_s is not None for result in results)
    if num_begun:
        each = "" if num_begun == 1 else " on average"
        rows.append(("first token after", f"{sums['ttft_s'] / num_begun:.2f} s{each}"))
    if sums["decode_tokens_per_s"] is not None:
        rows.append(("decoding", f"{sums['decode_tokens_per_s']:.2f} tokens/s"))
    return [*rows, *runtime_rows(stats, verbose=verbose)]


def runtime_rows(stats: "RuntimeStats", *, verbose: bool = False) -> list[tuple[str, str]]:
    """The rows about memory and experts, as `outcome_rows`."""
    asked = stats.hits + stats.late_hits + stats.misses
    hit_share = f"{stats.hits / asked:.1%}" if asked else "none asked for"
    used_bytes = stats.peak_rss_bytes - stats.baseline_rss_bytes
    return [
        (
            "memory",
            f"{format_bytes(used_bytes)} at the peak, budget {format_bytes(stats.budget_bytes)}, "
            f"model {format_bytes(stats.dense_bytes + stats.expert_bytes)}",
        ),
        ("room in memory", f"{stats.expert_slots} experts of {format_bytes(stats.slot_bytes)}"),
        (
            "experts asked for",
            f"{asked}: {hit_share} in memory, {stats.late_hits} on their way, {stats.misses} read",
        ),
        ("read from disk", f"{format_bytes(stats.bytes_read)}, waited {stats.stall_s:.2f} s"),
        *_miss_rows(stats),
        *_policy_rows(stats, verbose=verbose),
        *_prefetch_rows(stats, verbose=verbose),
    ]


def _miss_rows(stats: "RuntimeStats") -> list[tuple[str, str]]:
    if not stats.computed_misses and not stats.planned_s:
        return []
    copied = stats.misses - stats.computed_misses
    row = f"{stats.computed_misses} computed on the CPU, {copied} copied"
    if stats.planned_s:
        row += f"; planned {stats.planned_s:.2f} s, took {stats.spent_s:.2f} s"
    return [("misses", row)]


def _policy_rows(stats: "RuntimeStats", *, verbose: bool) -> list[tuple[str, str]]:
    if not stats.policy_reason:
        return []
    chosen = f"{stats.policy}, {stats.shares} shares"
    return [("policy", f"{chosen}: {stats.policy_reason}" if verbose else chosen)]


def _prefetch_rows(stats: "RuntimeStats", *, verbose: bool) -> list[tuple[str, str]]:
    if stats.prefetch == "off":
        return []
    if not verbose:
        return [("prefetch", stats.prefetch.partition(";")[0].partition(":")[0])]
    outcome = (
        f"{stats.guesses} experts: {stats.useful_guesses} in time, {stats.late_guesses} late, "
        f"{stats.wasted_guesses} wasted; guessing took {stats.predict_s:.2f} s"
    )
    return [("prefetch", stats.prefetch), ("prefetched", outcome)]
