"""Training of what lies around experts that stay as the checkpoint has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from moe_runtime.allocator import return_freed_blocks
from moe_runtime.inference.budget import peak_resident_bytes
from moe_runtime.memory.store import ExpertStore
from moe_runtime.training.offload.execution.compute_copies import LinkTraffic
from moe_runtime.training.offload.execution.frozen import ExpertAdapters, FrozenPasses
from moe_runtime.training.offload.execution.offloaded_experts import OffloadedTrainingExperts
from moe_runtime.training.offload.execution.window import MicroBatchBarrier, run_window
from moe_runtime.training.offload.expert_training import OffloadStats
from moe_runtime.training.offload.memory import FrozenMemory
from moe_runtime.training.offload.optimizers.adamw import AdamW
from moe_runtime.training.offload.optimizers.dense_adamw import DenseAdamW, StepOutcome, clip_scale
from moe_runtime.training.offload.site import ExpertsModuleSpec
from moe_runtime.training.offload.states.entries import Traffic
from moe_runtime.types import ExpertKey

S = TypeVar("S")


class AdapterTraining:
    """The optimizer of a model whose experts are frozen and stay in the checkpoint's files.

    Used as `OffloadedTraining`; a step's micro-batches meet at the experts, which are read once for
    all of them in either direction.

    Args:
        model: everything that shall be trained requires gradients, and nothing else; its experts
            are replaced.
        sites: its experts.
        passes: computes them.
        adapters: of the experts, layer by layer; empty if they have none. They become parts of the
            model.
        stores: what experts are computed from, and below that, where a device computes, the one of
            the host; closed at the end.
        settings: of AdamW.
        memory: how the budgets were divided.

    Attributes:
        model, memory: as given.
        dense: of the trained parameters.

    Raises:
        ValueError: there is nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        sites: Sequence[ExpertsModuleSpec],
        passes: FrozenPasses,
        adapters: Sequence[ExpertAdapters],
        stores: Sequence[ExpertStore[Tensor]],
        settings: AdamW,
        memory: FrozenMemory,
    ) -> None:
        return_freed_blocks()
        self.model = model
        self._stores = [*stores]
        self.memory = memory
        self._steps = self._skipped = 0
        self._num_experts = sum(site.num_experts for site in sites)
        self._passes = passes
        self._settings = settings
        self._modules: list[OffloadedTrainingExperts] = []
        for layer, site in enumerate(sites):
            module = OffloadedTrainingExperts(site, layer, passes)
            if adapters:
                module.add_module("adapters", adapters[layer])
            model.set_submodule(site.name, module)
            self._modules.append(module)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("there is nothing to train: no parameter requires gradients")
        self.dense = DenseAdamW(
            named,
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
        )

    def backward(
        self, parts: Sequence[Callable[[], Tensor]], *, rate: float | None = None
    ) -> list[Tensor]:
        """Forward and backward passes of a step's micro-batches; returns the losses, detached.

        Raises:
            MoERuntimeError: an expert could not be read.
        """
        del rate  # for optimizers that update inside the backward pass
        self._passes.begin()
        losses: list[Tensor] = []
        try:
            found = run_window(self.model, [partial(_part, p) for p in parts], self._set_window)
            self._passes.finish()
            losses = found
        finally:
            if not losses:
                self.dense.forget()
                self._passes.abandon()
        return losses

    def step(self, rate: float | None = None) -> StepOutcome:
        """Clips, updates and forgets the gradients; one that is not finite changes nothing."""
        norm = self.dense.norm()
        bad = () if math.isfinite(norm) else self.dense.bad_gradients()
        if not bad:
            rate = self._settings.lr if rate is None else rate
            self.dense.step(rate, clip_scale(norm, self._settings.clip_norm))
        self.dense.forget()
        self._steps += not bad
        self._skipped += bool(bad)
        return StepOutcome(norm, bad)

    def stats(self) -> OffloadStats:
        """Counters since the training was made."""
        fast, last = self._stores[0].stats(), self._stores[-1].stats()
        link = LinkTraffic()
        if len(self._stores) > 1:
            kept = (fast.hits + fast.late_hits) * fast.slot_bytes
            link = LinkTraffic(to_device_bytes=fast.bytes_read, kept_bytes=kept)
        return OffloadStats(
            steps=self._steps,
            skipped_steps=self._skipped,
            traffic=Traffic(read_bytes=last.bytes_read, stall_s=fast.stall_s),
            link=link,
            num_experts=self._num_experts,
            resident_experts=self.memory.host.num_slots,
            budget_bytes=self.memory.host.budget_bytes,
            disk_bytes=0,
            peak_rss_bytes=peak_resident_bytes(),
        )

    def expert(self, key: ExpertKey) -> dict[str, Tensor]:
        """A copy of one expert's parameters in fp32, adapters included, by name."""
        return self._passes.expert(key)

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts."""
        return self.dense.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes up what `state_dict` gave.

        Raises:
            CheckpointError: the state is damaged, or belongs to other parameters.
        """
        self.dense.load_state_dict(state)

    def write(
        self, state: S, own: Callable[[S], Mapping[str, Any]], job: Callable[[S], object]
    ) -> None:
        """Has a job write a state that holds what `state_dict` gave."""
        del own
        job(state)

    def transfers(self) -> dict[str, Any]:
        """Seconds of waiting and bytes so far, by name."""
        fast, last = self._stores[0].stats(), self._stores[-1].stats()
        return {
            "stall_s": fast.stall_s,
            "memory_bytes": (last.hits + last.late_hits) * last.slot_bytes,
            "read_bytes": last.bytes_read,
            "written_bytes": 0,
        }

    def check(self) -> None:
        """Proves that the stores' books balance.

        Raises:
            AssertionError: they do not.
        """
        for store in self._stores:
            store.check()

    def wait(self) -> None:
        """Returns when the last checkpoint is written, as it is here."""

    def close(self) -> None:
        """Ends the reads; the model is of no use then."""
        self._stores[0].close()

    def _set_window(self, window: MicroBatchBarrier[Any] | None) -> None:
        for module in self._modules:
            module.window = window


def _part(part: Callable[[], Tensor]) -> Tensor:
    loss = part()
    loss.backward()
    return loss.detach()
