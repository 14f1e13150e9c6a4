"""Copies of experts' weights where products are computed, some kept from one pass to the next.

A kept copy is made anew only after its expert's weights have changed. No copy changes a bit.

Sources: Ren et al., "ZeRO-Offload" (2021) for this cut between what crosses and what does not;
Hecate (2025) for the choice of copies: the experts used most, chosen again as loads drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.kernels.expert_mlp import StackedExperts
from moe_runtime.lab.record_tiers import UseCounts, spread
from moe_runtime.training.offload.device_link import DeviceLink, add_up, kept_bytes
from moe_runtime.types import ExpertKey


@dataclass(slots=True)
class LinkTraffic:
    """Bytes between the tiers of experts and the device that computes, or between their types.

    Attributes:
        to_device_bytes: weights.
        from_device_bytes: gradients.
        kept_bytes: weights that were there already and did not cross.
    """

    to_device_bytes: int = 0
    from_device_bytes: int = 0
    kept_bytes: int = 0


@dataclass(slots=True)
class _Copy:
    step: int
    tensors: list[Tensor]
    num_bytes: int


class ComputeCopies:
    """Copies of experts' weights on the device, or in the type of products.

    Args:
        keys: all experts, in order.
        num_bytes: that copies may take from one pass to the next; 0 keeps none.
        link: to the device that computes; None where that is the CPU.
    """

    def __init__(
        self, keys: Iterable[ExpertKey], num_bytes: int = 0, link: DeviceLink | None = None
    ) -> None:
        self.link = link
        self.traffic = LinkTraffic()
        self._keys = list(keys)
        self._num_bytes = num_bytes
        self.kept_bytes = 0
        self._tiers: set[ExpertKey] | None = None
        self._copies: dict[ExpertKey, _Copy] = {}
        self._uses = UseCounts(self._keys)
        self._used: set[ExpertKey] = set()
        self._scratch: dict[tuple[object, ...], list[Tensor]] = {}

    def weights(
        self, key: ExpertKey, step: int, tensors: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """An expert's weights on the device and in the type of `like`; `tensors` where nothing has
        to cross."""
        if not self._num_bytes and not crosses(tensors[0], like):
            return list(tensors)
        self._used.add(key)
        size = sum(tensor.numel() for tensor in tensors) * like.element_size()
        kept = self._copies.get(key)
        is_alike = kept is not None and not crosses(kept.tensors[0], like)
        if kept is not None and is_alike and kept.step == step:
            self.traffic.kept_bytes += size
            return kept.tensors
        self.traffic.to_device_bytes += size
        if kept is not None and is_alike:
            self._bring(tensors, like, kept.tensors)
            kept.step = step
            return kept.tensors
        self._drop(key)
        room = size if self.link is None else kept_bytes(tensors, like.dtype)
        if not self._is_resident(key, room):
            return self._bring(tensors, like)
        found = None if self.link is None else self.link.keep(tensors, like.dtype)
        found = self._bring(tensors, like, found)
        self._copies[key] = _Copy(step, found, room)
        self.kept_bytes += room
        return found

    def _bring(
        self, tensors: Sequence[Tensor], like: Tensor, into: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        if self.link is not None:
            return self.link.bring(tensors, like.dtype, into)
        if into is None:
            return [tensor.to(like.device, like.dtype, copy=True) for tensor in tensors]
        for ours, theirs in zip(into, tensors, strict=True):
            ours.copy_(theirs)
        return list(into)

    def release(self, action: Callable[[], object]) -> None:
        """All work with the last weights is queued; `action` releases their record once the device
        is done."""
        if self.link is None:
            action()
        else:
            self.link.release(action)

    def finish(self) -> None:
        if self.link is not None:
            self.link.finish()

    def memory(
        self,
        like: Sequence[Tensor],
        weights: StackedExperts,
        *,
        dtype: torch.dtype | None = None,
        is_part: bool = False,
    ) -> list[Tensor]:
        """Memory for an expert's gradients where its weights are, in their type unless told.

        Args:
            is_part: of one micro-batch, which is summed there.
        """
        dtype = weights.dtype if dtype is None else dtype
        if self.link is not None:
            return self.link.part(like, dtype) if is_part else self.link.gradients(like, dtype)
        place = (*(tensor.shape for tensor in like), weights.device)
        if self._scratch and next(iter(self._scratch))[:-2] != place:
            self._scratch.clear()  # that of one kind of expert at a time
        key = (*place, dtype, is_part)
        if key not in self._scratch:
            self._scratch[key] = [
                torch.empty(tensor.shape, dtype=dtype, device=weights.device) for tensor in like
            ]
        return self._scratch[key]

    def send_back(self, found: Sequence[Tensor], targets: Sequence[Tensor], *, adds: bool) -> None:
        """Brings gradients to their expert's record, and counts them."""
        sizes = (gradient.numel() * gradient.element_size() for gradient in found)
        self.traffic.from_device_bytes += sum(sizes)
        if self.link is not None:
            self.link.send_back(found, targets, adds=adds)
        else:
            add_up(targets, found, adds=adds)

    def after_step(self) -> None:
        """Counts uses; the experts used most get the room of those used least."""
        tiers = self._tiers
        if tiers is None:
            return
        for arriving, leaving in self._uses.after_step(self._used, tiers.__contains__):
            tiers.add(arriving)
            tiers.remove(leaving)
            self._drop(leaving)
        self._used.clear()

    def forget(self) -> None:
        """Drops all copies: weights were taken back, or a checkpoint has others."""
        if self.link is not None:
            self.link.abandon()
        self._copies.clear()
        self.kept_bytes = 0
        self._used.clear()

    def _drop(self, key: ExpertKey) -> None:
        if (copy := self._copies.pop(key, None)) is not None:
            self.kept_bytes -= copy.num_bytes

    def _is_resident(self, key: ExpertKey, size: int) -> bool:
        if self._tiers is None:
            count = min(len(self._keys), self._num_bytes // max(1, size))
            self._tiers = set(spread(self._keys, count))
        return key in self._tiers and self.kept_bytes + size <= self._num_bytes


def crosses(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor is elsewhere, or of another type, than what computes with it."""
    return tensor.dtype != like.dtype or tensor.device != like.device
