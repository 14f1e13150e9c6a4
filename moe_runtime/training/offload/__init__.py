"""Training with routed experts off the device: in host memory and on the disk."""

from moe_runtime.training.offload.adamw import AdamW
from moe_runtime.training.offload.offloaded_training import OffloadedTraining, OffloadStats

__all__ = ["AdamW", "OffloadStats", "OffloadedTraining"]
