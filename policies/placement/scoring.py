"""How well a placement serves routing that it was not made from.

Legend: T tokens, L layers, K experts a token visits, E experts, G devices.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.policies.placement.base import Devices, Placement, count_by_layer

_TOKENS_AT_ONCE = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementScore:
    """Balance and hops over a stretch of routing."""

    balancedness: float  # mean over max load of the devices, averaged over layers; 1 is perfect
    worst_balancedness: float  # the same of the worst layer
    # share of a layer's tokens on its busiest device in a window, times the number of devices; the
    # highest over windows and layers ("Max Load"; 1 is perfect)
    max_load: float
    mean_max_load: float  # the same, averaged over windows and layers ("Avg Max Load")
    # share of ways that lead to another device, over all ways from an expert of a token in one
    # layer to an expert of the same token in the next
    hops: float
    primary_hops: float  # the same for the ways between first choices only: ExFlow's top-1 setting
    node_hops: float  # share of all ways that lead to another node
    # devices that hold at least one of a token's experts in a layer, on average: copies of a token
    # that a dispatcher sends which sends each device one
    devices_per_token: float
    # rows that travel for a token in a layer if tokens stay with their first expert (ExFlow): one
    # for its hop, two for each other choice elsewhere; 2 * K * (G - 1) / G if tokens return
    staying_rows: float


def score_placement(
    placement: Placement, ids_TLK: np.ndarray, devices: Devices, *, num_windows: int = 32
) -> PlacementScore:
    """Sends every token where the placement says and counts.

    Args:
        ids_TLK: ``[T, L, K]`` routing; ids outside ``[0, E)`` are slots that were not used.
    """
    ids = np.asarray(ids_TLK)
    if ids.ndim != 3 or 0 in ids.shape or ids.shape[1] != placement.num_layers:
        raise ValueError(
            f"ids_TLK must be [tokens, {placement.num_layers}, k], none 0, got {ids.shape}"
        )
    if devices.num_gpus != placement.num_gpus:
        raise ValueError(
            f"the placement has {placement.num_gpus} devices, the machine {devices.num_gpus}"
        )
    gpus = gpus_of_tokens(placement, ids)
    is_real = gpus >= 0
    by_layer = gpus.swapaxes(0, 1)
    loads = count_by_layer(by_layer, placement.num_gpus)
    if not loads.any():
        raise ValueError("ids_TLK have no expert, so there is nothing to score")
    windows = np.stack(
        [
            count_by_layer(part, placement.num_gpus)
            for part in np.array_split(by_layer, num_windows, axis=1)
        ]
    )
    # a layer that nobody visited, whole or in a window, is neither balanced nor not
    seen = loads[loads.any(axis=1)]
    balance = seen.mean(axis=1) / seen.max(axis=1)
    windows = windows[windows.any(axis=2)]
    peaks = windows.max(axis=1) / windows.mean(axis=1)
    hops, primary_hops, node_hops = _hop_shares(gpus, devices)
    return PlacementScore(
        balancedness=float(balance.mean()),
        worst_balancedness=float(balance.min()),
        max_load=float(peaks.max()),
        mean_max_load=float(peaks.mean()),
        hops=hops,
        primary_hops=primary_hops,
        node_hops=node_hops,
        devices_per_token=_distinct(gpus) / max(1, int(is_real.any(axis=2).sum())),
        staying_rows=_staying_rows(gpus, devices.num_gpus) / max(1, int(is_real[..., 0].sum())),
    )


def split_window(ids_TLK: np.ndarray, fit_share: float) -> tuple[np.ndarray, np.ndarray]:
    """The stretch that a placement is made from, and the next one, which it is scored on."""
    num_fit = round(fit_share * len(ids_TLK))
    if not 0 < num_fit < len(ids_TLK):
        raise ValueError(
            f"a share of {fit_share} of {len(ids_TLK)} tokens leaves nothing to place by or "
            "nothing to score on; record more tokens, or choose another share"
        )
    return ids_TLK[:num_fit], ids_TLK[num_fit:]


def random_score(
    ids_TLK: np.ndarray,
    num_experts: int,
    devices: Devices,
    *,
    num_draws: int = 5,
    seed: int = 0,
    on_draw: Callable[[int], None] = lambda number: None,
) -> PlacementScore:
    """Mean scores of random placements without replicas, as a baseline."""
    drawn = random_placements(
        ids_TLK.shape[1], num_experts, devices, num_draws=num_draws, seed=seed
    )
    scores = []
    for number, placement in enumerate(drawn, 1):
        on_draw(number)
        scores.append(score_placement(placement, ids_TLK, devices))
    return mean_score(scores)


def random_placements(
    num_layers: int, num_experts: int, devices: Devices, *, num_draws: int = 5, seed: int = 0
) -> Iterator[Placement]:
    random = np.random.default_rng(seed)
    width = -(-num_experts // devices.num_gpus) * devices.num_gpus
    for _ in range(num_draws):
        slots = np.stack([random.permutation(width) for _ in range(num_layers)])
        yield Placement(
            expert_of_slot=np.where(slots < num_experts, slots, -1),
            num_experts=num_experts,
            num_gpus=devices.num_gpus,
        )


def mean_score(scores: Sequence[PlacementScore]) -> PlacementScore:
    names = PlacementScore.__dataclass_fields__
    return PlacementScore(
        **{name: float(np.mean([getattr(score, name) for score in scores])) for name in names}
    )


def gpus_of_tokens(placement: Placement, ids_TLK: np.ndarray) -> np.ndarray:
    """``[T, L, K]`` device that each token's experts are computed on; -1 where there is none."""
    ids = ids_TLK.astype(np.int64)
    is_real = (ids >= 0) & (ids < placement.num_experts)
    experts = np.where(is_real, ids, 0)
    layers = np.arange(placement.num_layers)[None, :, None]
    turn = np.arange(len(ids))[:, None, None] % placement.copies[layers, experts]
    slots = placement.slots_of_expert[layers, experts, turn]
    return np.where(is_real, slots // placement.slots_per_gpu, -1)


def _hop_shares(gpus_TLK: np.ndarray, devices: Devices) -> tuple[float, float, float]:
    """Shares of ways to another device: all ways, those of first choices, and to another node."""
    hits, ways = np.zeros(3), np.zeros(3)
    # Every token has K * K ways from layer to layer: in parts, so that a long trace fits in memory.
    for part in np.array_split(gpus_TLK, -(-len(gpus_TLK) // _TOKENS_AT_ONCE)):
        here, there = part[:, :-1, :, None], part[:, 1:, None, :]
        both = (here >= 0) & (there >= 0)
        leaves = (here != there) & both
        crosses = (devices.node_of(here) != devices.node_of(there)) & both
        hits += (leaves.sum(), leaves[..., 0, 0].sum(), crosses.sum())
        ways += (both.sum(), both[..., 0, 0].sum(), both.sum())
    hops, primary_hops, node_hops = (hits / np.maximum(ways, 1)).tolist()
    return hops, primary_hops, node_hops


def _staying_rows(gpus_TLK: np.ndarray, num_gpus: int) -> float:
    """Rows that travel in all layers; tokens begin on any device."""
    first_TL = gpus_TLK[:, :, 0]
    # a token without a first choice stays where its last one was
    layers_TL = np.where(first_TL >= 0, np.arange(first_TL.shape[1]), 0)
    here_TL = np.take_along_axis(first_TL, np.maximum.accumulate(layers_TL, axis=1), axis=1)
    moves = (here_TL[:, 1:] != here_TL[:, :-1]) & (here_TL[:, :-1] >= 0)
    begun = (here_TL[:, -1] >= 0).sum() * (1 - 1 / num_gpus)
    hops = moves.sum() + begun
    others = (gpus_TLK[:, :, 1:] != here_TL[:, :, None]) & (gpus_TLK[:, :, 1:] >= 0)
    return float(hops + 2 * others.sum())


def _distinct(gpus_TLK: np.ndarray) -> int:
    """Number of devices that hold experts of a token in a layer, summed over all."""
    ordered = np.sort(gpus_TLK, axis=2)
    repeats = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    return int((ordered >= 0).sum() - repeats.sum())
