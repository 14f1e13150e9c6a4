"""The latest routing of a model, kept between runs in the user's cache, for `auto` to replay.

Only decoded tokens are kept: a prompt visits nearly every expert and streams past the cache.
"""

import contextlib
import hashlib
import os
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import platformdirs

from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.files import make_private_folder
from moe_runtime.lab.traces.format import Trace, join_traces, one_step, read_trace, write_trace
from moe_runtime.types import ModelSignature

KEPT_STEPS, KEPT_TOKENS = 512, 4096
"""Decode steps and tokens that a run keeps in memory at most, the latest ones."""
FILE_STEPS, FILE_TOKENS = 12288, 12288
"""The same for the file, which holds many runs; the latest step is always kept."""
BURST = 64
"""Passes recorded in a row: the first of a run, and later ones while all of them take at most
``MOST_SHARE`` of its time."""
MOST_SHARE, LAYER_S = 0.01, 2e-5
"""``LAYER_S`` is the time to record a layer on a processor of two cores."""
WRITE_EVERY_S = 300.0
"""Seconds between two writes of a run."""
_MAX_BYTES = 256 << 20
_DIGEST_BYTES = 6
_END_BYTES = 1 << 16
"""Bytes at the end of each file, which differ between checkpoints of one shape."""


def recent_path(signature: ModelSignature, checkpoint: Path) -> Path:
    """The file of a model's latest routing, there or not."""
    return cached_path("routing", signature, checkpoint)


def cached_path(folder: str, signature: ModelSignature, checkpoint: Path, suffix: str = "") -> Path:
    """The file of a checkpoint in a folder of the user's cache."""
    files = [checkpoint]
    if checkpoint.is_dir():
        files = [checkpoint / "config.json", *sorted(checkpoint.glob("*.safetensors"))]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END_BYTES))
            digest.update(f"{path.name} {size} ".encode(errors="surrogateescape") + file.read())
    name = (
        f"{signature.model_type}-{signature.num_layers}x{signature.num_experts}"
        f"-top{signature.top_k}-{signature.vocab_size}-{digest.hexdigest()}{suffix}.npz"
    )
    return platformdirs.user_cache_path("moe-runtime") / folder / name


def read_recent(signature: ModelSignature, checkpoint: Path) -> Trace | None:
    """The latest routing of a model; None if there is none or, with a warning, if it cannot be
    read."""
    return _read(recent_path(signature, checkpoint), signature)


class RecentRouting:
    """Records the latest decode steps of a run, with the methods of a ``TraceRecorder``."""

    def __init__(
        self,
        signature: ModelSignature,
        checkpoint: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
        on_kept: Callable[[Trace], object] | None = None,
    ) -> None:
        """``on_kept`` is called at the end with all kept routing, if some was added."""
        self._on_kept = on_kept
        self._signature = signature
        self._path = recent_path(signature, checkpoint)
        self._clock = clock
        self._begun_s = self._written_s = clock()
        self._requests = 0
        self._running = 0
        self._num_seen = 0  # passes that were looked at
        self._before: list[Trace] | None = None  # of earlier runs, once it was read
        self._steps: deque[Trace] = deque()
        # the layers' routing of each step, until it is written
        self._routed: deque[list[tuple[int, np.ndarray, np.ndarray]]] = deque()
        self._num_tokens = 0
        self._rows: slice | np.ndarray | None = None  # tokens of the step that are kept

    def wants_step(self) -> bool:
        """Whether to record the pass that begins."""
        self._rows = None
        now_s = self._clock()
        if now_s - self._written_s >= WRITE_EVERY_S:
            self._write()
        burst_s = (self._num_seen + BURST) * self._signature.num_layers * LAYER_S
        is_free = self._num_seen < BURST or self._num_seen % BURST > 0
        if is_free or burst_s <= MOST_SHARE * (now_s - self._begun_s):
            self._num_seen += 1
            return True
        return False

    def hold(self) -> None:
        """Does nothing: of several runs at once, the last one's routing is kept."""

    def begin_request(self, *, num_sequences: int = 1) -> None:
        self._requests += self._running
        self._running = num_sequences

    def begin_step(
        self, *, phase: str, token_ids: np.ndarray, positions: np.ndarray, sequences: np.ndarray
    ) -> None:
        """Begins a forward pass; prompts are left out."""
        rows: slice | np.ndarray = slice(None)
        if phase != "decode":
            _, place, count = np.unique(sequences, return_inverse=True, return_counts=True)
            rows = np.flatnonzero((count[place] == 1) & (positions > 0))
            if not rows.size:
                return
        self._rows = rows
        step = one_step(
            self._signature,
            phase="decode",
            requests=sequences[rows] + self._requests,
            token_ids=token_ids[rows],
            positions=positions[rows],
        )
        self._steps.append(step)
        self._routed.append([])
        self._num_tokens += step.num_tokens
        while len(self._steps) > KEPT_STEPS or self._num_tokens > KEPT_TOKENS:
            if len(self._steps) == 1:
                return
            self._num_tokens -= self._steps.popleft().num_tokens
            self._routed.popleft()

    def routing(self, layer: int, expert_ids: np.ndarray, weights: np.ndarray) -> None:
        """Records where a layer sent the tokens of the step."""
        if self._rows is not None:  # written into the step later: a layer waits for this
            self._routed[-1].append((layer, expert_ids[self._rows], weights[self._rows].copy()))

    def discard(self) -> None:
        self._steps.clear()
        self._routed.clear()
        self._num_tokens, self._rows = 0, None

    def close(self) -> None:
        """Adds the recorded steps to the file; the oldest steps make room."""
        kept = self._write()
        self.discard()
        if kept is not None and self._on_kept is not None:
            self._on_kept(kept)

    def _write(self) -> Trace | None:
        """Appends the recorded steps to those of earlier runs, and returns all."""
        self._written_s = self._clock()
        if not self._steps:
            return None
        for step, routed in zip(self._steps, self._routed, strict=True):
            for one in routed:
                step.record(*one)
            routed.clear()
        if self._before is None:
            before = _read(self._path, self._signature)
            self._before = [] if before is None else [join_traces([_latest(before)])]  # a copy
        first_new = max((int(b.token_request.max()) + 1 for b in self._before), default=0)
        own = [replace(s, token_request=s.token_request + np.int32(first_new)) for s in self._steps]
        kept = _latest(join_traces([*self._before, *own]))
        # requests are numbered anew, or the numbers would grow for as long as the cache lives
        requests = np.unique(kept.token_request, return_inverse=True)[1].astype(np.int32)
        with contextlib.suppress(OSError, CheckpointError):
            make_private_folder(self._path.parent)  # token ids are text
            write_trace(self._path, replace(kept, token_request=requests))
        return kept


def _read(path: Path, signature: ModelSignature) -> Trace | None:
    if not os.path.exists(path):
        return None
    try:
        trace = read_trace(path, max_bytes=_MAX_BYTES)
        if trace.signature != signature:
            raise CheckpointError(f"{path}: is of another model")
    except CheckpointError as error:
        text = f"the routing of earlier runs is not used: {error}"
        warnings.warn(text, MoERuntimeWarning, stacklevel=1)  # as for a lesson
        return None
    return trace if trace.num_steps else None


def _latest(trace: Trace) -> Trace:
    first = int(np.searchsorted(trace.step_start, trace.num_tokens - FILE_TOKENS))
    first = max(first, trace.num_steps - FILE_STEPS)
    return trace.steps(min(first, trace.num_steps - 1), trace.num_steps)
