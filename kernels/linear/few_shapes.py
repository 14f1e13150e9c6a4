"""Products of half precision by torch that leave little code behind: see `ROWS_OF_A_PRODUCT`."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from moe_runtime.kernels.linear.op import ROWS_OF_A_PRODUCT, SMALL_WEIGHT


def linear_of_few_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Torch's product in fp32, or in portions of few sizes, whatever the number of rows."""
    if has_torch_function((x,)):  # one who divides rows must do it before their number decides
        return handle_torch_function(linear_of_few_shapes, (x,), x, weight, bias)
    x_RK = x.reshape(-1, x.shape[-1])
    num_rows = len(x_RK)
    if num_rows <= 1:
        return F.linear(x, weight, bias)
    if weight.numel() <= SMALL_WEIGHT:
        wide_bias = None if bias is None else bias.float()
        return F.linear(x.float(), weight.float(), wide_bias).to(x.dtype)
    out = x.new_empty((num_rows, len(weight)))
    for first in range(0, num_rows, ROWS_OF_A_PRODUCT[-1]):
        rows = x_RK[first : first + ROWS_OF_A_PRODUCT[-1]]
        size = next(size for size in ROWS_OF_A_PRODUCT if size >= len(rows))
        padded = F.pad(rows, (0, 0, 0, size - len(rows))) if size > len(rows) else rows
        out[first : first + len(rows)] = F.linear(padded, weight, bias)[: len(rows)]
    return out.view(*x.shape[:-1], len(weight))
