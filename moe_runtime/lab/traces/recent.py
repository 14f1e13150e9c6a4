"""The latest routing of a model, kept between runs in the user's cache: what `auto` replays.

Only decode steps are kept: a prompt visits nearly every expert and streams past the cache.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import platformdirs

from moe_runtime.errors import CheckpointError
from moe_runtime.files import make_folders
from moe_runtime.lab.traces.format import (
    PHASES,
    TRACE_VERSION,
    Trace,
    absent_id,
    as_recorded,
    expert_dtype,
    read_trace,
    write_trace,
)
from moe_runtime.types import ModelSignature

KEPT_STEPS = 512
"""Decode steps in the file, the latest ones."""
RECORDED_STEPS = 256
"""Decode steps of one run that are recorded, the first ones: then recording costs nothing more."""
_MAX_BYTES = 256 << 20


def recent_path(signature: ModelSignature) -> Path:
    """Where the latest routing of a model lies, if there is any."""
    return cached_path("routing", signature)


def cached_path(folder: str, signature: ModelSignature, suffix: str = "") -> Path:
    """The file of a model in a folder of the user's cache."""
    name = (
        f"{signature.model_type}-{signature.num_layers}x{signature.num_experts}"
        f"-top{signature.top_k}-{signature.vocab_size}{suffix}.npz"
    )
    return platformdirs.user_cache_path("moe-runtime") / folder / name


def read_recent(signature: ModelSignature) -> Trace | None:
    """The latest routing of a model; None where none, or none that can be read, was kept."""
    try:
        trace = read_trace(recent_path(signature), max_bytes=_MAX_BYTES)
    except CheckpointError:
        return None
    return trace if trace.signature == signature and trace.num_steps else None


class RecentRouting:
    """Records the first decode steps of a run, as a ``TraceRecorder`` does whole ones.

    What cannot be kept is dropped: a cache that is missing or full must not fail a run.
    """

    def __init__(self, signature: ModelSignature) -> None:
        self._signature = signature
        self._dtype = expert_dtype(signature.num_experts)
        self._requests = 0
        self._running = 0
        self._steps: list[Trace] = []
        self._is_open = False

    @property
    def is_done(self) -> bool:
        """Whether enough was recorded."""
        return len(self._steps) >= RECORDED_STEPS

    def hold(self) -> None:
        """Nothing is held: of several runs at once the last one's routing is kept."""

    def begin_request(self, *, num_sequences: int = 1) -> None:
        """Begins a batch of prompts."""
        self._requests += self._running
        self._running = num_sequences

    def begin_step(
        self,
        *,
        phase: str,
        token_ids: npt.ArrayLike,
        positions: npt.ArrayLike,
        sequences: np.ndarray,
    ) -> None:
        """Begins a forward pass; prompts are left out."""
        self._is_open = phase == "decode" and len(self._steps) < RECORDED_STEPS
        if not self._is_open:
            return
        num_tokens = len(sequences)
        block = (num_tokens, self._signature.num_layers, self._signature.top_k)
        self._steps.append(
            Trace(
                version=TRACE_VERSION,
                signature=self._signature,
                step_phase=np.array([PHASES.index(phase)], np.uint8),
                step_start=np.array([0, num_tokens], np.int64),
                token_request=(sequences + self._requests).astype(np.int32),
                token_id=np.array(token_ids, np.int32),
                token_position=np.array(positions, np.int32),
                expert_ids=np.full(block, absent_id(self._dtype), self._dtype),
                gate_weights=np.zeros(block, np.float16),
            )
        )

    def routing(self, layer: int, expert_ids: npt.ArrayLike, weights: npt.ArrayLike) -> None:
        """Records where a layer sent the tokens of the step."""
        if self._is_open:
            absent = absent_id(self._dtype)
            ids, gates = as_recorded(np.asarray(expert_ids), np.asarray(weights), absent)
            self._steps[-1].expert_ids[:, layer, : ids.shape[1]] = ids
            self._steps[-1].gate_weights[:, layer, : ids.shape[1]] = gates

    def discard(self) -> None:
        """Forgets what was recorded."""
        self._steps, self._is_open = [], False

    def close(self) -> None:
        """Adds what was recorded to the file; the oldest steps make room for it."""
        steps, self._steps, self._is_open = self._steps, [], False
        if not steps:
            return
        before = read_recent(self._signature)
        if before is not None:
            first_new = int(before.token_request.max(initial=-1)) + 1
            steps = [
                before,
                *(replace(s, token_request=s.token_request + np.int32(first_new)) for s in steps),
            ]
        joined = _join(steps)
        kept = joined.steps(max(0, joined.num_steps - KEPT_STEPS), joined.num_steps)
        # requests are numbered anew, or the numbers would grow for as long as the cache lives
        requests = np.unique(kept.token_request, return_inverse=True)[1].astype(np.int32)
        path = recent_path(self._signature)
        try:
            make_folders(path.parent)
            write_trace(path, replace(kept, token_request=requests))
        except (OSError, CheckpointError):
            return


def _join(parts: list[Trace]) -> Trace:
    lengths = np.concatenate([np.diff(part.step_start) for part in parts])
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Trace.__dataclass_fields__
        if name not in ("version", "signature", "step_start", "step_update")
    }
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Trace(version=TRACE_VERSION, signature=parts[0].signature, step_start=starts, **columns)
