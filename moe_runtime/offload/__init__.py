"""Training with routed experts off the device: in host memory and on the disk."""

from moe_runtime.offload.adamw import AdamW
from moe_runtime.offload.handle import OffloadedTraining, OffloadStats

__all__ = ["AdamW", "OffloadStats", "OffloadedTraining"]
