"""The contract of an eviction policy: it orders keys; the store that asks it moves the bytes.

Layers have shares of the slots, each ordered by a policy of its own: a model visits its layers in a
cycle, and one order over all of them would evict those that come next.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

from moe_runtime.policies.prediction.base import Event, Routes, Shape
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.policies.prediction.tracked import TrackedPredictor

K = TypeVar("K", bound=Hashable)

Evictable = Callable[[Hashable], bool]
"""Says whether a key may be chosen: leased and arriving experts may not."""

Events = Sequence[Sequence[ExpertKey]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What policies may be told about the model and the workload when they are made."""

    shape: Shape
    training: Routes | None = None  # recorded sequences to learn from
    future: Events | None = None  # the keys of every event to come, for Belady's bounds
    predictor: TrackedPredictor | None = None  # not shared: the policy passes every event on to it
    # what a miss of each expert costs, such as the bytes to be read; only ratios matter. None where
    # all cost the same.
    costs: Mapping[ExpertKey, float] | None = None

    @property
    def cost_of(self) -> Callable[[Any], float] | None:
        return None if self.costs is None else self.costs.__getitem__


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyChoice:
    """An eviction policy and why."""

    policy: str
    adaptive: bool  # whether the layers' shares of the slots move
    reason: str


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """All that a policy does which starts empty, for the compiled replay."""

    name: str
    # the rule's one number: the share that SLRU protects, the half-life of ageing, or the weight of
    # the present step in MRS
    parameter: float = 0.0
    weights: Mapping[Any, float] | None = None  # of static pinning; a key that is absent has 0


class Watcher(Protocol):
    """What must see all routing for a policy to decide; the layers' policies may share one."""

    def observe(self, event: Event) -> None:
        """Notes a step or a layer's routing, before the layer's experts are used."""
        ...

    def finish(self, sequence: int) -> None:
        """Ends a request."""
        ...


