"""Options, output and exit codes that all commands of ``bench`` share.

A command takes one of the runs here, which has the options of all cases.
"""

import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from moe_runtime.benchmarks.suite.figures import figure, metric_words, unit_for, with_half
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_json, print_table, say_line
from moe_runtime.cli.stopping import StopRequest, stop_on_signals
from moe_runtime.files import require_not_read

if TYPE_CHECKING:
    from moe_runtime.benchmarks.suite import Rules
    from moe_runtime.benchmarks.suite.peers import PeerProgram

STOPPING = "showing what was measured so far; Ctrl-C once more stops at once"
Peers = Annotated[
    list[str] | None, typer.Option("--peer", metavar="NAME[:VARIANT][@PYTHON][=MODEL]")
]
Threads = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Threads of every system; all when omitted.")
]


def cap_bytes(cap: str | None) -> int | None:
    if cap is None:
        return None
    from moe_runtime.benchmarks.suite.memory_cap import why_unavailable

    limit = options.bytes_of(cap, "--cap", needs_unit=True)
    if reason := why_unavailable():
        raise ValueError(f"--cap {cap}: memory cannot be capped here: {reason}")
    return limit


@dataclass(kw_only=True)
class CaseRun:
    """One run of a case.

    Args:
        output: Write all results to this file.
    """

    output: Annotated[Path | None, typer.Option("--output", "-o")] = None
    as_json: options.Json = False

    def check(self, ctx: typer.Context) -> None:
        """Start the run."""
        self.ctx, self.session = ctx, cast(Session, ctx.obj)
        self.stop: StopRequest | None = None
        self._facts: dict[str, Any] = {}

    def asked(self, *names: str) -> dict[str, Any]:
        """Options as given, for the settings of the results."""
        return {name: self.ctx.params[name] for name in names}

    def refuse_peer_files(self, peers: Sequence["PeerProgram"]) -> None:
        """Refuse to overwrite the file of a peer or of its model."""
        from moe_runtime.benchmarks.suite.peers import files_under

        if self.output is not None:
            models = [Path(one.settings["model"]) for one in peers if one.settings.get("model")]
            read = [file for model in models for file in files_under(model)]
            require_not_read(self.output, "results", [*(one.file for one in peers), *read])

    @contextmanager
    def stopping(self) -> Iterator[StopRequest]:
        """Let a signal stop the block; it decides the exit code."""
        with stop_on_signals(STOPPING) as self.stop:
            yield self.stop

    def end(
        self,
        results: dict[str, Any],
        *,
        unasked: Collection[str] = (),
        percentiles: Collection[str] = (),
    ) -> None:
        """Write and print the results; report failed systems."""
        results["settings"] |= self._facts
        unwritten = keep_results(results, self.output)
        if self.as_json:
            print_json(results)
        else:
            show_results(results, percentiles)
        failed = [one for one in results["measurements"] if one["failure"] is not None]
        for one in failed:
            say_line(f"{one['system']}: {one['failure']}")
        if unwritten is not None:
            say_line(unwritten)
        self.exit_if_stopped()
        if unwritten is not None or results["ended"] == "failed":
            raise typer.Exit(2)
        if asked := [one["system"] for one in failed if one["system"] not in unasked]:
            say_line(f"error: {', '.join(asked)}: asked for, and without numbers; exit code 1")
            raise typer.Exit(1)

    def exit_if_stopped(self) -> None:
        """Exit with the code of a signal, if one came."""
        if self.stop is not None and self.stop.is_set:
            raise typer.Exit(self.stop.exit_code)


@dataclass(kw_only=True)
class QuickRun(CaseRun):
    """A run with a quick form.

    Args:
        quick: Measure less, in about a minute.
        output: Write all results to this file.
    """

    quick: bool = False


