"""Puts weighted items into packs of equal size so that the packs weigh alike, many rows at once.

Legend: N rows (each packed on its own), I items of a row, P packs, M = I / P items a pack.
"""

import numpy as np

PACKINGS = ("greedy", "snake", "refined")
"""``greedy`` gives each item, heaviest first, to the lightest pack with room. ``snake`` deals the
sorted items to the packs forwards and backwards in turn, without looking at weights again.
``refined`` is greedy, then swaps items of the heaviest pack while that helps."""

_MAX_SWAPS = 64


def pack(weights_NI: np.ndarray, num_packs: int, *, packing: str = "greedy") -> np.ndarray:
    """Divides each row's items among packs of equal size.

    Args:
        weights_NI: ``[N, I]`` weight of each item.
        num_packs: P, which divides I.
        packing: one of ``PACKINGS``.

    Returns:
        ``[N, P, M]`` int64 items of each pack, heaviest first (refined: in no particular order).

    Raises:
        ValueError: the packing is not known, or the items do not divide among the packs.
    """
    weights = np.asarray(weights_NI, dtype=np.float64)
    num_rows, num_items = weights.shape
    if packing not in PACKINGS:
        raise ValueError(f"packing must be one of {', '.join(PACKINGS)}, got {packing!r}")
    if num_packs < 1 or num_items % num_packs:
        raise ValueError(f"{num_items} items do not divide among {num_packs} packs")
    if num_items == num_packs:
        # One item a pack: any order is as good, and the identity moves nothing.
        return np.tile(np.arange(num_items)[None, :, None], (num_rows, 1, 1))
    order = np.argsort(-weights, axis=1, kind="stable")
    if packing == "snake":
        return _snake(order, num_packs)
    packs = _greedy(weights, order, num_packs)
    return _refine(weights, packs) if packing == "refined" else packs


def _snake(order_NI: np.ndarray, num_packs: int) -> np.ndarray:
    rounds = order_NI.reshape(len(order_NI), -1, num_packs).copy()
    rounds[:, 1::2] = rounds[:, 1::2, ::-1]
    return rounds.transpose(0, 2, 1)


def _greedy(weights_NI: np.ndarray, order_NI: np.ndarray, num_packs: int) -> np.ndarray:
    """One step an item, all rows in each step: what a loop over rows and items would choose."""
    num_rows, num_items = weights_NI.shape
    room = num_items // num_packs
    flat_first = np.arange(num_rows) * num_packs
    # A step costs a handful of calls whatever the number of rows, so the steps work on flat
    # arrays with indices that are computed before the loop.
    sorted_IN = np.ascontiguousarray(np.take_along_axis(weights_NI, order_NI, axis=1).T)
    heaviness = np.zeros((num_rows, num_packs))
    flat_heaviness = heaviness.reshape(-1)
    filled = np.zeros(num_rows * num_packs, dtype=np.int64)
    places_IN = np.empty((num_items, num_rows), dtype=np.int64)
    for item in range(num_items):
        chosen = heaviness.argmin(axis=1)
        chosen += flat_first
        taken = filled[chosen]
        places_IN[item] = chosen * room + taken
        taken += 1
        filled[chosen] = taken
        # A full pack weighs infinitely much: it is never the lightest again.
        flat_heaviness[chosen] += np.where(taken == room, np.inf, sorted_IN[item])
    packs = np.empty(num_rows * num_items, dtype=np.int64)
    packs[places_IN.T] = order_NI
    return packs.reshape(num_rows, num_packs, room)


def _refine(weights_NI: np.ndarray, packs_NPM: np.ndarray) -> np.ndarray:
    """Swaps one item of the heaviest pack with one of another while the larger of both shrinks."""
    packs = packs_NPM.copy()
    num_rows, num_packs, room = packs.shape
    rows = np.arange(num_rows)
    weights = np.take_along_axis(weights_NI[:, None, :], packs, axis=2)
    totals = weights.sum(axis=2)
    for _ in range(_MAX_SWAPS):
        heavy = totals.argmax(axis=1)
        top = totals[rows, heavy]
        # moved[n, m, p, q]: what the heavy pack loses by giving its m-th item for p's q-th.
        moved = weights[rows, heavy][:, :, None, None] - weights[:, None, :, :]
        worse = np.maximum(top[:, None, None, None] - moved, totals[:, None, :, None] + moved)
        worse[rows, :, heavy] = np.inf
        best = worse.reshape(num_rows, -1).argmin(axis=1)
        gains = worse.reshape(num_rows, -1)[rows, best] < top * (1 - 1e-12)
        if not gains.any():
            break
        row, (mine, other, theirs) = (
            rows[gains],
            np.unravel_index(best[gains], (room, num_packs, room)),
        )
        here = heavy[gains]
        for table in (packs, weights):
            kept = table[row, here, mine].copy()
            table[row, here, mine] = table[row, other, theirs]
            table[row, other, theirs] = kept
        totals[row] = weights[row].sum(axis=2)
    return packs
