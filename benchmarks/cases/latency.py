"""The case ``latency``: one sequence at a time, first token and time between tokens.

Each repetition of a system is a process: it imports, loads, answers the first prompt once untimed,
then every prompt. All systems are given the same tokens, those that this project finds likeliest in
a run before that is not timed, and each says what it finds likeliest after each of them: who
differs in more than the share agreed on gets no numbers. (In bf16, systems that sum in
different order disagree now and then on which of two almost equal logits is the larger.)
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
    "first_token_s": Metric("s"),
    "between_tokens_s": Metric("s"),
    **MEMORY_METRICS,
}


@dataclass(frozen=True, kw_only=True)
class LatencyPlan:
    """What is asked of every system.

    Attributes:
        prompts: ids of each prompt.
        num_new: tokens after each prompt, the first included; at least 2.
        agreement: least share of likeliest tokens that must equal this project's.
        timeout_s: seconds after which a system that does not answer is ended.
        continuations: ``num_new`` ids of text after each prompt, which all are given in place of
            this project's likeliest ones: a model of random weights writes no text.
    """

    prompts: Sequence[list[int]]
    num_new: int
    agreement: float = 0.9
    timeout_s: float = 900.0
    continuations: Sequence[list[int]] | None = None


class LatencySystem(TextSystem):
    """A peer that answers one prompt after another."""

    def __init__(self, program: PeerProgram, plan: LatencyPlan, expected: list[list[int]]) -> None:
        super().__init__(program, expected, plan.agreement)
        self._plan, self._given = plan, plan.continuations or expected

    def repeat(self) -> Mapping[str, Number]:
        """Runs the peer once.

        Raises:
            PeerFailedError: it ended, or its text differs.
        """
        answers, numbers = self.answers(self._plan, self._given, _answer)
        self.require_same_text([answer["ids"] for answer in answers])
        return {
            "first_token_s": [answer["first_token_s"] for answer in answers],
            "between_tokens_s": [s for answer in answers for s in answer["between_tokens_s"]],
            **numbers,
        }


def measure_latency(
    ours: PeerProgram,
    peers: Sequence[PeerProgram],
    plan: LatencyPlan,
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
        "latency",
        [LatencySystem(program, plan, expected) for program in (ours, *peers)],
        METRICS,
        rules,
        clock,
        settings=settings,
        on_repetition=on_repetition,
        is_stopping=is_stopping,
    )


def _likeliest(ours: PeerProgram, plan: LatencyPlan) -> list[list[int]]:
    """The likeliest tokens after each prompt: its greedy continuation, unless one is given."""
    return likeliest(ours, plan, len(plan.prompts), _answer)


def _answer(
    process: PeerProcess, plan: LatencyPlan, number: int, given: list[int] | None
) -> dict[str, Any]:
    return process.ask(
        "measure",
        ids=plan.prompts[number],
        num_new=plan.num_new,
        given=given,
        is_text=plan.continuations is not None,
    )
