"""The contract of an eviction policy: it orders keys, and a store moves the bytes.

Each layer has a share of the slots and a policy of its own. A model visits its layers in a cycle,
so one order over all layers would evict those that come next.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from moe_runtime.policies.prediction.base import Event, Routes, Shape
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.policies.prediction.tracked import TrackedPredictor

K = TypeVar("K", bound=Hashable)

Evictable = Callable[[Hashable], bool]
"""Whether a key may be evicted: leased and arriving experts may not."""

Events = Sequence[Sequence[ExpertKey]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The model and the workload that a policy is made for."""

    shape: Shape
    training: Routes | None = None  # recorded sequences to learn from
    future: Events | None = None  # the keys of every event to come, for Belady's bounds
    predictor: TrackedPredictor | None = None  # used by this policy alone
    # cost of a miss of each expert, for example its bytes; only ratios matter. None: all equal.
    costs: Mapping[ExpertKey, float] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyChoice:
    """An eviction policy and why."""

    policy: str
    adaptive: bool  # whether the layers' shares of the slots move
    reason: str


class Watcher(Protocol):
    """Watches the routing for a policy; the policies of several layers may share one."""

    def observe(self, event: Event) -> None: ...  # before the layer's experts are used
    def finish(self, sequence: int) -> None: ...  # a request ended


