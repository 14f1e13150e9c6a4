"""Zeroth-order training: forward passes alone, an expert's record its parameters alone."""

from moe_runtime.research.zeroth_order.training import ZerothOrder as ZerothOrder
from moe_runtime.research.zeroth_order.training import ZerothOrderTraining as ZerothOrderTraining
from moe_runtime.research.zeroth_order.training import offload_zeroth_order as offload_zeroth_order

__all__ = ["ZerothOrder", "ZerothOrderTraining", "offload_zeroth_order"]
