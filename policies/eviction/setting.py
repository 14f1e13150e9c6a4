"""Which eviction policy is to be made, and what it may be told then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_runtime.policies.prediction.base import Routes, Shape
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.policies.eviction.base import EvictionPolicy
    from moe_runtime.policies.prediction.tracked import TrackedPredictor

Maker = Callable[[], "EvictionPolicy[ExpertKey]"]
"""Makes one ordering; what several of them share was made before."""

Events = Sequence[Sequence[ExpertKey]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What policies may be told about the model and the workload when they are made.

    Attributes:
        shape: the sizes of the model.
        training: recorded sequences to learn from; None where there are none. ``static`` counts
            in them, ``activation-aware`` begins with their matrices.
        future: the keys of every event to come, for the policies that bound all others.
        predictor: predicts visits, for the policies that evict by predictions. It must not be
            shared with anyone else: the policy tells it of every event.
        costs: what a miss of each expert costs, such as the bytes to be read; only ratios matter.
            None where all cost the same.
    """

    shape: Shape
    training: Routes | None = None
    future: Events | None = None
    predictor: TrackedPredictor | None = None
    costs: Mapping[ExpertKey, float] | None = None

    @property
    def cost_of(self) -> Callable[[Any], float] | None:
        """The cost of an expert's miss; None where all cost the same."""
        return None if self.costs is None else self.costs.__getitem__


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyChoice:
    """An eviction policy and why.

    Attributes:
        policy: its name.
        adaptive: whether the layers' shares of the slots move.
        reason: one sentence.
        predictor: name of what the policy ``predicted`` asks; empty for others.
    """

    policy: str
    adaptive: bool
    reason: str
    predictor: str = ""
