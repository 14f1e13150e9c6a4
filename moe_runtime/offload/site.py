"""One module of routed experts in a model, as offloaded training sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.expert_mlp import ActivationSpec, StackedExperts
from moe_runtime.layer import Experts, MoELayer
from moe_runtime.offload.dense import decays
from moe_runtime.offload.records import ExpertTensor, RecordLayout, StateFormat


@dataclass(frozen=True, kw_only=True)
class ExpertsSite:
    """What has to be known of a module to take its place.

    Attributes:
        name: its path in the model.
        module: the module; its expert parameters are stacked, one slice for each expert.
        num_experts: how many.
        first: name of the first product's parameter: `gate_up_proj` or `up_proj`.
        has_gate, is_transposed, is_concatenated: as in `StackedExperts`.
        activation: a formula, or a function of the pre-activations as they lie.
        impl: implementation of the kernels.
        recompute: the backward pass computes the pre-activations again.
        keeps_dtype: the output has the dtype of the input, under autocast too.
    """

    name: str
    module: nn.Module
    num_experts: int
    first: str
    has_gate: bool
    is_transposed: bool
    is_concatenated: bool
    activation: ActivationSpec | Callable[[Tensor], Tensor]
    impl: str = "auto"
    recompute: bool = False
    keeps_dtype: bool = True

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The stacked parameters that there are, in the order of a record: matrices first."""
        names = (self.first, "down_proj", f"{self.first}_bias", "down_proj_bias")
        present = {name for name, _ in self.module.named_parameters(recurse=False)}
        return tuple(name for name in names if name in present)

    def layout(self, state: StateFormat | None = None) -> RecordLayout:
        """Of the record of one of its experts: fp32, or fp64 for experts in fp64.

        Args:
            state: what it holds beside parameters; full moments when omitted.
        """
        parameters = {name: self.module.get_parameter(name) for name in self.parameter_names}
        dtypes = {parameter.dtype for parameter in parameters.values()}
        dtype = torch.float64 if dtypes == {torch.float64} else torch.float32
        return RecordLayout(
            [
                ExpertTensor(name, tuple(parameter.shape[1:]), decays(name, parameter))
                for name, parameter in parameters.items()
            ],
            dtype,
            state,
        )

    def stacked(self, names: Sequence[str], tensors: Sequence[Tensor]) -> StackedExperts:
        """One expert's tensors as kernels take them, alone in slot 0."""
        named = {name: tensor[None] for name, tensor in zip(names, tensors, strict=True)}
        return StackedExperts(
            gate_up=named[self.first],
            down=named["down_proj"],
            gate_up_bias=named.get(f"{self.first}_bias"),
            down_bias=named.get("down_proj_bias"),
            has_gate=self.has_gate,
            is_transposed=self.is_transposed,
            is_concatenated=self.is_concatenated,
        )


def layer_sites(model: nn.Module) -> list[ExpertsSite]:
    """The experts of every `MoELayer` in a model, in its order.

    Raises:
        UnsupportedModelError: a layer has experts of another kind.
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, MoELayer)]
    for name, layer in layers:
        if not isinstance(layer.experts, Experts):
            raise UnsupportedModelError(
                f"{name}: {type(layer.experts).__name__} cannot be trained offloaded, only Experts"
            )
    return [
        ExpertsSite(
            name=f"{name}.experts" if name else "experts",
            module=layer.experts,
            num_experts=layer.experts.num_experts,
            first=layer.experts.first_name,
            has_gate=layer.experts.activation.has_gate,
            is_transposed=False,
            is_concatenated=True,
            activation=layer.experts.activation.spec,
            impl=layer.experts.impl,
            recompute=layer.experts.recompute,
            keeps_dtype=False,
        )
        for name, layer in layers
        if isinstance(layer.experts, Experts)
    ]
