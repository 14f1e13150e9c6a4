"""Autograd of the block-sparse products: each gradient is one of the same two products.

With `s = sdd(a, b)`: `da = ds @ b.T` and `db = (ds.T @ a).T`. With `y = s @ b`: `ds = sdd(dy, b.T)`
and `db = s.T @ dy`; with `y = s.T @ b`: `ds = sdd(b, dy.T)` and `db = s @ dy`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology import BlockTopology
from moe_runtime.kernels.block_sparse.torch_path import dsd_torch, sdd_torch
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.token_sort import SortedTokens


class Gather(NamedTuple):
    """Row r of the sparse matrix belongs to row `order[r] // num_choices` of the operand."""

    sorted_tokens: SortedTokens
    num_choices: int

    @property
    def tokens_R(self) -> Tensor:
        return self.sorted_tokens.order_R // self.num_choices


class Products(NamedTuple):
    """The two products in one implementation, `triton` or `torch`."""

    impl: Literal["triton", "torch"]

    def sdd(
        self, a: Tensor, b_KN: Tensor, topology: BlockTopology, gather: Gather | None = None
    ) -> Tensor:
        if self.impl == "torch":
            tokens_R = None if gather is None else gather.tokens_R
            return sdd_torch(a, b_KN, topology, tokens_R=tokens_R)
        from moe_runtime.kernels.block_sparse.kernel import launch_sdd

        return launch_sdd(a, b_KN, topology, **_gathering(gather))

    def dsd(
        self,
        values: Tensor,
        b: Tensor,
        topology: BlockTopology,
        *,
        is_transposed: bool = False,
        gather: Gather | None = None,
    ) -> Tensor:
        if self.impl == "torch":
            tokens_R = None if gather is None else gather.tokens_R
            return dsd_torch(values, b, topology, is_transposed=is_transposed, tokens_R=tokens_R)
        from moe_runtime.kernels.block_sparse.kernel import launch_dsd

        num_rows = topology.num_columns if is_transposed else topology.num_rows
        return launch_dsd(
            values.contiguous(),
            b,
            topology,
            out=torch.empty(num_rows, b.shape[1], dtype=values.dtype, device=values.device),
            is_transposed=is_transposed,
            **_gathering(gather),
        )


def _gathering(gather: Gather | None) -> dict[str, Any]:
    if gather is None:
        return {}
    return {"order_R": gather.sorted_tokens.order_R, "num_choices": gather.num_choices}


class Sdd(torch.autograd.Function):
    """`sdd` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b_KN: Tensor,
        topology: BlockTopology,
        gather: Gather | None,
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(a, b_KN)
        ctx.topology, ctx.gather, ctx.products = topology, gather, products
        return products.sdd(a, b_KN, topology, gather)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        a, b_KN = ctx.saved_tensors
        topology, gather, products = ctx.topology, ctx.gather, ctx.products
        da = db = None
        if ctx.needs_input_grad[0]:
            da = products.dsd(grads[0], b_KN.T, topology)
            if gather is not None:
                da = combine(
                    da,
                    None,
                    gather.sorted_tokens,
                    num_choices=gather.num_choices,
                    impl=products.impl,
                )
        if ctx.needs_input_grad[1]:
            db = products.dsd(grads[0], a, topology, is_transposed=True, gather=gather).T
        return da, db, None, None, None


class Dsd(torch.autograd.Function):
    """`dsd` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        b: Tensor,
        topology: BlockTopology,
        is_transposed: bool,
        products: Products,
    ) -> Tensor:
        ctx.save_for_backward(values, b)
        ctx.topology, ctx.is_transposed, ctx.products = topology, is_transposed, products
        return products.dsd(values, b, topology, is_transposed=is_transposed)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        values, b = ctx.saved_tensors
        topology, products, dout = ctx.topology, ctx.products, grads[0]
        dvalues = db = None
        if ctx.needs_input_grad[0]:
            left, right = (b, dout.T) if ctx.is_transposed else (dout, b.T)
            dvalues = products.sdd(left, right, topology)
        if ctx.needs_input_grad[1]:
            db = products.dsd(values, dout, topology, is_transposed=not ctx.is_transposed)
        return dvalues, db, None, None, None
