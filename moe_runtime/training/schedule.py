"""The learning rate over the steps: linear warm-up, then a cosine.

Source: Loshchilov and Hutter, "SGDR" (2017), without restarts.
"""

import math

from moe_runtime.training.run_config import OptimizerConfig

COURSE = "half a cosine to behind the last step"
"""What a run that goes on must have begun with, as its other settings."""


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The rate of one step.

    Rises linearly over the first `warmup_steps` and reaches the peak at the last of them; then
    falls along half a cosine, from the peak in the first step after them to `final_share` of it
    where the run ends, behind its last step: no step is lost to an end of 0.

    Args:
        config: the peak and the shape.
        step: number of the step, the first is 0; from `num_steps` on the rate stays at its end.
        num_steps: steps of the whole run.
    """
    if step < config.warmup_steps:
        return config.peak_rate * (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.peak_rate * (config.final_share + (1 - config.final_share) * cosine)
