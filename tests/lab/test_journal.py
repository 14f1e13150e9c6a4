"""A recording that is killed leaves what it had finished; a damaged journal never misleads."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from trace_files import SIGNATURE, assert_begins_as, record_steps

from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.files import OutputFile, draft_of
from moe_runtime.lab.traces import Trace, TraceRecorder, read_trace
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.types import ModelSignature


@pytest.fixture
def whole(tmp_path: Path) -> Trace:
    with TraceRecorder(tmp_path / "whole.npz", SIGNATURE) as recorder:
        record_steps(recorder, 100)
    return read_trace(tmp_path / "whole.npz")


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """What is left of a recording of 30 steps in blocks of seven that nobody closed."""
    record_steps(TraceRecorder(tmp_path / "t.npz", SIGNATURE, block_tokens=7), 30)
    return tmp_path / "t.npz.part"


def test_waiting_steps_are_written_after_a_while(tmp_path):
    recorder = TraceRecorder(tmp_path / "t.npz", SIGNATURE, block_s=0.0, expert_bytes=196_608)
    record_steps(recorder, 10)
    left = read_trace(tmp_path / "t.npz.part")
    assert (left.num_steps, left.expert_bytes) == (9, 196_608)
    recorder.close()
    assert read_trace(tmp_path / "t.npz").expert_bytes == 196_608


def test_a_recording_that_ends_well_leaves_no_journal(tmp_path, whole):
    with TraceRecorder(tmp_path / "t.npz", SIGNATURE, block_tokens=7) as recorder:
        record_steps(recorder, 100)
        assert draft_of(tmp_path / "t.npz").exists()
    assert sorted(os.listdir(tmp_path)) == ["t.npz", "whole.npz"]
    assert_begins_as(read_trace(tmp_path / "t.npz"), whole)


def test_the_file_appears_only_when_complete_and_not_without_steps(tmp_path):
    path = tmp_path / "trace.npz"
    TraceRecorder(path, SIGNATURE).close()
    assert os.listdir(tmp_path) == []
    path.write_bytes(b"older")
    recorder = TraceRecorder(path, SIGNATURE)
    recorder.begin_step(phase="decode", token_ids=[1], positions=[0])
    assert path.read_bytes() == b"older"
    recorder.close()
    recorder.close()
    TraceRecorder(path, SIGNATURE).close()
    assert os.listdir(tmp_path) == ["trace.npz"]
    assert read_trace(path).num_steps == 1


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_failed_write_leaves_the_journal_if_it_has_a_block(tmp_path, monkeypatch):
    recorder = TraceRecorder(tmp_path / "t.npz", SIGNATURE)
    record_steps(recorder, 3)
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "write_at", full_disk)
        with pytest.raises(CheckpointError, match="No space left"):
            recorder.close()
    assert not any(tmp_path.iterdir())
    recorder = TraceRecorder(tmp_path / "t.npz", SIGNATURE, block_tokens=7)
    record_steps(recorder, 30)
    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(CheckpointError, match="No space left"):
        recorder.close()
    assert read_trace(tmp_path / "t.npz.part").num_steps == 30


@pytest.mark.parametrize("moment", ["before", "within", "after"])
def test_an_exception_around_a_block_neither_repeats_nor_cuts_it(tmp_path, monkeypatch, moment):
    recorder = TraceRecorder(tmp_path / "t.npz", SIGNATURE, block_tokens=7)
    real = OutputFile.write_at

    def interrupted(output: OutputFile, offset: int, data: bytes) -> int:
        if moment != "before":
            real(output, offset, data[: len(data) // 2 if moment == "within" else None])
        raise KeyboardInterrupt

    def go_on() -> None:
        for step in range(12, 30):
            recorder.begin_step(phase="decode", token_ids=[step % 100], positions=[step])

    record_steps(recorder, 12)
    with monkeypatch.context() as patch:
        patch.setattr(OutputFile, "write_at", interrupted)
        with pytest.raises(KeyboardInterrupt):
            go_on()
    num_steps = recorder.num_steps
    recorder.begin_step(phase="decode", token_ids=[0], positions=[0])
    left = read_trace(tmp_path / "t.npz.part")
    assert left.num_steps == num_steps
    assert left.token_position.tolist() == list(range(num_steps))
    recorder.close()


def test_what_was_left_is_named_and_never_overwritten(journal, whole, tmp_path):
    (tmp_path / "empty.npz.part").touch()
    with pytest.raises(CheckpointError, match=r"empty\.npz: cannot be read: No such file"):
        read_trace(tmp_path / "empty.npz")
    target = journal.with_name("t.npz")
    with pytest.raises(CheckpointError, match=r"an interrupted recording left .*t\.npz\.part"):
        read_trace(target)
    with pytest.warns(MoERuntimeWarning, match=r"t\.npz\.interrupted: holds what an interrupted"):
        recorder = TraceRecorder(target, SIGNATURE, block_tokens=7)
    record_steps(recorder, 9)
    recorder.close()
    assert read_trace(target).num_steps == 9
    kept = read_trace(journal.with_name("t.npz.interrupted"))
    assert kept.num_steps == 28
    assert_begins_as(kept, whole)


def test_a_trace_that_is_being_recorded_is_refused_to_others(tmp_path):
    first = TraceRecorder(tmp_path / "t.npz", SIGNATURE, block_tokens=7)
    record_steps(first, 30)
    with pytest.raises(CheckpointError, match="another process is writing"):
        TraceRecorder(tmp_path / "t.npz", SIGNATURE)
    first.close()
    assert read_trace(tmp_path / "t.npz").num_steps == 30


def test_blocks_of_two_models_are_refused(tmp_path, journal):
    other = ModelSignature(model_type="y", num_layers=2, num_experts=8, top_k=2, vocab_size=100)
    record_steps(TraceRecorder(tmp_path / "u.npz", other, block_tokens=7), 10)
    journal.write_bytes(journal.read_bytes() + (tmp_path / "u.npz.part").read_bytes()[8:])
    with pytest.raises(CheckpointError, match=r"model_type='y'.*model_type='x'"):
        read_trace(journal)


def test_a_killed_process_leaves_its_finished_blocks(tmp_path, whole):
    program = (
        "import sys, time\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from trace_files import SIGNATURE, record_steps\n"
        "from moe_runtime.lab.traces import TraceRecorder\n"
        "recorder = TraceRecorder(sys.argv[1], SIGNATURE, block_tokens=7)\n"
        "record_steps(recorder, 30)\n"
        "print('recorded', flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "t.npz")]
    with subprocess.Popen(
        [*command, str(Path(__file__).parents[1] / "support")], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"recorded\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(timeout=600) == -signal.SIGKILL
    assert not (tmp_path / "t.npz").exists()
    trace = read_trace(tmp_path / "t.npz.part")
    assert (trace.num_steps, trace.signature) == (28, SIGNATURE)
    assert_begins_as(trace, whole)
    assert read_any_trace(tmp_path / "t.npz.part").num_steps == 28
