"""Records the gates' choices in a training run: `run.trace`.

A step of the trace is the forward pass of a micro-batch, with the number of its optimizer step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.lab.traces.recorder import TraceRecorder
from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.export import hugging_face_family
from moe_runtime.training.examples import PADDING, READ
from moe_runtime.training.run_config import LoopConfig
from moe_runtime.types import ModelSignature

_COPIES = 2
"""Of the recorded data while the file is written."""


@dataclass(slots=True)
class _Pass:
    """The forward pass of one micro-batch: its windows as by `Batches.draw`, without the last
    column, and its layers' choices."""

    windows: np.ndarray
    routings: list[tuple[int, np.ndarray, np.ndarray]] = field(default_factory=list)


class TrainingTrace:
    """Hooks on a model's experts, active while micro-batches are computed.

    Micro-batches may be computed side by side, each in its own context; the trace has one after
    another. Passes outside `micro_batch` are not recorded.

    Args:
        experts: modules of routed experts in order, called with rows, ids and weights.
        last_step: the optimizer step after which the file is written and recording ends.
        expert_bytes: of the largest expert in the checkpoint, if there is one.
    """

    def __init__(
        self, path: Path, signature: ModelSignature, experts: Sequence[nn.Module], *,
        last_step: int, expert_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.path = path
        self._recorder = TraceRecorder(path, signature, expert_bytes=expert_bytes, trains=True)
        self._num_experts = signature.num_experts
        self._last_step = last_step
        self._passes: list[_Pass] = []
        self._current: ContextVar[_Pass | None] = ContextVar("pass", default=None)
        self._hooks = [
            module.register_forward_pre_hook(partial(self._routed, layer), with_kwargs=True)
            for layer, module in enumerate(experts)
        ]

    @contextlib.contextmanager
    def micro_batch(self, windows: Tensor) -> Iterator[None]:
        """The block is the forward pass of a micro-batch: ids `[B, C]`, or rows `[B, C, 3]` of
        documents, whose padding is not recorded."""
        if not self._hooks:
            yield
            return
        self._passes.append(_Pass(windows.numpy()))
        token = self._current.set(self._passes[-1])
        try:
            yield
        finally:
            self._current.reset(token)

    def finish_step(self, step: int) -> None:
        """Assigns the passes since the last call to an optimizer step, taken or skipped."""
        passes, self._passes = self._passes, []
        for recorded in passes if self._hooks else []:
            self._record(recorded, step)
        if step >= self._last_step:
            self.close()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._recorder.close()

    def _routed(
        self, layer: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        del module
        found = self._current.get()
        if found is None:
            return
        _, ids_TK, weights_TK = (*args, *kwargs.values())[:3]
        ids = ids_TK.cpu().numpy()
        ids = np.where((ids >= 0) & (ids < self._num_experts), ids, -1)
        found.routings.append((layer, ids, weights_TK.detach().float().cpu().numpy()))

    def _record(self, found: _Pass, step: int) -> None:
        windows = found.windows
        if windows.ndim == 2:
            positions = np.broadcast_to(np.arange(windows.shape[1]), windows.shape)
            windows = np.stack([windows, positions, np.full_like(windows, READ)], axis=-1)
        ids, positions, roles = windows[..., :3].reshape(-1, 3).T
        is_token = roles != PADDING
        sequences = np.cumsum(positions[is_token] == 0) - 1
        self._recorder.begin_request(num_sequences=int(sequences[-1]) + 1)
        self._recorder.begin_step(
            phase="train",
            token_ids=ids[is_token],
            positions=positions[is_token],
            sequences=sequences,
            update=step,
        )
        for layer, chosen, weights in found.routings:
            self._recorder.routing(layer, chosen[is_token], weights[is_token])


def signature_of_config(config: LanguageModelConfig) -> ModelSignature:
    """The signature of traces of a language model, and of its exported checkpoint."""
    if config.moe is None:
        raise UnsupportedModelError("a model without routed experts has nothing to trace")
    try:
        family = hugging_face_family(config)
    except UnsupportedModelError:
        family = "moe_runtime"
    return ModelSignature(
        model_type=family,
        num_layers=config.num_layers // (1 if config.moe.shortcut is None else 2),
        num_experts=config.moe.num_experts,
        top_k=config.moe.top_k,
        vocab_size=config.vocab_size or 1,
    )


def open_trace(
    path: Path, signature: ModelSignature, model: nn.Module, names: Sequence[str], *,
    first_step: int, num_steps: int, expert_bytes: int | None = None,
) -> TrainingTrace:  # fmt: skip
    """The trace of a run from a step on; a resumed run writes `NAME-from-STEP.npz`."""
    modules = [model.get_submodule(name) for name in names]
    widths = {getattr(module, "num_experts", signature.num_experts) for module in modules}
    if widths != {signature.num_experts}:
        raise UnsupportedModelError(f"a trace wants layers of equal width, got {sorted(widths)}")
    if first_step:
        path = path.with_name(f"{path.stem}-from-{first_step}{path.suffix}")
    last = first_step + num_steps if num_steps else 2**62
    return TrainingTrace(path, signature, modules, last_step=last, expert_bytes=expert_bytes)


def trace_bytes(config: LoopConfig, signature: ModelSignature) -> int:
    steps = min(config.run.steps, config.run.trace_steps or config.run.steps)
    tokens = steps * config.data.tokens_per_step
    id_bytes = 1 if signature.num_experts <= 0xFF else 2
    return _COPIES * tokens * (12 + signature.num_layers * signature.top_k * (id_bytes + 2))
