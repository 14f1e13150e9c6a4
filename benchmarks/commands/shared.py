"""What all commands of ``bench`` have in common: options, the run, its end, and tables.

A command is a function with ``@case``, which gives it the options of all cases and a `CaseRun`.
"""

import inspect
import itertools
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.benchmarks.suite.figures import figure, unit_for, with_half
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_json, print_table, say_line
from moe_runtime.cli.stopping import StopRequest, stop_on_signals
from moe_runtime.files import require_not_read

if TYPE_CHECKING:
    from moe_runtime.benchmarks.suite.peers import PeerProgram
    from moe_runtime.benchmarks.suite.runner import Rules

STOPPING = "showing what was measured so far; Ctrl-C once more stops at once"
JOULE_ROWS = {"processors": "cpu_joules", "GPUs": "gpu_joules"}
MEMORY_ROWS = {
    "load without imports": "load_s",
    "imports": "import_s",
    "peak memory": "peak_rss_bytes",
    "peak memory of the GPU": "peak_device_bytes",
    "after imports": "rss_after_imports_bytes",
    "read by calls": "read_call_bytes",
    "of these from the page cache": "page_cache_bytes",
    "read from storage": "storage_bytes",
    **JOULE_ROWS,
}
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
Cap = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Cap each system's memory, page cache included, as in 7GiB: by a control group or "
        "systemd. Each repetition then begins with the model out of the page cache.",
    ),
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
        show: Callable[[dict[str, Any]], None],
        *,
        unasked: Collection[str] = (),
    ) -> None:
        """Writes and prints what was measured; says which systems failed."""
        results["settings"] |= self._facts
        unwritten = keep_results(results, self.output)
        if self.as_json:
            print_json(results)
        else:
            show(results)
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
        show: Callable[[dict[str, Any]], None],
        *more: Any,
        unasked: Collection[str] = (),
    ) -> None:
        """Measures ``case(plan, rules, settings, *more)``, and ends the command."""
        with self.rules(*judged) as rules:
            results = case(plan, rules, settings, *more)
        self.end(results, show, unasked=unasked)

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


def with_numbers(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The systems of a results file that have numbers."""
    return [one for one in results["measurements"] if one["summary"]]


def show_rows(
    title: str, heads: Iterable[str], rows: Sequence[Sequence[str]], *, num_left: int = 1
) -> None:
    """Prints a table, unless it has no rows: first columns at the left, numbers at the right."""
    if rows:
        sides = (("left", "right")[place >= num_left] for place in itertools.count())
        print_table(title, list(zip(heads, sides, strict=False)), rows)


def show_systems(
    results: dict[str, Any],
    title: str,
    spreads: Mapping[str, str],
    singles: Mapping[str, str],
    equal: str,
) -> None:
    """Prints a column for each system that has numbers.

    ``spreads`` are metrics shown with percentiles, ``singles`` those with the median alone, by the
    names of their rows; ``equal`` is what was compared.
    """
    shown = with_numbers(results)
    if not shown:
        return
    rows = [["repetitions", *map(num_repetitions, shown)]]
    for what, metric in spreads.items():
        for part in ("p50", "p90", "p99"):
            cells, unit = cells_of(shown, metric, partial(_part_cell, part))
            rows.append([f"{what}, {unit}: {part}", *cells])
        means, unit = cells_of(shown, metric, mean_cell)
        rows.append([f"{what}, {unit}: mean of medians", *means])
    for what, metric in singles.items():
        if any(metric in one["summary"] for one in shown):
            cells, unit = cells_of(shown, metric, median_cell)
            rows.append([f"{what}, {unit}", *cells])
    rows.append([equal, *map(equal_cell, shown)])
    show_rows(title, ["", *(one["system"] for one in shown)], rows)


def cells_of(
    shown: list[dict[str, Any]], metric: str, cell: Callable[[dict[str, Any], str, float], str]
) -> tuple[list[str], str]:
    """A metric of several systems, and the unit in which it is shown."""
    found = [one["summary"][metric] for one in shown if metric in one["summary"]]
    factor, unit = unit_for(found[0]["unit"], (one["median"] for one in found))
    return [cell(one, metric, factor) for one in shown], unit


def num_repetitions(one: dict[str, Any]) -> str:
    return str(len(one["repetitions"]))


def equal_cell(one: dict[str, Any]) -> str:
    found = one["quality"]
    return "–" if found is None else f"{found['equal']} of {found['compared']}"


def _part_cell(part: str, one: dict[str, Any], metric: str, factor: float) -> str:
    """A percentile or the like of a system's metric; a dash where it has none."""
    summary = one["summary"].get(metric)
    return figure(summary[part] * factor) if summary else "–"


def median_cell(one: dict[str, Any], metric: str, factor: float) -> str:
    return _part_cell("median", one, metric, factor)


def mean_cell(one: dict[str, Any], metric: str, factor: float) -> str:
    """The mean of a system's metric with half of its interval; a dash where it has none."""
    summary = one["summary"].get(metric)
    return with_half(summary, factor) if summary else "–"
