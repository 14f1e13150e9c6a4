"""What an implementation of the layer in torch operations is made of: the steps of one expert.

Shape suffixes: T tokens, n rows of one expert, D model, F hidden, Z = 2F with a gate and F without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.implementations.products import Products
from moe_runtime.kernels.operands import precise_dtype
from moe_runtime.kernels.operands.activation import ActivationSpec, GateLayout


class TorchSteps:
    """Products and what happens between them, for `forward` and `backward`.

    Args:
        activation: What lies between the products.
    """

    def __init__(self, activation: ActivationSpec) -> None:
        self._activation = activation

    def products(self, dtype: torch.dtype) -> Products:
        """The products of one call, for experts of `dtype`."""
        return Products()

    def gather(self, source_TD: Tensor, tokens_n: Tensor, out_nD: Tensor) -> Tensor:
        """``out[i] = source[tokens[i]]``, in the dtype of `out`."""
        if source_TD.dtype == out_nD.dtype:
            return torch.index_select(source_TD, 0, tokens_n, out=out_nD)
        return out_nD.copy_(source_TD[tokens_n])

    def activate(
        self, z_nZ: Tensor, layout: GateLayout, hidden_nF: Tensor, kept_nZ: Tensor | None = None
    ) -> None:
        """Hidden values of pre-activations, computed in fp32 or better, into `hidden`.

        Args:
            z_nZ: Pre-activations.
            layout: How `z` lies.
            hidden_nF: Receives them.
            kept_nZ: Receives a copy of `z`, in its own dtype.
        """
        if kept_nZ is not None:
            kept_nZ.copy_(z_nZ)
        gate, up = layout.split(z_nZ.to(precise_dtype(z_nZ)))
        hidden_nF.copy_(self._activation(gate, up))

    def activate_backward(
        self,
        z_nZ: Tensor,
        layout: GateLayout,
        hidden_nF: Tensor,
        weights_n: Tensor | None,
        grad_z_nZ: Tensor,
    ) -> Tensor:
        """Steps back over the activation, with the gate weight still to be multiplied.

        Args:
            z_nZ: Pre-activations, possibly in a narrower dtype than the rest.
            layout: How `z` lies.
            hidden_nF: Gradient of the hidden values for a gate weight of one; receives the hidden
                values times the gate weight.
            weights_n: Gate weights in fp32 or better; None stands for ones.
            grad_z_nZ: Receives the gradient of `z`; may be `z`.

        Returns:
            The gradient of the gate weights ``[n]`` in fp32 or better.
        """
        precise = precise_dtype(z_nZ)
        gate, up = layout.split(z_nZ.to(precise))
        grad = hidden_nF.to(precise)
        hidden = self._activation(gate, up)
        grad_weights_n = (grad * hidden).sum(1)
        if weights_n is not None:
            grad, hidden = grad * weights_n[:, None], hidden * weights_n[:, None]
        gate_grad, up_grad = self._activation.backward(gate, up, grad)
        out_gate, out_up = layout.split(grad_z_nZ)
        out_up.copy_(up_grad)
        if out_gate is not None and gate_grad is not None:
            out_gate.copy_(gate_grad)
        hidden_nF.copy_(hidden)
        return grad_weights_n

    def add_rows(
        self, sums_TD: Tensor, tokens_n: Tensor, rows_nD: Tensor, weights_n: Tensor | None
    ) -> None:
        """``sums[tokens[i]] += weights[i] * rows[i]``.

        Always in the same order, also where `index_add_` adds by atomics: a token comes once among
        the rows of an expert, unless its choices name that one twice.
        """
        rows_nD = rows_nD.to(sums_TD.dtype)
        if weights_n is not None:
            rows_nD = rows_nD * weights_n[:, None]
        sums_TD.index_add_(0, tokens_n, rows_nD)
