"""Exchanges that autograd differentiates and that overlap with computation in both directions.

Starting and waiting are two nodes of the graph. Autograd runs nodes in the reverse order of their
creation: the backward pass starts the reverse exchange where the forward pass waited, and waits
where it started.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.parallel.communication.transport import Pending, Transport
from moe_runtime.parallel.communication.wire import ExactWire, Wire
from moe_runtime.parallel.rows import SPREAD, alias


class AsyncAllToAll:
    """One exchange of rows, there or back, and the exchange of its gradients the other way.

    Args:
        route: As the transport prepared it.
        is_return: Whether these rows travel back along the route.
        out_RD: Where the arriving rows are written; new memory by default.
    """

    def __init__(
        self,
        transport: Transport,
        route: object,
        *,
        is_return: bool,
        wire: Wire,
        gradient_wire: Wire,
        out_RD: Tensor | None = None,
    ) -> None:
        self._transport = transport
        self._route = route
        self._is_return = is_return
        self._wires = {False: wire, True: gradient_wire}
        self._out_RD = out_RD
        self._pending: Pending | None = None
        self._dtype = torch.float32
        self._width = 0
        self._token: Tensor | None = None

    def start(self, rows_RD: Tensor) -> None:
        self._token = _Start.apply(rows_RD, self)  # pyright: ignore[reportAttributeAccessIssue]

    def wait(self) -> Tensor:
        """The rows that arrived."""
        if self._token is None:
            raise ValueError("start() has to come before wait()")
        token, self._token = self._token, None
        return _Wait.apply(token, self)  # pyright: ignore[reportReturnType]

    def launch(self, rows_RD: Tensor, *, is_gradient: bool) -> None:
        self._dtype, self._width = rows_RD.dtype, rows_RD.shape[1]
        self._pending = self._transport.exchange(
            self._wires[is_gradient].encode(rows_RD),
            self._route,
            reverse=self._is_return != is_gradient,
            # What is written in another way has to be decoded into its place.
            out=self._out_RD
            if not is_gradient and isinstance(self._wires[False], ExactWire)
            else None,
        )

    def land(self, *, is_gradient: bool) -> Tensor:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        arrived_RD = self._wires[is_gradient].decode(pending.wait(), self._dtype, self._width)
        out_RD = self._out_RD
        if is_gradient or out_RD is None:
            return arrived_RD
        if arrived_RD.data_ptr() != out_RD.data_ptr():
            out_RD.copy_(arrived_RD)
        return alias(out_RD)


class _Start(Function):
    """Launches; gives a token, which ties the wait to the rows in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.launch(rows_RD, is_gradient=False)
        return rows_RD.new_zeros(1)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_token: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.land(is_gradient=True), None


class _Wait(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: AsyncAllToAll) -> Tensor:
        ctx.transfer = transfer
        return transfer.land(is_gradient=False)

    @staticmethod
    @first_derivatives_only(SPREAD)
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.launch(grad_RD, is_gradient=True)
        return grad_RD.new_zeros(1), None
