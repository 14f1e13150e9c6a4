"""The module that stands where a model had its experts, and trains them where they live."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.layer.experts import compute_dtype
from moe_runtime.training.offload.execution.absent_experts import AbsentExperts
from moe_runtime.training.offload.execution.activations import ActivationPolicy
from moe_runtime.training.offload.execution.passes import LayerInput
from moe_runtime.training.offload.site import ExpertsModuleSpec


class LayerPasses(Protocol):
    """Computes layers whose experts are elsewhere; `LayerExecutor` says more.

    What its forward pass returns for the backward pass has `give_up_tensors` and `take_tensors` as
    `StreamedExperts` has them.
    """

    def forward(
        self, layer: int, inputs: Sequence[LayerInput], /, *, keeps: bool, is_visit: bool
    ) -> tuple[list[Any], list[Tensor]]: ...

    def backward(
        self, layer: int, calls: Sequence[Any], grads_TD: Sequence[Tensor], /
    ) -> list[tuple[Tensor, Tensor]]: ...

    def stacked(self, layer: int, name: str, /) -> Tensor: ...


class OffloadedTrainingExperts(AbsentExperts):
    """Routed experts whose parameters are not here, for `MoELayer` and for transformers.

    Args:
        site: the module whose place it takes.
        layer: its number among the layers with experts.
        passes: computes it.
        activations: what autograd's saved tensors become; kept when omitted.
        has_gradient: as of `AbsentExperts`; frozen experts never have one.
    """

    def __init__(
        self,
        site: ExpertsModuleSpec,
        layer: int,
        passes: LayerPasses,
        activations: ActivationPolicy | None = None,
        has_gradient: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(site, layer, has_gradient)
        self._activations = activations
        self._passes = passes
        # gives every call a node in the graph, also where no input needs a gradient
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor | None
    ) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`.

        Args:
            hidden_states: `[T, D]`.
            top_k_index: `[T, K]`; choices with ids of no expert are passed over.
            top_k_weights: `[T, K]` gate weights; None for rows that are sorted by expert, of one
                choice each, which all weigh one.

        Returns:
            `[T, D]`.

        Raises:
            MoERuntimeError: an expert could not be read or written.
        """
        dtype = compute_dtype(hidden_states)
        # a copy within would hide from autograd where it came from
        x_TD = hidden_states.to(dtype).contiguous()
        if torch.is_grad_enabled():
            with self._saving():
                out_TD = cast(
                    Tensor, _Call.apply(self._anchor, x_TD, top_k_weights, top_k_index, self)
                )
        else:
            entry = LayerInput(x_TD, top_k_index, top_k_weights)
            with _plainly(x_TD):
                _, (out_TD,) = self._passes.forward(
                    self.layer, [entry], keeps=False, is_visit=False
                )
        return out_TD.to(hidden_states.dtype) if self._keeps_dtype else out_TD

    def compute(self, entry: LayerInput) -> tuple[Any, Tensor]:
        """The forward pass, together with the other micro-batches of a window."""
        # inside a backward pass, activations are only computed again
        is_visit = torch._C._current_graph_task_id() == -1

        def together(entries: list[LayerInput]) -> list[tuple[Any, Tensor]]:
            with _plainly(entry.x_TD):
                calls, outputs = self._passes.forward(
                    self.layer, entries, keeps=True, is_visit=is_visit
                )
            return list(zip(calls, outputs, strict=True))

        return self._meet(("forward", self.layer), entry, together)

    def step_back(self, call: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor]:
        """The backward pass, likewise."""

        def together(entries: list[tuple[Any, Tensor]]) -> list[tuple[Tensor, Tensor]]:
            calls, grads = zip(*entries, strict=True)
            with _plainly(grad_TD):
                return self._passes.backward(self.layer, calls, grads)

        return self._meet(("backward", self.layer), (call, grad_TD), together)

    def _saving(self) -> AbstractContextManager[object]:
        if self._activations is None:
            return contextlib.nullcontext()
        return self._activations.saving(self.layer)

    def _meet(self, place: tuple[str, int], entry: Any, together: Any) -> Any:
        if self.window is None:
            return together([entry])[0]
        return self.window.meet(place, entry, together)

    def get_parameter(self, target: str) -> nn.Parameter:
        """A copy of a parameter as the module had it, for exporters; no part of the module."""
        return nn.Parameter(self._passes.stacked(self.layer, target), requires_grad=False)


@contextlib.contextmanager
def _plainly(x: Tensor) -> Iterator[None]:
    """No graph, and products in the dtype of their inputs, in whichever thread this runs."""
    with torch.no_grad(), without_autocast(x.device.type):
        yield


class _Call(torch.autograd.Function):
    """One micro-batch's pass through a layer."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        x_TD: Tensor,
        weights_TK: Tensor | None,
        ids_TK: Tensor,
        module: OffloadedTrainingExperts,
    ) -> Tensor:
        call, out_TD = module.compute(LayerInput(x_TD, ids_TK, weights_TK))
        ctx.module, ctx.call, ctx.has_weights = module, call, weights_TK is not None
        ctx.save_for_backward(*call.give_up_tensors())
        return out_TD

    @staticmethod
    @first_derivatives_only(
        "offloaded experts have no second derivatives: train the model without offloading"
    )
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.take_tensors(*ctx.saved_tensors)
        grad_TD, grad_weights_TK = ctx.module.step_back(ctx.call, grad)
        ctx.call.give_up_tensors()
        return None, grad_TD, grad_weights_TK if ctx.has_weights else None, None, None
