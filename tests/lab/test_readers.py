"""Routing from elsewhere: what is written is read, and damage is one clear error."""

import numpy as np
import pytest
from trace_files import ROUTES, megatron_lines, write_lines, write_plain
from traces import trace_of

from moe_runtime.errors import CheckpointError
from moe_runtime.lab.traces import write_trace
from moe_runtime.lab.traces.readers import read_any_trace


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