class EvictionPolicy(ABC, Generic[K]):
    """Decides which resident key gives up its slot.

    A policy holds exactly the keys that were inserted and not removed since. It touches no tensors,
    bytes, clocks or threads, so that the same object runs in a live store and in a replayed trace.
    """

    # whether the policy may decline a newcomer, which is then used once and not kept. It decides
    # after the use, when keys of the same event may be evicted too.
    may_decline: bool = False
    watcher: Watcher | None = None  # must see every routing event

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        """Returns a function that makes the policy of one layer; they may share a watcher."""
        return cls

    @property
    def slots_by_layer(self) -> Sequence[int] | None:
        """Slots of each layer, where the policy divides them."""
        return None

    def most_held(self, keys: Sequence[K], num_slots: int) -> int:
        """Most keys of an event that may be held after it."""
        return num_slots

    @abstractmethod
    def touch(self, key: K) -> None:
        """Notes a use of a resident key."""

    @abstractmethod
    def insert(self, key: K) -> None:
        """Starts to hold a key, as just used."""

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether ``victim`` stays and ``incoming`` is not kept."""
        return False

    def decline(self, key: K) -> None:
        """Notes a use of a key that was not kept."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Stops holding a key."""

    @abstractmethod
    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """Chooses an evictable key to evict for ``incoming``, or None; changes no order."""

    def check(self) -> None:
        """Proves the policy's own invariants, where its state could contradict itself."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    def checked_victim(self, evictable: Evictable, incoming: K) -> K | None:
        """The victim; a ValueError if the policy does not hold it or may not evict it."""
        key = self.victim(evictable, incoming)
        if key is not None and not (key in self and evictable(key)):
            problem = "may not be evicted now" if key in self else "is not held"
            raise ValueError(f"{type(self).__name__}.victim chose {key}, which {problem}")
        return key

    def access(self, keys: Sequence[K], num_slots: int) -> int:
        """Serves one event of a demand-filled cache, as a store does with leases.

        Args:
            keys: distinct keys that are used together, those wanted most last.
            num_slots: keys that may be held. Where the event alone needs more, the first of the
                missing keys are used once and not kept, and held keys of the event stay.

        Returns:
            How many of the keys were held.
        """
        missing = [key for key in keys if key not in self]
        num_hits, num_before = len(keys) - len(missing), len(self)
        if self.may_decline:
            self._require_held(num_before + self._keep_the_best(keys, missing, num_slots))
            return num_hits
        missing = missing[max(0, len(keys) - self.most_held(keys, num_slots)) :]
        in_use = frozenset(keys)
        evicting = missing[max(0, num_slots - len(self)) :]
        for key in evicting:
            victim = self.checked_victim(lambda held: held not in in_use, key)
            if victim is None:
                raise ValueError(
                    f"{type(self).__name__}.victim found no key, but some may be evicted"
                )
            self.remove(victim)
        kept = set(missing)
        for key in keys:
            if key in kept:
                self.insert(key)
            elif key in self:
                self.touch(key)
        self._require_held(num_before - len(evicting) + len(kept))
        return num_hits

    def _require_held(self, number: int) -> None:
        if len(self) != number:
            raise ValueError(
                f"{type(self).__name__} has the length {len(self)}, but was given {number} keys "
                "that were not removed"
            )

    def _keep_the_best(self, keys: Sequence[K], missing: Sequence[K], num_slots: int) -> int:
        """Returns how many more keys are held than before."""
        num_more = 0
        for key in keys:
            if key in self:
                self.touch(key)
        for key in missing:
            if len(self) >= num_slots:
                victim = self.checked_victim(lambda _: True, key)
                if victim is None or self.declines(key, victim):
                    self.decline(key)
                    continue
                self.remove(victim)
                num_more -= 1
            self.insert(key)
            num_more += 1
        return num_more


Maker = Callable[[], EvictionPolicy[ExpertKey]]
"""Makes the policy of one layer."""


_GHOST_SHARE = 0.5
"""Evicted keys that a layer remembers, as a share of its slots."""
_USES_BETWEEN_MOVES = 64
"""Uses per slot of the cache before a share moves: fewer would be chance."""


def even_shares(num_slots: int, num_layers: int) -> list[int]:
    """Splits slots over layers as evenly as whole slots allow; earlier layers get the remainder."""
    if num_layers < 1 or num_slots < 0:
        raise ValueError(f"cannot split {num_slots} slots over {num_layers} layers")
    each, remainder = divmod(num_slots, num_layers)
    return [each + (layer < remainder) for layer in range(num_layers)]


class LayerShares(EvictionPolicy[ExpertKey]):
    """One policy per layer; a layer holds at most its share of the slots.

    A full layer evicts one of its own experts. A layer below its share takes a slot from the layer
    that is furthest above its share. With ``counts_uses``, ``touch`` of this object must be called,
    not that of the layer's policy.
    """

    counts_uses = False

    def __init__(
        self, make_policy: Callable[[], EvictionPolicy[ExpertKey]], shares: Sequence[int]
    ) -> None:
        self._shares, self._sharing = list(shares), range(len(shares))
        self._make_policy = make_policy
        self.clear()
        self.may_decline = any(policy.may_decline for policy in self.layers)

    def clear(self) -> None:
        """Forgets all keys; watchers that the layers share stay."""
        self.layers = [self._make_policy() for _ in self._shares]
        watchers = {id(policy.watcher): policy.watcher for policy in self.layers}
        self.watchers = [one for one in watchers.values() if one is not None]
        self.watcher = self if self.watchers else None

    def __bool__(self) -> bool:
        return True  # also without keys

    def observe(self, event: Event) -> None:
        for watcher in self.watchers:
            watcher.observe(event)

    def finish(self, sequence: int) -> None:
        for watcher in self.watchers:
            watcher.finish(sequence)

    def access(self, keys: Sequence[ExpertKey], num_slots: int) -> int:
        """Serves one event of one layer from that layer's share; ignores ``num_slots``."""
        layer = keys[0].layer
        return self.layers[layer].access(keys, self._shares[layer])

    @property
    def slots_by_layer(self) -> list[int]:
        return list(self._shares)

    def most_held(self, keys: Sequence[ExpertKey], num_slots: int) -> int:
        return self._shares[keys[0].layer]

    def share(self, layer: int) -> int:
        return self._shares[layer]

    def room(self, layer: int) -> int:
        """Experts that the layer may still add before its share is full."""
        return max(0, self._shares[layer] - len(self.layers[layer]))

    def divide(self, num_slots: int) -> None:
        """Divides slots evenly; a layer that holds more keeps it."""
        shares = dict(zip(self._sharing, even_shares(num_slots, len(self._sharing)), strict=True))
        self._shares = [shares.get(layer, 0) for layer in range(len(self.layers))]

    def keep_to(self, layers: Sequence[int]) -> LayerShares:
        """Divides the slots between these layers alone from now on."""
        self._sharing = layers
        self.divide(sum(self._shares))
        return self

    def touch(self, key: ExpertKey) -> None:
        self.layers[key.layer].touch(key)

    def insert(self, key: ExpertKey) -> None:
        self.layers[key.layer].insert(key)

    def declines(self, incoming: ExpertKey, victim: ExpertKey) -> bool:
        """Asks the layer's policy; a layer below its share declines nothing of its own."""
        same_layer = incoming.layer == victim.layer
        return same_layer and self.layers[incoming.layer].declines(incoming, victim)

    def decline(self, key: ExpertKey) -> None:
        self.layers[key.layer].decline(key)

    def remove(self, key: ExpertKey) -> None:
        self.layers[key.layer].remove(key)

    def victim(self, evictable: Evictable, incoming: ExpertKey) -> ExpertKey | None:
        """Chooses from the incoming key's layer if that is full, else from the fullest layer."""
        if self.room(incoming.layer) == 0:
            own = self.layers[incoming.layer].checked_victim(evictable, incoming)
            if own is not None:
                return own
        surplus = [len(held) - share for held, share in zip(self.layers, self._shares, strict=True)]
        layers = sorted(range(len(self.layers)), key=surplus.__getitem__, reverse=True)
        victims = (self.layers[n].checked_victim(evictable, incoming) for n in layers)
        return next((key for key in victims if key is not None), None)

    def victim_within(
        self, layer: int, evictable: Evictable, incoming: ExpertKey
    ) -> ExpertKey | None:
        return self.layers[layer].checked_victim(evictable, incoming)

    def check(self) -> None:
        for policy in self.layers:
            policy.check()

    def __len__(self) -> int:
        return sum(map(len, self.layers))

    def __contains__(self, key: object) -> bool:
        return isinstance(key, ExpertKey) and key in self.layers[key.layer]


