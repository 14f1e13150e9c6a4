"""Replays a workload through an eviction policy: the object that runs live, and no torch."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moe_runtime.lab.traces.workload import Workload
from moe_runtime.policies.eviction import EvictionPolicy
from moe_runtime.policies.eviction.base import Events
from moe_runtime.policies.eviction.compiled import count_hits, rule_of
from moe_runtime.types import ExpertKey

MakePolicy = Callable[[Events], EvictionPolicy[ExpertKey]]
"""Makes an empty policy for a run of events; only bounds may look at them."""


@dataclass(frozen=True, eq=False)
class DemandReplay:
    """A replay without prefetching; ``hits`` ``[N]`` counts resident experts of each event."""

    workload: Workload
    hits: np.ndarray
    loaded_bytes: int | None = None

    @property
    def num_hits(self) -> int:
        """Experts that were resident when they were asked for."""
        return int(self.hits.sum())

    @property
    def num_accesses(self) -> int:
        return int(self.workload.num_keys.sum())

    @property
    def hit_rate(self) -> float:
        """Share of the experts asked for that were resident."""
        return _ratio(self.num_hits, self.num_accesses)

    @property
    def all_resident_rate(self) -> float:
        """Share of the events all of whose experts were resident."""
        return _ratio(int((self.hits == self.workload.num_keys).sum()), self.workload.num_events)

    @property
    def loads_per_event(self) -> float:
        """Experts moved for a layer of a step."""
        return _ratio(self.num_accesses - self.num_hits, self.workload.num_events)

    def hit_rate_by_layer(self) -> np.ndarray:
        """``[L]`` float64, 0 where a layer was never visited."""
        layer, num_layers = self.workload.layer, self.workload.trace.signature.num_layers
        hits = np.bincount(layer, weights=self.hits, minlength=num_layers)
        asked = np.bincount(layer, weights=self.workload.num_keys, minlength=num_layers)
        return np.divide(hits, asked, out=np.zeros(num_layers), where=asked > 0)


def replay_demand(
    workload: Workload,
    make_policy: MakePolicy,
    num_slots: int,
    *,
    reset_per_sequence: bool = False,
    sizes: Mapping[ExpertKey, int] | None = None,
) -> DemandReplay:
    """Replays without prefetching: every miss is loaded on demand."""
    if reset_per_sequence and not workload.is_by_request:
        raise ValueError(
            "reset empties the cache at the beginning of each request, and requests of this trace "
            "run at the same time; leave reset out, or replay one at a time (side by side 1)"
        )
    bounds = [*(workload.sequence_starts if reset_per_sequence else [0]), workload.num_events]
    counted = None
    if sizes is None:
        counted = _follow_rule(workload, make_policy(workload.keys), num_slots, bounds)
    if counted is not None:
        return DemandReplay(workload, counted)
    return ask_policy(workload, make_policy, num_slots, bounds, sizes)


def ask_policy(
    workload: Workload,
    make_policy: MakePolicy,
    num_slots: int,
    bounds: Sequence[int],
    sizes: Mapping[ExpertKey, int] | None = None,
) -> DemandReplay:
    """Serves all events with policy objects, a new one from each of the bounds to the next."""
    hits: list[int] = []
    loaded_bytes = 0
    for start, stop in itertools.pairwise(bounds):
        events = workload.keys[start:stop]
        policy = make_policy(events)
        watcher, access = policy.watcher, policy.access
        if not watcher and sizes is None:
            hits += [access(keys, num_slots) for keys in events]
            continue
        for number, (begins, routed) in enumerate(workload.routing(start, stop), start):
            keys = workload.keys[number]
            if watcher:
                if begins is not None:
                    workload.begin(number, begins, [watcher])
                watcher.observe(routed)
            if sizes is not None:
                loaded_bytes += sum(sizes[key] for key in keys if key not in policy)
            hits.append(access(keys, num_slots))
    found = np.array(hits, dtype=np.int64)
    return DemandReplay(workload, found, None if sizes is None else loaded_bytes)


def _follow_rule(
    workload: Workload, policy: EvictionPolicy[ExpertKey], num_slots: int, bounds: Sequence[int]
) -> np.ndarray | None:
    signature, rule = workload.trace.signature, rule_of(policy)
    if rule is None or not workload.num_events:
        return None
    weights = None
    if rule.weights is not None:
        places = itertools.product(range(signature.num_layers), range(signature.num_experts))
        weights = np.array([rule.weights.get(ExpertKey(*place), 0) for place in places])
    is_pool = policy.slots_by_layer is None
    return count_hits(
        rule,
        workload.key_numbers,
        workload.starts,
        bounds,
        num_slots=policy.slots_by_layer or [num_slots],
        num_keys=signature.num_experts * (signature.num_layers if is_pool else 1),
        layer_keys=signature.num_experts,
        weights=weights,
        gates=workload.mean_gates if rule.needs_gates else None,
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
