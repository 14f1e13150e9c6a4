"""The case ``throughput``: batches of prompts side by side, tokens a second in all.

Each repetition of a system is a process: it imports, loads, reads the first batch once untimed,
then reads every batch and appends tokens to all of its sequences at once. What is appended, and
when a system gets numbers, is as for ``latency``; the tokens are those of this project's batches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_runtime.benchmarks.cases.text_systems import (
    MEMORY_METRICS,
    TextSystem,
    likeliest,
    measure_in_turn,
)
from moe_runtime.benchmarks.suite.peer_process import PeerProcess, PeerProgram
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.benchmarks.suite.runner import Number, Rules

METRICS = {
    "new_tokens_per_s": Metric("tokens/s", better="more"),
    "prompt_tokens_per_s": Metric("tokens/s", better="more"),
    "step_tokens_per_s": Metric("tokens/s", better="more"),
    **MEMORY_METRICS,
}


@dataclass(frozen=True, kw_only=True)
class ThroughputPlan:
    """What is asked of every system.

    Attributes:
        batches: ids of the prompts that are read side by side; of different lengths if need be.
        num_new: tokens after each prompt, the first included; at least 2.
        agreement: least share of likeliest tokens that must equal this project's.
        timeout_s: seconds after which a system that does not answer is ended.
        continuations: of each sequence of each batch, as for `LatencyPlan`.
    """

    batches: Sequence[list[list[int]]]
    num_new: int
    agreement: float = 0.9
    timeout_s: float = 900.0
    continuations: Sequence[list[list[int]]] | None = None

    @property
    def num_sequences(self) -> int:
        """Prompts of all batches."""
        return sum(map(len, self.batches))

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts, without what fills shorter ones up."""
        return sum(len(ids) for batch in self.batches for ids in batch)


class ThroughputSystem(TextSystem):
    """A peer that answers batches of prompts."""

    def __init__(
        self, program: PeerProgram, plan: ThroughputPlan, expected: list[list[list[int]]]
    ) -> None:
        super().__init__(program, [ids for batch in expected for ids in batch], plan.agreement)
        self._plan, self._given = plan, plan.continuations or expected

    def repeat(self) -> Mapping[str, Number]:
        """Runs the peer once.

        Raises:
            PeerFailedError: it ended, reads one sequence at a time, or its text differs.
        """
        plan = self._plan
        answers, numbers = self.answers(plan, self._given, _answer)
        self.require_same_text([ids for answer in answers for ids in answer["ids"]])
        prompts_s = sum(answer["prompts_s"] for answer in answers)
        steps_s = sum(sum(answer["steps_s"]) for answer in answers)
        return {
            "new_tokens_per_s": plan.num_sequences * plan.num_new / (prompts_s + steps_s),
            "prompt_tokens_per_s": plan.num_prompt_tokens / prompts_s,
            # of each step, so that percentiles say how even they are
            "step_tokens_per_s": [
                len(batch) / s
                for batch, answer in zip(plan.batches, answers, strict=True)
                for s in answer["steps_s"]
            ],
            **numbers,
        }


def measure_throughput(
    ours: PeerProgram,
    peers: Sequence[PeerProgram],
    plan: ThroughputPlan,
    rules: Rules,
    clock: Callable[[], float],
    *,
    settings: Mapping[str, Any],
    on_repetition: Callable[[str, int], None] = lambda name, number: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measures this project and its peers.

    Returns:
        The content of a results file.

    Raises:
        PeerFailedError: this project does not run, so that there is no text to compare with.
    """
    expected = _likeliest(ours, plan)
    on_repetition(f"{ours.name}, untimed", 0)
    return measure_in_turn(
        "throughput",
        [ThroughputSystem(program, plan, expected) for program in (ours, *peers)],
        METRICS,
        rules,
        clock,
        settings=settings,
        on_repetition=on_repetition,
        is_stopping=is_stopping,
    )


def _likeliest(ours: PeerProgram, plan: ThroughputPlan) -> list[list[list[int]]]:
    """The likeliest tokens of each batch: its greedy continuations, unless some are given."""
    return likeliest(ours, plan, len(plan.batches), _answer)


def _answer(
    process: PeerProcess, plan: ThroughputPlan, number: int, given: list[list[int]] | None
) -> dict[str, Any]:
    prompts = plan.batches[number]
    return process.ask("measure_batch", prompts=prompts, num_new=plan.num_new, given=given)
