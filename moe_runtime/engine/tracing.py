"""Connects a model's forward passes to a trace recorder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moe_runtime.engine.experts import OffloadedExperts
from moe_runtime.tracing.recorder import TraceRecorder
from moe_runtime.types import ModelSignature


def attach_recorder(
    model: torch.nn.Module,
    modules: Iterable[OffloadedExperts],
    path: Path,
    signature: ModelSignature,
) -> TraceRecorder:
    """Records every forward pass of a model from now on.

    Raises:
        CheckpointError: the file cannot be written there.
    """
    recorder = TraceRecorder(path, signature)

    def begin_step(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _begin_step(recorder, args, kwargs)

    model.register_forward_pre_hook(begin_step, with_kwargs=True)
    for module in modules:
        module.recorder = recorder
    return recorder


def _begin_step(recorder: TraceRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    input_ids = kwargs.get("input_ids", args[0] if args else None)
    shape = kwargs["inputs_embeds"].shape[:2] if input_ids is None else input_ids.shape
    cache = kwargs.get("past_key_values")
    past = 0 if cache is None else int(cache.get_seq_length())
    if past == 0:
        recorder.begin_request(num_sequences=shape[0])
    positions = kwargs.get("position_ids")
    if positions is None or positions.shape != shape:
        positions = torch.arange(past, past + shape[1]).expand(shape)
    tokens = np.full(shape, -1) if input_ids is None else input_ids.cpu().numpy()
    recorder.begin_step(
        phase="decode" if past and shape[1] == 1 else "prefill",
        token_ids=tokens.reshape(-1),
        positions=positions.cpu().numpy().reshape(-1),
        sequences=np.repeat(np.arange(shape[0]), shape[1]),
    )
