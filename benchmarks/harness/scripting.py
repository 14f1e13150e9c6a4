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
from moe_runtime.lab.this_machine import commit as commit
from moe_runtime.lab.this_machine import describe_machine as describe_machine
from moe_runtime.lab.this_machine import versions as versions


def at_least(least: int) -> Callable[[str], int]:
    """Numbers from one on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")
        return number

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


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows a script's docstring as it is."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=raw)


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


def run_command(root: Path) -> str:
    """The command of a script that runs, as a results file has it."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    script = Path(sys.argv[0]).resolve().relative_to(root)
    return shlex.join(["python", str(script), *words])


def machine_name(facts: dict[str, object]) -> str:
    """A file-name-safe name made of processor, cores and memory."""
    gib = round(int(str(facts["memory_bytes"])) / 2**30)
    features = facts.get("cpu_features", ())
    assert isinstance(features, list | tuple)
    older = "-avx2" if "avx2" in features and "avx512f" not in features else ""
    words = f"{facts['cpu']}{older}-{facts['num_cores']}c-{gib}g".lower()
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|processor|cpu", "", words)).strip("-")


ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
Repetition = Mapping[str, Number]


def write_systems(
    path: Path,
    kind: str,
    settings: Mapping[str, Any],
    systems: Mapping[str, Sequence[Repetition] | str],
    metrics: Mapping[str, Metric],
    qualities: Mapping[str, Mapping[str, int]],
    *,
    ended: str = "most",
) -> None:
    """Writes a results file, for `bench compare` and `bench report` too."""
    rows = [
        describe_system(
            name,
            MeasuredSystem(failure=found)
            if isinstance(found, str)
            else MeasuredSystem(repetitions=[*found]),
            metrics,
            system_versions=versions(),
            quality=qualities.get(name),
        )
        for name, found in systems.items()
    ]
    results = make_results(kind, settings, ended, rows)
    write_results(path, results | {"command": run_command(ROOT)})


def save_results(
    kind: str,
    settings: Mapping[str, Any],
    systems: Mapping[str, Sequence[Repetition] | str],
    metrics: Mapping[str, Metric],
    path: Path | None = None,
) -> None:
    """As `write_systems`, and says so; without a path this machine's file of the kind."""
    path = path or RESULTS / f"{kind}-{machine_name(describe_machine())}.json"
    write_systems(path, kind, settings, systems, metrics, {})
    print(f"written to {path.name}")
