"""Shared parts of the scripts: arguments, exit codes, and results files."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks import suite
from moe_runtime.benchmarks.suite.figures import figure
from moe_runtime.errors import MoERuntimeError
from moe_runtime.files import check_output_path
from moe_runtime.lab.this_machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")
        return int(text)

    return parse


positive = at_least(1)


def present_folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def option(default: Any, words: str = "", **more: Any) -> dict[str, Any]:
    """An option by its default, or an argument by its type; ``more`` is argparse's."""
    if isinstance(default, type):
        return {"type": default, "help": words, **more}
    if default is False:
        return {"action": "store_true", "help": words}
    kind = {int: {"type": positive}, float: {"type": float}}.get(type(default), {})
    shown = words if default is None else f"{words} (default: %(default)s)".strip()
    return {**kind, "default": default, "help": shown, **more}


SAVED = {
    "save": option(False, "write a file in benchmarks/results"),
    "output": option(None, "write the results here", type=Path),
}
"""Options of the scripts that write `ScriptResults`."""
Main = Callable[[argparse.Namespace], int]


def script(*, saves: bool = True, **declared: Any) -> Callable[[Main], Callable[..., int]]:
    """Make a program of ``main(options)``, whose help is the docstring of its module.

    Options are declared by `option` or by their default; those of `SAVED` are added. The exit code
    is 130 after an interrupt, and 2 with one line for a refusal.
    """

    def decorate(main: Main) -> Callable[..., int]:
        def run(arguments: Sequence[str] | None = None) -> int:
            parser = argparse.ArgumentParser(
                description=sys.modules[main.__module__].__doc__,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
            for name, found in {**declared, **(SAVED if saves else {})}.items():
                own = found if isinstance(found, dict) else option(found)
                is_argument = not {"default", "action", "required"} & own.keys()
                flag = name if is_argument else f"--{name.replace('_', '-')}"
                parser.add_argument(flag, *["-o"] * (name == "output"), **own)
            try:
                return main(parser.parse_args(arguments))
            except MoERuntimeError as error:
                print(f"error: {error}", file=sys.stderr)
                return 2
            except KeyboardInterrupt:
                said = "interrupted; rows that were measured are kept where they are saved"
                print(said, file=sys.stderr)
                return 130

        return run

    return decorate


def chosen(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options as given, for the settings of the results."""
    return {name: getattr(options, name) for name in names}


def machine_name(found: Mapping[str, Any]) -> str:
    """A name for files, made of processor, cores and memory."""
    features = found.get("cpu_features", ())
    older = "-avx2" if "avx2" in features and "avx512f" not in features else ""
    gib = round(found["memory_bytes"] / 2**30)
    words = f"{found['cpu']}{older}-{found['num_cores']}c-{gib}g".lower()
    return plain(re.sub(r"\((r|tm)\)|processor|cpu", "", words))


def plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class ScriptResults:
    """A results file that is written after each row, so that a failure keeps the earlier rows.

    Args:
        kind: the case; with `--save` the file is ``<kind>-<machine>.json``.
        options: with those of `SAVED`.
        machine: named by its processor where it is omitted.
    """

    def __init__(
        self,
        kind: str,
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        metrics: Mapping[str, suite.Metric],
        *,
        file: str | None = None,
        machine: str | None = None,
    ) -> None:
        self.settings, self._kind, self._metrics = dict(settings), kind, metrics
        self.systems = dict[str, Sequence[Mapping[str, suite.Number]] | str]()
        self.qualities = dict[str, Mapping[str, int]]()
        self._ended, self._path = "interrupted", options.output
        if options.save:
            name = plain(machine) if machine else machine_name(describe_machine())
            self._path = RESULTS / f"{file or kind}-{name}.json"
        if self._path is not None:
            check_output_path(self._path, "results")

    def add(self, name: str, found: Sequence[Mapping[str, suite.Number | None]] | str) -> None:
        """Add the repetitions of a system, or why it has none; write the file and print them."""
        if not isinstance(found, str):
            found = [{key: v for key, v in one.items() if v is not None} for one in found]
        self.systems[name] = found
        self.write()
        values = {metric: self.value(name, metric) for metric in self._metrics}
        said = ", ".join(f"{key} {figure(one)}" for key, one in values.items() if one is not None)
        print(f"{name}: {found if isinstance(found, str) else said}", flush=True)

    def add_rounds(
        self, systems: Mapping[str, Callable[[], Mapping[str, suite.Number]]], rounds: int
    ) -> None:
        """Measure systems in turn, and add the repetitions so far after each."""
        found: dict[str, list[Mapping[str, suite.Number]]] = {name: [] for name in systems}
        for name, measure in [*systems.items()] * rounds:
            found[name].append(measure())
            self.add(name, found[name])

    def value(self, name: str, metric: str) -> float | None:
        """The median over a system's repetitions; None without any."""
        found = self.systems.get(name, "")
        rows = [] if isinstance(found, str) else [*found]
        values = suite.MeasuredSystem(repetitions=rows).values(metric)
        return suite.middle(values) if values else None

    def write(self) -> None:
        """Write the file, also for `bench compare` and `bench report`."""
        if self._path is None:
            return
        rows = []
        for name, found in self.systems.items():
            measured = suite.MeasuredSystem(repetitions=[] if isinstance(found, str) else [*found])
            measured.failure = found if isinstance(found, str) else None
            quality = self.qualities.get(name)
            rows.append(suite.describe_system(name, measured, self._metrics, quality=quality))
        # without paths of this machine
        words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
        script = Path(sys.argv[0]).resolve().relative_to(ROOT)
        command = {"command": shlex.join(["python", str(script), *words])}
        results = suite.make_results(self._kind, self.settings, self._ended, rows)
        suite.write_results(self._path, results | command)

    def finish(self) -> int:
        """Mark the file as complete; return exit code 0."""
        self._ended = "most"
        self.write()
        if self._path is not None:
            print(f"written to {self._path.name}", file=sys.stderr)
        return 0
