"""The trace file holds what was recorded, and damaged files get one clear error."""

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_runtime.errors import CheckpointError
from moe_runtime.lab.traces import TraceRecorder, read_trace, write_trace
from moe_runtime.types import ModelSignature

SIGNATURE = ModelSignature(
    model_type="olmoe", num_layers=3, num_experts=16, top_k=2, vocab_size=100
)


def record_two_steps(path: Path, seed: int = 0) -> list[dict[str, Any]]:
    """Records a prefill of five tokens and a decoding step; returns the events as given."""
    random = np.random.default_rng(seed)
    events = []
    with TraceRecorder(path, SIGNATURE) as recorder:
        recorder.begin_request()
        for phase, positions in (("prefill", np.arange(5)), ("decode", np.array([5]))):
            token_ids = random.integers(0, 100, len(positions))
            recorder.begin_step(phase=phase, token_ids=token_ids, positions=positions)
            for layer in range(3):
                ids = np.stack([random.permutation(16)[:2] for _ in positions])
                weights = random.random((len(positions), 2), dtype=np.float32)
                recorder.routing(layer, ids, weights)
                events.append(
                    {
                        "phase": phase,
                        "layer": layer,
                        "token_ids": token_ids,
                        "positions": positions,
                        "ids": ids,
                        "weights": weights,
                    }
                )
    return events


def test_every_event_is_read_back(tmp_path):
    events = record_two_steps(tmp_path / "trace.npz")
    trace = read_trace(tmp_path / "trace.npz")

    assert trace.signature == SIGNATURE
    assert trace.num_steps == 2
    assert trace.token_request.tolist() == [0] * 6
    for number, event in enumerate(events):
        step, layer = divmod(number, 3)
        rows = trace.tokens_of(step)
        assert ("prefill", "decode")[trace.step_phase[step]] == event["phase"]
        np.testing.assert_array_equal(trace.token_id[rows], event["token_ids"])
        np.testing.assert_array_equal(trace.token_position[rows], event["positions"])
        np.testing.assert_array_equal(trace.expert_ids[rows, layer], event["ids"])
        # float16 keeps eleven bits, so rounding errs by at most half of 2**-10 of a value below 1.
        np.testing.assert_allclose(
            trace.gate_weights[rows, layer], event["weights"], atol=2**-11, rtol=0
        )
    # distinct experts in order of time
    accesses = list(trace.accesses())
    assert [(step, layer) for step, layer, _ in accesses] == [
        (step, layer) for step in range(2) for layer in range(3)
    ]
    for (_, _, experts), event in zip(accesses, events, strict=True):
        assert experts.tolist() == sorted(set(event["ids"].ravel().tolist()))


def test_choices_without_an_expert_or_a_weight_are_marked_absent(tmp_path):
    """Layers that use fewer experts or none, and weights of a model that diverged."""
    with TraceRecorder(tmp_path / "t.npz", SIGNATURE) as recorder:
        recorder.begin_step(phase="decode", token_ids=[7], positions=[0])
        recorder.routing(1, [[3]], [[0.5]])
        recorder.begin_step(phase="decode", token_ids=[1] * 5, positions=range(5))
        recorder.routing(0, [[3, 4]] * 5, [[w, 0.5] for w in (np.nan, np.inf, -0.5, 1e6, 0.0)])
    trace = read_trace(tmp_path / "t.npz")
    absent = trace.absent
    assert trace.expert_ids[0].tolist() == [[absent] * 2, [3, absent], [absent] * 2]
    assert next(trace.accesses()) == (0, 1, [3])
    assert trace.expert_ids[1:, 0].tolist() == [[absent, 4]] * 4 + [[3, 4]]
    assert trace.gate_weights[1:, 0].tolist() == [[0.0, 0.5]] * 5


