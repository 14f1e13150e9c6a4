"""Traces of training: forward passes that belong to optimizer steps."""

from pathlib import Path

import pytest

from moe_runtime.lab.traces import TraceRecorder, read_trace
from moe_runtime.types import ModelSignature

SIGNATURE = ModelSignature(
    model_type="olmoe", num_layers=3, num_experts=16, top_k=2, vocab_size=100
)


def test_micro_batches_of_an_optimizer_step(tmp_path: Path) -> None:
    """Forward passes of training say which step they belong to, in the journal as well."""
    recorder = TraceRecorder(tmp_path / "trace.npz", SIGNATURE, trains=True, block_tokens=1)
    for update in (3, 3, 5):
        recorder.begin_step(phase="train", token_ids=[1], positions=[0], update=update)
        recorder.routing(0, [[7, -1]], [[0.5, 0.25]])
    interrupted = read_trace(tmp_path / "trace.npz.part")
    assert interrupted.step_update is not None
    assert interrupted.step_update.tolist() == [3, 3]
    for update in (None, 4):
        with pytest.raises(ValueError, match="update must be a number from 5 on"):
            recorder.begin_step(phase="train", token_ids=[1], positions=[0], update=update)
    recorder.close()
    trace = read_trace(tmp_path / "trace.npz")
    assert trace.version == 2
    assert trace.step_update is not None
    assert trace.step_update.tolist() == [3, 3, 5]
    later = trace.steps(1, 3).step_update
    assert later is not None
    assert later.tolist() == [3, 5]
    assert trace.expert_ids[:, 0].tolist() == [[7, trace.absent]] * 3
    assert trace.gate_weights[:, 0].tolist() == [[0.5, 0]] * 3
    other = TraceRecorder(tmp_path / "other.npz", SIGNATURE)
    with pytest.raises(ValueError, match="None outside of training"):
        other.begin_step(phase="decode", token_ids=[1], positions=[0], update=1)
