"""`rotary_step`: what lies between the products of an attention layer and its attention."""

from moe_runtime.kernels.rotary_step.op import rotary_step
from moe_runtime.kernels.rotary_step.reference import RowNorm, rotary_step_reference

__all__ = ["RowNorm", "rotary_step", "rotary_step_reference"]
