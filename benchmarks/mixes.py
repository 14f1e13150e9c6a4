"""`auto` beside fixed choices, over budgets and disks: `python benchmarks/mixes.py DISK=MODEL...`.

Each MODEL is a checkpoint's folder on a disk that DISK names; a tmpfs is a disk as fast as memory.
For each one and each share of its experts in memory, every policy and way of prefetching decodes
the same text in turn, in one process. Before, `auto` kept routing and learned from it. Prints
`auto` as a share of the best fixed choice, and of LRU without prefetching.

With `--routing` and `--train`, traces of the model, experts are those of other requests than what
is learned comes from, three predictors take part, and every system has its bounds.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import moe_runtime
from moe_runtime.benchmarks.cases.routed import ROUTED_METRICS, RecordedRouting, read_layers
from moe_runtime.benchmarks.cases.routed_model import RoutedModel
from moe_runtime.benchmarks.harness.scripting import (
    new_file,
    parser_of,
    positive,
    run_script,
    save_results,
)
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.inference.inspection import CheckpointSummary, inspect_checkpoint
from moe_runtime.lab.replay.teaching import teach_kept, teach_reuse
from moe_runtime.lab.traces.format import write_trace
from moe_runtime.lab.traces.learned import learned_path, write_predictor
from moe_runtime.lab.traces.recent import KEPT_STEPS, recent_path
from moe_runtime.lab.traces.routes import routes_of
from moe_runtime.policies.prediction import make_estimator
from moe_runtime.policies.prediction.base import shape_of

CAPACITIES = (0.125, 0.25, 0.375, 0.5, 0.75)
How = tuple[str, str, str]
"""Policy, way of prefetching and predictor."""
OFF: How = ("lru", "off", "auto")
AUTO: How = ("auto", "auto", "auto")
FIXED: tuple[How, ...] = (
    OFF,
    ("lfu-aging", "off", "auto"),
    ("reuse", "off", "auto"),
    ("lru", "enforce", "auto"),
    ("reuse", "enforce", "auto"),
)
ROUTED_CAPACITIES = (0.125, 0.25, 0.5)
PREDICTORS = ("path-network", "combined", "running-counts")
ROUTED: tuple[How, ...] = tuple(
    (policy, *rest)
    for policy in ("lru", "reuse")
    for rest in (("off", "auto"), *(("enforce", name) for name in PREDICTORS))
)
TEXT = Path(argparse.__file__)
"""Python's own source, cut by the model's tokenizer."""
PROMPT_TOKENS = 16
WARM_STEPS = 24
"""Steps before the measured ones: prefetching in `auto` ends its first trial within them."""
NUM_REQUESTS, ROUTED_PROMPT = 2, 8
Numbers = Mapping[str, Any]


def text_ids(path: str, count: int) -> torch.Tensor:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(path)(TEXT.read_text())["input_ids"]
    if len(ids) < count:
        raise SystemExit(f"{TEXT} has {len(ids)} tokens, {count} are asked for")
    return torch.tensor(ids[:count])[None]


def decode(model: Any, ids: torch.Tensor) -> Numbers:
    """Seconds of a step: the text's tokens come one by one behind a prompt."""
    cache, start = None, 0.0
    with torch.inference_mode():
        output = model(ids[:, :PROMPT_TOKENS], use_cache=True)
        for step in range(PROMPT_TOKENS, ids.shape[1]):
            if step == PROMPT_TOKENS + WARM_STEPS:
                start = time.perf_counter()
            cache = output.past_key_values
            output = model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
    seconds = (time.perf_counter() - start) / (ids.shape[1] - PROMPT_TOKENS - WARM_STEPS)
    stats = model.moe.stats()
    share = stats.predict_s / (seconds * ids.shape[1])
    return {"tokens_per_s": 1 / seconds, "misses": stats.misses, "predict_share": share}