def test_sequences_of_a_batch_are_requests_of_their_own(tmp_path):
    with TraceRecorder(tmp_path / "trace.npz", SIGNATURE) as recorder:
        recorder.begin_request(num_sequences=2)
        recorder.begin_step(phase="decode", token_ids=[1, 2], positions=[4, 4], sequences=[0, 1])
        recorder.begin_request()
        recorder.begin_step(phase="decode", token_ids=[3], positions=[0])
    assert read_trace(tmp_path / "trace.npz").token_request.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("num_experts", "itemsize"), [(255, 1), (256, 2), (257, 2)])
def test_the_last_expert_is_not_mistaken_for_absent(tmp_path, num_experts, itemsize):
    signature = ModelSignature(
        model_type="x", num_layers=1, num_experts=num_experts, top_k=1, vocab_size=2
    )
    with TraceRecorder(tmp_path / "trace.npz", signature) as recorder:
        recorder.begin_step(phase="decode", token_ids=[0], positions=[0])
        recorder.routing(0, [[num_experts - 1]], [[1.0]])
    trace = read_trace(tmp_path / "trace.npz")
    assert trace.expert_ids.dtype.itemsize == itemsize
    assert [experts.tolist() for _, _, experts in trace.accesses()] == [[num_experts - 1]]


def test_no_steps_are_a_trace(tmp_path):
    record_two_steps(tmp_path / "trace.npz")
    write_trace(tmp_path / "none.npz", read_trace(tmp_path / "trace.npz").steps(0, 0))
    trace = read_trace(tmp_path / "none.npz")
    assert (trace.num_steps, trace.num_tokens, list(trace.accesses())) == (0, 0, [])


def test_an_unwritable_place_is_refused_before_recording(tmp_path):
    with pytest.raises(CheckpointError, match="no folder"):
        TraceRecorder(tmp_path / "absent" / "trace.npz", SIGNATURE)
    with pytest.raises(CheckpointError, match="is a folder"):
        TraceRecorder(tmp_path, SIGNATURE)


@pytest.mark.parametrize(
    ("layer", "ids", "weights", "message"),
    [
        (3, [[0, 1]], [[0.5, 0.5]], "layer"),
        (-1, [[0, 1]], [[0.5, 0.5]], "layer"),
        (0, [[0, 16]], [[0.5, 0.5]], r"\[-1, 16\)"),
        (0, [[0, -2]], [[0.5, 0.5]], r"\[-1, 16\)"),
        (0, [[0, 1, 2]], [[0.5, 0.5, 0.5]], r"\[1, 2\]"),
        (0, [[0, 1], [0, 1]], [[0.5, 0.5], [0.5, 0.5]], r"\[1, 2\]"),
        (0, [[0, 1]], [[0.5]], r"\[1, 2\]"),
    ],
)
def test_routing_that_does_not_fit_the_model_is_refused(tmp_path, layer, ids, weights, message):
    recorder = TraceRecorder(tmp_path / "trace.npz", SIGNATURE)
    recorder.begin_step(phase="decode", token_ids=[1], positions=[0])
    with pytest.raises(ValueError, match=message):
        recorder.routing(layer, ids, weights)


def test_steps_that_cannot_be_are_refused(tmp_path):
    recorder = TraceRecorder(tmp_path / "trace.npz", SIGNATURE)
    with pytest.raises(ValueError, match="before begin_step"):
        recorder.routing(0, [[0, 1]], [[0.5, 0.5]])
    for phase, positions, update, message in (
        ("warm-up", [0], None, "prefill, decode"),
        ("decode", [0, 1], None, "equally long"),
        ("decode", [0], 1, "None outside of training"),
    ):
        with pytest.raises(ValueError, match=message):
            recorder.begin_step(phase=phase, token_ids=[1], positions=positions, update=update)