class AdaptiveShares(LayerShares):
    """Moves slots to the layers that use recently evicted experts most; the sum stays.

    Such a use is a miss that a slightly larger share would have saved. A slot moves only if the
    counts differ by more than chance explains.

    Args:
        smallest: least share of a layer: the experts of a token.
        worths: worth of a saved miss of each layer; only ratios matter. Default: 1 each.
    """

    counts_uses = True

    def __init__(
        self,
        make_policy: Callable[[], EvictionPolicy[ExpertKey]],
        shares: Sequence[int],
        *,
        smallest: int,
        worths: Sequence[float] | None = None,
    ) -> None:
        super().__init__(make_policy, shares)
        self._worths = [1.0] * len(shares) if worths is None else list(worths)
        self._smallest = smallest
        self._num_slots = sum(self._shares)
        self._ghosts: list[OrderedDict[ExpertKey, None]] = [OrderedDict() for _ in shares]
        self._saved = [0.0] * len(self._shares)
        self._num_uses = 0

    def divide(self, num_slots: int) -> None:
        super().divide(num_slots)
        self._num_slots = num_slots

    def touch(self, key: ExpertKey) -> None:
        super().touch(key)
        self._count_use()

    def insert(self, key: ExpertKey) -> None:
        super().insert(key)
        if key in self._ghosts[key.layer]:
            del self._ghosts[key.layer][key]
            self._saved[key.layer] += 1
        self._count_use()

    def remove(self, key: ExpertKey) -> None:
        super().remove(key)
        ghosts = self._ghosts[key.layer]
        ghosts[key] = None
        # one more: a victim leaves before the newcomer, which may be a ghost, enters
        while len(ghosts) > 1 + _GHOST_SHARE * self._shares[key.layer]:
            ghosts.popitem(last=False)

    def access(self, keys: Sequence[ExpertKey], num_slots: int) -> int:
        """Serves one event; all slots together are the limit, as in a store."""
        return EvictionPolicy.access(self, keys, self._num_slots)

    def check(self) -> None:
        """Proves that no held key is a ghost, and that shares only move."""
        super().check()
        assert sum(self._shares) == self._num_slots
        assert not any(key in self for ghosts in self._ghosts for key in ghosts)
        assert all(share >= 0 for share in self._shares)

    def _count_use(self) -> None:
        self._num_uses += 1
        if self._num_uses >= _USES_BETWEEN_MOVES * max(1, self._num_slots):
            self._num_uses = 0
            self._move_slot()

    def _move_slot(self) -> None:
        # Per remembered key, since a larger share remembers more of them.
        counts = [
            saved / max(1.0, _GHOST_SHARE * share)
            for saved, share in zip(self._saved, self._shares, strict=True)
        ]
        worth = [each * count for each, count in zip(self._worths, counts, strict=True)]
        givers = [n for n, share in enumerate(self._shares) if share > self._smallest]
        if givers:
            giver = min(givers, key=worth.__getitem__)
            taker = max(range(len(worth)), key=worth.__getitem__)
            chance = math.hypot(*(self._worths[n] * math.sqrt(counts[n]) for n in (taker, giver)))
            if worth[taker] - worth[giver] > 2 * chance:
                self._shares[taker] += 1
                self._shares[giver] -= 1
        self._saved = [saved / 2 for saved in self._saved]