class Requests:
    """Requests of a trace, decoded as ``bench latency --routing`` does, with bounds."""

    def __init__(self, trace: Path, taught: Path, path: str, num_new: int, folder: Path) -> None:
        numbers = [[one] for one in range(NUM_REQUESTS)]
        checkpoint = Path(path)
        self._folder, self._batches = folder, len(numbers)
        self._routing = RecordedRouting(trace, checkpoint, None, numbers, ROUTED_PROMPT, num_new)
        self._ids = self._routing.token_ids
        self._path = self._routing.saved(folder)
        learned, signature = read_layers(taught, self._routing.asked), self._routing.asked.signature
        os.environ["XDG_CACHE_HOME"] = str(folder / "taught")
        teach_reuse(learned, checkpoint)
        self.files = {"path-network": learned_path("predictor", signature, checkpoint)}
        combined = make_estimator("combined", shape_of(signature))
        combined.fit(routes_of(learned))
        self.files["combined"] = folder / "combined.npz"
        write_predictor(self.files["combined"], combined, signature)
        kept = recent_path(signature, checkpoint)
        kept.parent.mkdir()
        write_trace(kept, learned.steps(learned.num_steps - KEPT_STEPS, learned.num_steps))

    def begin(self) -> None:
        """The next run begins with what was taught, and nothing that a run learned since."""
        now = self._folder / "now"
        shutil.rmtree(now, ignore_errors=True)
        shutil.copytree(self._folder / "taught", now)
        os.environ["XDG_CACHE_HOME"] = str(now)

    def decode(self, model: Any) -> Numbers:
        routed = RoutedModel(model, str(self._path))
        self._answer(model, routed, 0)
        found = [self._answer(model, routed, number) for number in range(self._batches)]
        held, _ = self._answer(model, routed, 0, held=True)
        steps = [seconds for spent, _ in found for seconds in spent]
        counts = [counts for _, counts in found]
        return self._routing.numbers(steps, held, counts, model.moe.stats().expert_slots)

    def _answer(
        self, model: Any, routed: RoutedModel, number: int, *, held: bool = False
    ) -> tuple[list[float], Numbers]:
        """Seconds of each decode step of a request, and what the runtime counted in them."""
        routed.take(self._routing.requests(number, held=held))
        ids, spent = torch.tensor(self._ids[number])[None], list[float]()
        with torch.inference_mode():
            output = model(ids[:, :ROUTED_PROMPT], use_cache=True, logits_to_keep=1)
            before = asdict(model.moe.stats())
            for step in range(ROUTED_PROMPT, ids.shape[1] - 1):
                start, cache = time.perf_counter(), output.past_key_values
                output = model(ids[:, step : step + 1], past_key_values=cache, use_cache=True)
                spent.append(time.perf_counter() - start)
        after = asdict(model.moe.stats())
        names = ("bytes_read", "stall_s", "predict_s")
        return spent, {name: after[name] - before[name] for name in names}


def run_once(
    summary: CheckpointSummary,
    capacity: float,
    how: How,
    decode: Callable[[Any], Numbers],
    files: Mapping[str, Path] | None = None,
) -> Numbers:
    slots = round(capacity * summary.total_experts)
    budget = summary.smallest_budget_bytes
    while summary.slots_for(budget) < slots:
        budget += summary.slot_bytes
    policy, prefetch, predictor = how
    model: Any = moe_runtime.load(
        summary.path, device="cpu", host_memory=budget, max_tokens=summary.max_tokens,
        policy=policy, prefetch=prefetch, predictor=(files or {}).get(predictor, predictor),
        teach=False,
    )  # fmt: skip
    with model.moe as handle:
        found = decode(model)
        stats = handle.stats()
    del model
    gc.collect()
    seconds = found["step_s"] if "step_s" in found else 1 / found["tokens_per_s"]
    print(
        f"    {name_of(how)}: {1e3 * seconds:.2f} ms, {stats.policy}, {stats.prefetch}",
        file=sys.stderr,
        flush=True,
    )
    return found


