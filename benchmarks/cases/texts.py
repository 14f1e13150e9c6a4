"""The cases ``latency`` and ``throughput``: systems continue texts with the same tokens.

Each repetition is a process that loads the model, answers the first text untimed, and then times
all texts. All systems get the same tokens, the top tokens of this project, and report their own top
token after each. A system that disagrees too often gets no numbers. (In bf16, another order of sums
sometimes swaps two almost equal logits.)
"""

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.benchmarks import suite
from moe_runtime.benchmarks.suite.energy import EnergyMeter
from moe_runtime.benchmarks.suite.peers import PeerProcess, PeerProgram, started

if TYPE_CHECKING:
    from moe_runtime.benchmarks.cases.routed import RecordedRouting

MEMORY_METRICS = {
    **suite.facts("s", "load_s", "import_s"),
    "peak_rss_bytes": suite.Metric("bytes"),
    "peak_device_bytes": suite.Metric("bytes"),
    **suite.facts("bytes", "rss_after_imports_bytes", "read_call_bytes"),
    **suite.facts("bytes", "storage_bytes", "page_cache_bytes"),
    **suite.facts("count", "major_faults"),
    **suite.JOULES,
}
"""Metrics besides speed."""
_PEAKS = ("peak_rss_bytes", "peak_device_bytes")
_KERNEL_COUNTS = ("read_call_bytes", "storage_bytes", "major_faults")
Ids = list[list[int]]


_MORE_TOKENS = suite.Metric("tokens/s", better="more")
SPEEDS = {
    "latency": {
        "first_token_s": suite.Metric("s"),
        "between_tokens_s": suite.Metric("s"),
        # of all tokens after the first: with drafts some tokens take no time
        **suite.facts("tokens/s", "decode_tokens_per_s", better="more"),
    },
    "throughput": dict.fromkeys(
        ("new_tokens_per_s", "prompt_tokens_per_s", "step_tokens_per_s"), _MORE_TOKENS
    ),
}
CERTAIN = {
    "latency": ("first_token_s", "between_tokens_s"),
    "throughput": ("new_tokens_per_s",),
}
"""The metrics that decide when to stop, by case."""


@dataclass(frozen=True, kw_only=True)
class TextPlan:
    """The work of every system: batches of prompts; for ``latency`` one prompt each.

    Attributes:
        continuations: tokens after each prompt; None for this project's top tokens.
    """

    case: str
    batches: Sequence[Ids]
    num_new: int
    agreement: float = 0.9
    timeout_s: float = 900.0
    continuations: Sequence[Ids] | None = None
    routing: "RecordedRouting | None" = None

    def ask(
        self, process: PeerProcess, number: int, given: Ids | None, *, held: bool = False
    ) -> dict[str, Any]:
        """Ask a process for one batch, with given tokens if any. ``held`` repeats one routing."""
        return process.ask(
            "measure",
            prompts=self.batches[number],
            num_new=self.num_new,
            given=given,
            is_text=self.continuations is not None,
            requests=self.routing and self.routing.requests(number, held=held),
        )

    def numbers(self, answers: Sequence[dict[str, Any]]) -> dict[str, suite.Number]:
        """The speeds over all batches."""
        prompts_s, every_s = [one["prompts_s"] for one in answers], _steps_s(answers)
        if self.case == "latency":
            rate = len(every_s) / max(sum(every_s), 1e-9)
            found = (prompts_s, every_s, rate)
        else:
            prompts, prompt_s = joined(self.batches), sum(prompts_s)
            # each step counts, so that percentiles show how even they are
            pairs = zip(self.batches, answers, strict=True)
            steps = [len(batch) / s for batch, one in pairs for s in one["steps_s"]]
            new = len(prompts) * self.num_new / (prompt_s + sum(every_s))
            # padding does not count
            found = (new, sum(map(len, prompts)) / prompt_s, steps)
        return dict(zip(SPEEDS[self.case], found, strict=True))


