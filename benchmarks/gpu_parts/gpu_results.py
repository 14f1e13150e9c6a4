"""What the GPU benchmarks share: options, the file of their rows, what is aimed at beside it."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moe_runtime.benchmarks.harness.suite_results import RESULTS, write_systems
from moe_runtime.benchmarks.suite.results import Metric
from moe_runtime.benchmarks.suite.runner import MeasuredSystem, middle
from moe_runtime.files import check_output_path

Repetitions = list[dict[str, float]]


def add_options(parser: argparse.ArgumentParser, file: str) -> None:
    """Options of every script; a file of this name is written with `--save`."""
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, as a rehearsal")
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{file}-GPU")
    parser.add_argument("--out", type=Path, help="write the results here")


def lacks_gpu(options: argparse.Namespace) -> bool:
    """Whether a GPU is asked for and there is none, which is said."""
    is_lacking = options.device == "cuda" and not torch.cuda.is_available()
    if is_lacking:
        print("no GPU here; rehearse with --device cpu --tiny", file=sys.stderr)
    return is_lacking


class GpuResults:
    """A results file that is written after each row: what was measured stays if another fails.

    Args:
        kind: what is measured.
        file: the beginning of the file's name in `benchmarks/results`; the GPU's name ends it.
        options: of the command.
        settings: of all rows.
        metrics: what numbers mean; others are in repetitions alone.

    Attributes:
        settings: also `gpu`, and `aims`: by what and field, what is `asked`, what was `measured`
            and whether it `holds`.
        systems: repetitions of each row, or why it has none.
        qualities: see `write_systems`.
    """

    def __init__(
        self,
        kind: str,
        file: str,
        options: argparse.Namespace,
        settings: Mapping[str, Any],
        metrics: Mapping[str, Metric],
    ) -> None:
        gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
        self.settings = {"gpu": gpu, **settings, "aims": dict[str, Any]()}
        self.systems = dict[str, Repetitions | str]()
        self.qualities = dict[str, Mapping[str, int]]()
        self._kind, self._metrics, self._path = kind, metrics, options.out
        if options.save:
            name = re.sub(r"[^a-z0-9]+", "-", (gpu or "rehearsal").lower()).strip("-")
            self._path = RESULTS / f"{file}-{name}.json"
        if self._path is not None:
            check_output_path(self._path, "results")
        self._ended = "interrupted"

    def add(self, name: str, found: Sequence[Mapping[str, float | None]] | str) -> None:
        """Takes a row, and writes the file; of what is None there was nothing to measure."""
        if not isinstance(found, str):
            found = [{key: v for key, v in one.items() if v is not None} for one in found]
        self.systems[name] = found
        self.write()

    def value(self, name: str, metric: str) -> float | None:
        """The median over a row's repetitions; None where it has none."""
        found = self.systems.get(name, "")
        values = (
            [] if isinstance(found, str) else MeasuredSystem(repetitions=[*found]).values(metric)
        )
        return middle(values) if values else None

    def aim(
        self, what: str, field: str, asked: float, measured: float, *, at_most: bool = False
    ) -> None:
        """Notes what is aimed at beside what was measured."""
        holds = measured <= asked if at_most else measured >= asked
        self.settings["aims"][f"{what}: {field}"] = {
            "sign": "<=" if at_most else ">=",
            "asked": asked,
            "measured": measured,
            "holds": holds,
        }

    def write(self) -> None:
        """Writes the file, where one is wanted."""
        if self._path is not None:
            write_systems(
                self._path,
                self._kind,
                self.settings,
                self.systems,
                self._metrics,
                self.qualities,
                ended=self._ended,
            )

    def finish(self) -> None:
        """Writes that nothing is missing, and says what is aimed at beside what was measured."""
        self._ended = "most"
        self.write()
        print("\n".join(self.aim_lines()))

    def aim_lines(self) -> Iterator[str]:
        """One comparison each, for the terminal."""
        for what, aim in self.settings["aims"].items():
            verdict = "holds" if aim["holds"] else "MISSED"
            yield (
                f"{what:62} {aim['sign']} {aim['asked']:<12.6g} {aim['measured']:<12.6g} {verdict}"
            )
