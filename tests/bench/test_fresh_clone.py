"""The steps of a new user, in clones of small repositories whose Makefiles do nearly nothing."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moe_runtime.benchmarks import fresh_clone
from moe_runtime.benchmarks.fresh_clone import METRICS, WARM_BYTES, StepFailure, measure, pip_facts
from moe_runtime.benchmarks.suite import read_results

MAKEFILE = """
install:
	touch installed
demo:
	@test -e installed && test -n "$$XDG_CACHE_HOME"
	@printf The; sleep 0.2; echo " end"
test:
	@echo "== 12 passed, 3 skipped in 0.10s =="
"""


def repository(folder: Path, makefile: str) -> Path:
    """A checkout with one commit, and a change that is in none."""
    source = folder / "source"
    source.mkdir()
    (source / "Makefile").write_text(makefile)
    name = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "all"]):
        subprocess.run(["git", "-C", source, *words], check=True)
    (source / "Makefile").write_text("install:\n\tfalse\n")
    return source


@pytest.fixture
def place(tmp_path: Path) -> Path:
    place = tmp_path / "place"
    place.mkdir()
    return place


@pytest.mark.parametrize("tests", [False, True])
def test_each_step_has_its_time(tmp_path, place, tests):
    lines: list[str] = []
    found = measure(repository(tmp_path, MAKEFILE), place, lines.append, tests=tests)
    expected = {*METRICS} if tests else {"clone_s", "install_s", "text_s", "to_text_s"}
    assert found.keys() == expected
    steps = found["clone_s"] + found["install_s"]
    assert found["to_text_s"] == steps + found["text_s"]
    assert len(lines) == 3 + tests
    if tests:
        assert (found["passed"], found["skipped"]) == (12, 3)
        assert found["to_tests_s"] == steps + found["tests_s"]


def test_the_first_text_is_its_first_character(place, monkeypatch):
    """The command waits for the second look at the clock before it writes more."""
    looks: list[float] = []

    def clock() -> float:
        looks.append(float(len(looks)))
        if len(looks) == 2:
            (place / "go").touch()
        return looks[-1]

    monkeypatch.setattr(fresh_clone.time, "perf_counter", clock)
    command = "printf a; while ! test -e go; do sleep 0.01; done; printf b"
    step = fresh_clone.run_step(["sh", "-c", command], place, {})
    assert step == fresh_clone.Step(seconds=2.0, first_s=1.0, output="ab")


@pytest.mark.parametrize(
    ("makefile", "message"),
    [
        ("install:\n\t@echo no compiler; false\n", "make --silent install: exit code 2\nno comp"),
        (MAKEFILE.replace("The", "").replace('" end"', ""), "make demo: wrote no text"),
        (MAKEFILE.replace("demo:", "other:"), "make --silent demo: exit code 2\n"),
    ],
)
def test_a_step_that_fails_ends_it(tmp_path, place, makefile, message):
    with pytest.raises(StepFailure) as failure:
        measure(repository(tmp_path, makefile), place, lambda _: None, tests=True)
    assert str(failure.value).startswith(message)


def test_what_pip_says_of_its_cache(tmp_path, monkeypatch):
    said = {("cache", "dir"): f"{tmp_path}\n", ("config", "list"): "global.cert='x'\n"}
    monkeypatch.setattr(fresh_clone, "_pip", lambda *words: said.get(words))
    assert pip_facts() == {"pip_cache": "cold", "pip_cache_bytes": 0, "pip_folders": False}
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "wheel").write_bytes(b"12345")
    assert pip_facts() == {"pip_cache": "cold", "pip_cache_bytes": 5, "pip_folders": False}
    os.truncate(tmp_path / "part" / "wheel", WARM_BYTES)
    said["config", "list"] = "global.find-links='/opt/wheels'\n"
    assert pip_facts() == {"pip_cache": "warm", "pip_cache_bytes": WARM_BYTES, "pip_folders": True}
    said.clear()
    assert pip_facts() == {"pip_cache": "unknown", "pip_cache_bytes": None, "pip_folders": None}


def test_results_are_saved_and_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fresh_clone, "ROOT", repository(tmp_path, MAKEFILE))
    monkeypatch.setattr("moe_runtime.benchmarks.harness.scripting.RESULTS", tmp_path)
    words = [str(fresh_clone.__file__), "--save", "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(fresh_clone, "_pip", lambda *words: None)
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert fresh_clone.main() == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    printed = capsys.readouterr().out
    (file,) = tmp_path.glob("fresh-clone-*.json")
    results = read_results(file)
    (row,) = results["measurements"]
    assert f"to_text_s {row['summary']['to_text_s']['median']:.4g}" in printed
    assert results["settings"]["pip_cache"] == "unknown"
    assert [*tmp_path.glob("moe-clone-*")] == []


def test_an_interrupt_leaves_no_clone_and_no_process(tmp_path):
    """What a step has begun ends, too."""
    source = repository(tmp_path, "install:\n\tsleep 60\n")
    program = (
        "import sys; from pathlib import Path; from moe_runtime.benchmarks import fresh_clone;"
        "fresh_clone.ROOT = Path(sys.argv.pop(1));"
        "sys.exit(fresh_clone.main())"
    )
    folder = Path(fresh_clone.__file__).parent
    process = subprocess.Popen(
        [sys.executable, "-c", program, source, "--folder", tmp_path],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not _sleeping_in(tmp_path):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    assert process.stderr is not None
    assert "interrupted" in process.stderr.read()
    assert [*tmp_path.glob("moe-clone-*")] == []
    while _sleeping_in(tmp_path):  # it was killed, which takes a moment
        time.sleep(0.01)


def _sleeping_in(folder: Path) -> list[str]:
    """Numbers of the processes that run `sleep` and work below a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (process / "comm").read_text() == "sleep\n":
                place = os.readlink(process / "cwd")
                found += [process.name] * place.startswith(str(folder))
    return found
