"""The Triton kernel of `rms_norm`: a program a row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.rms_norm.reference import NormForm
from moe_runtime.kernels.triton_support import dependent_launch, launch, power_of_2


@triton.jit
def scaled_row(x, weight, scale, FORM: tl.constexpr):
    """`weight * round(x * scale)`, or rounded once, in the type of `x`."""
    normed = x.to(tl.float32) * scale
    if FORM == "rounded":
        normed = normed.to(x.dtype).to(tl.float32)
    factor = weight.to(tl.float32)
    if FORM == "plus_one":
        factor += 1.0
    return (factor * normed).to(x.dtype)


@triton.jit
def rms_norm_fwd(
    x_ptr, weight_ptr, out_ptr, dim, eps,
    stride_x, BLOCK_D: tl.constexpr, FORM: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`out[r] = weight * round(x[r] / sqrt(mean(x[r] ** 2) + eps))`, or rounded once; in fp32."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_D)
    mask = offs < dim
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / dim + eps)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    tl.store(out_ptr + row * dim + offs, scaled_row(x, weight, scale, FORM), mask=mask)


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float, form: NormForm) -> Tensor:
    """As `rms_norm`, for what `gpu` has looked at."""
    dim = weight.shape[0]
    rows_RD = x.reshape(-1, dim)
    rows_RD = rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
    out = x.new_empty(x.shape)
    block_d = power_of_2(dim)
    launch(
        rms_norm_fwd, (len(rows_RD),),
        x_ptr=rows_RD, weight_ptr=weight, out_ptr=out, dim=dim, eps=float(eps),
        stride_x=rows_RD.stride(0), BLOCK_D=block_d, FORM=form,
        num_warps=min(16, max(1, block_d // 512)), **dependent_launch(x.device),
    )  # fmt: skip
    return out
