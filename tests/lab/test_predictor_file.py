"""A predictor's file that is not what it claims to be gets one clear error, whatever is wrong."""

import dataclasses
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_routes import make_routes

from moe_runtime.errors import CheckpointError
from moe_runtime.lab.traces.learned import read_predictor, write_predictor
from moe_runtime.policies.prediction import PREDICTORS, Estimator, Shape, make_estimator
from moe_runtime.types import ModelSignature

SHAPE = Shape(num_layers=2, num_experts=6, top_k=2)
SIGNATURE = ModelSignature(model_type="x", num_layers=2, num_experts=6, top_k=2, vocab_size=99)
NAMES = sorted(name for name, kind in PREDICTORS.items() if not kind.needs_hidden)


@pytest.fixture(scope="module")
def trained() -> dict[str, Estimator]:
    routes = make_routes(SHAPE, num_sequences=4, length=20)
    estimators = {name: make_estimator(name, SHAPE) for name in NAMES}
    for estimator in estimators.values():
        estimator.fit(routes)
    return estimators


def file_of(header: Any, arrays: dict[str, np.ndarray]) -> bytes:
    buffer = io.BytesIO()
    raw = np.frombuffer(json.dumps(header).encode(), np.uint8)
    np.savez(buffer, header=raw, **arrays)
    return buffer.getvalue()


def header_of(estimator: Estimator) -> dict[str, Any]:
    return {
        "format": "moe-runtime-predictor",
        "version": 1,
        "predictor": estimator.name,
        "signature": dataclasses.asdict(SIGNATURE),
        "arrays": {name: array.dtype.str for name, array in estimator.state().items()},
    }


@pytest.mark.parametrize("name", NAMES)
def test_what_was_written_is_read(tmp_path, trained, name):
    write_predictor(tmp_path / "p.npz", trained[name], SIGNATURE)
    again = read_predictor(tmp_path / "p.npz", SIGNATURE)
    assert type(again) is type(trained[name])
    for array_name, array in trained[name].state().items():
        np.testing.assert_array_equal(again.state()[array_name], array)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"version": 2}, "version 2 is not known"),
        ({"format": "other"}, "not a predictor"),
        ({"predictor": "os.system"}, "is not known, expected one of"),
        ({"arrays": {"x": "|O"}}, "unknown types"),
        ({"arrays": []}, "unknown types"),
        ({"signature": {}}, "the signature must have exactly"),
        (
            {"signature": {**dataclasses.asdict(SIGNATURE), "num_layers": 10**12}},
            "the signature has num_layers",
        ),
    ],
)
def test_headers_that_cannot_be(tmp_path, trained, change, expected):
    estimator = trained["naive-bayes"]
    content = file_of({**header_of(estimator), **change}, dict(estimator.state()))
    (tmp_path / "p.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=expected):
        read_predictor(tmp_path / "p.npz")


def test_a_file_of_another_model_or_too_large_is_refused(tmp_path, trained):
    write_predictor(tmp_path / "p.npz", trained["combined"], SIGNATURE)
    other = dataclasses.replace(SIGNATURE, model_type="y", vocab_size=5)
    with pytest.raises(CheckpointError, match=r"for x with .*model is y with"):
        read_predictor(tmp_path / "p.npz", other)
    with pytest.raises(CheckpointError, match="expected at most"):
        read_predictor(tmp_path / "p.npz", max_bytes=100)


@settings(max_examples=60)
@given(data=st.data())
def test_arrays_that_do_not_fit_never_escape_as_other_errors(tmp_path, trained, data):
    estimator = trained[data.draw(st.sampled_from(NAMES))]
    header, arrays = header_of(estimator), dict(estimator.state())
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(arrays)))
        action = data.draw(st.sampled_from(["drop", "shape", "dtype", "fill", "cut"]))
        if action == "drop":
            header["arrays"].pop(name, None)
        elif action == "shape":
            shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
            arrays[name] = np.zeros(shape, arrays[name].dtype)
        elif action == "dtype":
            dtype = data.draw(st.sampled_from(["|u1", "<u2", "<i8", "<f4"]))
            arrays[name] = arrays[name].astype(dtype)
            header["arrays"][name] = dtype
        elif action == "fill":
            value = data.draw(st.sampled_from([0, 1, 255, 100]))
            arrays[name] = np.full_like(arrays[name], value)
        elif arrays[name].ndim:
            arrays[name] = arrays[name][: data.draw(st.integers(0, len(arrays[name])))]
    (tmp_path / "p.npz").write_bytes(file_of(header, arrays))
    try:
        found = read_predictor(tmp_path / "p.npz", SIGNATURE)
    except CheckpointError:
        return
    assert found.name == estimator.name
