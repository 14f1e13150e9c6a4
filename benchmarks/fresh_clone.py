"""Time a new user's way from clone to first text: `python benchmarks/fresh_clone.py --save`.

The commit that is checked out is cloned into a temporary folder. There `make install` makes the
environment, `make demo` writes text, and with `--tests` `make test` runs. The results say how pip's
cache was before (`pip_cache`), and whether pip looks in folders of this machine (`pip_folders`).
The exit code is 1 where a step fails; then nothing is saved.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.harness import scripting
from moe_runtime.benchmarks.harness.scripting import option
from moe_runtime.benchmarks.suite import Metric, facts
from moe_runtime.benchmarks.suite.programs import running

ROOT = scripting.ROOT
WORDS = {
    "clone_s": "git clone",
    "install_s": "make install",
    "text_s": "make demo, to its first character",
    "to_text_s": "from clone to first text",
    "tests_s": "make test",
    "to_tests_s": "from clone to green tests",
}
METRICS = {
    **{name: Metric("s", is_judged=name.startswith("to_")) for name in WORDS},
    **facts("count", "passed", better="more"),
    **facts("count", "skipped"),
}
WARM_BYTES = 100 * 10**6
"""Of pip's cache; the smallest torch wheels are larger."""
SHOWN_LINES = 20
"""Output lines shown of a failed step."""


class StepFailure(Exception):
    """A step failed; the message has the end of its output."""


@dataclass(frozen=True)
class Step:
    """The time and the output of a step."""

    seconds: float
    first_s: float
    output: str


def run_step(words: list[str], place: Path, more: Mapping[str, str]) -> Step:
    """Run a command to its end; its children end with it in any case."""
    with tempfile.TemporaryFile("w+") as complaints:
        began = time.perf_counter()
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": complaints, "text": True}
        with running(words, cwd=place, env={**os.environ, **more}, **pipes) as process:
            assert process.stdout is not None
            output = process.stdout.read(1)
            first_s = time.perf_counter() - began
            output += process.stdout.read()
            code = process.wait()
        seconds = time.perf_counter() - began
        if code:
            complaints.seek(0)
            lines = (output + complaints.read()).splitlines()[-SHOWN_LINES:]
            raise StepFailure("\n".join([f"{' '.join(words)}: exit code {code}", *lines]))
    return Step(seconds, first_s, output)


def measure(
    source: Path, folder: Path, say: Callable[[str], None], *, tests: bool
) -> dict[str, float]:
    """Clone a checkout and take a new user's steps in the clone."""
    clone = folder / "clone"
    found: dict[str, float] = {}

    def take(name: str, *words: str, **more: str) -> Step:
        step = run_step([*words], folder if name == "clone_s" else clone, more)
        found[name] = step.first_s if name == "text_s" else step.seconds
        say(f"{WORDS[name]}: {found[name]:.1f} s")
        return step

    take("clone_s", "git", "clone", "--quiet", "--no-local", str(source), str(clone))
    take("install_s", "make", "--silent", "install")
    # without anything that earlier runs of this user learned
    text = take("text_s", "make", "--silent", "demo", XDG_CACHE_HOME=str(folder / "cache"))
    if not text.output.strip():
        raise StepFailure("make demo: wrote no text")
    found["to_text_s"] = found["clone_s"] + found["install_s"] + found["text_s"]
    if tests:
        said = take("tests_s", "make", "--silent", "test").output
        counts = {one: re.findall(rf"(\d+) {one}", said) for one in ("passed", "skipped")}
        found |= {one: int(numbers[-1]) for one, numbers in counts.items() if numbers}
        found["to_tests_s"] = found["clone_s"] + found["install_s"] + found["tests_s"]
    return found


def pip_facts() -> dict[str, Any]:
    """pip's cache, and local folders that pip searches."""
    cache, settings = _pip("cache", "dir"), _pip("config", "list")
    num_bytes, state = None, "unknown"
    if cache:
        files = (one for one in Path(cache.strip()).rglob("*") if one.is_file())
        num_bytes = sum(one.stat().st_size for one in files)
        state = "warm" if num_bytes >= WARM_BYTES else "cold"
    folders = None if settings is None else bool(re.search(r"file:|'/|find-links", settings))
    return {"pip_cache": state, "pip_cache_bytes": num_bytes, "pip_folders": folders}


def _pip(*words: str) -> str | None:
    """The output of this user's pip; None if it has none."""
    command = ["python3", "-m", "pip", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


@scripting.script(
    tests=option(False, "run the whole suite in the clone, too"),
    folder=option(None, "where the clone lies meanwhile", type=scripting.present_folder),
)
def main(options: Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    pip = pip_facts()
    results = scripting.ScriptResults("fresh-clone", options, {"model": "pocket", **pip}, METRICS)
    _say(f"pip's cache: {pip['pip_cache']}, {pip['pip_cache_bytes']} bytes")
    try:
        with tempfile.TemporaryDirectory(prefix="moe-clone-", dir=options.folder) as folder:
            found = measure(ROOT, Path(folder), _say, tests=options.tests)
    except StepFailure as error:
        _say(f"error: {error}")
        return 1
    results.add("moe_runtime", [found])
    return results.finish()


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
