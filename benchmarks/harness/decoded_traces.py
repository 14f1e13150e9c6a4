"""Routes as traces of decoding, and a machine whose times are modelled, for replays."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from moe_runtime.lab.replay.link_model import Machine
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.readers import read_plain_ids
from moe_runtime.policies.prediction import Routes

EXPERT_BYTES = 16 << 20
LAYER_S = 1e-3
"""Time that a layer computes, experts included; only the link's time relative to it matters."""
EXPERTS_SHARE = 0.4
"""Of that, the experts; they compute while others are still on their way."""


def decoded(routes: Routes, num_tokens: int) -> Trace:
    """The first whole sequences of so many tokens, as a trace of one token a step."""
    ends = routes.offsets[1:]
    num_sequences = min(int((ends < num_tokens).sum()) + 1, routes.num_sequences)
    some = routes.select(range(num_sequences))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "held_out.npz"
        np.savez(
            path,
            ids=some.expert_ids,
            probs=some.gate_weights,
            token_ids=some.token_ids,
            offsets=some.offsets,
        )
        return read_plain_ids(path, num_experts=routes.shape.num_experts)


def modelled_machine(ratio: float, top_k: int) -> Machine:
    """A machine whose link takes so many times as long for an expert as a layer computes."""
    return Machine(
        bytes_per_s=EXPERT_BYTES / (ratio * LAYER_S),
        latency_s=0.0,
        expert_bytes=EXPERT_BYTES,
        layer_s=(1 - EXPERTS_SHARE) * LAYER_S,
        expert_s=EXPERTS_SHARE * LAYER_S / top_k,
    )
