"""What can be read off a trace without replaying it: loads, popularity, reuse distances.

Legend: T tokens, L layers, E experts of a layer, K experts that a token visits.
"""

import numpy as np

from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.workload import Workload


def expert_loads(trace: Trace) -> np.ndarray:
    """Share of the tokens that visit each expert: ``[L, E]`` float64."""
    num_layers, num_experts = trace.signature.num_layers, trace.signature.num_experts
    loads = np.zeros((num_layers, num_experts))
    for layer in range(num_layers):
        ids = trace.expert_ids[:, layer].ravel()
        loads[layer] = np.bincount(ids[ids != trace.absent], minlength=num_experts)
    return loads / max(1, trace.num_tokens)


def popularity_curves(loads_LE: np.ndarray) -> np.ndarray:
    """Share of a layer's visits that go to its n most visited experts: ``[L, E + 1]``, n from 0."""
    ranked = -np.sort(-loads_LE, axis=1)
    totals = np.maximum(ranked.sum(axis=1, keepdims=True), np.finfo(float).tiny)
    return np.pad(np.cumsum(ranked / totals, axis=1), ((0, 0), (1, 0)))


def reuse_distances(workload: Workload) -> np.ndarray:
    """How many other experts of its layer were used since an expert was used last.

    This is the place of an expert in its layer's order by recency (Mattson et al., "Evaluation
    Techniques for Storage Hierarchies", 1970): an LRU cache with more slots than the distance holds
    it. All experts of an event are looked up before any of them is renewed.

    Returns:
        ``[L, E + 1]`` int64: accesses by distance; the last column counts first uses.
    """
    signature = workload.trace.signature
    num_experts = signature.num_experts
    counts = np.zeros((signature.num_layers, num_experts + 1), np.int64)
    last_use = np.full((signature.num_layers, num_experts), -1, np.int64)
    stamp = 0
    for keys in workload.keys:
        layer = keys[0].layer
        stamps = last_use[layer]
        experts = np.fromiter((key.expert for key in keys), np.int64, count=len(keys))
        own = stamps[experts]
        distances = (stamps > own[:, None]).sum(axis=1)
        distances[own < 0] = num_experts
        np.add.at(counts[layer], distances, 1)
        stamps[experts] = stamp + np.arange(len(experts))
        stamp += len(experts)
    return counts


def token_overlap(trace: Trace) -> np.ndarray:
    """Share of a token's experts that the token before, of the same request, visited: ``[L]``.

    nan where no request has two tokens.
    """
    order = np.lexsort((trace.token_position, trace.token_request))
    ids = trace.expert_ids[order].astype(np.int64)
    follows = np.diff(trace.token_request[order]) == 0
    now, before = ids[1:][follows], ids[:-1][follows]
    known = now != trace.absent
    shared = (now[..., :, None] == before[..., None, :]).any(axis=-1) & known
    visits = known.sum(axis=(0, 2))
    return np.divide(
        shared.sum(axis=(0, 2)), visits, out=np.full(len(visits), np.nan), where=visits > 0
    )
