"""Collects routing events while a model runs and writes them when it is done.

Finished steps go to a journal beside the file as they come, so that a crash loses only the last.

Legend: T tokens of one step, L layers, K experts a token visits.
"""

import io
import os
import time
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from moe_runtime.errors import CheckpointError
from moe_runtime.files import check_draft_path
from moe_runtime.lab.traces.format import (
    PHASES,
    JournalWriter,
    Trace,
    join_traces,
    one_step,
    save_columns,
    write_trace,
)
from moe_runtime.types import ModelSignature


class TraceRecorder:
    """Records the routing of every token of every step into one file.

    Call ``begin_request`` for each prompt, ``begin_step`` for each forward pass and ``routing`` for
    each layer of it. An event costs two small array copies; a token takes ``L * K * 3`` bytes (4
    when a layer has more than 255 experts) until the file is written by ``close``.

    Args:
        path: file to write, conventionally ``*.npz``. It is replaced only when the recording is
            closed, and never left half written; a recording without steps leaves it as it was. The
            journal of a killed recording gets another name (``MoERuntimeWarning``).
        expert_bytes: of the largest expert of the model, if that is known.
        trains: whether the forward passes belong to optimizer steps, whose numbers are recorded.
        block_tokens: tokens after which a block of finished steps is appended to the journal.
        block_s: seconds after which a block of any size is appended.

    Raises:
        CheckpointError: the file could not be written there, or another process has begun its
            journal. Found out now rather than after minutes of generation.
        ValueError: the model has more than 65535 experts a layer.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        signature: ModelSignature,
        *,
        expert_bytes: int | None = None,
        trains: bool = False,
        block_tokens: int = 256,
        block_s: float = 1.0,
    ) -> None:
        if signature.num_experts > 0xFFFF:
            raise ValueError(
                f"a trace holds at most {0xFFFF} experts a layer, got {signature.num_experts}"
            )
        self._path = Path(path)
        check_draft_path(path, "trace")
        self._signature = signature
        self._expert_bytes = expert_bytes
        self._closed = False
        self._first_request = 0
        self._num_requests = 0
        self._block_tokens = block_tokens
        self._block_s = block_s
        self._journal: JournalWriter | None = None
        self._journalled = (0, 0)  # bytes and steps, together: an exception may strike anywhere
        self._waiting_tokens = 0
        self._last_block_s = time.monotonic()
        self._trains = trains
        self._steps: list[Trace] = []  # of one step each

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def wants_step(self) -> bool:
        """Whether to record the pass that begins: always."""
        return True

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def begin_request(self, *, num_sequences: int = 1) -> None:
        """Starts a prompt, or a batch of them: each sequence gets the next request number."""
        if num_sequences < 1:
            raise ValueError(f"num_sequences must be at least 1, got {num_sequences}")
        if not self._closed:
            self._first_request = self._num_requests
            self._num_requests += num_sequences

    def begin_step(
        self,
        *,
        phase: str,
        token_ids: npt.ArrayLike,
        positions: npt.ArrayLike,
        sequences: npt.ArrayLike | None = None,
        update: int | None = None,
    ) -> None:
        """Starts a forward pass.

        Args:
            phase: ``"prefill"``, ``"decode"`` or, of training, ``"train"``.
            token_ids: ``[T]`` ids in the vocabulary, -1 where there is none.
            positions: ``[T]`` positions in their sequences.
            sequences: ``[T]`` sequence of the batch that each token belongs to; all 0 when omitted.
            update: in training, the number of the optimizer step, from 1 on and never falling.

        Raises:
            ValueError: the phase is not known, the lengths differ, or the optimizer step does not
                fit.
        """
        if phase not in PHASES:
            raise ValueError(f"phase must be one of {', '.join(PHASES)}, got {phase!r}")
        before = self._steps[-1].step_update if self._steps else None
        last = 1 if before is None else int(before[0])
        if self._trains != (update is not None) or (update is not None and update < last):
            wanted = f"a number from {last} on" if self._trains else "None outside of training"
            raise ValueError(f"update must be {wanted}, got {update}")
        if self._closed:
            return
        tokens = np.array(token_ids, dtype=np.int32)
        places = np.array(positions, dtype=np.int32)
        rows = np.zeros_like(tokens) if sequences is None else np.array(sequences, dtype=np.int32)
        if tokens.ndim != 1 or tokens.shape != places.shape or tokens.shape != rows.shape:
            raise ValueError(
                "token_ids, positions and sequences must be one-dimensional and equally long, got "
                f"shapes {tokens.shape}, {places.shape} and {rows.shape}"
            )
        self._journal_if_due()
        self._waiting_tokens += len(tokens)
        self._num_requests = max(self._num_requests, 1)
        self._steps.append(
            one_step(
                self._signature,
                phase=phase,
                requests=rows + np.int32(self._first_request),
                token_ids=tokens,
                positions=places,
                update=update,
                expert_bytes=self._expert_bytes,
            )
        )

    def routing(self, layer: int, expert_ids: npt.ArrayLike, weights: npt.ArrayLike) -> None:
        """Records where one layer sent the tokens of the current step.

        Args:
            layer: index among the Mixture-of-Experts layers.
            expert_ids: ``[T, K]`` (or fewer columns, for a layer that uses fewer experts), -1 for
                a choice of no expert.
            weights: ``[T, K]`` factors of the experts' outputs.

        Raises:
            ValueError: no step was begun, or layer, shape or ids do not fit the model.
        """
        if self._closed:
            return
        if not self._steps:
            raise ValueError("routing was called before begin_step")
        if not 0 <= layer < self._signature.num_layers:
            raise ValueError(f"layer must be below {self._signature.num_layers}, got {layer}")
        ids, gates = np.asarray(expert_ids), np.asarray(weights)
        num_tokens, _, top_k = self._steps[-1].expert_ids.shape
        if ids.shape != gates.shape or len(ids) != num_tokens or not 0 < ids.shape[-1] <= top_k:
            raise ValueError(
                f"expert_ids and weights must be [{num_tokens}, {top_k}], "
                f"got {ids.shape} and {gates.shape}"
            )
        if ids.size and not -1 <= ids.min() <= ids.max() < self._signature.num_experts:
            raise ValueError(
                f"expert_ids must lie in [-1, {self._signature.num_experts}), "
                f"got {ids.min()} to {ids.max()}"
            )
        self._steps[-1].record(layer, ids, gates)

    def hold(self) -> None:
        """Begins the journal, so that no other process can; otherwise the first steps do.

        From then on `close` or `discard` must be called.

        Raises:
            CheckpointError: another process has begun it, or it cannot be made.
        """
        if self._journal is None:
            self._journal = JournalWriter(self._path)

    def close(self) -> None:
        """Writes the file, if a step was recorded. Later calls do nothing.

        Raises:
            CheckpointError: the file cannot be written; finished steps are in the journal.
        """
        if self._closed:
            return
        if self._steps:
            self._closed = True
            self._journal_waiting()
            write_trace(self._path, join_traces(self._steps))
        self.discard()

    def discard(self) -> None:
        """Ends the recording and leaves the file as it was."""
        self._closed = True
        if self._journal is not None:
            self._journal.remove()

    def _journal_if_due(self) -> None:
        """Appends the finished steps to the journal when there are many, or some wait long."""
        now_s = time.monotonic()
        is_due = self._waiting_tokens >= self._block_tokens
        if not is_due and (not self._waiting_tokens or now_s - self._last_block_s < self._block_s):
            return
        self._journal_waiting()
        self._waiting_tokens = 0
        self._last_block_s = now_s

    def _journal_waiting(self) -> None:
        """Appends the finished steps that the journal lacks."""
        end, num_steps = self._journalled
        if num_steps == len(self._steps):
            return
        self.hold()
        assert self._journal is not None
        block = io.BytesIO()
        save_columns(block, join_traces(self._steps[num_steps:]), compressed=False)
        try:
            self._journalled = self._journal.append(block.getvalue(), end), len(self._steps)
        except CheckpointError:
            if not end:  # nothing in it can be read
                self._journal.remove()
                self._journal = None
            raise
