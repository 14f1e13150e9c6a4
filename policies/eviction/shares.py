"""A share of the slots for every layer, each ordered by a policy of its own.

A model visits its layers in a fixed cycle. A single order over all layers would let the layers just
computed push out those that come next, although every layer is equally far away; a share for each
layer keeps what is useful in all of them.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence

import numpy as np

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, Watcher
from moe_runtime.policies.prediction.base import Event
from moe_runtime.types import ExpertKey


def even_shares(num_slots: int, num_layers: int) -> list[int]:
    """Splits slots over layers as evenly as whole slots allow; earlier layers get the remainder.

    Raises:
        ValueError: there is no layer, or a negative number of slots.
    """
    if num_layers < 1 or num_slots < 0:
        raise ValueError(f"cannot split {num_slots} slots over {num_layers} layers")
    each, remainder = divmod(num_slots, num_layers)
    return [each + (layer < remainder) for layer in range(num_layers)]


class LayerShares(EvictionPolicy[ExpertKey], has_rule=True):
    """An eviction policy for expert keys that lets a layer grow to its share and no further.

    A layer that has used up its share evicts one of its own experts. A layer below its share takes
    a slot from the layer that is furthest above its share.

    Args:
        make_policy: makes the policy of one layer.
        shares: how many experts each layer may hold.

    Attributes:
        layers: the policy of each layer; whoever holds one of them may find it replaced by
            ``restore``.
        watchers: those of the layers' policies, each once.
        counts_uses: whether it has to hear of every use itself, not only the layer's policy.
    """

    counts_uses = False

    def __init__(
        self, make_policy: Callable[[], EvictionPolicy[ExpertKey]], shares: Sequence[int]
    ) -> None:
        self._shares = list(shares)
        self._make_policy = make_policy
        self.layers = [make_policy() for _ in shares]
        self._find_watchers()
        self.may_decline = any(policy.may_decline for policy in self.layers)
        self.needs_no_events = all(policy.needs_no_events for policy in self.layers)
        rules = [policy.replay_rule for policy in self.layers]
        self.rule = rules[0] if all(rule == rules[0] for rule in rules) else None

    def access(self, keys: Sequence[ExpertKey], num_slots: int) -> int:
        """Serves one event of one layer from that layer's share; ``num_slots`` is not asked."""
        layer = keys[0].layer
        return self.layers[layer].access(keys, self._shares[layer])

    def access_all(self, events: Sequence[Sequence[ExpertKey]], num_slots: int) -> list[int]:
        """Serves layer after layer, where none of them can learn from the others' events."""
        if self.watcher and not self.needs_no_events:
            return super().access_all(events, num_slots)
        places: list[list[int]] = [[] for _ in self.layers]
        for place, keys in enumerate(events):
            places[keys[0].layer].append(place)
        hits = np.zeros(len(events), np.int64)
        for layer, mine in enumerate(places):
            of_layer = [events[place] for place in mine]
            hits[mine] = self.layers[layer].access_all(of_layer, self._shares[layer])
        return hits.tolist()

    @property
    def slots_by_layer(self) -> list[int]:
        """How many experts each layer may hold."""
        return list(self._shares)

    def most_held(self, keys: Sequence[ExpertKey], num_slots: int) -> int:
        """The share of the event's layer."""
        return self._shares[keys[0].layer]

    def share(self, layer: int) -> int:
        """How many experts the layer may hold."""
        return self._shares[layer]

    def room(self, layer: int) -> int:
        """How many more experts the layer may hold before its share is used up."""
        return max(0, self._shares[layer] - len(self.layers[layer]))

    def touch(self, key: ExpertKey) -> None:
        """Notes a use of a held key in its layer's order."""
        self.layers[key.layer].touch(key)

    def insert(self, key: ExpertKey) -> None:
        """Starts to hold a key in its layer's order."""
        self.layers[key.layer].insert(key)

    def declines(self, incoming: ExpertKey, victim: ExpertKey) -> bool:
        """Asks the layer's policy where both are of one layer; its share is granted otherwise."""
        same_layer = incoming.layer == victim.layer
        return same_layer and self.layers[incoming.layer].declines(incoming, victim)

    def decline(self, key: ExpertKey) -> None:
        """Notes a use of a key that its layer did not keep."""
        self.layers[key.layer].decline(key)

    def remove(self, key: ExpertKey) -> None:
        """Stops holding a key."""
        self.layers[key.layer].remove(key)

    def victim(self, evictable: Evictable, incoming: ExpertKey) -> ExpertKey | None:
        """Chooses from the incoming key's layer if its share is used up, else the fullest layer."""
        if self.room(incoming.layer) == 0:
            own = self.layers[incoming.layer].victim(evictable, incoming)
            if own is not None:
                return own
        layers = sorted(range(len(self.layers)), key=self._surplus, reverse=True)
        victims = (self.layers[layer].victim(evictable, incoming) for layer in layers)
        return next((key for key in victims if key is not None), None)

    def victim_within(
        self, layer: int, evictable: Evictable, incoming: ExpertKey
    ) -> ExpertKey | None:
        """Chooses from one layer only, whatever the shares."""
        return self.layers[layer].victim(evictable, incoming)

    def restore(self, keys: Collection[ExpertKey]) -> None:
        """Holds just these keys, after an exception may have cut any method short.

        A layer whose policy contradicts itself, or holds others, gets a new one.
        """
        for layer in range(len(self.layers)):
            own = [key for key in keys if key.layer == layer]
            if not self._holds(layer, own):
                policy = self._make_policy()
                for key in own:
                    policy.insert(key)
                self.layers[layer] = policy
        self._find_watchers()

    def check(self) -> None:
        """Proves that every key is held by its own layer's policy, and each policy's invariants."""
        for policy in self.layers:
            policy.check()

    def __len__(self) -> int:
        return sum(map(len, self.layers))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, ExpertKey) and key in self.layers[key.layer]

    def _holds(self, layer: int, keys: Collection[ExpertKey]) -> bool:
        """Whether a layer's policy is sound and holds just these keys."""
        policy = self.layers[layer]
        with contextlib.suppress(Exception):  # what is torn may raise anything
            policy.check()
            return len(policy) == len(keys) and all(key in policy for key in keys)
        return False

    def _find_watchers(self) -> None:
        watchers = {id(policy.watcher): policy.watcher for policy in self.layers}
        self.watchers = [one for one in watchers.values() if one is not None]
        self.watcher = _Watchers(self.watchers)

    def _surplus(self, layer: int) -> int:
        return len(self.layers[layer]) - self._shares[layer]


class _Watchers:
    """Tells several watchers what one was told."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers

    def __bool__(self) -> bool:
        return bool(self._watchers)

    def observe(self, event: Event) -> None:
        for watcher in self._watchers:
            watcher.observe(event)

    def finish(self, sequence: int) -> None:
        for watcher in self._watchers:
            watcher.finish(sequence)
