"""Remembers recent tokens and what followed them, and recalls what followed similar ones.

Legend: M remembered tokens, L layers, E experts of a layer, K experts that a token visits.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from moe_runtime.policies.prediction.base import LayerRouted, Shape, StepBegins
from moe_runtime.policies.prediction.limits import REMEMBERED_TOKENS

_SHARPNESS = 20.0
"""Exponent of the similarity: full agreement weighs e^20 times as much as none."""
_NUM_FOLLOWERS = 8
_DISCOUNT = 0.7
"""Of each further token that followed; after eight of them 6 % of the weight is left out."""
_LONGEST_STEP = 32
"""Tokens of a request that are remembered of one step: a prompt must not fill the memory."""


@dataclass(slots=True)
class _Request:
    """One running request: its last remembered tokens, the youngest last."""

    rows: deque[int] = field(default_factory=lambda: deque(maxlen=_NUM_FOLLOWERS + 1))
    token_id: int = -1
    overlap: np.ndarray | None = None  # [M] of its last token with all remembered ones


class Episodes:
    """A ring of the latest tokens of all requests, with their paths and what followed.

    Two moments are alike when their tokens, the tokens before, and the experts visited so far
    agree. What followed alike moments, weighted by likeness, predicts what follows now. Nothing is
    trained: a memory fills as requests are served.

    Args:
        shape: the sizes of the model.
        capacity: tokens to remember; M.
    """

    def __init__(self, shape: Shape, *, capacity: int = REMEMBERED_TOKENS) -> None:
        self._shape = shape
        self._capacity = capacity
        self._visited = np.zeros((shape.num_layers, shape.num_experts + 1, capacity), np.uint8)
        self._followed = np.zeros((shape.num_layers, capacity, shape.num_experts + 1), np.float32)
        self._token_id = np.full(capacity, -1, np.int64)
        self._token_before = np.full(capacity, -1, np.int64)
        self._row_before = np.zeros(capacity, np.int64)
        # Added to the likeness: only tokens whose followers are all known may be recalled.
        self._closed = np.full(capacity, -np.inf, np.float32)
        self._requests: dict[int, _Request] = {}
        self._next_row = 0
        self._weights = (1 - _DISCOUNT) * _DISCOUNT ** np.arange(_NUM_FOLLOWERS, dtype=np.float32)
        self._step: list[tuple[int, int, list[int], bool]] = []  # token, row, rows it follows, last
        self._queries: list[np.ndarray] = []
        self._before: list[np.ndarray] = []
        self._num_compared = 0

    def begin(self, event: StepBegins) -> None:
        """Opens a row for every token of the step that will be remembered."""
        self._step, self._queries, self._before = [], [], []
        self._num_compared = 0
        sequences = event.sequences
        for sequence in dict.fromkeys(sequences.tolist()):
            tokens = np.flatnonzero(sequences == sequence)[-_LONGEST_STEP:].tolist()
            request = self._requests.setdefault(sequence, _Request())
            for token in tokens:
                self._open_row(request, token, int(event.token_ids[token]), token == tokens[-1])

    def route(self, event: LayerRouted) -> None:
        """Notes where a layer sent the tokens, and compares their paths with all others."""
        layer, query = event.layer, 0
        visited, followed = self._visited[layer], self._followed[layer]
        self._num_compared += 1
        for token, row, followed_rows, is_last in self._step:
            experts = event.expert_ids[token]
            if is_last:
                self._queries[query] += visited[experts].sum(axis=0, dtype=np.uint8)
                query += 1
            visited[experts, row] = 1
            if followed_rows:
                weights = self._weights[: len(followed_rows), None]
                followed[np.array(followed_rows)[:, None], experts] += weights

    def recall(self, layer: int) -> np.ndarray:
        """What followed moments like the present one.

        Args:
            layer: a layer that was just routed.

        Returns:
            ``[E]`` float32: for each expert the expected discounted uses by the next tokens, summed
            over the running requests; a request that visits an expert at every token adds 1.
        """
        total = np.zeros(self._shape.num_experts + 1, np.float32)
        num_agreements = self._num_compared * self._shape.top_k + 6
        full_path = self._shape.num_layers * self._shape.top_k
        for path, before in zip(self._queries, self._before, strict=True):
            likeness = path * np.float32(_SHARPNESS / num_agreements)
            likeness += before * np.float32(_SHARPNESS * 0.5 / full_path)
            likeness += self._closed
            highest = likeness.max()
            if np.isfinite(highest):
                weights = np.exp(likeness - highest)
                total += (weights @ self._followed[layer]) / weights.sum()
        return total[:-1]

    def finish(self, sequence: int) -> None:
        """Forgets that a request was running; what it did stays remembered."""
        self._requests.pop(sequence, None)

    def _open_row(self, request: _Request, token: int, token_id: int, is_last: bool) -> None:
        row = self._next_row
        self._next_row = (row + 1) % self._capacity
        self._visited[:, :, row] = 0
        self._followed[:, row] = 0
        self._closed[row] = -np.inf
        rows_before = [r for r in reversed(request.rows) if r != row][:_NUM_FOLLOWERS]
        if len(rows_before) == _NUM_FOLLOWERS:
            # The step that begins completes what followed the oldest of them; its last layers are
            # still to come, where it counts for slightly less.
            self._closed[request.rows[0]] = 0.0
        if is_last:
            agreement = 4.0 * (self._token_id == token_id) * (token_id >= 0)
            agreement += 2.0 * (self._token_before == request.token_id) * (request.token_id >= 0)
            self._queries.append(agreement.astype(np.float32))
            before = request.overlap
            self._before.append(
                np.zeros(self._capacity, np.float32) if before is None else before[self._row_before]
            )
            request.overlap = self._queries[-1]
        self._token_id[row] = token_id
        self._token_before[row] = request.token_id
        self._row_before[row] = request.rows[-1] if request.rows else row
        request.rows.append(row)
        request.token_id = token_id
        self._step.append((token, row, rows_before, is_last))
