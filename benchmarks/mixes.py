"""`auto` beside fixed choices, over budgets and disks: `python benchmarks/mixes.py DISK=MODEL...`.

Each MODEL is a checkpoint's folder on a disk that DISK names; a tmpfs is a disk as fast as memory.
For each one and each share of its experts in memory, every policy and way of prefetching decodes
the same text in turn, in one process. Before, `auto` kept routing and learned from it. Prints
`auto` as a share of the best fixed choice, and of LRU without prefetching.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import moe_runtime
from moe_runtime.benchmarks.harness.scripting import (
    new_file,
    parser_of,
    positive,
    run_script,
    save_results,
)
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.inference.inspection import CheckpointSummary, inspect_checkpoint
from moe_runtime.lab.replay.teaching import teach_kept
from moe_runtime.lab.traces.recent import KEPT_STEPS, recent_path

CAPACITIES = (0.125, 0.25, 0.375, 0.5, 0.75)
FIXED = (
    ("lru", "off"),
    ("lfu-aging", "off"),
    ("reuse", "off"),
    ("lru", "enforce"),
    ("reuse", "enforce"),
)
AUTO, OFF = ("auto", "auto"), ("lru", "off")
TEXT = Path(argparse.__file__)
"""Python's own source, cut by the model's tokenizer."""
PROMPT_TOKENS = 16
WARM_STEPS = 24
"""Steps before the measured ones: prefetching in `auto` ends its first trial within them."""


def text_ids(path: str, count: int) -> torch.Tensor:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(path)(TEXT.read_text())["input_ids"]
    if len(ids) < count:
        raise SystemExit(f"{TEXT} has {len(ids)} tokens, {count} are asked for")
    return torch.tensor(ids[:count])[None]


def decode(model: Any, ids: torch.Tensor) -> float:
    """Seconds of a step: the text's tokens come one by one behind a prompt."""
    cache, start = None, 0.0
    with torch.inference_mode():
        output = model(ids[:, :PROMPT_TOKENS], use_cache=True)
        for step in range(PROMPT_TOKENS, ids.shape[1]):
            if step == PROMPT_TOKENS + WARM_STEPS:
                start = time.perf_counter()
            cache = output.past_key_values
            output = model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
    return (time.perf_counter() - start) / (ids.shape[1] - PROMPT_TOKENS - WARM_STEPS)


def run_once(
    summary: CheckpointSummary, capacity: float, how: tuple[str, str], ids: torch.Tensor
) -> dict[str, float]:
    slots = round(capacity * summary.total_experts)
    budget = summary.smallest_budget_bytes
    while summary.slots_for(budget) < slots:
        budget += summary.slot_bytes
    model: Any = moe_runtime.load(
        summary.path, device="cpu", host_memory=budget, max_tokens=summary.max_tokens,
        policy=how[0], prefetch=how[1], predictor="auto", teach=False,
    )  # fmt: skip
    with model.moe as handle:
        seconds = decode(model, ids)
        stats = handle.stats()
    used = stats.policy
    del model
    gc.collect()
    print(f"    {' '.join(how)}: {1e3 * seconds:.2f} ms, {used}, {stats.prefetch}", file=sys.stderr)
    return {
        "tokens_per_s": 1 / seconds,
        "misses": stats.misses,
        "predict_share": stats.predict_s / (seconds * ids.shape[1]),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="+", metavar="DISK=MODEL")
    parser.add_argument("--steps", type=positive, default=64, help="measured tokens")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--learned", type=positive, default=3000, help="tokens of other text that auto sees before"
    )
    parser.add_argument("--output", "-o", type=new_file, help="results file")
    asked = parser.parse_args()
    systems: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in asked.models:
            disk, _, path = name.partition("=")
            count = PROMPT_TOKENS + WARM_STEPS + asked.steps
            each = min(asked.learned, PROMPT_TOKENS + KEPT_STEPS)
            summary = inspect_checkpoint(path, max_tokens=max(count, each))
            ids = text_ids(path, count + asked.learned)
            for first in range(count, ids.shape[1] - each + 1, each):
                run_once(summary, 0.25, AUTO, ids[:, first : first + each])
            print(f"{name}: taught {teach(summary)}", file=sys.stderr)
            for capacity in CAPACITIES:
                found = {how: [] for how in (*FIXED, AUTO)}
                for _ in range(asked.rounds):
                    for how, runs in found.items():
                        runs.append(run_once(summary, capacity, how, ids[:, :count]))
                mix = f"{Path(path).name} {disk} {capacity:g}"
                systems |= {f"{mix} {' '.join(how)}": runs for how, runs in found.items()}
                speed = {
                    how: median(r["tokens_per_s"] for r in runs) for how, runs in found.items()
                }
                best = max(FIXED, key=speed.__getitem__)
                print(
                    f"{mix}: auto {speed[AUTO]:.2f} tokens/s, {speed[AUTO] / speed[best]:.3f} of "
                    f"{' '.join(best)}, {speed[AUTO] / speed[OFF]:.3f} of {' '.join(OFF)}",
                    flush=True,
                )
    if asked.output:
        metrics = {
            "tokens_per_s": Metric("tokens/s", better="more"),
            "misses": Metric("count", is_judged=False),
            "predict_share": Metric("share", is_judged=False),
        }
        settings = {"steps": asked.steps, "rounds": asked.rounds, "capacities": [*CAPACITIES]}
        save_results("mixes", settings, systems, metrics, asked.output)
    return 0


def teach(summary: CheckpointSummary) -> bool:
    """Teaches at once from what `auto` kept, as a run does in the background."""
    return teach_kept(recent_path(summary.signature, summary.path), summary.path)


if __name__ == "__main__":
    sys.exit(run_script(main))
