"""Systems that continue text, each a process for every repetition, held to the same tokens."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_runtime.benchmarks.suite.energy import EnergyMeter
from moe_runtime.benchmarks.suite.peer_process import PeerProgram, started
from moe_runtime.benchmarks.suite.results import JOULES, Metric, describe_system, make_results
from moe_runtime.benchmarks.suite.runner import (
    MeasuredSystem,
    Number,
    PeerFailedError,
    Rules,
    run_in_turn,
)

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


class TextSystem(ABC):
    """A peer under test.

    Attributes:
        name: the peer's.
        versions: of its packages, once it ran.
        gpu: that it computed on, once it ran; None for none, or one of which it does not say.
        compared, equal: likeliest tokens in the latest repetition, and how many were as expected.
        energy: measures that of the machine while it answers.
    """

    def __init__(
        self, program: PeerProgram, expected: Sequence[list[int]], agreement: float
    ) -> None:
        """What it is held to.

        Args:
            program: the peer.
            expected: the likeliest tokens of each sequence.
            agreement: least share of them that it must find likeliest, too.
        """
        self.name = program.name
        self.versions: dict[str, str] = {}
        self.gpu: str | None = None
        self.compared = self.equal = 0
        self.program, self._expected, self._agreement = program, expected, agreement
        self.energy = EnergyMeter()

    @abstractmethod
    def repeat(self) -> Mapping[str, Number]:
        """Runs the peer once.

        Raises:
            PeerFailedError: it ended, or its text differs.
        """

    def answers(
        self, plan: Any, given: Sequence[Any], answer: Callable[..., dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], dict[str, Number]]:
        """Runs the peer once: it reads the first text untimed, then all of them.

        Args:
            plan: of the case.
            given: the texts.
            answer: as of `likeliest`.

        Returns:
            What it answered to each, and numbers of memory and energy.

        Raises:
            PeerFailedError: it ended.
        """
        with started(self.program, plan.timeout_s) as process:
            begun = process.ask("start", settings=self.program.settings)
            self.versions = begun["versions"]
            loaded = process.ask("load")
            answer(process, plan, 0, given[0])
            with self.energy.measured() as joules:
                found = [answer(process, plan, number, text) for number, text in enumerate(given)]
            ended = process.ask("end")
        self.gpu = ended.get("device_name")
        return found, {**memory_numbers(begun, loaded, found, ended), **joules}

    def require_same_text(self, found: Sequence[list[int]]) -> None:
        """Compares its likeliest tokens with those expected.

        Raises:
            PeerFailedError: too few are equal.
        """
        pairs = [
            pair
            for one, other in zip(found, self._expected, strict=True)
            for pair in zip(one, other, strict=True)
        ]
        self.compared, self.equal = len(pairs), sum(one == other for one, other in pairs)
        if self.equal < self._agreement * self.compared:
            raise PeerFailedError(
                f"{self.equal} of {self.compared} likeliest tokens equal moe_runtime's, expected "
                f"{self._agreement:.0%}; its times would be those of other work"
            )


def likeliest(
    ours: PeerProgram, plan: Any, number: int, answer: Callable[..., Mapping[str, Any]]
) -> list[Any]:
    """The likeliest tokens of each text, untimed, which every system is held to.

    Args:
        ours: this project.
        plan: of the case; its `continuations`, where there are some, are the texts.
        number: of texts.
        answer: asks a process for one: called with it, the plan, the text's number and the text.

    Raises:
        PeerFailedError: it does not run.
    """
    given = plan.continuations or [None] * number
    try:
        with started(ours, plan.timeout_s) as process:
            process.ask("start", settings=ours.settings)
            process.ask("load")
            found = [answer(process, plan, place, text)["ids"] for place, text in enumerate(given)]
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


def measure_in_turn(
    case: str,
    systems: Sequence[TextSystem],
    metrics: Mapping[str, Metric],
    rules: Rules,
    clock: Callable[[], float],
    *,
    settings: Mapping[str, Any],
    on_repetition: Callable[[str, int], None],
    is_stopping: Callable[[], bool],
) -> dict[str, Any]:
    """Measures systems in turn; the content of a results file."""
    found, ended = run_in_turn(
        systems, rules, clock, on_repetition=on_repetition, is_stopping=is_stopping
    )
    return make_results(
        case,
        settings,
        ended,
        [_describe(system, found[system.name], metrics) for system in systems],
        gpu=next((system.gpu for system in systems if system.gpu), None),
    )


def _describe(
    system: TextSystem, measured: MeasuredSystem, metrics: Mapping[str, Metric]
) -> dict[str, Any]:
    quality = {"compared": system.compared, "equal": system.equal} if system.compared else None
    return describe_system(
        system.name, measured, metrics, system_versions=system.versions, quality=quality
    )
