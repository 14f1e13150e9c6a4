"""Expert buffering: first the experts that this batch does not use, then the last one loaded.

Huang et al., "Towards MoE Deployment" (arXiv 2303.06182). Where a layer runs its experts one after
another in the order of their numbers, the one loaded last is the one needed last again.
"""

from collections.abc import Callable
from functools import partial
from typing import Self

from moe_runtime.policies.eviction.base import Evictable, EvictionPolicy, ReplayRule
from moe_runtime.policies.eviction.setting import Setting
from moe_runtime.policies.prediction.base import Event, LayerRouted
from moe_runtime.types import ExpertKey


class ActiveExperts:
    """Which experts the last routed layer uses."""

    def __init__(self) -> None:
        self._active: set[ExpertKey] = set()

    def observe(self, event: Event) -> None:
        """Notes the experts of a layer."""
        if isinstance(event, LayerRouted):
            experts = set(event.expert_ids.ravel().tolist())
            self._active = {ExpertKey(event.layer, expert) for expert in experts}

    def finish(self, sequence: int) -> None:
        """Nothing is kept of a request."""

    def __contains__(self, key: object) -> bool:
        return key in self._active


class ExpertBuffering(EvictionPolicy[ExpertKey], has_rule=True):
    """Last in, first out, after the experts that the present batch does not use.

    Args:
        active: what the layers' policies know about the present batch.
    """

    rule = ReplayRule("expert-buffering")

    @classmethod
    def maker(cls, setting: Setting) -> Callable[[], Self]:
        """See ``EvictionPolicy.maker``."""
        return partial(cls, ActiveExperts())

    def __init__(self, active: ActiveExperts) -> None:
        self.watcher = self._active = active
        self._order: dict[ExpertKey, None] = {}

    def touch(self, key: ExpertKey) -> None:
        """A use changes nothing."""
        if key not in self._order:
            raise KeyError(key)

    def insert(self, key: ExpertKey) -> None:
        """Starts to hold a key as the last one in."""
        if key in self._order:
            raise ValueError(f"{key} is held already")
        self._order[key] = None

    def remove(self, key: ExpertKey) -> None:
        """Stops holding a key."""
        del self._order[key]

    def victim(self, evictable: Evictable, incoming: ExpertKey) -> ExpertKey | None:
        """The last evictable key in that is not active, or else the last one in."""
        candidates = [key for key in reversed(self._order) if evictable(key)]
        idle = (key for key in candidates if key not in self._active)
        return next(idle, candidates[0] if candidates else None)

    def check(self) -> None:
        """Nothing can contradict itself here: the order is the state."""

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order
