"""Routing as a trace that was recorded while decoding."""

import numpy as np

from moe_runtime.lab.traces import Trace
from moe_runtime.policies.prediction import Routes
from moe_runtime.types import ModelSignature


def trace_of(routes: Routes, step_lengths: list[int] | None = None) -> Trace:
    """A trace with the given steps, of one decoded token each unless said otherwise."""
    lengths = step_lengths or [1] * routes.num_tokens
    request = np.repeat(np.arange(routes.num_sequences), np.diff(routes.offsets))
    shape = routes.shape
    return Trace(
        version=1,
        signature=ModelSignature(
            model_type="synthetic",
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            vocab_size=100,
        ),
        step_phase=np.ones(len(lengths), np.uint8),
        step_start=np.cumsum([0, *lengths]).astype(np.int64),
        token_request=request.astype(np.int32),
        token_id=routes.token_ids.astype(np.int32),
        token_position=(np.arange(routes.num_tokens) - routes.offsets[request]).astype(np.int32),
        expert_ids=routes.expert_ids.astype(np.uint8),
        gate_weights=routes.gate_weights.astype(np.float16),
    )
