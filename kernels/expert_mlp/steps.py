"""What an implementation of the layer in torch operations is made of: the steps of one expert.

Shape suffixes: T tokens, n rows of one expert, D model, F hidden, Z = 2F with a gate and F without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp.experts import OneExpert
from moe_runtime.kernels.expert_mlp.products import Products
from moe_runtime.kernels.operands import precise_dtype
from moe_runtime.kernels.operands.activation import ActivationSpec, split_preactivations


class TorchSteps:
    """Products and what happens between them, for `forward` and `backward`."""

    def products(self, dtype: torch.dtype) -> Products:
        """The products of one call, for experts of `dtype`."""
        return Products()

    def gather(self, source_TD: Tensor, tokens_n: Tensor, out_nD: Tensor) -> Tensor:
        """``out[i] = source[tokens[i]]``, in the dtype of `out`."""
        if source_TD.dtype == out_nD.dtype:
            return torch.index_select(source_TD, 0, tokens_n, out=out_nD)
        return out_nD.copy_(source_TD[tokens_n])

    def activate(
        self,
        z_nZ: Tensor,
        layout: OneExpert,
        activation: ActivationSpec,
        hidden_nF: Tensor,
        kept_nZ: Tensor | None = None,
    ) -> None:
        """Hidden values of pre-activations, computed in fp32 or better, into `hidden`.

        Args:
            z_nZ: Pre-activations.
            layout: The expert, for how `z` lies.
            activation: What lies between the products.
            hidden_nF: Receives them.
            kept_nZ: Receives a copy of `z`, in its own dtype.
        """
        if kept_nZ is not None:
            kept_nZ.copy_(z_nZ)
        gate, up = _halves(z_nZ.to(precise_dtype(z_nZ)), layout)
        hidden_nF.copy_(activation(gate, up))

    def activate_backward(
        self,
        z_nZ: Tensor,
        hidden_nF: Tensor,
        weights_n: Tensor | None,
        layout: OneExpert,
        activation: ActivationSpec,
        grad_z_nZ: Tensor,
    ) -> Tensor:
        """Steps back over the activation, with the gate weight still to be multiplied.

        Args:
            z_nZ: Pre-activations, possibly in a narrower dtype than the rest.
            hidden_nF: Gradient of the hidden values for a gate weight of one; receives the hidden
                values times the gate weight.
            weights_n: Gate weights in fp32 or better; None stands for ones.
            layout: The expert, for how `z` lies.
            activation: What lies between.
            grad_z_nZ: Receives the gradient of `z`; may be `z`.

        Returns:
            The gradient of the gate weights ``[n]`` in fp32 or better.
        """
        precise = precise_dtype(z_nZ)
        gate, up = _halves(z_nZ.to(precise), layout)
        grad = hidden_nF.to(precise)
        hidden = activation(gate, up)
        grad_weights_n = (grad * hidden).sum(1)
        if weights_n is not None:
            grad, hidden = grad * weights_n[:, None], hidden * weights_n[:, None]
        gate_grad, up_grad = activation.backward(gate, up, grad)
        out_gate, out_up = _halves(grad_z_nZ, layout)
        out_up.copy_(up_grad)
        if out_gate is not None and gate_grad is not None:
            out_gate.copy_(gate_grad)
        hidden_nF.copy_(hidden)
        return grad_weights_n

    def add_rows(
        self, sums_TD: Tensor, tokens_n: Tensor, rows_nD: Tensor, weights_n: Tensor | None
    ) -> None:
        """``sums[tokens[i]] += weights[i] * rows[i]``, always in the same order."""
        rows_nD = rows_nD.to(sums_TD.dtype)
        if weights_n is not None:
            rows_nD = rows_nD * weights_n[:, None]
        if sums_TD.is_cuda:
            # index_add_ would sum by atomics, in any order; this one sorts first
            sums_TD.index_put_((tokens_n,), rows_nD, accumulate=True)
        else:
            sums_TD.index_add_(0, tokens_n, rows_nD)


def _halves(z_nZ: Tensor, layout: OneExpert) -> tuple[Tensor | None, Tensor]:
    return split_preactivations(
        z_nZ, has_gate=layout.has_gate, is_concatenated=layout.is_concatenated
    )