class EvictionPolicy(ABC, Generic[K]):
    """Decides which resident key gives up its slot.

    A policy holds exactly the keys that were inserted and not removed since. It touches no tensors,
    bytes, clocks or threads, so that the same object runs in a live store and in a replayed trace.
    """

    # the policy may rather keep what it holds than a newcomer, which is then used once and not
    # kept. It is asked after the use, when keys of the same event may go too.
    may_decline: bool = False
    watcher: Watcher | None = None  # must see every routing event
    # says all that the policy does, where the compiled replay can do the same. A class that has one
    # names ``rule`` in its own body; a subclass does not inherit it, since it may do something
    # else.
    rule: ReplayRule | None = None

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        """Makes the maker of this policy's orderings, and what they share."""
        return cls

    @property
    def replay_rule(self) -> ReplayRule | None:
        """The rule, unless a subclass inherited it."""
        return self.rule if "rule" in vars(type(self)) else None

    @property
    def slots_by_layer(self) -> Sequence[int] | None:
        """Slots of each layer, where the policy divides them."""
        return None

    def most_held(self, keys: Sequence[K], num_slots: int) -> int:
        """How many of an event's keys may be held after it, of all slots."""
        return num_slots

    @abstractmethod
    def touch(self, key: K) -> None:
        """Notes a use of a resident key."""

    @abstractmethod
    def insert(self, key: K) -> None:
        """Starts to hold a key, as just used."""

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether the policy would rather keep a victim than the key that needs its slot."""
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
        num_hits = len(keys) - len(missing)
        if self.may_decline:
            self._keep_the_best(keys, missing, num_slots)
            return num_hits
        missing = missing[max(0, len(keys) - self.most_held(keys, num_slots)) :]
        in_use = frozenset(keys)
        for key in missing[max(0, num_slots - len(self)) :]:
            victim = self.victim(lambda held: held not in in_use, key)
            assert victim is not None, "what is kept of the event fits, so another key is held"
            self.remove(victim)
        kept = set(missing)
        for key in keys:
            if key in kept:
                self.insert(key)
            elif key in self:
                self.touch(key)
        return num_hits

    def _keep_the_best(self, keys: Sequence[K], missing: Sequence[K], num_slots: int) -> None:
        for key in keys:
            if key in self:
                self.touch(key)
        for key in missing:
            if len(self) >= num_slots:
                victim = self.victim(lambda _: True, key)
                if victim is None or self.declines(key, victim):
                    self.decline(key)
                    continue
                self.remove(victim)
            self.insert(key)


Maker = Callable[[], EvictionPolicy[ExpertKey]]
"""Makes one ordering; what several of them share was made before."""


_GHOST_SHARE = 0.5
"""Evicted keys that a layer remembers, as a share of its slots: what a few more would have held."""
_USES_BETWEEN_MOVES = 64
"""Uses for each slot of the cache before the next move, so that a count means something."""


def even_shares(num_slots: int, num_layers: int) -> list[int]:
    """Splits slots over layers as evenly as whole slots allow; earlier layers get the remainder."""
    if num_layers < 1 or num_slots < 0:
        raise ValueError(f"cannot split {num_slots} slots over {num_layers} layers")
    each, remainder = divmod(num_slots, num_layers)
    return [each + (layer < remainder) for layer in range(num_layers)]


class LayerShares(EvictionPolicy[ExpertKey]):
    """An eviction policy for expert keys that lets a layer grow to its share and no further.

    A layer that has used up its share evicts one of its own experts. A layer below its share takes
    a slot from the layer that is furthest above its share. ``counts_uses``: it must see every use
    itself, not only the layer's policy.
    """

    counts_uses = False
    rule: ReplayRule | None = None

    def __init__(
        self, make_policy: Callable[[], EvictionPolicy[ExpertKey]], shares: Sequence[int]
    ) -> None:
        self._shares = list(shares)
        self._make_policy = make_policy
        self.layers = [make_policy() for _ in shares]
        self._find_watchers()
        self.may_decline = any(policy.may_decline for policy in self.layers)
        rules = [policy.replay_rule for policy in self.layers]
        self.rule = rules[0] if all(rule == rules[0] for rule in rules) else None

    def access(self, keys: Sequence[ExpertKey], num_slots: int) -> int:
        """Serves one event of one layer from that layer's share; ``num_slots`` is not asked."""
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
        """How many more experts the layer may hold before its share is used up."""
        return max(0, self._shares[layer] - len(self.layers[layer]))

    def divide(self, num_slots: int) -> None:
        """Divides slots evenly; a layer that holds more keeps it."""
        self._shares = even_shares(num_slots, len(self.layers))

    def touch(self, key: ExpertKey) -> None:
        self.layers[key.layer].touch(key)

    def insert(self, key: ExpertKey) -> None:
        self.layers[key.layer].insert(key)

    def declines(self, incoming: ExpertKey, victim: ExpertKey) -> bool:
        """Asks the layer's policy where both are of one layer; its share is granted otherwise."""
        same_layer = incoming.layer == victim.layer
        return same_layer and self.layers[incoming.layer].declines(incoming, victim)

    def decline(self, key: ExpertKey) -> None:
        self.layers[key.layer].decline(key)

    def remove(self, key: ExpertKey) -> None:
        self.layers[key.layer].remove(key)

    def victim(self, evictable: Evictable, incoming: ExpertKey) -> ExpertKey | None:
        """Chooses from the incoming key's layer if its share is used up, else the fullest layer."""
        if self.room(incoming.layer) == 0:
            own = self.layers[incoming.layer].victim(evictable, incoming)
            if own is not None:
                return own
        surplus = [len(held) - share for held, share in zip(self.layers, self._shares, strict=True)]
        layers = sorted(range(len(self.layers)), key=surplus.__getitem__, reverse=True)
        victims = (self.layers[layer].victim(evictable, incoming) for layer in layers)
        return next((key for key in victims if key is not None), None)

    def victim_within(
        self, layer: int, evictable: Evictable, incoming: ExpertKey
    ) -> ExpertKey | None:
        return self.layers[layer].victim(evictable, incoming)

    def restore(self, keys: Collection[ExpertKey]) -> None:
        """Holds just these keys, after an exception may have cut any method short."""
        for layer in range(len(self.layers)):
            own = [key for key in keys if key.layer == layer]
            if not self._holds(layer, own):
                policy = self._make_policy()
                for key in own:
                    policy.insert(key)
                self.layers[layer] = policy
        self._find_watchers()

    def check(self) -> None:
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


class AdaptiveShares(LayerShares):
    """Moves slots from the layer whose lately evicted experts are missed least to the one that
    misses them most; the sum stays.

    A use of an expert that was evicted lately is a miss that a slightly larger share would have
    saved. A slot moves only when the counts differ by more than chance explains.

    Args:
        smallest: no layer's share falls below; a token's experts must fit.
        worths: what a saved miss of each layer is worth; only ratios matter. One each when omitted.
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
        # One more than counts: room is made before the newcomer, which may be a ghost, comes in.
        while len(ghosts) > 1 + _GHOST_SHARE * self._shares[key.layer]:
            ghosts.popitem(last=False)

    def access(self, keys: Sequence[ExpertKey], num_slots: int) -> int:
        """Serves one event; the slots of all layers together are the limit, as in a store."""
        return EvictionPolicy.access(self, keys, self._num_slots)

    def restore(self, keys: Collection[ExpertKey]) -> None:
        super().restore(keys)
        for key in keys:
            self._ghosts[key.layer].pop(key, None)

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
                moved = list(self._shares)
                moved[taker] += 1
                moved[giver] -= 1
                self._shares = moved  # at once, so that an interrupt loses no slot
        self._saved = [saved / 2 for saved in self._saved]


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
