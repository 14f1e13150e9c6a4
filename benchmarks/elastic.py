"""An elastic service while it grows and shrinks: `python benchmarks/elastic.py`.

Starts a generation service on two processes, keeps requests running, and goes to four ranks, to
three, rebalances by what was counted, and back to two. Reported for every change: how many experts
travelled, how long it was prepared while tokens went on, how long the service stood still, and the
longest time that any request waited for its next token meanwhile. At the end every answer is
compared with that of one process without any of this; a difference ends the run.

All ranks share this machine's cores, so this is about changes, not about tokens a second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from harness.machine import commit, describe_machine, machine_name, versions

import moe_runtime
from moe_runtime.files import write_text
from moe_runtime.models.pocket import pocket_path
from moe_runtime.research.elastic import (
    ChangeReport,
    ElasticRequest,
    ElasticService,
    start_local_workers,
)

PROMPTS = (
    "The for statement is used to iterate",
    "A class definition is an executable statement.",
    "The import system",
    "def function(argument):",
    "Strings are sequences of",
    "An exception is raised when",
)


class Clock:
    """When every request got its tokens."""

    def __init__(self, count: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(count)]

    def watch(self, index: int) -> Callable[[int], None]:
        return lambda token: self._times[index].append(time.perf_counter())

    def longest_wait_s(self, begin: float, end: float) -> float:
        """The longest time between two tokens of a request that overlaps a stretch of time."""
        waits = [
            after - before
            for times in self._times
            for before, after in itertools.pairwise(times)
            if after >= begin and before <= end
        ]
        return max(waits, default=0.0)

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second of all requests in a stretch of time."""
        count = sum(begin <= moment <= end for times in self._times for moment in times)
        return count / (end - begin)


def load_prompts(path: Path) -> list[tuple[int, ...]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    return [tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]


def reference(path: Path, prompts: list[tuple[int, ...]], new_tokens: int) -> list[tuple[int, ...]]:
    """What one process answers."""
    model: Any = moe_runtime.load(path, device="cpu", max_tokens=512)
    answers = []
    with model.moe:
        for prompt in prompts:
            tokens = model.generate(
                torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False
            )
            answers.append(tuple(tokens[0, len(prompt) :].tolist()))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=pocket_path(), help="a checkpoint's folder")
    parser.add_argument("--new-tokens", type=int, default=300)
    parser.add_argument("--pause-s", type=float, default=1.0, help="between two changes")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    prompts = load_prompts(options.model)
    expected = reference(options.model, prompts, options.new_tokens)
    service = ElasticService(options.model, timeout_s=100)
    start_local_workers(3, options.model, service.address, timeout_s=100)
    changes: dict[str, Callable[[], Future[ChangeReport]]] = {
        "2 to 4 ranks": lambda: service.resize(4),
        "4 to 3 ranks": lambda: service.resize(3),
        "rebalance, 2 replicas or more": lambda: service.rebalance(num_replicas=2),
        "3 to 2 ranks": lambda: service.resize(2),
    }
    rows = []
    with service.start(2):
        clock = Clock(len(prompts))
        answers = [
            service.submit(
                ElasticRequest(prompt=prompt, max_new_tokens=options.new_tokens),
                clock.watch(index),
            )
            for index, prompt in enumerate(prompts)
        ]
        for name, change in changes.items():
            quiet = time.perf_counter()
            time.sleep(options.pause_s)
            begin = time.perf_counter()
            report = change().result()
            end = time.perf_counter()
            rows.append(
                {
                    "change": name,
                    **asdict(report),
                    "longest_wait_s": clock.longest_wait_s(begin, end),
                    "longest_wait_before_s": clock.longest_wait_s(quiet, begin),
                    "tokens_per_s_meanwhile": clock.rate(begin, end),
                    "tokens_per_s_before": clock.rate(quiet, begin),
                    "unfinished_requests": sum(not answer.done() for answer in answers),
                }
            )
            print(json.dumps(rows[-1]))
        found = [answer.result() for answer in answers]
    if found != expected:
        raise SystemExit("an answer differs from that of one process")
    print(f"all {len(found)} answers are those of one process, token by token")
    machine = describe_machine()
    report = {
        "machine": machine,
        "versions": versions(),
        "commit": commit(Path(__file__).parent),
        "model": "pocket" if options.model == pocket_path() else options.model.name,
        "requests": len(prompts),
        "new_tokens": options.new_tokens,
        "changes": rows,
    }
    output = options.output
    if output is None:
        output = Path(__file__).parent / "results" / f"elastic-{machine_name(machine)}.json"
    write_text(output, json.dumps(report, indent=1) + "\n")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
