"""Experts' parameters where they are computed with: what crosses the link, and what stays there.

Records hold weights in fp32 in host memory. Products want them on a device, or in another type:
then a copy crosses the link in the type of the products, and the gradient crosses it back. Some
experts keep their copy on the device from one pass to the next; theirs is made anew only after
their weights have changed. Where all do, products are in bf16 and every expert gets tokens, a step
moves four bytes a parameter: its weights there, its gradient back. The copy is that of the same
weights, so who keeps one changes no bit.

Sources: Ren et al., "ZeRO-Offload" (2021) for this cut between what crosses and what does not;
Hecate (2025) for who keeps a copy: the experts used most, chosen again as loads drift.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_runtime.planning.record_tiers import UseCounts, spread
from moe_runtime.training.offload.execution.device_link import DeviceLink, kept_bytes
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
    """Weights on the device, as they were after a step."""

    step: int
    tensors: list[Tensor]
    num_bytes: int


class ComputeCopies:
    """Copies of experts' weights on the device, or in the type of products.

    Args:
        keys: all experts, in order.
        num_bytes: that copies may take from one pass to the next; 0 keeps none.
        link: to the device that computes; None where that is the CPU.

    Attributes:
        link: as given.
        traffic: what crossed so far.
        kept_bytes: of the copies that are there.
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

    def weights(
        self, key: ExpertKey, step: int, tensors: Sequence[Tensor], like: Tensor
    ) -> list[Tensor]:
        """An expert's weights on the device and in the type of `like`.

        Args:
            key: the expert.
            step: up to which its record goes.
            tensors: its weights in the record; returned as they are where nothing has to cross.
            like: what they are multiplied with.
        """
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
        """Weights in the type of `like` and where it is; in given memory, or for this use."""
        if self.link is not None:
            return self.link.bring(tensors, like.dtype, into)
        if into is None:
            return [tensor.to(like.device, like.dtype, copy=True) for tensor in tensors]
        for ours, theirs in zip(into, tensors, strict=True):
            ours.copy_(theirs)
        return list(into)

    def let_go(self, action: Callable[[], object]) -> None:
        """All work with the last weights is queued; calls what gives their record up, once the
        device needs it no more: soon."""
        if self.link is None:
            action()
        else:
            self.link.let_go(action)

    def finish(self) -> None:
        """Returns when every record has been given up."""
        if self.link is not None:
            self.link.finish()

    def take_back(self, gradients: Sequence[Tensor]) -> None:
        """Counts gradients that cross the link to their expert's tier."""
        sizes = (gradient.numel() * gradient.element_size() for gradient in gradients)
        self.traffic.from_device_bytes += sum(sizes)

    def after_step(self) -> None:
        """Counts who was used; the experts used most get the room of those used least."""
        tiers = self._tiers
        if tiers is None:
            return
        for arriving, leaving in self._uses.after_step(self._used, tiers.__contains__):
            tiers.add(arriving)
            tiers.remove(leaving)
            self._drop(leaving)
        self._used.clear()

    def forget(self) -> None:
        """Drops all copies: weights become what they were, or what a checkpoint has."""
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
