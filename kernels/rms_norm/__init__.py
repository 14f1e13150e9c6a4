"""`rms_norm`: rows divided by their root mean square, times a weight; also of a sum of two."""

from moe_runtime.kernels.rms_norm.op import FORMS, NormForm, rms_norm, rms_norm_reference

__all__ = ["FORMS", "NormForm", "rms_norm", "rms_norm_reference"]
