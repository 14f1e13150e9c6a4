"""Connects a model's forward passes to a timeline."""

from __future__ import annotations

import time
from typing import Any

import torch

from moe_runtime.inference.routing_record import Step, read_step
from moe_runtime.inference.timed_store import TimedStore
from moe_runtime.lab.traces.timeline import Timeline
from moe_runtime.memory.residency import ExpertStore


def attach_timeline(model: torch.nn.Module, store: ExpertStore[Any], timeline: Timeline) -> None:
    """Notes every forward pass from now on."""
    assert isinstance(store, TimedStore)
    begun: list[tuple[float, Step]] = []

    def begin_step(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begun[:] = [(time.perf_counter(), read_step(args, kwargs))]
        store.begin_dense()

    def end_step(*_: Any) -> None:
        now_s = time.perf_counter()
        store.end_dense(now_s)
        begin_s, step = begun.pop()
        timeline.slice(step.phase, begin_s, now_s, tokens=len(step.token_ids))
        timeline.flush()

    model.register_forward_pre_hook(begin_step, with_kwargs=True)
    model.register_forward_hook(end_step)
