"""A generation service whose ranks come and go: `python benchmarks/elastic.py [--save]`.

Six requests run while the service changes its ranks and rebalances. Measured of each change:
experts that travelled, seconds of preparation, and the longest wait of any request for a token. All
answers must be those of one process. Ranks share this machine's cores: this measures no speed.
"""

import itertools
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer

import moe_runtime
from moe_runtime.benchmarks.harness.scripting import ScriptResults, option, script
from moe_runtime.benchmarks.suite import Metric, facts
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
METRICS = {
    **facts("count", "experts_moved", "requests_moved"),
    "prepared_s": Metric("s"),
    "longest_wait_s": Metric("s"),
    **facts("s", "longest_wait_before_s"),
}
QUIET_S = 1.0
"""Between two changes."""

Prompt = tuple[int, ...]
Change = Callable[[], "Future[ChangeReport]"]


class TokenTimes:
    def __init__(self, num_requests: int) -> None:
        self._times: list[list[float]] = [[] for _ in range(num_requests)]

    def add(self, request: int, token: int) -> None:
        self._times[request].append(time.perf_counter())

    def longest_wait_s(self, begin_s: float, end_s: float) -> float:
        """The longest time between two tokens of a request that overlaps an interval."""
        waits = [
            after - before
            for times in self._times
            for before, after in itertools.pairwise(times)
            if after >= begin_s and before <= end_s
        ]
        return max(waits, default=0.0)


def answers_of_one_process(prompts: list[Prompt], num_tokens: int) -> list[Prompt]:
    model: Any = moe_runtime.load(pocket_path(), device="cpu", max_tokens=1024)
    with model.moe:
        found = [
            model.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False)
            for prompt in prompts
        ]
    pairs = zip(found, prompts, strict=True)
    return [tuple(tokens[0, len(prompt) :].tolist()) for tokens, prompt in pairs]


def measure(change: Change, times: TokenTimes) -> dict[str, float]:
    quiet_s = time.perf_counter()
    time.sleep(QUIET_S)
    begin_s = time.perf_counter()
    report = change().result()
    end_s = time.perf_counter()
    return {
        "experts_moved": report.num_transfers,
        "requests_moved": report.num_moved_requests,
        "prepared_s": report.prepare_s,
        "longest_wait_s": times.longest_wait_s(begin_s, end_s),
        "longest_wait_before_s": times.longest_wait_s(quiet_s, begin_s),
    }


def run(rounds: int, num_tokens: int, results: ScriptResults) -> None:
    """Add the numbers of each change, in every round."""
    tokenizer: Any = AutoTokenizer.from_pretrained(pocket_path())
    prompts: list[Prompt] = [tuple(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    service = ElasticService(pocket_path(), timeout_s=100)
    start_local_workers(3, pocket_path(), service.address, timeout_s=100)
    changes: Mapping[str, Change] = {
        "2 to 4 ranks": lambda: service.resize(4),
        "4 to 3 ranks": lambda: service.resize(3),
        "rebalance, 2 replicas or more": lambda: service.rebalance(num_replicas=2),
        "3 to 2 ranks": lambda: service.resize(2),
    }
    with service.start(2):
        times = TokenTimes(len(prompts))
        requests = [ElasticRequest(prompt=one, max_new_tokens=num_tokens) for one in prompts]
        answers = [
            service.submit(request, partial(times.add, number))
            for number, request in enumerate(requests)
        ]

        def measured(change: Change) -> dict[str, float]:
            if all(answer.done() for answer in answers):
                raise SystemExit("the answers ended before the changes: give more --new-tokens")
            return measure(change, times)

        systems = {name: partial(measured, change) for name, change in changes.items()}
        results.add_rounds(systems, rounds)
        got = [answer.result() for answer in answers]
    if got != answers_of_one_process(prompts, num_tokens):
        raise SystemExit("an answer differs from that of one process")
    print(f"all {len(got)} answers are those of one process, token by token")


@script(rounds=option(3, "times all changes are made"), new_tokens=option(480, "of each request"))
def main(options: Namespace) -> int:
    settings = {"model": "pocket", "requests": len(PROMPTS), "new_tokens": options.new_tokens}
    results = ScriptResults("elastic", options, settings, METRICS)
    run(options.rounds, options.new_tokens, results)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
