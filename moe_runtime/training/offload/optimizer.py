"""AdamW steps of the offloaded experts."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.lab.record_tiers import UseCounts
from moe_runtime.training.checkpoint import AMOUNT, COUNT, MAPPING, require_kinds
from moe_runtime.training.offload.adamw import AdamW, LossScale, UpdateStep, take_steps
from moe_runtime.training.offload.device_updates import DeviceUpdates
from moe_runtime.training.offload.record_store import Need, RecordStore
from moe_runtime.training.offload.records import Sections
from moe_runtime.training.offload.site import OneProcess
from moe_runtime.training.optimizer import clip_scale
from moe_runtime.types import ExpertKey

_KINDS = {
    "step": COUNT,
    "rates": AMOUNT.listed(),
    "scales": AMOUNT.listed(),
    "last_norm": AMOUNT.or_none(),
    "loss_scale": MAPPING,
}
_MISSED = {"missed": COUNT.listed().named()}  # older versions kept none


class ExpertOptimizer:
    """Updates the offloaded experts for `OffloadedTraining`, in memory or while they are read.

    With `clip_norm > 0` and `clip="two_phase"`, as `finetune` and `train` have by default, every
    gradient waits for `step`. Otherwise an expert on the disk is updated inside the backward pass,
    as soon as its gradient is final; one in memory at the end of it, which costs no transfer.

    Source: Liao et al., "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a
    Single GPU" (Fuyou, 2024) for the update inside the backward pass.

    Attributes:
        step: steps taken, skipped ones not counted.
        clip_norm: largest global norm of the next step's gradients; 0 does not clip.
        unscale: factor of the experts' gradients, from a loop's own gradient scaler.
        bad_experts: experts whose gradients since the last step are not finite.
    """

    def __init__(
        self,
        records: RecordStore,
        settings: AdamW,
        device_updates: DeviceUpdates | None,
        processes: OneProcess,
    ) -> None:
        self.records = records
        self.device_updates = device_updates
        self.step = 0
        self.loss_scale = LossScale(settings.loss_scale)
        self.clip_norm = settings.clip_norm
        self.unscale = 1.0
        self.bad_experts: list[ExpertKey] = []
        self._processes, self._settings = processes, settings
        self._mean = 1 / processes.loss_parts
        self._rates: list[float] = []
        self._scales: list[float] = []
        # steps in which a layer had no part: its parameters had no gradients, not gradients of zero
        self._missed: dict[int, list[int]] = {key.layer: [] for key in records.experts}
        self._norms: dict[ExpertKey, float] = {}
        self._last_norm: float | None = None
        self._uses = UseCounts(records.experts)

    def sections_needed(self, key: ExpertKey) -> Sections:
        """Sections to read before an expert can compute: all of it if it missed steps."""
        return Sections.STATE if self._is_behind(key) else Sections.PARAMETERS

    def needs(self, keys: Iterable[ExpertKey]) -> Iterator[Need]:
        return ((key, self.sections_needed(key)) for key in keys)

    def fetch(
        self, key: ExpertKey, more: Sections = Sections.NONE, *, writes: bool = False
    ) -> Tensor:
        """The record of an expert after `step` steps; `records.release` gives it back."""
        is_behind = self._is_behind(key)
        record = self.records.acquire(
            key, self.sections_needed(key) | more, writes=writes or is_behind
        )
        if is_behind and self._is_behind(key):
            self._catch_up(key, record, self._rates)
            self.records.set_content_step(key, self.step)
        return record

    def updates_in_backward(self, key: ExpertKey) -> bool:
        waits = self._settings.waits_for_norm and not self._settings.is_delayed(self.step)
        return not (self.records.is_resident(key) or waits or self.bad_experts)

    def accept(self, key: ExpertKey, record: Tensor, rate: float | None) -> None:
        """Takes an acquired record with its summed gradient, and releases the record.

        Args:
            rate: learning rate if the gradient is final; None if more may be added.
        """
        layout = self.records.experts[key].layout
        gradient = layout.flat(record, Sections.GRADIENT)
        norm = float(torch.linalg.vector_norm(gradient)) * self._mean / self.loss_scale.value
        self._norms[key] = norm
        if not math.isfinite(norm) and key not in self.bad_experts:
            self.bad_experts.append(key)
        if rate is not None and self.updates_in_backward(key):
            self._update(key, record, rate, self._mean * self._scale(self._last_norm))
            self.records.forget_gradient(key)  # an earlier part's, now in the sum
        else:
            self.records.park_gradient(key)
            self.records.release(key, has=Sections.GRADIENT)

    def take_step(
        self, rate: float, dense_norm: float, dense_is_bad: bool, layers: Collection[int]
    ) -> tuple[float, float, bool]:
        """Takes the step of experts whose gradients wait, or rolls all of it back; collective.

        Args:
            dense_norm: norm of the other parameters' gradients, with the loss scale.
            layers: those that a backward pass went through. AdamW leaves the others alone.

        Returns:
            Global norm of the gradients, the factor for the other parameters' gradients, and
            whether the step was skipped because a gradient is not finite.
        """
        norm, num_bad = self.norm(dense_norm)
        is_skipped = dense_is_bad or num_bad > 0
        scale = self._scale(self._last_norm if self._settings.clip == "delayed" else norm)
        own_scale = self._mean * self.unscale * scale
        waiting = [key for key in sorted(self._norms) if self.records.experts[key].has_gradient]
        self._await_device()
        if is_skipped:
            for key in waiting:
                self.records.forget_gradient(key)
            self.records.roll_back()
        else:
            self.records.expect((key, Sections.ALL) for key in waiting)
            for key in waiting:
                record = self.fetch(key, Sections.ALL, writes=True)
                self._update(key, record, rate, own_scale)
                self.records.forget_gradient(key)
            self._await_device()
            self.records.commit()
            if not self._settings.is_delayed(self.step):
                for layer in self._missed.keys() - layers:
                    self._missed[layer].append(self.step)
            self._rates.append(rate)
            self._scales.append(own_scale)
            self.step += 1
            self._last_norm = norm
            for arriving, leaving in self._uses.after_step(self._norms, self.records.is_resident):
                self.records.exchange_tiers(arriving, leaving)
        self.loss_scale.after_step(was_skipped=is_skipped)
        self._forget_norms()
        return norm, scale, is_skipped

    def norm(self, dense_norm: float) -> tuple[float, float]:
        """Global norm of the gradients, and the number of experts with gradients that are not
        finite; arguments as of `take_step`."""
        square, num_bad = self._processes.sums(
            [sum(value * value for value in self._norms.values()), float(len(self.bad_experts))]
        )
        square *= self.unscale**2
        return math.sqrt(square + (dense_norm / self.loss_scale.value) ** 2), num_bad

    def discard(self) -> None:
        """Drops the gradients since the last step, and rolls back what they changed."""
        self._await_device()
        for key, expert in self.records.experts.items():
            if expert.has_gradient:
                self.records.forget_gradient(key)
        self.records.abandon()
        self.records.roll_back()
        self._forget_norms()

    def _forget_norms(self) -> None:
        self.clip_norm, self.unscale = self._settings.clip_norm, 1.0
        self._norms.clear()
        self.bad_experts.clear()

    @property
    def has_gradient(self) -> bool:
        return bool(self._norms)

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "rates": list(self._rates),
            "scales": list(self._scales),
            "last_norm": self._last_norm,
            "loss_scale": self.loss_scale.state_dict(),
            "missed": {str(layer): list(steps) for layer, steps in self._missed.items() if steps},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_kinds(state, _KINDS, "the checkpoint's steps", optional=_MISSED)
        if not state["step"] == len(state["rates"]) == len(state["scales"]):
            raise CheckpointError(
                f"the checkpoint has {len(state['rates'])} rates and {len(state['scales'])} scales "
                f"of {state['step']} steps"
            )
        if (state["last_norm"] is None) != (state["step"] == 0):
            raise CheckpointError(f"the checkpoint's last_norm is {state['last_norm']}")
        missed = {str(layer): list[int]() for layer in self._missed} | state.get("missed", {})
        for layer, steps in missed.items():
            is_sound = layer.isdecimal() and int(layer) in self._missed
            if (
                not is_sound
                or sorted({*steps}) != [*steps]
                or max(steps, default=-1) >= state["step"]
            ):
                raise CheckpointError(f"the checkpoint's missed steps of layer {layer} are {steps}")
        self._missed = {int(layer): [*steps] for layer, steps in missed.items()}
        self.step, self._last_norm = state["step"], state["last_norm"]
        self._rates = [float(rate) for rate in state["rates"]]
        self._scales = [float(scale) for scale in state["scales"]]
        self.loss_scale.load_state_dict(state["loss_scale"])

    def _await_device(self) -> None:
        if self.device_updates is not None:
            self.device_updates.wait()

    def _is_behind(self, key: ExpertKey) -> bool:
        if not self.records.experts[key].layout.trained:
            return False
        is_exact = self._settings.untouched == "dense_exact"
        is_old = self.records.content_step(key) < self.step
        return is_old and (is_exact or self._pending(key) is not None)

    def _pending(self, key: ExpertKey) -> int | None:
        """The step whose gradient is kept in the nearest copy of a record and not used yet."""
        step = self.records.experts[key].pending
        return step if step is not None and step + 1 == self.records.content_step(key) else None

    def _catch_up(self, key: ExpertKey, record: Tensor, rates: Sequence[float]) -> None:
        """Takes the steps that a record missed, the first with the gradient that it may keep."""
        layout, count = self.records.experts[key].layout, self.records.experts[key].count
        pending, behind = self._pending(key), self.records.content_step(key)
        steps = [
            UpdateStep(number, rates[step])
            for step in range(behind, len(rates))
            if (number := self._number(key.layer, step)) is not None
        ]
        if self._settings.untouched == "sparse_skip":
            steps = [] if pending is None else [UpdateStep(count + 1, rates[pending + 1])]
        gradient = None
        if pending is not None:
            gradient = layout.kept_gradient(record).mul_(self._scales[pending])
        if steps:
            refreshes = count % self._settings.galore_refresh == 0
            take_steps(layout, record, self._settings, steps, gradient, refreshes=refreshes)

    def _number(self, layer: int, step: int) -> int | None:
        """The number of a layer's update in a step, from 1; None if it has none."""
        missed = self._missed[layer]
        before = bisect_left(missed, step)
        number = self._settings.update_number(step)
        return None if number is None or step in missed[before:][:1] else number - before

    def _scale(self, norm: float | None) -> float:
        """Factor of gradients as the backward pass makes them."""
        clip = 1.0 if norm is None else clip_scale(norm, self.clip_norm)
        return clip / self.loss_scale.value

    def _update(self, key: ExpertKey, record: Tensor, rate: float, scale: float) -> None:
        """Takes the step of an acquired record with its gradient, and releases the record."""
        number = self.step + 1

        def write_back() -> None:
            self.records.set_content_step(key, number)
            self.records.write_state(key)
            self.records.release(key)

        expert = self.records.experts[key]
        gradient = expert.layout.flat(record, Sections.GRADIENT)
        if self._settings.is_delayed(self.step):  # as ZeRO-Offload does
            self._catch_up(key, record, [*self._rates, rate])
            expert.count += expert.pending is not None
            expert.layout.kept_gradient(record).copy_(gradient)
            expert.pending = self.step
            write_back()
            return
        is_exact = self._settings.untouched == "dense_exact"
        own = number - len(self._missed[key.layer])
        step = UpdateStep(own if is_exact else expert.count + 1, rate)
        if scale != 1:
            gradient.mul_(scale)
        refreshes = expert.count % self._settings.galore_refresh == 0
        expert.count += 1
        if self.device_updates is not None and self.device_updates.takes(
            expert.layout, record, self._settings, step, refreshes=refreshes, finish=write_back
        ):
            return
        take_steps(expert.layout, record, self._settings, [step], gradient, refreshes=refreshes)
        write_back()
