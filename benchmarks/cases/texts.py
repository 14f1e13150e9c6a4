"""The cases ``latency`` and ``throughput``: systems that continue text, held to the same tokens.

Each repetition is a process: it imports, loads, answers the first text untimed, then all of them.
All systems are given the tokens that this project finds likeliest, and say what they find likeliest
after each: one that differs in more than the share agreed on gets no numbers. (In bf16, systems
that sum in another order sometimes disagree on two almost equal logits.)
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from moe_runtime.benchmarks.suite.energy import EnergyMeter
from moe_runtime.benchmarks.suite.peers import PeerProcess, PeerProgram, started
from moe_runtime.benchmarks.suite.results import JOULES, Metric, measure_systems
from moe_runtime.benchmarks.suite.runner import BenchSystem, Number, PeerFailedError, Rules

if TYPE_CHECKING:
    from moe_runtime.benchmarks.cases.routed import RecordedRouting

MEMORY_METRICS = {
    "load_s": Metric("s", is_judged=False),
    "import_s": Metric("s", is_judged=False),
    "peak_rss_bytes": Metric("bytes"),
    "peak_device_bytes": Metric("bytes"),
    "rss_after_imports_bytes": Metric("bytes", is_judged=False),
    "read_call_bytes": Metric("bytes", is_judged=False),
    "storage_bytes": Metric("bytes", is_judged=False),
    "page_cache_bytes": Metric("bytes", is_judged=False),
    "major_faults": Metric("count", is_judged=False),
    **JOULES,
}
"""What is measured besides speed."""
_PEAKS = ("peak_rss_bytes", "peak_device_bytes")
_KERNEL_COUNTS = ("read_call_bytes", "storage_bytes", "major_faults")
Ids = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class TextPlan(ABC):
    """What is asked of every system, text by text; a text is a prompt or a batch of prompts."""

    case: ClassVar[str]
    judged: ClassVar[tuple[str, ...]]
    spread: ClassVar[tuple[str, ...]]
    speeds: ClassVar[Mapping[str, Metric]]
    num_new: int
    agreement: float = 0.9
    timeout_s: float = 900.0
    continuations: Sequence[Any] | None = None
    routing: "RecordedRouting | None" = None

    @property
    @abstractmethod
    def texts(self) -> Sequence[Any]:
        """Ids of each text."""

    @abstractmethod
    def request(self, number: int) -> dict[str, Any]:
        """What a text is, as a process is asked for it."""

    def ask(
        self, process: PeerProcess, number: int, given: Any, *, held: bool = False
    ) -> dict[str, Any]:
        """What a process answers to a text, given the tokens after it, if any. ``held``: routed
        as one token throughout."""
        routed = None if self.routing is None else self.routing.requests(number, held=held)
        request = self.request(number)
        return process.ask(**request, num_new=self.num_new, given=given, requests=routed)

    @abstractmethod
    def steps_s(self, answer: Mapping[str, Any]) -> Sequence[float]:
        """Seconds of each step after the prompts."""

    @abstractmethod
    def sequences(self, ids: Sequence[Any]) -> Ids:
        """Likeliest tokens of each sequence, from those of each text."""

    @abstractmethod
    def numbers(self, answers: Sequence[dict[str, Any]]) -> dict[str, Number]:
        """What the answers to all texts say of the speed."""


@dataclass(frozen=True, kw_only=True)
class LatencyPlan(TextPlan):
    """One sequence at a time: first token and time between tokens."""

    case: ClassVar[str] = "latency"
    judged: ClassVar[tuple[str, ...]] = ("first_token_s", "between_tokens_s")
    spread: ClassVar[tuple[str, ...]] = judged
    speeds: ClassVar[Mapping[str, Metric]] = {
        "first_token_s": Metric("s"),
        "between_tokens_s": Metric("s"),
        # of all tokens after the first: with drafts some of them take no time
        "decode_tokens_per_s": Metric("tokens/s", better="more", is_judged=False),
    }
    prompts: Sequence[list[int]]

    @property
    def texts(self) -> Sequence[list[int]]:
        return self.prompts

    def request(self, number: int) -> dict[str, Any]:
        is_text = self.continuations is not None
        return {"what": "measure", "ids": self.prompts[number], "is_text": is_text}

    def steps_s(self, answer: Mapping[str, Any]) -> Sequence[float]:
        return answer["between_tokens_s"]

    def sequences(self, ids: Sequence[Any]) -> Ids:
        return [*ids]

    def numbers(self, answers: Sequence[dict[str, Any]]) -> dict[str, Number]:
        between = [s for answer in answers for s in answer["between_tokens_s"]]
        return {
            "first_token_s": [answer["first_token_s"] for answer in answers],
            "between_tokens_s": between,
            "decode_tokens_per_s": len(between) / max(sum(between), 1e-9),
        }


@dataclass(frozen=True, kw_only=True)
class ThroughputPlan(TextPlan):
    """Batches of prompts side by side: tokens a second in all."""

    case: ClassVar[str] = "throughput"
    judged: ClassVar[tuple[str, ...]] = ("new_tokens_per_s",)
    spread: ClassVar[tuple[str, ...]] = ("step_tokens_per_s",)
    speeds: ClassVar[Mapping[str, Metric]] = {
        "new_tokens_per_s": Metric("tokens/s", better="more"),
        "prompt_tokens_per_s": Metric("tokens/s", better="more"),
        "step_tokens_per_s": Metric("tokens/s", better="more"),
    }
    batches: Sequence[Ids]

    @property
    def texts(self) -> Sequence[Ids]:
        return self.batches

    def request(self, number: int) -> dict[str, Any]:
        return {"what": "measure_batch", "prompts": self.batches[number]}

    def steps_s(self, answer: Mapping[str, Any]) -> Sequence[float]:
        return answer["steps_s"]

    def sequences(self, ids: Sequence[Any]) -> Ids:
        return [one for batch in ids for one in batch]

    def numbers(self, answers: Sequence[dict[str, Any]]) -> dict[str, Number]:
        prompts = self.sequences(self.batches)
        prompts_s = sum(answer["prompts_s"] for answer in answers)
        steps_s = sum(sum(answer["steps_s"]) for answer in answers)
        return {
            "new_tokens_per_s": len(prompts) * self.num_new / (prompts_s + steps_s),
            # without what fills shorter ones up
            "prompt_tokens_per_s": sum(map(len, prompts)) / prompts_s,
            # of each step, so that percentiles say how even they are
            "step_tokens_per_s": [
                len(batch) / s
                for batch, answer in zip(self.batches, answers, strict=True)
                for s in answer["steps_s"]
            ],
        }


class TextSystem(BenchSystem):
    def __init__(self, program: PeerProgram, plan: TextPlan, expected: Sequence[Any]) -> None:
        super().__init__(program.name, {})
        self.program, self.energy = program, EnergyMeter()
        self._plan, self._expected = plan, plan.sequences(expected)
        self._given = plan.continuations or expected

    def repeat(self) -> Mapping[str, Number]:
        """Runs the peer once: it reads the first text untimed, then all of them."""
        plan = self._plan
        with started(self.program, plan.timeout_s) as process:
            begun = process.ask("start", settings=self.program.settings)
            self.versions = begun["versions"]
            loaded = process.ask("load")
            plan.ask(process, 0, self._given[0])
            with self.energy.measured() as joules:
                answers = [plan.ask(process, number, ids) for number, ids in enumerate(self._given)]
            held = None
            if plan.routing is not None:
                held = plan.steps_s(plan.ask(process, 0, self._given[0], held=True))
            ended = process.ask("end")
        self.gpu = ended.get("device_name")
        self._require_same_text(plan.sequences([answer["ids"] for answer in answers]))
        found = {**plan.numbers(answers), **memory_numbers(begun, loaded, answers, ended), **joules}
        if plan.routing is not None and held is not None:
            steps_s = [s for answer in answers for s in plan.steps_s(answer)]
            counts = [answer["of_steps"] for answer in answers]
            found |= plan.routing.numbers(steps_s, held, counts, ended["counts"]["expert_slots"])
        return found

    def _require_same_text(self, found: Ids) -> None:
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


def likeliest(ours: PeerProgram, plan: TextPlan) -> list[Any]:
    """The likeliest tokens after each text, untimed: greedy continuations, or what is given."""
    given = plan.continuations or [None] * len(plan.texts)
    try:
        with started(ours, plan.timeout_s) as process:
            process.ask("start", settings=ours.settings)
            process.ask("load")
            found = [plan.ask(process, number, ids)["ids"] for number, ids in enumerate(given)]
            process.ask("end")
    except PeerFailedError as error:  # no table has its name beside it
        raise PeerFailedError(f"{ours.name}: {error}") from None
    return found


def memory_numbers(
    begun: Mapping[str, Any],
    loaded: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    ended: Mapping[str, Any],
) -> dict[str, Number]:
    """The numbers of ``MEMORY_METRICS`` from what a peer answered to its requests."""
    counts = {name: sum(answer[name] for answer in answers) for name in _KERNEL_COUNTS}
    return {
        "load_s": loaded["load_s"],
        "import_s": begun["start_s"] + loaded["import_s"],
        **{name: ended[name] for name in _PEAKS if name in ended},
        "rss_after_imports_bytes": begun["rss_after_imports_bytes"],
        **counts,
        # What was read by calls and did not come from the disk was in the kernel's page cache.
        "page_cache_bytes": max(0, counts["read_call_bytes"] - counts["storage_bytes"]),
    }


def measure_texts(
    ours: PeerProgram,
    peers: Sequence[PeerProgram],
    plan: TextPlan,
    rules: Rules,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    expected = likeliest(ours, plan)
    rules.on_repetition(f"{ours.name}, untimed", 0)
    systems = [TextSystem(program, plan, expected) for program in (ours, *peers)]
    metrics = {**plan.speeds, **MEMORY_METRICS}
    if plan.routing is not None:
        from moe_runtime.benchmarks.cases.routed import ROUTED_METRICS

        metrics = {**plan.speeds, **ROUTED_METRICS, **MEMORY_METRICS}
    return measure_systems(plan.case, systems, metrics, rules, settings)
