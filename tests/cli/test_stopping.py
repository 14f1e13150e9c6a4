"""Signals that end a command: once, in good order, with the exit code that a shell expects."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moe_runtime.checkpoints.packing import staging_of, writer
from moe_runtime.cli.main import describe, main
from moe_runtime.cli.stopping import stop_on_signals, terminable
from moe_runtime.models.pocket import pocket_path


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """As in a process of its own."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_is_an_interrupt_and_more_of_them_are_nothing(number):
    with terminable() as request:
        assert not request.is_set
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGHUP)
    assert request.exit_code == 128 + number
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_what_is_ignored_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with terminable() as request, stop_on_signals("stopping") as stop:
        signal.raise_signal(signal.SIGHUP)
        assert not request.is_set
        assert not stop.is_set
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_each_message_is_one_signal_more_that_interrupts_nothing(capsys):
    with terminable(), stop_on_signals("finishing", "cutting off") as stop:
        signal.raise_signal(signal.SIGTERM)
        assert (stop.num_signals, stop.exit_code) == (1, 143)
        signal.raise_signal(signal.SIGINT)
        assert (stop.num_signals, stop.exit_code) == (2, 130)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == "finishing\ncutting off\n"


def test_no_signal_interrupts_what_is_held(capsys):
    is_held = True
    with terminable(), stop_on_signals("finishing", "cutting", is_held=lambda: is_held) as stop:
        for _ in range(4):
            signal.raise_signal(signal.SIGINT)
        assert stop.num_signals == 4
        is_held = False
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert capsys.readouterr().err == "finishing\ncutting\n"


def test_work_in_hand_is_finished_at_the_first_and_interrupted_at_the_second(capsys):
    with terminable() as request, stop_on_signals("stopping") as stop:
        signal.raise_signal(signal.SIGHUP)
        assert (stop.is_set, stop.exit_code, request.is_set) == (True, 129, False)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert request.exit_code == 143
    assert capsys.readouterr().err == "stopping\n"


def test_a_third_termination_does_not_cut_the_clean_up_off():
    """The second one made `terminable` ignore more of them, which the inner block must not undo."""
    with terminable():
        with contextlib.suppress(KeyboardInterrupt), stop_on_signals("stopping") as stop:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
        assert stop.exit_code == 143
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_interrupt_lets_outputs_be_finished_and_a_third_does_not(first, capsys):
    done: list[str] = []
    with terminable():
        with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as outputs:
            outputs.callback(done.append, "outputs")
            outputs.callback(signal.raise_signal, signal.SIGINT)
            signal.raise_signal(first)
        assert done == ["outputs"]
        assert capsys.readouterr().err.startswith("ending; Ctrl-C once more ends at once")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


class Finalized:
    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike

    def __del__(self) -> None:
        self._strike()


def strike_in_a_finalizer(strike: Callable[[], None]) -> None:
    Finalized(strike)


def strike_in_a_callback_of_a_weak_reference(strike: Callable[[], None]) -> None:
    referred = Finalized(lambda: None)
    kept = weakref.ref(referred, lambda _: strike())
    del referred
    assert kept() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "drop_one", [strike_in_a_finalizer, strike_in_a_callback_of_a_weak_reference]
)
def test_a_signal_within_a_callback_is_raised_after_it(drop_one, number, capsys):
    """Python prints and drops whatever is raised there; the test is that the wait is cut off."""
    if number == signal.SIGTERM:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    hook = sys.unraisablehook

    def drop_one_and_wait() -> None:
        drop_one(lambda: signal.raise_signal(number))
        threading.Event().wait(60)

    with terminable() as request, pytest.raises(KeyboardInterrupt):
        drop_one_and_wait()
    assert request.exit_code == 128 + number
    assert capsys.readouterr().err == ""
    assert sys.unraisablehook is hook


def test_other_exceptions_of_a_callback_reach_the_hook_that_was_there(monkeypatch):
    lost_types: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: lost_types.append(lost.exc_type))
    with terminable() as request:
        strike_in_a_callback_of_a_weak_reference(lambda: [].remove(1))
    assert lost_types == [ValueError]
    assert not request.is_set


