"""Routing from elsewhere: what is written is read, and damage is one clear error."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.errors import CheckpointError
from moe_runtime.lab.traces import write_trace
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.policies.prediction import Shape

SHAPE = Shape(num_layers=2, num_experts=6, top_k=2)
ROUTES = make_routes(SHAPE, num_sequences=3, length=5)


def write_plain(path: Path, **changes) -> Path:
    arrays = {
        "ids": ROUTES.expert_ids.astype(np.uint8),
        "probs": ROUTES.gate_weights.astype(np.float16),
        "token_ids": ROUTES.token_ids.astype(np.int32),
        "offsets": ROUTES.offsets,
    } | changes
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


def megatron_lines() -> list[dict]:
    return [
        {
            "step": step,
            "stage": "decode",
            "block": 0,
            "layer": 3 + 2 * layer,
            "rank": 0,
            "num_tokens": 3,
            "topk": 2,
            "top_indices": ROUTES.expert_ids[3 * step : 3 * step + 3, layer].tolist(),
        }
        for step in range(5)
        for layer in range(2)
    ]


def write_lines(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_plain_ids(tmp_path):
    trace = read_any_trace(write_plain(tmp_path / "ids.npz"), num_experts=6)
    assert np.array_equal(trace.expert_ids, ROUTES.expert_ids)
    assert np.array_equal(trace.token_id, ROUTES.token_ids)
    assert trace.token_request.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    assert trace.token_position.tolist() == [0, 1, 2, 3, 4] * 3
    assert trace.signature.num_experts == 6
    assert trace.num_steps == 15


def test_plain_ids_alone_are_enough(tmp_path):
    path = write_plain(
        tmp_path / "a.npz", ids=ROUTES.expert_ids, probs=None, token_ids=None, offsets=None
    )
    trace = read_any_trace(path)
    assert trace.signature.num_experts == ROUTES.expert_ids.max() + 1
    assert set(trace.token_id.tolist()) == {-1}
    assert np.allclose(trace.gate_weights, 0.5)


def test_megatron_lines(tmp_path):
    lines = megatron_lines()
    lines[3]["top_indices"] = np.ravel(lines[3]["top_indices"]).tolist()  # flat is read as well
    trace = read_any_trace(write_lines(tmp_path / "r.jsonl", lines[::-1]), num_experts=8)
    assert np.array_equal(trace.expert_ids, ROUTES.expert_ids)
    assert trace.step_start.tolist() == [0, 3, 6, 9, 12, 15]
    assert trace.token_request.tolist() == [0, 1, 2] * 5
    assert trace.token_position.tolist() == [n for n in range(5) for _ in range(3)]


def test_a_number_of_experts_that_the_trace_contradicts_is_refused(tmp_path):
    write_trace(tmp_path / "own.npz", trace_of(ROUTES))
    assert read_any_trace(tmp_path / "own.npz", num_experts=6).signature.num_experts == 6
    with pytest.raises(ValueError, match="layers have 6 experts; leave out"):
        read_any_trace(tmp_path / "own.npz", num_experts=3)


def test_our_own_traces_are_told_apart(tmp_path):
    write_trace(tmp_path / "own.npz", trace_of(ROUTES))
    trace = read_any_trace(tmp_path / "own.npz")
    assert trace.signature.model_type == "synthetic"


def weights_with(value: float) -> np.ndarray:
    weights = np.full(ROUTES.expert_ids.shape, 0.5)
    weights[2, 1, 0] = value
    return weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": ROUTES.expert_ids[:, 0]}, r"ids must be \[T, L, K\]"),
        ({"ids": ROUTES.expert_ids.astype(np.float32)}, "'ids' is missing, damaged, or not"),
        ({"ids": np.full((15, 2, 2), 70000)}, "do not fit"),
        ({"probs": ROUTES.gate_weights[:3]}, "probs must be"),
        (
            {"probs": weights_with(np.nan)},
            "probs must be finite.*nan at token 2, layer 1, choice 0",
        ),
        ({"probs": weights_with(-1)}, "got -1.0 at token 2, layer 1, choice 0"),
        ({"probs": weights_with(1e300)}, "got inf at token 2, layer 1, choice 0"),
        ({"token_ids": np.full(15, -2)}, "token_ids lie in"),
        ({"offsets": np.array([0, 9, 4, 15])}, "must not fall"),
        ({"offsets": np.array([0, 4])}, "offsets must run from 0 to 15"),
        ({"ids": np.array([{"a": 1}] * 15, dtype=object)}, "'ids' is missing, damaged, or not"),
    ],
)
def test_plain_ids_that_do_not_fit_together(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        read_any_trace(write_plain(tmp_path / "bad.npz", **changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "one"}, "line 1: expected a whole number 'step'"),
        ({"layer": True}, "line 1: expected a whole number 'layer'"),
        ({"top_indices": [[1, 2]]}, "3 lists of 2"),
        ({"top_indices": [[1, 2], [3], [4, 5]]}, "3 lists of 2"),
        ({"top_indices": [[1, -2], [3, 1], [4, 5]]}, "3 lists of 2"),
        ({"num_tokens": 2, "top_indices": [[1, 2], [3, 1]]}, r"step 0 have \[2, 3\] tokens"),
        ({"layer": 5}, "has layer 5 twice"),
    ],
)
def test_megatron_lines_that_are_wrong(tmp_path, change, message):
    lines = megatron_lines()
    lines[0] |= change
    with pytest.raises(CheckpointError, match=message):
        read_any_trace(write_lines(tmp_path / "bad.jsonl", lines))


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "holds no records"), ("{\n", "not JSON"), ("[1]\n", "expected an object")],
)
def test_lines_that_are_no_records(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_any_trace(path)


def test_missing_files(tmp_path):
    for name in ("none.npz", "none.jsonl"):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_any_trace(tmp_path / name)


@settings(max_examples=120)
@given(st.data())
def test_damaged_bytes_are_one_error_or_a_sound_trace(tmp_path, data):
    """Whatever happens to the bytes of a file, the reader answers with its error or a trace."""
    suffix = data.draw(st.sampled_from([".npz", ".jsonl"]))
    path = tmp_path / f"damaged{suffix}"
    if suffix == ".npz":
        write_plain(path)
    else:
        write_lines(path, megatron_lines())
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    path.write_bytes(bytes(content))
    try:
        trace = read_any_trace(path)
    except CheckpointError:
        return
    known = trace.expert_ids[trace.expert_ids != trace.absent]
    assert known.max(initial=0) < trace.signature.num_experts