def _steps_s(answers: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of each step after the prompts."""
    return [s for one in answers for s in one["steps_s"]]


def joined(batches: Sequence[Ids]) -> Ids:
    return [ids for batch in batches for ids in batch]


class TextSystem(suite.BenchSystem):
    def __init__(self, program: PeerProgram, plan: TextPlan, expected: Sequence[Ids]) -> None:
        super().__init__(program.name, {})
        self.program, self.energy = program, EnergyMeter()
        self._plan, self._expected = plan, joined(expected)
        self._given = plan.continuations or expected

    def repeat(self) -> Mapping[str, suite.Number]:
        """Run the peer once: it reads the first text untimed, then all texts."""
        plan = self._plan
        with (
            _as_taught(self.program, plan) as program,
            started(program, plan.timeout_s) as process,
        ):
            begun = process.ask("start", settings=self.program.settings)
            self.versions = begun["versions"]
            loaded = process.ask("load")
            plan.ask(process, 0, self._given[0])
            with self.energy.measured() as joules:
                answers = [plan.ask(process, number, ids) for number, ids in enumerate(self._given)]
            held = None
            if plan.routing is not None:
                held = plan.ask(process, 0, self._given[0], held=True)["steps_s"]
            ended = process.ask("end")
        self.gpu = ended.get("device_name")
        self._require_same_text(joined([answer["ids"] for answer in answers]))
        found = {**plan.numbers(answers), **memory_numbers(begun, loaded, answers, ended), **joules}
        if plan.routing is not None and held is not None:
            counts, num_slots = (
                [one["of_steps"] for one in answers],
                ended["counts"]["expert_slots"],
            )
            found |= plan.routing.numbers(_steps_s(answers), held, counts, num_slots)
        return found

    def _require_same_text(self, found: Ids) -> None:
        pairs = [
            pair
            for one, other in zip(found, self._expected, strict=True)
            for pair in zip(one, other, strict=True)
        ]
        self.compared, self.equal = len(pairs), sum(one == other for one, other in pairs)
        if self.equal < self._plan.agreement * self.compared:
            raise suite.PeerFailedError(
                f"{self.equal} of {self.compared} likeliest tokens equal moe_runtime's, expected "
                f"{self._plan.agreement:.0%}; its times would be those of other work"
            )


@contextmanager
def _as_taught(program: PeerProgram, plan: TextPlan) -> Iterator[PeerProgram]:
    """With recorded routing, every repetition starts from the same trained network."""
    if plan.routing is None or program.cache is None:
        yield program
        return
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        shutil.copytree(program.cache, cache)
        yield replace(program, cache=cache)


def likeliest(ours: PeerProgram, plan: TextPlan) -> list[Ids]:
    """The most likely tokens after each prompt or given token, untimed."""
    given = plan.continuations or [None] * len(plan.batches)
    try:
        with started(ours, plan.timeout_s) as process:
            process.ask("start", settings=ours.settings)
            process.ask("load")
            found = [plan.ask(process, number, ids)["ids"] for number, ids in enumerate(given)]
            process.ask("end")
    except suite.PeerFailedError as error:  # no table shows its name
        raise suite.PeerFailedError(f"{ours.name}: {error}") from None
    return found


def memory_numbers(
    begun: Mapping[str, Any],
    loaded: Mapping[str, Any],
    answers: Sequence[Mapping[str, Any]],
    ended: Mapping[str, Any],
) -> dict[str, suite.Number]:
    """The values of ``MEMORY_METRICS`` from a peer's answers."""
    counts = {name: sum(answer[name] for answer in answers) for name in _KERNEL_COUNTS}
    return {
        "load_s": loaded["load_s"],
        "import_s": begun["start_s"] + loaded["import_s"],
        **{name: ended[name] for name in _PEAKS if name in ended},
        "rss_after_imports_bytes": begun["rss_after_imports_bytes"],
        **counts,
        # Bytes read by calls but not from storage came from the page cache.
        "page_cache_bytes": max(0, counts["read_call_bytes"] - counts["storage_bytes"]),
    }


def measure_texts(
    ours: PeerProgram,
    peers: Sequence[PeerProgram],
    plan: TextPlan,
    rules: suite.Rules,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    expected = likeliest(ours, plan)
    rules.on_repetition(f"{ours.name}, untimed", 0)
    systems = [TextSystem(program, plan, expected) for program in (ours, *peers)]
    metrics = SPEEDS[plan.case] | MEMORY_METRICS
    if plan.routing is not None:
        from moe_runtime.benchmarks.cases.routed import ROUTED_METRICS

        metrics = SPEEDS[plan.case] | ROUTED_METRICS | MEMORY_METRICS
    return suite.measure_systems(plan.case, systems, metrics, rules, settings)
