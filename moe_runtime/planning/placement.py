"""Placement policies by name: those of ``policies.placement``, and what a caller adds to them.

``research.placement_solvers`` adds ExFlow and MoETuner; the commands take those.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.config import nearest
from moe_runtime.planning.alignment import align
from moe_runtime.policies.placement import (
    EPLB,
    AntiCorrelation,
    Devices,
    Greedy,
    Placement,
    PlacementPolicy,
    RoundRobin,
    RoutingProfile,
)
from moe_runtime.policies.placement.scoring import PlacementScore, score_placement


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacementOptions:
    """What policies can be told; each reads what concerns it.

    Attributes:
        num_groups: groups of experts that stay on one node (EPLB).
        time_limit_s: seconds for searches and solvers; the best placement found by then counts.
        load_slack: how far loads may exceed the best balance for fewer hops.
        aligned: rename devices of each layer to save hops, where a policy looks at loads only.
    """

    num_groups: int = 1
    time_limit_s: float = 30.0
    load_slack: float = 0.1
    aligned: bool = True


Algorithms = Mapping[str, Callable[[PlacementOptions], PlacementPolicy]]
"""Name -> what makes the policy from its options."""

ALGORITHMS: Algorithms = {
    "round-robin": lambda options: RoundRobin(),
    "greedy": lambda options: Greedy(),
    "anti-correlation": lambda options: AntiCorrelation(),
    "eplb": lambda options: EPLB(num_groups=options.num_groups),
}
_LOADS_ONLY = frozenset({"greedy", "anti-correlation", "eplb"})


def place_experts(
    algorithm: str,
    profile: RoutingProfile,
    devices: Devices,
    *,
    num_replicas: int = 0,
    options: PlacementOptions | None = None,
    algorithms: Algorithms = ALGORITHMS,
) -> Placement:
    """Places experts by the named algorithm.

    Args:
        algorithm: a key of ``algorithms``.
        profile: what was seen of the routing.
        devices: where experts go.
        num_replicas: slots of a layer beyond one for each expert.
        options: see ``PlacementOptions``.
        algorithms: those to choose from.

    Raises:
        ValueError: no algorithm has this name (the message suggests the nearest), or sizes that do
            not fit each other or the algorithm.
    """
    check_algorithm(algorithm, algorithms)
    options = options or PlacementOptions()
    placement = algorithms[algorithm](options)(profile, devices, num_replicas=num_replicas)
    if options.aligned and algorithm in _LOADS_ONLY:
        placement = align(placement, profile, devices)
    return placement


def check_algorithm(algorithm: str, algorithms: Algorithms = ALGORITHMS) -> None:
    """Refuses names of no algorithm.

    Raises:
        ValueError: there is none; the message suggests the nearest.
    """
    if algorithm not in algorithms:
        raise ValueError(f"unknown algorithm {algorithm!r}: {nearest(algorithm, algorithms)}")


def split_window(ids_TLK: np.ndarray, fit_share: float) -> tuple[np.ndarray, np.ndarray]:
    """The stretch that a placement is made from, and the next one, which it is scored on.

    Raises:
        ValueError: either would be empty.
    """
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
    """Mean scores of random placements without replicas: what any placement should beat.

    Where the experts do not divide among the devices, the last slots stay empty.

    Args:
        ids_TLK: the routing that is scored.
        num_experts: of a layer.
        devices: where the experts lie.
        num_draws: placements that the mean is over.
        seed: of the placements.
        on_draw: called with the number of each placement, from 1, before it is scored.
    """
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
    """Random placements without replicas; see `random_score`."""
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
    """The mean of each number, over at least one score."""
    names = PlacementScore.__dataclass_fields__
    return PlacementScore(
        **{name: float(np.mean([getattr(score, name) for score in scores])) for name in names}
    )
