"""The contract of an eviction policy: it orders keys; who calls it moves the bytes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from moe_runtime.policies.eviction.setting import Setting
from moe_runtime.policies.prediction.base import Event

K = TypeVar("K", bound=Hashable)

Evictable = Callable[[Hashable], bool]
"""Says whether a key may be chosen: leased and arriving experts may not."""


@dataclass(frozen=True, slots=True)
class ReplayRule:
    """What a policy that starts empty does, for a replay that need not ask the object itself.

    Attributes:
        name: one of the rules of ``compiled``.
        parameter: the rule's one number: the share that SLRU protects, the half-life of ageing, or
            the weight of the present step in MRS.
        weights: what static pinning orders keys by; a key that is absent has 0.
    """

    name: str
    parameter: float = 0.0
    weights: Mapping[Any, float] | None = None


_STEPS = ("touch", "insert", "declines", "decline", "remove", "victim", "may_decline")
_SHORTER_WAYS = {"access": _STEPS, "access_all": (*_STEPS, "access")}
"""What a policy may have shorter ways for, and what each is made of."""


class Watcher(Protocol):
    """What must see all routing for a policy to decide; the layers' policies may share one."""

    def observe(self, event: Event) -> None:
        """Takes note of a step or of a layer's routing, before the layer's experts are used."""
        ...

    def finish(self, sequence: int) -> None:
        """Ends a request."""
        ...


class EvictionPolicy(ABC, Generic[K]):
    """Decides which resident key gives up its slot.

    A policy holds exactly the keys that were inserted and not removed since. It touches no tensors,
    bytes, clocks or threads, so that the same object runs in a live store and in a replayed trace.

    Attributes:
        may_decline: the policy may rather keep what it holds than a newcomer, which is then used
            once and not kept. It is asked after the use, when keys of the same event may go too.
        watcher: what must be told of every routing event, if the policy needs more than uses.
        needs_no_events: ``access_all`` learns all it needs from the events, so nobody need tell the
            watcher.
        rule: says all that the policy does, where a replay has a quicker way to the same hits. It
            counts for the very class that states it (``class LRU(..., has_rule=True)``): a subclass
            may do something else, so its own methods are asked.
    """

    may_decline: bool = False
    watcher: Watcher | None = None
    needs_no_events: bool = False
    rule: ReplayRule | None = None
    _has_rule: ClassVar[bool] = False

    def __init_subclass__(cls, *, has_rule: bool = False, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._has_rule = has_rule
        if has_rule:
            return
        for name, steps in _SHORTER_WAYS.items():
            giver = next(base for base in cls.__mro__ if name in vars(base))
            # a shorter way does not ask for what is overridden here or in another base
            if issubclass(giver, EvictionPolicy) and any(
                getattr(cls, step) is not getattr(giver, step) for step in steps
            ):
                setattr(cls, name, vars(EvictionPolicy)[name])

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        """Makes the maker of this policy's orderings, and what they share.

        Raises:
            ValueError: the setting lacks what the policy needs.
        """
        return cls

    @property
    def replay_rule(self) -> ReplayRule | None:
        """The rule, unless a subclass inherited it."""
        return self.rule if self._has_rule else None

    @property
    def slots_by_layer(self) -> Sequence[int] | None:
        """Slots of each layer, where the policy divides them."""
        return None

    def most_held(self, keys: Sequence[K], num_slots: int) -> int:
        """How many of an event's keys may be held after it, of all slots."""
        return num_slots

    @abstractmethod
    def touch(self, key: K) -> None:
        """Notes a use of a resident key.

        Raises:
            KeyError: the key is not held.
        """

    @abstractmethod
    def insert(self, key: K) -> None:
        """Starts to hold a key, as just used.

        Raises:
            ValueError: the key is held already.
        """

    def declines(self, incoming: K, victim: K) -> bool:
        """Whether the policy would rather keep a victim than the key that needs its slot."""
        return False

    def decline(self, key: K) -> None:
        """Notes a use of a key that was not kept."""

    @abstractmethod
    def remove(self, key: K) -> None:
        """Stops holding a key.

        Raises:
            KeyError: the key is not held.
        """

    @abstractmethod
    def victim(self, evictable: Evictable, incoming: K) -> K | None:
        """Chooses the key to evict for ``incoming``; changes no order.

        Args:
            evictable: only keys for which this holds may be chosen.
            incoming: the key that needs the slot.

        Returns:
            The chosen key, or None when no held key is evictable.
        """

    @abstractmethod
    def check(self) -> None:
        """Proves the policy's own invariants.

        Raises:
            AssertionError: the policy's state contradicts itself.
        """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, key: object) -> bool: ...

    def access(self, keys: Sequence[K], num_slots: int) -> int:
        """Serves one event of a demand-filled cache: looks up all keys, then keeps the missing.

        This is what a store does with leases, in one call; policies with a shorter way to the same
        state replace it.

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
            self._touch_then_settle(keys, missing, num_slots)
            return num_hits
        missing = missing[max(0, len(keys) - self.most_held(keys, num_slots)) :]
        self._make_room(keys, missing, num_slots)
        kept = set(missing)
        for key in keys:
            if key in kept:
                self.insert(key)
            elif key in self:
                self.touch(key)
        return num_hits

    def access_all(self, events: Sequence[Sequence[K]], num_slots: int) -> list[int]:
        """Serves events one after another, as ``access`` does each.

        A replay spends its time here; policies with a quicker loop replace it.

        Returns:
            For each event, how many of its keys were held.
        """
        access = self.access
        return [access(keys, num_slots) for keys in events]

    def _make_room(self, keys: Sequence[K], missing: Sequence[K], num_slots: int) -> None:
        in_use = frozenset(keys)
        for key in missing[max(0, num_slots - len(self)) :]:
            victim = self.victim(lambda held: held not in in_use, key)
            assert victim is not None  # what is kept of the event fits, so some other key is held
            self.remove(victim)

    def _touch_then_settle(self, keys: Sequence[K], missing: Sequence[K], num_slots: int) -> None:
        for key in keys:
            if key in self:
                self.touch(key)
        for key in missing:
            if len(self) >= num_slots:
                victim = self.victim(_anything, key)
                if victim is None or self.declines(key, victim):
                    self.decline(key)
                    continue
                self.remove(victim)
            self.insert(key)


def _anything(_: Hashable) -> bool:
    return True
