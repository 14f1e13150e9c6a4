"""Linear maps, multiplied in the dtype that the processor is fastest in under autocast."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.kernels.linear import is_faster_widened
from moe_runtime.kernels.native import native_library


def product_dtype(device_type: str, dtype: torch.dtype) -> torch.dtype:
    """What operands of `dtype` are multiplied in.

    Autocast's dtype where autocast is on; float32, of which nothing is lost, on a processor that
    multiplies that faster than autocast's.
    """
    if not torch.is_autocast_enabled(device_type):
        return dtype
    narrow = torch.get_autocast_dtype(device_type)
    library = native_library() if device_type == "cpu" else None
    return torch.float32 if library and is_faster_widened(library, narrow) else narrow


class Linear(nn.Linear):
    """`nn.Linear` whose result has autocast's dtype, whatever its products are computed in."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., D]` to `[..., F]`."""
        device_type = input.device.type
        is_autocast = torch.is_autocast_enabled(device_type) and input.dtype != torch.float64
        if not is_autocast or product_dtype(device_type, input.dtype) != torch.float32:
            return super().forward(input)
        with torch.autocast(device_type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            y = F.linear(input.float(), self.weight.float(), bias)
        return y.to(torch.get_autocast_dtype(device_type))
