"""The contract of an eviction policy: it orders keys; the store that asks it moves the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
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