def good_arrays(tmp_path: Path) -> dict[str, np.ndarray]:
    record_two_steps(tmp_path / "good.npz")
    with np.load(tmp_path / "good.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def header(**changes: Any) -> np.ndarray:
    content = {
        "format": "moe-runtime-trace",
        "version": 1,
        "signature": {
            "model_type": "olmoe",
            "num_layers": 3,
            "num_experts": 16,
            "top_k": 2,
            "vocab_size": 100,
        },
    }
    content["signature"] |= changes.pop("signature", {})
    return np.frombuffer(json.dumps(content | changes).encode(), dtype=np.uint8)


def one_changed(weights: np.ndarray, value: float) -> np.ndarray:
    weights[4, 2, 1] = value
    return weights


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("header", lambda _: header(version=3), "version 3"),
        ("header", lambda _: header(version=2), "no array named 'step_update'"),
        ("header", lambda _: header(format="other"), "not a routing trace"),
        ("header", lambda _: header(signature={"num_layers": 4}), "expert_ids has shape"),
        ("header", lambda _: header(signature={"num_layers": "3"}), "num_layers"),
        ("header", lambda _: header(signature={"num_experts": 8}), "below num_experts"),
        ("header", lambda _: header(signature={"num_experts": 300}), "expert_ids.*uint16"),
        ("header", lambda _: header(signature={"num_experts": 10**6}), "65535"),
        ("header", lambda _: header(signature={"top_k": 0}), "top_k"),
        ("header", lambda _: header(signature={"extra": 1}), "exactly"),
        ("header", lambda _: header(expert_bytes=True), "expert_bytes"),
        ("header", lambda _: np.frombuffer(b"{", dtype=np.uint8), "not JSON"),
        ("header", lambda _: np.frombuffer(b"[" * 60000, dtype=np.uint8), "not JSON"),
        ("header", lambda _: np.zeros(1 << 17, dtype=np.uint8), "at most"),
        ("token_id", lambda a: a[:-1], "shape"),
        ("token_id", lambda a: a.astype(np.int64), "int64"),
        ("token_id", lambda a: a + 100, "vocab_size"),
        ("token_id", lambda a: a.astype(">i4"), "expected int32"),
        ("token_id", lambda a: np.array([None] * 6), "damaged"),
        ("token_request", lambda a: a - 1, "token_request"),
        ("step_phase", lambda a: a + 1, "step_phase"),
        ("step_start", lambda a: a[::-1], "step_start"),
        ("step_start", lambda a: a[:-1], "shape"),
        ("expert_ids", lambda a: a + 16, "below num_experts"),
        ("expert_ids", lambda a: np.asfortranarray(a), "C order"),
        ("gate_weights", lambda a: a.astype(np.float32), "float32"),
        ("gate_weights", lambda a: a[..., :1], "shape"),
        ("gate_weights", lambda _: None, "no array named 'gate_weights'"),
        ("gate_weights", lambda a: one_changed(a, np.nan), "nan at token 4, layer 2, choice 1"),
        ("gate_weights", lambda a: one_changed(a, -0.5), "-0.5 at token 4, layer 2, choice 1"),
    ],
)
def test_wrong_content_gets_a_clear_error(tmp_path, name, change, message):
    arrays = good_arrays(tmp_path)
    changed = change(arrays.pop(name))
    if changed is not None:
        arrays[name] = changed
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, **arrays)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_member_may_not_announce_more_than_it_holds(tmp_path):
    record_two_steps(tmp_path / "good.npz")
    huge = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        huge, {"descr": "<i4", "fortran_order": False, "shape": (1 << 50,)}
    )
    with (
        zipfile.ZipFile(tmp_path / "good.npz") as good,
        zipfile.ZipFile(tmp_path / "bad.npz", "w") as bad,
    ):
        for member in good.namelist():
            bad.writestr(member, huge.getvalue() if "token_id" in member else good.read(member))
    with pytest.raises(CheckpointError, match="shape"):
        read_trace(tmp_path / "bad.npz")


def test_files_that_are_no_trace_get_a_clear_error(tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npz").write_bytes(b"")
    for name, message in (
        ("text.npz", r"not an \.npz file"),
        ("empty.npz", r"not an \.npz file"),
        ("missing.npz", "No such file"),
        ("", "cannot be read"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_trace(tmp_path / name)
    record_two_steps(tmp_path / "trace.npz")
    with pytest.raises(CheckpointError, match="at most 100 B"):
        read_trace(tmp_path / "trace.npz", max_bytes=100)


def test_micro_batches_of_an_optimizer_step(tmp_path):
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
