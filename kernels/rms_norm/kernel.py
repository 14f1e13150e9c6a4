"""The Triton kernel of `rms_norm`: one program per row."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moe_runtime.kernels.rms_norm.op import NormForm
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
    x_ptr, residual_ptr, weight_ptr, sum_ptr, out_ptr, dim, eps,
    stride_x, stride_residual, BLOCK_D: tl.constexpr, FORM: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """`out[r] = weight * round(x[r] / sqrt(mean(x[r] ** 2) + eps))`, or rounded once; in fp32.

    HAS_RESIDUAL: normalises `sum[r] = x[r] + residual[r]`, rounded to its type and stored too.
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_D)
    mask = offs < dim
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()  # type: ignore[attr-defined]
        tl.extra.cuda.gdc_wait()  # type: ignore[attr-defined]
    x = tl.load(x_ptr + row * stride_x + offs, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * stride_residual + offs, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * dim + offs, x, mask=mask)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(wide * wide, axis=0) / dim + eps)
    tl.store(out_ptr + row * dim + offs, scaled_row(x, weight, scale, FORM), mask=mask)


def launch_rms_norm(
    x: Tensor, weight: Tensor, eps: float, form: NormForm, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The normalised sum (or `x`), and the result of `rms_norm`."""
    dim = weight.shape[0]
    rows_RD = _rows(x, dim)
    residual_RD = rows_RD if residual is None else _rows(residual, dim)
    out = x.new_empty(x.shape)
    sums = x if residual is None else x.new_empty(x.shape)
    block_d = power_of_2(dim)
    launch(
        rms_norm_fwd, (len(rows_RD),),
        x_ptr=rows_RD, residual_ptr=residual_RD, weight_ptr=weight, sum_ptr=sums, out_ptr=out,
        dim=dim, eps=float(eps),
        stride_x=rows_RD.stride(0), stride_residual=residual_RD.stride(0),
        BLOCK_D=block_d, FORM=form, HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, block_d // 512)), **dependent_launch(x.device),
    )  # fmt: skip
    return sums, out


def _rows(x: Tensor, dim: int) -> Tensor:
    rows_RD = x.reshape(-1, dim)
    return rows_RD if rows_RD.stride(1) == 1 else rows_RD.contiguous()
