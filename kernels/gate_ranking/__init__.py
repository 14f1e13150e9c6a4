"""The experts that a gate prefers for a hidden state, best first, and a look-ahead made of it."""

from moe_runtime.kernels.gate_ranking.look_ahead import MOST_TOKENS, NativeLookAhead
from moe_runtime.kernels.gate_ranking.op import GateRanking

__all__ = ["MOST_TOKENS", "GateRanking", "NativeLookAhead"]
