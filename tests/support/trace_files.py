"""Traces of every kind that is read: recorded, plain arrays, Megatron's lines."""

import json
from pathlib import Path

import numpy as np
from synthetic_routes import make_routes

from moe_runtime.lab.traces import Trace, TraceRecorder
from moe_runtime.policies.prediction import Shape
from moe_runtime.types import ModelSignature

SIGNATURE = ModelSignature(model_type="x", num_layers=2, num_experts=8, top_k=2, vocab_size=100)


def record_steps(recorder: TraceRecorder, num_steps: int) -> None:
    """Steps of one token each, whose id, experts and weights follow from its position."""
    recorder.begin_request()
    for step in range(num_steps):
        recorder.begin_step(phase="decode", token_ids=[step % 100], positions=[step])
        for layer in range(2):
            recorder.routing(layer, [[step % 8, (step + 1 + layer) % 8]], [[0.75, 0.25]])


def assert_begins_as(trace: Trace, whole: Trace) -> None:
    steps, tokens = trace.num_steps, trace.num_tokens
    np.testing.assert_array_equal(trace.step_start, whole.step_start[: steps + 1])
    for name in ("token_request", "token_id", "token_position", "expert_ids", "gate_weights"):
        np.testing.assert_array_equal(getattr(trace, name), getattr(whole, name)[:tokens])


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
