"""`make gpu`: every test that a GPU can fail is run, and what is found is kept, whatever fails."""

import ast
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from moe_runtime.benchmarks import on_a_gpu
from moe_runtime.benchmarks import on_a_gpu as timed_parts
from moe_runtime.benchmarks.on_a_gpu import LATE, Part, run_parts
from moe_runtime.cli.main import main

TESTS = Path(__file__).resolve().parents[1]
NINE_MINUTES, SETTING_UP = 540, 20
LONG = 1e9  # seconds: nothing here depends on how fast this machine is


def is_marked(tree: ast.AST) -> bool:
    """Whether a test of a file is marked `gpu`, or takes the places of `accelerator`."""
    nodes = [*ast.walk(tree)]
    marks = (n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "gpu")
    return any(ast.unparse(node) == "pytest.mark.gpu" for node in marks) or any(
        isinstance(node, ast.Name) and node.id == "PLACES" for node in nodes
    )


def test_every_test_that_is_marked_is_run():
    paths = sorted(TESTS.rglob("test_*.py"))
    texts = {path: path.read_text() for path in paths}
    asked = [path for path, text in texts.items() if "mark.gpu" in text or "PLACES" in text]
    marked = [path for path in asked if is_marked(ast.parse(texts[path]))]
    names = [str(path.relative_to(TESTS.parent)) for path in marked]
    assert len(names) >= 13
    command = on_a_gpu.PARTS[0].command(LONG)
    assert [word for word in command if word.startswith("tests/")] == names
    assert command[command.index("-m", 3) + 1] == "gpu and not long"


def test_kernels_are_tested_where_they_run_on_a_gpu():
    (part,) = (part for part in on_a_gpu.PARTS if part.name == "tests-of-kernels")
    command = part.command(LONG)
    for name in ("test_grouped_gemm.py", "expert_mlp/test_slotted_products.py", "test_combine.py"):
        assert f"tests/kernels/{name}" in command
    assert "tests/training/test_slotted_adapters.py" in command
    # compilers and native kernels need no GPU
    assert not {"tests/kernels/test_aot.py", "tests/kernels/test_linear.py"} & {*command}


def test_all_parts_fit_into_nine_minutes():
    assert sum(part.seconds for part in on_a_gpu.PARTS) + SETTING_UP <= NINE_MINUTES
    names = [part.name for part in on_a_gpu.PARTS]
    assert names[0].startswith("tests")
    for part in on_a_gpu.PARTS:
        script = part.command(100.0)[1]
        assert not script.startswith("benchmarks/") or (TESTS.parent / script).is_file()
    decode = on_a_gpu.PARTS[names.index("decode-qwen3-30b-a3b")].command(100.0)
    assert decode[decode.index("--seconds") + 1] == "90"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_suite_is_called_with_words_that_it_knows(capsys):
    """All are read before it says that there is no GPU."""
    commands = [part.command(LONG) for part in on_a_gpu.PARTS]
    suite = [words[1:] for words in commands if words[1] == "bench"]
    assert [words[1] for words in suite] == ["latency", "kernels"]
    for words in suite:
        assert main(words) == 2
        assert "torch sees no" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so_in_one_line(tmp_path, capsys):
    assert on_a_gpu.main(["--results", str(tmp_path / "kept")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n"), said.err[:11]) == ("", 1, "no GPU here")
    assert not (tmp_path / "kept").exists()


def python(name: str, seconds: float, code: str) -> Part:
    return Part(name, seconds, lambda _: [sys.executable, "-c", code])


def test_what_fails_or_is_late_keeps_no_other_from_its_turn(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(timed_parts, "GRACE_S", 0.05)
    results, folder = tmp_path / "results", tmp_path / "kept" / "here"
    results.mkdir()
    (results / "old.json").write_text("{}")
    (results / "again.json").write_text("{}")
    os.utime(results / "again.json", (1, 1))
    stubborn = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "time.sleep(600)"
    )
    parts = [
        python("writes", LONG, "print('said'); open('results/new.json', 'w').write('1')"),
        python("fails", LONG, "import sys; open('results/again.json', 'w'); sys.exit(3)"),
        python("is-late", -3 * LONG, stubborn),
        python("comes-last", 4 * LONG, "open('results/last.json', 'w').write('2')"),
    ]
    found = run_parts(parts, folder, [results], root=tmp_path)
    assert [(one.name, one.end) for one in found] == [
        ("writes", "done"), ("fails", "failed with 3"), ("is-late", LATE), ("comes-last", "done"),
    ]  # fmt: skip
    assert [one.has_failed for one in found] == [False, True, False, False]
    names = {path.name for path in folder.iterdir()}
    logs = {f"{part.name}.log" for part in parts}
    assert names == {"new.json", "again.json", "last.json", *logs}
    assert (folder / "new.json").read_text() == "1"
    assert (folder / "writes.log").read_text() == "said\n"
    assert "said\n== writes: done" in capfd.readouterr().out


def test_what_a_part_leaves_is_the_next_ones():
    given: list[float] = []
    now = iter([0.0, 0.0, 10.0, 10.0, 100.0])

    def command(seconds: float) -> list[str]:
        given.append(seconds + timed_parts.GRACE_S)
        return [sys.executable, "-c", ""]

    folder = Path(os.environ["XDG_CACHE_HOME"]) / "parts"
    run_parts(
        [Part("one", 60.0, command), Part("two", 30.0, command)],
        folder, [], root=folder.parent, clock=lambda: next(now),
    )  # fmt: skip
    assert given == [60.0, 80.0]


def test_an_interrupt_ends_the_part_too(tmp_path, monkeypatch):
    monkeypatch.setattr(timed_parts, "GRACE_S", 0.05)
    started: list[timed_parts.subprocess.Popen[bytes]] = []

    class Interrupted(timed_parts.subprocess.Popen):  # type: ignore[type-arg]
        def wait(self, timeout: float | None = None) -> int:
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(timed_parts.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_parts([python("part", LONG, "while True: pass")], tmp_path, [], root=tmp_path)
    assert started[0].poll() is not None


@pytest.mark.long
def test_who_ends_the_program_ends_its_part(tmp_path):
    """Which has written a result by then."""
    os.mkfifo(tmp_path / "begun")
    part = (
        "import os, time; open('kept.json', 'w'); print(os.getpid(), file=open('begun', 'w'))\n"
        "time.sleep(600)"
    )
    code = f"""
import pathlib, sys, torch, on_a_gpu
on_a_gpu.PARTS = [on_a_gpu.Part("one", 1e6, lambda _: [sys.executable, "-c", {part!r}])]
on_a_gpu.ROOT, torch.cuda.is_available = pathlib.Path.cwd(), lambda: True
on_a_gpu.cache_folder = pathlib.Path.cwd
sys.exit(on_a_gpu.main(["--results", "results"]))
"""
    paths = {"PYTHONPATH": str(Path(on_a_gpu.__file__).parent)}
    program = subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path, env=os.environ | paths, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    child = int((tmp_path / "begun").read_text())
    program.terminate()
    assert program.wait() != 0
    with contextlib.suppress(psutil.NoSuchProcess):  # it is gone, or about to be
        ended = psutil.Process(child)
        while ended.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    assert (tmp_path / "results" / "kept.json").exists()
