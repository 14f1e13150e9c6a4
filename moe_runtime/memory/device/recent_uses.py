"""Recent uses of experts, which decide whether one gets a slot of a device.

Source: Einziger et al., "TinyLFU", ACM TOS 2017.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moe_runtime.types import ExpertKey

DECAY = 0.98
"""A use counts half after 34 steps; from replayed routes."""


class RecentUses:
    """Decayed uses of the experts of each layer."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, int] = defaultdict(int)
        # uses as of the step at which they were counted last
        self._uses: dict[ExpertKey, tuple[int, float]] = {}

    def count(self, layer: int, experts: Sequence[int]) -> None:
        """Adds the choices of one step of a layer."""
        self._steps[layer] += 1
        for expert in experts:
            key = ExpertKey(layer, expert)
            self._uses[key] = self._steps[layer], self.of(key) + 1.0

    def of(self, key: ExpertKey) -> float:
        step, uses = self._uses.get(key, (0, 0.0))
        return uses * DECAY ** (self._steps[key.layer] - step)
