"""`rms_norm`: rows divided by their root mean square, times a weight."""

from moe_runtime.kernels.rms_norm.op import rms_norm
from moe_runtime.kernels.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]
