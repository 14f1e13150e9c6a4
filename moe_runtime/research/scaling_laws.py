"""Scaling laws of routed language models (Clark et al., "Unified Scaling Laws for Routed Language
Models", 2022): the value of more experts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedLaw:
    """`log L = a log N + b log E' + c log N log E' + d`, in powers of ten.

    `N` are the parameters of the dense model, `L` its loss in nats a token, and `E'` the number of
    experts with both ends saturated: `1/E' = 1/(E - 1 + 1/(1/e_start - 1/e_max)) + 1/e_max`.

    Attributes:
        a, b, c, d: the fitted exponents; `c` lowers the value of experts in larger models.
        e_start: `E'` of one expert.
        e_max: `E'` of infinitely many.
    """

    a: float
    b: float
    c: float
    d: float
    e_start: float
    e_max: float

    def saturated(self, num_experts: float) -> float:
        """`E'` of a number of experts, from `e_start` for one to `e_max`."""
        if not num_experts >= 1:
            raise ValueError(f"num_experts must be at least 1, got {num_experts}")
        offset = 1 / (1 / self.e_start - 1 / self.e_max)
        return 1 / (1 / (num_experts - 1 + offset) + 1 / self.e_max)

    def loss(self, parameters: float, num_experts: float = 1) -> float:
        """Nats a token that the law expects."""
        return 10 ** self._log_loss(parameters, self.saturated(num_experts))

    def dense_equivalent(self, parameters: float, num_experts: float) -> float:
        """Parameters of the dense model with the loss of this one with experts."""
        log_start = math.log10(self.e_start)
        gained = self._log_loss(parameters, self.saturated(num_experts)) - self.d
        return 10 ** ((gained - self.b * log_start) / (self.a + self.c * log_start))

    def _log_loss(self, parameters: float, saturated: float) -> float:
        if not parameters > 0:
            raise ValueError(f"parameters must be positive, got {parameters}")
        log_n, log_e = math.log10(parameters), math.log10(saturated)
        return self.a * log_n + self.b * log_e + self.c * log_n * log_e + self.d


ROUTED_LAWS: Mapping[str, RoutedLaw] = MappingProxyType(
    {
        "S-BASE": RoutedLaw(a=-0.082, b=-0.108, c=0.009, d=1.104, e_start=1.847, e_max=314.478),
        "RL-R": RoutedLaw(a=-0.083, b=-0.126, c=0.012, d=1.111, e_start=1.880, e_max=469.982),
        "HASH": RoutedLaw(a=-0.087, b=-0.136, c=0.012, d=1.157, e_start=4.175, e_max=477.741),
    }
)
"""By router: optimal transport, reinforcement learning, and a fixed table of token numbers."""


def routed_law_of(gate: str) -> str:
    """Which of `ROUTED_LAWS` is nearest to a gate of `moe_runtime.routing`."""
    return {"hash": "HASH", "rl_r": "RL-R"}.get(gate, "S-BASE")
