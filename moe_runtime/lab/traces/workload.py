"""A trace as a replay sees it: one event for every layer of every step, with its experts.

Legend: T tokens, L layers, K experts a token visits, N events, E experts of a layer.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_runtime.lab.traces.format import Trace
from moe_runtime.policies.eviction.base import Watcher
from moe_runtime.policies.prediction.base import LayerRouted, Predictor, StepBegins
from moe_runtime.types import ExpertKey


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests to an expert store, in order of time.

    Attributes:
        keys: ``[N]`` the distinct experts of every event. A step of one token keeps the gate's
            order; a step of several lists the most wanted last, as the store gets them.
        step: ``[N]`` int64, the step of each event.
        layer: ``[N]`` int64, the layer of each event.
        key_numbers: ``[U]`` int32, all keys one after another: layer times E plus expert.
        starts: ``[N + 1]`` int64, where each event's keys begin there.
    """

    trace: Trace
    keys: list[list[ExpertKey]]
    step: np.ndarray
    layer: np.ndarray
    key_numbers: np.ndarray
    starts: np.ndarray

    @property
    def num_events(self) -> int:
        """Layers visited over all steps."""
        return len(self.keys)

    @cached_property
    def num_keys(self) -> np.ndarray:
        """Experts of every event: ``[N]`` int64."""
        return np.diff(self.starts)

    @cached_property
    def mean_gates(self) -> np.ndarray:
        """Gate weight of every key, as the mean over the tokens of its step: ``[U]`` float64."""
        trace = self.trace
        if len(self.key_numbers) == trace.gate_weights.size and np.all(
            np.diff(trace.step_start) == 1
        ):
            return trace.gate_weights.astype(np.float64).ravel()
        return np.concatenate([np.zeros(0), *map(self._gates_of, range(self.num_events))])

    def _gates_of(self, event: int) -> np.ndarray:
        trace, layer = self.trace, int(self.layer[event])
        rows = trace.tokens_of(int(self.step[event]))
        sums = np.bincount(
            trace.expert_ids[rows, layer].ravel(),
            weights=trace.gate_weights[rows, layer].astype(np.float32).ravel(),
            minlength=trace.signature.num_experts,
        )
        numbers = self.key_numbers[self.starts[event] : self.starts[event + 1]]
        return sums[numbers - layer * trace.signature.num_experts] / (rows.stop - rows.start)

    @cached_property
    def sequence_starts(self) -> list[int]:
        """Events at which a step of another request begins, the first event included."""
        trace = self.trace
        first = np.minimum(trace.step_start[:-1], max(0, trace.num_tokens - 1))
        request = trace.token_request[first]
        begins = np.flatnonzero(np.diff(request, prepend=-1))
        return np.unique(np.searchsorted(self.step, begins)).tolist()

    @property
    def is_by_request(self) -> bool:
        """Whether requests come one after another: no step has several, and none comes back."""
        trace = self.trace
        changes = np.flatnonzero(np.diff(trace.token_request)) + 1
        are_apart = np.isin(changes, trace.step_start).all()
        return bool(are_apart) and len(changes) < max(1, len(np.unique(trace.token_request)))

    @cached_property
    def _ended(self) -> dict[int, list[int]]:
        """Requests by the first event after their last ones."""
        trace = self.trace
        step = np.repeat(np.arange(trace.num_steps), np.diff(trace.step_start))
        behind = np.searchsorted(self.step, step, side="right")
        last = dict(zip(trace.token_request.tolist(), behind.tolist(), strict=True))
        ended: dict[int, list[int]] = {}
        for request, event in last.items():
            ended.setdefault(event, []).append(request)
        return ended

    def begin(self, event: int, step: StepBegins, watchers: Iterable[Watcher | Predictor]) -> None:
        """Tells of a step, and of the requests that ended before it, as a loaded model does."""
        for watcher in watchers:
            for request in self._ended.get(event, ()):
                watcher.finish(request)
            watcher.observe(step)

    def routing(self, start: int, stop: int) -> Iterator[tuple[StepBegins | None, LayerRouted]]:
        """The events as policies and predictors get them."""
        trace, last_step = self.trace, -1
        ids = weights = np.zeros((0, 0, 0))
        num_experts = trace.signature.num_experts
        for number in range(start, stop):
            step, layer = int(self.step[number]), int(self.layer[number])
            begins = None
            if step != last_step:
                rows = trace.tokens_of(step)
                last_step = step
                begins = StepBegins(
                    sequences=trace.token_request[rows], token_ids=trace.token_id[rows]
                )
                ids = trace.expert_ids[rows].astype(np.int64)
                ids[ids == trace.absent] = num_experts
                weights = trace.gate_weights[rows].astype(np.float32)
            yield (
                begins,
                LayerRouted(layer=layer, expert_ids=ids[:, layer], gate_weights=weights[:, layer]),
            )


def workload_of(trace: Trace) -> Workload:
    """Lists the events of a trace."""
    num_experts = trace.signature.num_experts
    ordered = np.sort(trace.expert_ids, axis=-1)
    are_distinct = ordered.max(initial=0) < trace.absent and np.all(
        ordered[..., 1:] > ordered[..., :-1]
    )
    if are_distinct and np.all(np.diff(trace.step_start) == 1):
        num_tokens, num_layers, top_k = trace.expert_ids.shape
        first_of_layer = num_experts * np.arange(num_layers, dtype=np.int32)
        numbers = (trace.expert_ids + first_of_layer[:, None]).ravel()
        starts = top_k * np.arange(num_tokens * num_layers + 1)
        steps, layers = np.divmod(np.arange(num_tokens * num_layers), num_layers)
    else:
        parts = [np.zeros(0, np.int32)]
        places: list[tuple[int, int]] = []
        for step, layer, _ in trace.accesses():
            used = trace.expert_ids[trace.tokens_of(step), layer].ravel()
            experts = _by_wants(used[used != trace.absent])
            parts.append(experts + np.int32(num_experts * layer))
            places.append((step, layer))
        numbers = np.concatenate(parts)
        starts = np.cumsum([len(part) for part in parts])
        steps, layers = np.array(places, dtype=np.int64).reshape(-1, 2).T
    keys = _keys(trace, numbers.tolist(), starts.tolist())
    return Workload(trace, keys, steps, layers, numbers, starts)


def _by_wants(used: np.ndarray) -> np.ndarray:
    """Each expert once, by the number of its uses; equals by their last use."""
    experts, places, counts = np.unique(used[::-1], return_index=True, return_counts=True)
    return experts[np.lexsort((-places, counts))]


def _keys(trace: Trace, numbers: list[int], starts: list[int]) -> list[list[ExpertKey]]:
    signature = trace.signature
    named = [
        ExpertKey(layer, expert)
        for layer in range(signature.num_layers)
        for expert in range(signature.num_experts)
    ]
    flat = list(map(named.__getitem__, numbers))
    return [flat[start:stop] for start, stop in itertools.pairwise(starts)]
