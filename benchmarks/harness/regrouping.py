"""ExpertFlow's token scheduler: regroup two batches so that each touches fewer experts.

He et al., arXiv 2410.17954. Sequences whose next tokens take similar paths are decoded together.
`benchmarks/regrouping.py` asks what that would save a server here.

Legend: N sequences of both batches, L layers, E experts.
"""

from dataclasses import dataclass

import numpy as np

MAX_ROUNDS = 20
"""Rounds of assigning and choosing new centres; the cost rarely falls after a few."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Regrouping:
    """Two batches of equal size (the first one larger by one for an odd number of sequences).

    Attributes:
        first: numbers of the sequences in the first batch, ascending.
        second: those in the second one.
        cost: experts that the two batches touch, summed over layers and batches.
        cost_before: the same for the batches as they were given.
    """

    first: np.ndarray
    second: np.ndarray
    cost: int
    cost_before: int


def regroup(paths_NLE: np.ndarray, *, max_rounds: int = MAX_ROUNDS) -> Regrouping:
    """Splits sequences into two batches that touch few experts.

    Two clusters of fixed size around medoids, by the share of experts that two paths agree on, then
    exchanges of pairs that lower the number of touched experts. Never worse than what was given;
    deterministic.

    Args:
        paths_NLE: ``[N, L, E]`` bool, the experts that each sequence's next token is expected to
            visit; the first half of the rows is the first batch.
        max_rounds: most rounds of either part.

    Raises:
        ValueError: there are fewer than two sequences, or the array is not ``[N, L, E]``.
    """
    if paths_NLE.ndim != 3 or len(paths_NLE) < 2:
        raise ValueError(f"expected paths [N, L, E] of two or more, got {paths_NLE.shape}")
    flat_NX = paths_NLE.reshape(len(paths_NLE), -1).astype(bool)
    half = (len(flat_NX) + 1) // 2
    given = np.arange(len(flat_NX)) < half
    candidates = [given, _cluster(flat_NX, half, max_rounds)]
    improved = [_exchange(flat_NX, side, max_rounds) for side in candidates]
    best = min(improved, key=lambda side: _cost(flat_NX, side))
    return Regrouping(
        first=np.flatnonzero(best),
        second=np.flatnonzero(~best),
        cost=_cost(flat_NX, best),
        cost_before=_cost(flat_NX, given),
    )


def _cost(flat_NX: np.ndarray, side: np.ndarray) -> int:
    return int(flat_NX[side].any(axis=0).sum() + flat_NX[~side].any(axis=0).sum())


def _cluster(flat_NX: np.ndarray, half: int, max_rounds: int) -> np.ndarray:
    """Membership in the first of two clusters of fixed sizes around medoids: ``[N]`` bool."""
    paths = flat_NX.astype(np.float32)
    differing = paths @ (1 - paths).T
    similarity_NN = 1.0 - (differing + differing.T) / flat_NX.shape[1]
    centres = np.unravel_index(int(similarity_NN.argmin()), similarity_NN.shape)
    side = np.zeros(len(flat_NX), dtype=bool)
    for _ in range(max_rounds):
        preference = similarity_NN[:, centres[0]] - similarity_NN[:, centres[1]]
        side = np.zeros(len(flat_NX), dtype=bool)
        side[np.argsort(-preference, kind="stable")[:half]] = True
        chosen = tuple(_medoid(similarity_NN, np.flatnonzero(s)) for s in (side, ~side))
        if chosen == tuple(map(int, centres)):
            break
        centres = chosen
    return side


def _medoid(similarity_NN: np.ndarray, members: np.ndarray) -> int:
    return int(members[similarity_NN[np.ix_(members, members)].sum(axis=1).argmax()])


def _exchange(flat_NX: np.ndarray, side: np.ndarray, max_rounds: int) -> np.ndarray:
    """Exchanges the best pair as long as that touches fewer experts."""
    side = side.copy()
    for _ in range(max_rounds):
        gains = _exchange_gains(flat_NX, side)
        best = np.unravel_index(int(gains.argmax()), gains.shape)
        if gains[best] <= 0:
            break
        leaving, coming = np.flatnonzero(side)[best[0]], np.flatnonzero(~side)[best[1]]
        side[leaving], side[coming] = False, True
    return side


def _exchange_gains(flat_NX: np.ndarray, side: np.ndarray) -> np.ndarray:
    """How many experts fewer are touched when a member of each side moves over."""
    first, second = flat_NX[side], flat_NX[~side]
    counts = first.sum(axis=0), second.sum(axis=0)
    before = sum(int((count > 0).sum()) for count in counts)
    gains = np.empty((len(first), len(second)), dtype=np.int64)
    for row, leaving in enumerate(first):
        moved = leaving.astype(np.int64) - second
        after = ((counts[0] - moved) > 0).sum(axis=1) + ((counts[1] + moved) > 0).sum(axis=1)
        gains[row] = before - after
    return gains
