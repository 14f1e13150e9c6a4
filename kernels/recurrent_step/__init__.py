"""Steps of one token in layers with recurrent states, which change where they lie."""

from moe_runtime.kernels.recurrent_step.op import conv_step, delta_rule_step

__all__ = ["conv_step", "delta_rule_step"]
