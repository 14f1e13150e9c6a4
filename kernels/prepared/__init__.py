"""`linear` and `rms_norm` of few rows, with what they ask about a weight answered once."""

from moe_runtime.kernels.prepared.weights import PreparedLinear, PreparedRMSNorm

__all__ = ["PreparedLinear", "PreparedRMSNorm"]