def test_an_interrupt_that_an_import_drops_ends_the_program(tmp_path):
    """Before `main` there is: its module is imported by a loader that is struck in a callback."""
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import os, signal, sys, threading, weakref\n"
        "class Struck:\n"
        "    def __getattr__(self, name):\n"
        "        gone = threading.Event()\n"
        "        kept = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGINT))\n"
        "        del gone\n"
        "        threading.Event().wait(60)\n"
        "        return lambda: 7\n"
        "sys.modules['moe_runtime.cli.main'] = Struck()\n"
        "from moe_runtime.cli.program import program\n"
        "sys.exit(program())\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", str(starter)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupted_pack_says_whether_the_next_one_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(writer, "SHARD_BYTES", 1 << 18)
    whole, out = writer.CheckpointWriter._write_file, tmp_path / "packed"
    growing = staging_of(out)
    endings = ["no file was whole yet; the same command begins again"]
    endings += [f"the files that are whole stay in {growing}; the same command goes on from there"]
    for number_whole, ending in enumerate(endings):

        def be_interrupted(self: Any, number: int, *rest: Any, last: int = number_whole) -> Any:
            if number < last:
                return whole(self, number, *rest)
            self._progress("experts", 0, 1)
            raise KeyboardInterrupt

        monkeypatch.setattr(writer.CheckpointWriter, "_write_file", be_interrupted)
        assert main(["pack", str(pocket_path()), str(out)]) == 130
        assert capsys.readouterr().err.splitlines()[-1] == f"moe-runtime: {ending}"
        assert growing.exists() == (number_whole > 0)
        assert len(list(growing.glob("experts-*"))) == number_whole


def test_a_signal_within_a_write_to_stderr_is_told_and_asks(monkeypatch, tmp_path):
    class Struck(io.FileIO):
        """A file during whose first write a signal comes, while Python holds its buffer's lock."""

        is_struck = False

        def write(self, data: Any) -> int:
            if not self.is_struck:
                self.is_struck = True
                signal.raise_signal(signal.SIGINT)
            return super().write(data) or 0

    raw = Struck(tmp_path / "stderr", "w")
    stream = io.TextIOWrapper(io.BufferedWriter(raw), line_buffering=True)
    monkeypatch.setattr(sys, "stderr", stream)
    with stop_on_signals("stopping") as request:
        stream.write("progress\n")
        assert request.is_set
    assert (tmp_path / "stderr").read_text() == "stopping\nprogress\n"


@pytest.mark.parametrize(
    ("where", "code"),
    [
        ("in the last line", 130),
        ("after it", 130),
        ("while a thread ends", 130),
        ("in an exit handler", 130),
        ("as modules are torn down", 7),
    ],
)
def test_an_interrupt_of_the_end_gives_an_exit_code(tmp_path, where, code):
    """Whatever Python has left to do; results are written. `main` ends with 7."""
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import atexit, os, signal, sys, threading, time, types\n"
        "where = sys.argv.pop(1)\n"
        "def strike(name, kill=os.kill, number=signal.SIGINT, own=os.getpid()):\n"
        "    if name == where:\n"
        "        kill(own, number)\n"
        "    return name == where\n"
        "def late():\n"
        "    if where == 'while a thread ends':\n"
        "        time.sleep(0.2)  # the main thread waits for this one by then\n"
        "        strike(where)\n"
        "        time.sleep(60)\n"
        "class Torn:\n"
        "    def __del__(self, strike=strike):\n"
        "        strike('as modules are torn down')\n"
        "def main():\n"
        "    sys.torn = Torn()\n"
        "    atexit.register(strike, 'in an exit handler')\n"
        "    print('result', flush=True)\n"
        "    threading.Thread(target=late).start()\n"
        "    found = signal.getsignal\n"
        "    def struck(number):\n"
        "        signal.getsignal = found\n"
        "        strike('in the last line')\n"
        "        return found(number)\n"
        "    signal.getsignal = struck\n"
        "    return 7\n"
        "sys.modules['moe_runtime.cli.main'] = types.SimpleNamespace(main=main)\n"
        "from moe_runtime.cli.program import program\n"
        "code = program()\n"
        "strike('after it')\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", str(starter), where], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "result\n", "")


def test_a_full_disk_is_named_by_the_stream_without_a_buffer(tmp_path, monkeypatch):
    problem = OSError(28, "No space left on device")
    with (tmp_path / "text").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=0))
        code, line = describe(problem)
    assert (code, line) == (2, "stdout cannot be written: No space left on device")
