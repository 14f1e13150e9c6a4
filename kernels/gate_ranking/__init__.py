"""The experts that a gate prefers for a hidden state, best first."""

from moe_runtime.kernels.gate_ranking.op import GateRanking

__all__ = ["GateRanking"]
