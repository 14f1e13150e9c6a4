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

from moe_runtime.bench.peer_process import PeerProcess, PeerProgram, started
from moe_runtime.bench.results import Metric, describe_system, make_results
from moe_runtime.bench.runner import MeasuredSystem, Number, PeerFailedError, Rules, run_in_turn

METRICS = {
    "first_token_s": Metric("s"),
    "between_tokens_s": Metric("s"),
    "load_s": Metric("s", is_judged=False),
    "import_s": Metric("s", is_judged=False),
    "peak_rss_bytes": Metric("bytes"),
    "rss_after_imports_bytes": Metric("bytes", is_judged=False),
    "read_call_bytes": Metric("bytes", is_judged=False),
    "storage_bytes": Metric("bytes", is_judged=False),
    "page_cache_bytes": Metric("bytes", is_judged=False),
    "major_faults": Metric("count", is_judged=False),
}
_KERNEL_COUNTS = ("read_call_bytes", "storage_bytes", "major_faults")


@dataclass(frozen=True, kw_only=True)
class LatencyPlan:
    """What is asked of every system.

    Attributes:
        prompts: ids of each prompt.
        num_new: tokens after each prompt, the first included; at least 2.
        agreement: least share of likeliest tokens that must equal this project's.
        timeout_s: seconds after which a system that does not answer is ended.
    """

    prompts: Sequence[list[int]]
    num_new: int
    agreement: float = 0.9
    timeout_s: float = 900.0


class LatencySystem:
    """A peer under test.

    Attributes:
        name: the peer's.
        versions: of its packages, once it ran.
        compared, equal: likeliest tokens in the latest repetition, and how many were as expected.
    """

    def __init__(self, program: PeerProgram, plan: LatencyPlan, expected: list[list[int]]) -> None:
        self.name = program.name
        self.versions: dict[str, str] = {}
        self.compared = self.equal = 0
        self._program, self._plan, self._expected = program, plan, expected

    def repeat(self) -> Mapping[str, Number]:
        """Runs the peer once.

        Raises:
            PeerFailedError: it ended, or its text differs.
        """
        plan, expected = self._plan, self._expected
        with started(self._program, plan.timeout_s) as process:
            begun = process.ask("start", settings=self._program.settings)
            self.versions = begun["versions"]
            loaded = process.ask("load")
            _answer(process, plan, 0, expected[0])
            answers = [_answer(process, plan, n, ids) for n, ids in enumerate(expected)]
            ended = process.ask("end")
        self._require_same_text([answer["ids"] for answer in answers])
        counts = {name: sum(answer[name] for answer in answers) for name in _KERNEL_COUNTS}
        return {
            "first_token_s": [answer["first_token_s"] for answer in answers],
            "between_tokens_s": [s for answer in answers for s in answer["between_tokens_s"]],
            "load_s": loaded["load_s"],
            "import_s": begun["start_s"] + loaded["import_s"],
            "peak_rss_bytes": ended["peak_rss_bytes"],
            "rss_after_imports_bytes": begun["rss_after_imports_bytes"],
            **counts,
            # What was read by calls and did not come from the disk was in the kernel's page cache.
            "page_cache_bytes": max(0, counts["read_call_bytes"] - counts["storage_bytes"]),
        }

    def _require_same_text(self, found: list[list[int]]) -> None:
        pairs = [
            pair
            for one, other in zip(found, self._expected, strict=True)
            for pair in zip(one, other, strict=True)
        ]
        self.compared, self.equal = len(pairs), sum(one == other for one, other in pairs)
        if self.equal < self._plan.agreement * self.compared:
            raise PeerFailedError(
                f"{self.equal} of {self.compared} likeliest tokens equal moe_runtime's, expected "
                f"{self._plan.agreement:.0%}; its times would be those of other work"
            )


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
    systems = [LatencySystem(program, plan, expected) for program in (ours, *peers)]
    found, ended = run_in_turn(
        systems, rules, clock, on_repetition=on_repetition, is_stopping=is_stopping
    )
    return make_results(
        "latency", settings, ended, [_describe(system, found[system.name]) for system in systems]
    )


def _describe(system: LatencySystem, measured: MeasuredSystem) -> dict[str, Any]:
    quality = {"compared": system.compared, "equal": system.equal} if system.compared else None
    return describe_system(
        system.name, measured, METRICS, system_versions=system.versions, quality=quality
    )


def _likeliest(ours: PeerProgram, plan: LatencyPlan) -> list[list[int]]:
    """The greedy continuation of each prompt."""
    with started(ours, plan.timeout_s) as process:
        process.ask("start", settings=ours.settings)
        process.ask("load")
        found = [_answer(process, plan, n, None)["ids"] for n in range(len(plan.prompts))]
        process.ask("end")
    return found


def _answer(
    process: PeerProcess, plan: LatencyPlan, number: int, given: list[int] | None
) -> dict[str, Any]:
    return process.ask("measure", ids=plan.prompts[number], num_new=plan.num_new, given=given)
