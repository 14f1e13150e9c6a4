"""Experts of zeroth-order training: computed with to both sides of their parameters in one visit.

How far an expert has come is counted in half steps: 2 t before step t, with all updates made, and
2 t + 1 after it was moved to both sides and back in step t, whose update waits for the slope.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from moe_runtime.errors import UnsupportedUseError
from moe_runtime.kernels.expert_mlp.streamed import StreamedExperts
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.kernels.operands.second_derivative import first_derivatives_only
from moe_runtime.layer.experts import compute_dtype
from moe_runtime.research.zeroth_order.directions import ZerothOrder, descend, direction, perturb
from moe_runtime.training.offload.execution.absent_experts import AbsentExperts
from moe_runtime.training.offload.execution.passes import LayerInput
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.training.offload.states.records import Sections
from moe_runtime.training.offload.states.states import ExpertStates
from moe_runtime.types import ExpertKey

_SIDES = (1, -2, 1)
"""Distances, in `eps`: to one side, from there to the other, and back."""


class SpsaExecutor:
    """Forward passes of layers whose experts come once for both sides.

    Args:
        sites: the layers' experts; the position is the layer of an `ExpertKey`.
        states: their records, parameters alone.
        settings: of MeZO.

    Attributes:
        slopes: projected gradient of each step so far; None where it was not finite.
        rates: learning rate of each step so far.
        num_left: how many of the inputs of a layer belong to the first side; 0 outside a step.
    """

    def __init__(
        self, sites: Sequence[ExpertsModuleSpec], states: ExpertStates, settings: ZerothOrder
    ) -> None:
        self.slopes: list[float | None] = []
        self.rates: list[float] = []
        self.num_left = 0
        self._sites = list(sites)
        self._states = states
        self._settings = settings
        self._last_visited: dict[int, list[ExpertKey]] = {}

    @property
    def step(self) -> int:
        """The number of the step under way; the first is 0."""
        return len(self.slopes)

    def finish_step(self, slope: float | None, rate: float) -> None:
        """The step's slope is known; experts are moved by it when they are needed next."""
        self.slopes.append(slope)
        self.rates.append(rate)
        self._states.commit()
        self._expect(0, [])

    def forward(self, layer: int, inputs: Sequence[LayerInput]) -> list[Tensor]:
        """One layer: for all micro-batches to both sides in a step, else for one as it is.

        Args:
            layer: its number.
            inputs: one of each micro-batch, the first `num_left` of them to the first side.

        Returns:
            The outputs, `[T, D]` each.
        """
        site = self._sites[layer]
        calls = [
            StreamedExperts(x, ids, weights, site.num_experts, site.activation, site.impl)
            for x, ids, weights in inputs
        ]
        keys = [ExpertKey(layer, e) for e in sorted({e for call in calls for e in call.experts})]
        self._expect(layer, keys)
        self._last_visited[layer] = keys
        for call in calls:
            call.begin_forward(0, keeps=False)
        for key in keys:
            if self.num_left:
                self._visit(key, calls[: self.num_left], calls[self.num_left :])
            else:
                self._compute(key, self._fetch(key), calls)
                self._states.release(key)
        return [call.output() for call in calls]

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters after the steps so far, by name."""
        record = self._fetch(key)
        named = self._named(key, record)
        copies = {name: tensor.clone() for name, tensor in named.items()}
        self._states.release(key)
        return copies

    def _visit(
        self, key: ExpertKey, left: list[StreamedExperts], right: list[StreamedExperts]
    ) -> None:
        record = self._fetch(key)
        named = self._trained(key, record)
        along = self._directions(key, named, self.step)
        for distance, calls in zip(_SIDES, (left, right, []), strict=True):
            self._shift(named, along, distance)
            self._compute(key, record, calls)
        if named:
            self._states.set_content_step(key, 2 * self.step + 1)
            self._states.write_state(key)
        self._states.release(key)

    def _fetch(self, key: ExpertKey) -> Tensor:
        """An expert's record after all steps so far."""
        trains = bool(self._states.experts[key].layout.trained)
        record = self._states.acquire(key, Sections.PARAMETERS, writes=trains)
        behind = self._states.content_step(key)
        if behind >= 2 * self.step or not trains:
            return record
        self._catch_up(key, self._trained(key, record), behind)
        self._states.set_content_step(key, 2 * self.step)
        return record

    def _catch_up(self, key: ExpertKey, named: dict[str, Tensor], behind: int) -> None:
        """Makes the update that waits, and takes the steps that the expert was not visited in."""
        first, is_visited = divmod(behind, 2)
        moves_always = self._settings.untouched == "dense_exact"
        for step in range(first, self.step):
            was_visited = step == first and is_visited
            if not (was_visited or moves_always):
                return
            along = self._directions(key, named, step)
            for distance in () if was_visited else _SIDES:
                self._shift(named, along, distance)
            self._descend(key, named, along, step)

    def _descend(
        self, key: ExpertKey, named: dict[str, Tensor], along: dict[str, Tensor], step: int
    ) -> None:
        slope = self.slopes[step]
        if slope is None:
            return
        for tensor in self._states.experts[key].layout.trained:
            decay = self._settings.weight_decay if tensor.decays else 0.0
            descend(
                named[tensor.name], along[tensor.name], slope, rate=self.rates[step], decay=decay
            )

    def _shift(self, named: dict[str, Tensor], along: dict[str, Tensor], times: int) -> None:
        for name, tensor in named.items():
            perturb(tensor, along[name], times * self._settings.eps)

    def _directions(self, key: ExpertKey, named: dict[str, Tensor], step: int) -> dict[str, Tensor]:
        place = self._sites[key.layer].name
        return {
            name: direction(
                tensor, seed=self._settings.seed, step=step, name=f"{place}.{name}.{key.expert}"
            )
            for name, tensor in named.items()
        }

    def _compute(self, key: ExpertKey, record: Tensor, calls: Sequence[StreamedExperts]) -> None:
        here = [call for call in calls if call.num_rows(key.expert)]
        if not here:
            return
        views = list(self._named(key, record).values())
        x_TD = here[0].x_TD
        if x_TD.dtype != views[0].dtype or x_TD.is_cuda:
            views = [view.to(x_TD.device, x_TD.dtype) for view in views]
        names = [tensor.name for tensor in self._states.experts[key].layout.tensors]
        weights = self._sites[key.layer].stacked(names, views)
        for call in here:
            call.forward(key.expert, weights)

    def _named(self, key: ExpertKey, record: Tensor) -> dict[str, Tensor]:
        layout = self._states.experts[key].layout
        views = layout.views(record, Sections.PARAMETERS)
        return {tensor.name: view for tensor, view in zip(layout.tensors, views, strict=True)}

    def _trained(self, key: ExpertKey, record: Tensor) -> dict[str, Tensor]:
        """The parameters that move."""
        named = self._named(key, record)
        return {t.name: named[t.name] for t in self._states.experts[key].layout.trained}

    def _expect(self, layer: int, keys: Sequence[ExpertKey]) -> None:
        """Reads ahead: this layer's experts, then those that the next layer had last time."""
        following = self._last_visited.get(layer + 1 if keys else layer, [])
        self._states.expect((key, Sections.PARAMETERS) for key in [*keys, *following])


