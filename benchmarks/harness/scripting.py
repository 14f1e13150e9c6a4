"""What the scripts share: arguments, exit codes, and results in the format that `bench` reads."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.suite.results import (
    Metric,
    describe_system,
    make_results,
    write_results,
)
from moe_runtime.benchmarks.suite.runner import MeasuredSystem, Number
from moe_runtime.errors import MoERuntimeError
from moe_runtime.lab.this_machine import describe_machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Systems = Mapping[str, Sequence[Mapping[str, Number]] | str]
"""Repetitions by system, or why it has none."""


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


def new_file(text: str) -> Path:
    """A file to write, whose folder is there: hours of measuring must not end in its absence."""
    present_folder(str(Path(text).parent))
    return Path(text)


def parser_of(doc: str | None, *flags: str) -> argparse.ArgumentParser:
    """A parser whose help is a script's docstring; a flag comes with its help, ``--save=...``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, words in (flag.split("=", 1) for flag in flags):
        parser.add_argument(name, action="store_true", help=words)
    return parser


SAVE = "--save=write a file in benchmarks/results"


def facts(unit: str, *names: str, better: str = "less") -> dict[str, Metric]:
    """Metrics that are reported and not judged."""
    return {name: Metric(unit, better, is_judged=False) for name in names}


def run_script(main: Callable[[], int]) -> int:
    """Exit code of a script: 130 where it was interrupted, 2 where it was refused, and a line."""
    try:
        return main()
    except MoERuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; rows that were measured are kept where they are saved", file=sys.stderr)
        return 130


def machine_name(found: Mapping[str, Any]) -> str:
    """A file-name-safe name made of processor, cores and memory."""
    features = found.get("cpu_features", ())
    older = "-avx2" if "avx2" in features and "avx512f" not in features else ""
    gib = round(found["memory_bytes"] / 2**30)
    words = f"{found['cpu']}{older}-{found['num_cores']}c-{gib}g".lower()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu", "", words)).strip("-")


def write_systems(
    path: Path,
    kind: str,
    settings: Mapping[str, Any],
    systems: Systems,
    metrics: Mapping[str, Metric],
    qualities: Mapping[str, Mapping[str, int]] | None = None,
    *,
    ended: str = "most",
) -> None:
    """Writes a results file, for `bench compare` and `bench report` too."""
    rows = []
    for name, found in systems.items():
        failed = isinstance(found, str)
        measured = MeasuredSystem(failure=found) if failed else MeasuredSystem(repetitions=[*found])
        quality = (qualities or {}).get(name)
        rows.append(describe_system(name, measured, metrics, quality=quality))
    # the command as a reader would repeat it: no place on this machine is named
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    command = shlex.join(["python", str(script), *words])
    write_results(path, make_results(kind, settings, ended, rows) | {"command": command})


def save_results(
    kind: str,
    settings: Mapping[str, Any],
    systems: Systems,
    metrics: Mapping[str, Metric],
    path: Path | None = None,
) -> None:
    """As `write_systems`, and says so; without a path this machine's file of the kind."""
    path = path or RESULTS / f"{kind}-{machine_name(describe_machine())}.json"
    write_systems(path, kind, settings, systems, metrics)
    print(f"written to {path.name}")