@dataclass(kw_only=True)
class TimedRun(QuickRun):
    """A run that repeats its measurements until the means are certain.

    Args:
        max_s: Seconds after which no repetition starts. [300; quick: 60]
        precision: Stop when half of the 95 % confidence interval is at most this share of the mean.
        quick: Measure less, in about a minute.
        output: Write all results to this file.
    """

    max_s: Annotated[float | None, typer.Option("--time", min=1.0)] = None
    precision: Annotated[float, typer.Option(min=0.0001, max=1.0)] = 0.05

    @contextmanager
    def rules(self, *judged: str) -> Iterator["Rules"]:
        """The rules of a measurement, which a signal stops within the block."""
        from moe_runtime.benchmarks.suite import Rules

        max_s = self.max_s or (60.0 if self.quick else 300.0)
        self._facts = {"precision": self.precision, "max_s": max_s}
        with self.stopping() as stop:
            yield Rules(
                judged=judged,
                precision=self.precision,
                max_s=max_s,
                clock=time.monotonic,
                on_repetition=say_repetition,
                is_stopping=lambda: stop.is_set,
            )

    def measure(
        self,
        case: Callable[..., dict[str, Any]],
        plan: Any,
        settings: dict[str, Any],
        judged: Iterable[str],
        *more: Any,
        **shown: Collection[str],
    ) -> None:
        """Measure ``case(plan, rules, settings, *more)`` and finish with `end`."""
        with self.rules(*judged) as rules:
            results = case(plan, rules, settings, *more)
        self.end(results, **shown)


def say_repetition(name: str, number: int) -> None:
    say_line(f"{name}: repetition {number}" if number else f"{name}: has the reference results")


def keep_results(results: dict[str, Any], output: Path | None) -> str | None:
    """Write the results before they are shown, so that a failure loses neither."""
    from moe_runtime.benchmarks.suite import write_results

    results["command"] = shlex.join(["moe-runtime", *sys.argv[1:]])
    if not any(one["repetitions"] for one in results["measurements"]):
        left = "" if output is None else f", and {output} is left as it was"
        say_line(f"nothing was measured{left}")
    elif output is not None:
        try:
            write_results(output, results)
        except OSError as error:
            return f"error: {output}: the results cannot be written: {error.strerror}"
    return None


def show_results(results: dict[str, Any], percentiles: Collection[str] = ()) -> None:
    """Print a table of all systems with numbers, systems as columns unless there are many. Metrics
    in ``percentiles`` show p50, p90 and p99 too."""
    from moe_runtime.benchmarks.suite.comparing import heading_words

    shown = [one for one in results["measurements"] if one["summary"]]
    if not shown:
        return
    table = [("repetitions", [str(len(one["repetitions"])) for one in shown])]
    for metric in dict.fromkeys(name for one in shown for name in one["summary"]):
        found = [one["summary"].get(metric) for one in shown]
        table += _lines(metric, found, ("p50", "p90", "p99") if metric in percentiles else ())
    if any(one["quality"] for one in shown):
        counts = [one["quality"] for one in shown]
        equal = [f"{one['equal']} of {one['compared']}" if one else "–" for one in counts]
        table.append(("equal", equal))
    title = ", ".join(filter(None, [heading_words(results), results["machine"].get("gpu")]))
    names = [one["system"] for one in shown]
    if len(names) <= len(table):
        heads, rows = names, [[label, *cells] for label, cells in table]
    else:
        heads = [label for label, _ in table]
        rows = [list(row) for row in zip(names, *(cells for _, cells in table), strict=True)]
    columns = [("", "left"), *((head, "right") for head in heads)]
    print_table(": ".join(filter(None, [results["case"], title])), columns, rows)


def _lines(
    metric: str, found: Sequence[dict[str, Any] | None], parts: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """The lines of a metric: percentiles if asked, then the mean, or the median if not judged."""
    known = [one for one in found if one is not None]
    factor, unit = unit_for(known[0]["unit"], (one["median"] for one in known))
    label = metric_words(metric) + (f", {unit}" if unit not in ("count", "share") else "")
    for part in parts:
        cells = ["–" if one is None else figure(one[part] * factor) for one in found]
        yield f"{label}: {part}", cells

    def cell(one: dict[str, Any]) -> str:
        return with_half(one, factor) if one["judged"] else figure(one["median"] * factor)

    yield label, ["–" if one is None else cell(one) for one in found]