class SpsaExperts(AbsentExperts):
    """Routed experts whose parameters are not here, for forward passes to both sides.

    Args:
        site: the module whose place it takes.
        layer: its number among the layers with experts.
        passes: computes it.
    """

    def __init__(self, site: ExpertsModuleSpec, layer: int, passes: SpsaExecutor) -> None:
        super().__init__(site, layer, has_gradient=lambda: False)
        self._passes = passes

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`out[t] = sum_k weights[t, k] * expert[ids[t, k]](x[t])`; a backward pass is refused.

        Args:
            hidden_states: `[T, D]`.
            top_k_index: `[T, K]`; choices with ids of no expert are passed over.
            top_k_weights: `[T, K]` gate weights.

        Returns:
            `[T, D]`.

        Raises:
            MoERuntimeError: an expert could not be read or written.
        """
        x_TD = hidden_states.detach().to(compute_dtype(hidden_states))
        entry = LayerInput(x_TD, top_k_index, top_k_weights.detach())

        def together(entries: list[LayerInput]) -> list[Tensor]:
            # another thread's part may have left autocast or gradients on
            with torch.no_grad(), without_autocast(hidden_states.device.type):
                return self._passes.forward(self.layer, entries)

        if self.window is None:
            (out_TD,) = together([entry])
        else:
            out_TD = self.window.meet(self.layer, entry, together)
        out_TD = out_TD.to(hidden_states.dtype) if self._keeps_dtype else out_TD
        return _NoBackward.apply(out_TD, hidden_states, top_k_weights)


class _NoBackward(torch.autograd.Function):
    """Passes an output through, and refuses gradients, which would lack the experts' part."""

    @staticmethod
    def forward(ctx: Any, out_TD: Tensor, *inputs: Tensor) -> Tensor:
        return out_TD.view_as(out_TD)

    @staticmethod
    @first_derivatives_only("experts of offload_zeroth_order have no derivatives")
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise UnsupportedUseError(
            "offload_zeroth_order trains by forward passes alone: call `backward` and `step` of "
            "the optimizer that it returned, or train by gradients with offload_training"
        )
