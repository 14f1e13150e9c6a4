"""Training with routed experts off the device: in host memory and on the disk."""

from moe_runtime.training.offload.expert_training import OffloadStats
from moe_runtime.training.offload.handle import OffloadedTraining
from moe_runtime.training.offload.optimizers.adamw import AdamW

__all__ = ["AdamW", "OffloadStats", "OffloadedTraining"]
