"""What all commands of ``bench`` have in common: options, the run, its end, and tables.

A command is a function with ``@case``, which gives it the options of all cases and a `CaseRun`.
"""

import inspect
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.benchmarks.suite.figures import figure, metric_words, unit_for, with_half
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_json, print_table, say_line
from moe_runtime.cli.stopping import StopRequest, stop_on_signals
from moe_runtime.files import require_not_read

if TYPE_CHECKING:
    from moe_runtime.benchmarks.suite.peers import PeerProgram
    from moe_runtime.benchmarks.suite.runner import Rules

STOPPING = "showing what was measured so far; Ctrl-C once more stops at once"
_BY_NAME = inspect.Parameter.KEYWORD_ONLY
_OUTPUT_HELP = "Write everything measured to this file."
Output = Annotated[Path | None, typer.Option("--output", "-o", help=_OUTPUT_HELP)]
Precision = Annotated[
    float,
    typer.Option(
        min=0.0001,
        max=1.0,
        help="Half of the 95 % confidence interval that is narrow enough, as a share of the mean.",
    ),
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


class CaseRun:
    """One run of a case: the options that all cases have, and how it ends."""

    def __init__(
        self,
        ctx: typer.Context,
        *,
        seconds: tuple[float, float],
        output: Path | None,
        as_json: bool,
        max_s: float | None = None,
        precision: float = 0.05,
        quick: bool = False,
    ) -> None:
        self.ctx, self.quick, self.output = ctx, quick, output
        self.session: Session = ctx.obj
        self.as_json, self._precision = as_json, precision
        self._max_s = max_s or seconds[quick]
        self._facts: dict[str, Any] = {}
        self.stop: StopRequest | None = None

    def refuse_peer_files(self, peers: Sequence["PeerProgram"]) -> None:
        """Refuses to replace the file of a peer, or of the model that it is given."""
        from moe_runtime.benchmarks.suite.peers import files_under

        if self.output is not None:
            models = [Path(one.settings["model"]) for one in peers if one.settings.get("model")]
            read = [file for model in models for file in files_under(model)]
            require_not_read(self.output, "results", [*(one.file for one in peers), *read])

    @contextmanager
    def rules(self, *judged: str) -> Iterator["Rules"]:
        """Rules of a measurement, which a signal stops within the block."""
        from moe_runtime.benchmarks.suite.runner import Rules

        self._facts = {"precision": self._precision, "max_s": self._max_s}
        with self.stopping() as stop:
            yield Rules(
                judged=judged,
                precision=self._precision,
                max_s=self._max_s,
                clock=time.monotonic,
                on_repetition=say_repetition,
                is_stopping=lambda: stop.is_set,
            )

    @contextmanager
    def stopping(self) -> Iterator[StopRequest]:
        """A signal asks to stop within the block, and decides the exit code."""
        with stop_on_signals(STOPPING) as self.stop:
            yield self.stop

    def end(
        self,
        results: dict[str, Any],
        *,
        unasked: Collection[str] = (),
        percentiles: Collection[str] = (),
    ) -> None:
        """Writes and prints what was measured; says which systems failed."""
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

    def measure(
        self,
        case: Callable[..., dict[str, Any]],
        plan: Any,
        settings: dict[str, Any],
        judged: Iterable[str],
        *more: Any,
        **shown: Collection[str],
    ) -> None:
        """Measures ``case(plan, rules, settings, *more)``, and ends the command as `end` does."""
        with self.rules(*judged) as rules:
            results = case(plan, rules, settings, *more)
        self.end(results, **shown)

    def exit_if_stopped(self) -> None:
        """Ends the command with the exit code of a signal, if one came."""
        if self.stop is not None and self.stop.is_set:
            raise typer.Exit(self.stop.exit_code)


def case(
    *,
    quick: str | None = None,
    seconds: tuple[int, int] | None = (300, 60),
    output: str = _OUTPUT_HELP,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function: adds the options that all cases have, and a `CaseRun`."""
    kinds: dict[str, tuple[Any, Any]] = {}
    if seconds is not None:
        words = f"Seconds after which no repetition begins. [{seconds[0]}; quick: {seconds[1]}]"
        kinds["max_s"] = Annotated[float | None, typer.Option("--time", min=1.0, help=words)], None
        kinds["precision"] = Precision, 0.05
    if quick is not None:
        kinds["quick"] = Annotated[bool, typer.Option("--quick", help=quick)], False
    kinds["output"] = (Annotated[Path | None, typer.Option("--output", "-o", help=output)], None)
    kinds["as_json"] = options.Json, False

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **given: Any) -> None:
            common = {name: given.pop(name) for name in kinds}
            function(CaseRun(ctx, seconds=seconds or (0, 0), **common), **given)

        parameters = [inspect.Parameter("ctx", _BY_NAME, annotation=typer.Context)]
        own = [*inspect.signature(function).parameters.values()][1:]
        parameters += (one.replace(kind=_BY_NAME) for one in own)
        parameters += (
            inspect.Parameter(name, _BY_NAME, default=default, annotation=kind)
            for name, (kind, default) in kinds.items()
        )
        for name, value in (
            *(("__name__", function.__name__), ("__doc__", function.__doc__)),
            ("__signature__", inspect.Signature(parameters)),
            ("__annotations__", {one.name: one.annotation for one in parameters}),
        ):
            setattr(command, name, value)
        return command

    return decorate


def say_repetition(name: str, number: int) -> None:
    say_line(f"{name}: repetition {number}" if number else f"{name}: has what all are held to")


def keep_results(results: dict[str, Any], output: Path | None) -> str | None:
    """Writes what was measured before it is shown, so that neither is lost with the other."""
    from moe_runtime.benchmarks.suite.results import write_results

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
    """Prints a table of all systems that have numbers: beside each other, or one below the other
    where they are more than the metrics. Of some metrics percentiles are shown, too."""
    from moe_runtime.benchmarks.suite.comparing import heading_words

    shown = [one for one in results["measurements"] if one["summary"]]
    if not shown:
        return
    table = [("repetitions", [str(len(one["repetitions"])) for one in shown])]
    for metric in dict.fromkeys(name for one in shown for name in one["summary"]):
        found = [one["summary"].get(metric) for one in shown]
        table += _lines(metric, found, ("p50", "p90", "p99") if metric in percentiles else ())
    if any(one["quality"] for one in shown):
        table.append(("equal", [_equal(one["quality"]) for one in shown]))
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
    """A metric's lines: percentiles if wanted; then means, or medians of what is not judged."""
    known = [one for one in found if one is not None]
    factor, unit = unit_for(known[0]["unit"], (one["median"] for one in known))
    label = metric_words(metric) + (f", {unit}" if unit not in ("count", "share") else "")
    for part in parts:
        yield (
            f"{label}: {part}",
            ["–" if one is None else figure(one[part] * factor) for one in found],
        )

    def cell(one: dict[str, Any]) -> str:
        return with_half(one, factor) if one["judged"] else figure(one["median"] * factor)

    yield label, ["–" if one is None else cell(one) for one in found]


def _equal(quality: dict[str, int] | None) -> str:
    return f"{quality['equal']} of {quality['compared']}" if quality else "–"
