"""Autograd of the block-sparse products: each gradient is one of the same two products.

With `s = sdd(a, b)`: `da = ds @ b.T` and `db = (ds.T @ a).T`. With `y = s @ b`: `ds = sdd(dy, b.T)`
and `db = s.T @ dy`; with `y = s.T @ b`: `ds = sdd(b, dy.T)` and `db = s @ dy`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse.topology import BlockTopology, Gather
from moe_runtime.kernels.block_sparse.torch_path import dsd_torch, sdd_torch
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only


class BlockSparseProducts(NamedTuple):
    """The two products in one implementation, `triton` or `torch`."""

    impl: Literal["triton", "torch"]

    def sdd(
        self, a: Tensor, b_KN: Tensor, topology: BlockTopology, gather: Gather | None = None
    ) -> Tensor:
        if self.impl == "torch":
            return sdd_torch(a, b_KN, topology, gather)
        from moe_runtime.kernels.block_sparse.kernel import launch_sdd

        return launch_sdd(a, b_KN, topology, gather)

    def dsd(
        self,
        values: Tensor,
        b: Tensor,
        topology: BlockTopology,
        *,
        is_transposed: bool = False,
        gather: Gather | None = None,
    ) -> Tensor:
        how: dict[str, Any] = {"is_transposed": is_transposed, "gather": gather}
        if self.impl == "torch":
            return dsd_torch(values, b, topology, **how)
        from moe_runtime.kernels.block_sparse.kernel import launch_dsd

        num_rows = topology.num_columns if is_transposed else topology.num_rows
        out = values.new_empty(num_rows, b.shape[1])
        return launch_dsd(values.contiguous(), b, topology, out=out, **how)


class Sdd(torch.autograd.Function):
    """`sdd` with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b_KN: Tensor,
        topology: BlockTopology,
        gather: Gather | None,
        products: BlockSparseProducts,
    ) -> Tensor:
        ctx.save_for_backward(a, b_KN)
        ctx.topology, ctx.gather, ctx.products = topology, gather, products
        return products.sdd(a, b_KN, topology, gather)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        a, b_KN = ctx.saved_tensors
        topology, gather, products = ctx.topology, ctx.gather, ctx.products
        da = db = None
        if ctx.needs_input_grad[0]:
            da = products.dsd(grads[0], b_KN.T, topology)
            if gather is not None:
                order, num_choices = gather
                da = combine(da, None, order, num_choices=num_choices, impl=products.impl)
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
        products: BlockSparseProducts,
    ) -> Tensor:
        ctx.save_for_backward(values, b)
        ctx.topology, ctx.is_transposed, ctx.products = topology, is_transposed, products
        return products.dsd(values, b, topology, is_transposed=is_transposed)

    @staticmethod
    @first_derivatives_only()
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, b = ctx.saved_tensors
        topology, products, dout = ctx.topology, ctx.products, grads[0]
        dvalues = db = None
        if ctx.needs_input_grad[0]:
            left, right = (b, dout.T) if ctx.is_transposed else (dout, b.T)
            dvalues = products.sdd(left, right, topology)
        if ctx.needs_input_grad[1]:
            db = products.dsd(values, dout, topology, is_transposed=not ctx.is_transposed)
        return dvalues, db, None, None, None