def name_of(how: How) -> str:
    return " ".join(how if how[1] == "enforce" and how[2] != "auto" else how[:2])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("models", nargs="+", metavar="DISK=MODEL")
    parser.add_argument("--routing", type=Path, metavar="TRACE", help="requests to route by")
    parser.add_argument("--train", type=Path, metavar="TRACE", help="others, to learn from")
    parser.add_argument("--steps", type=positive, default=64, help="measured tokens")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument(
        "--learned", type=positive, default=3000, help="tokens of other text that auto sees before"
    )
    parser.add_argument("--output", "-o", type=new_file, help="results file")
    asked = parser.parse_args()
    if (asked.routing is None) != (asked.train is None):
        raise ValueError("--routing TRACE and --train TRACE belong together")
    systems: dict[str, list[Numbers]] = {}
    fixed, capacities = (FIXED, CAPACITIES) if asked.train is None else (ROUTED, ROUTED_CAPACITIES)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        for name in asked.models:
            disk, _, path = name.partition("=")
            if asked.train is None:
                run = prepare_text(name, path, asked.steps, asked.learned)
            else:
                run = prepare_requests(path, asked, Path(cache))
            for capacity in capacities:
                found: dict[How, list[Numbers]] = {how: [] for how in (*fixed, AUTO)}
                for _ in range(asked.rounds):
                    for how, runs in found.items():
                        runs.append(run(capacity, how))
                mix = f"{Path(path).name} {disk} {capacity:g}"
                systems |= {f"{mix} {name_of(how)}": runs for how, runs in found.items()}
                speed = {
                    how: median(r.get("tokens_per_s") or 1 / r["step_s"] for r in runs)
                    for how, runs in found.items()
                }
                best = max(fixed, key=speed.__getitem__)
                print(
                    f"{mix}: auto {speed[AUTO]:.2f} tokens/s, {speed[AUTO] / speed[best]:.3f} of "
                    f"{name_of(best)}, {speed[AUTO] / speed[OFF]:.3f} of {name_of(OFF)}",
                    flush=True,
                )
    if asked.output:
        metrics = ROUTED_METRICS if asked.train else {
            "tokens_per_s": Metric("tokens/s", better="more"),
            "misses": Metric("count", is_judged=False),
            "predict_share": Metric("share", is_judged=False),
        }  # fmt: skip
        settings = {"steps": asked.steps, "rounds": asked.rounds, "capacities": [*capacities]}
        if asked.train is not None:
            settings |= {"routing": asked.routing.name, "train": asked.train.name}
        save_results("mixes", settings, systems, metrics, asked.output)
    return 0


Run = Callable[[float, How], Numbers]


def prepare_text(name: str, path: str, num_steps: int, num_learned: int) -> Run:
    """Has `auto` see text of the model, and learn from it; how a share is decoded."""
    count = PROMPT_TOKENS + WARM_STEPS + num_steps
    each = min(num_learned, PROMPT_TOKENS + KEPT_STEPS)
    summary = inspect_checkpoint(path, max_tokens=max(count, each))
    ids = text_ids(path, count + num_learned)
    for first in range(count, ids.shape[1] - each + 1, each):
        run_once(summary, 0.25, AUTO, partial(decode, ids=ids[:, first : first + each]))
    print(f"{name}: taught {teach(summary)}", file=sys.stderr)
    text = partial(decode, ids=ids[:, :count])
    return lambda capacity, how: run_once(summary, capacity, how, text)


def prepare_requests(path: str, asked: argparse.Namespace, folder: Path) -> Run:
    """Teaches policies and predictors; how a share is decoded."""
    summary = inspect_checkpoint(path, max_tokens=ROUTED_PROMPT + asked.steps)
    requests = Requests(asked.routing, asked.train, path, asked.steps, folder)
    print(f"taught by {asked.train.name}", file=sys.stderr, flush=True)

    def run(capacity: float, how: How) -> Numbers:
        requests.begin()
        return run_once(summary, capacity, how, requests.decode, requests.files)

    return run


def teach(summary: CheckpointSummary) -> bool:
    """Teaches at once from what `auto` kept, as a run does in the background."""
    return teach_kept(recent_path(summary.signature, summary.path), summary.path)


if __name__ == "__main__":
    sys.exit(run_script(main))
