"""A store whose slots are filled from the tier below."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from moe_runtime.memory.io_queue import Read
from moe_runtime.memory.lease import Lease
from moe_runtime.memory.residency import ExpertStore
from moe_runtime.memory.tier_fetcher import TierFetcher
from moe_runtime.types import ExpertKey

W = TypeVar("W")


class TierLease(Lease[W]):
    """A hold on experts of a tier over another.

    The garbage collector may end it on any thread, in the midst of an operation of the tier below:
    then nothing is waited for, and the next operation of the store gives back what it held.
    """

    _store: TierStore[W]

    def _leave(self) -> None:
        if self._store.fetcher.is_within_lower():
            self.is_whole = False
            self._store._changed.disturb()
        else:
            super()._leave()


class TierStore(ExpertStore[W]):
    """Experts in slots that are filled from the tier below.

    Attributes:
        fetcher: fills them.
    """

    def __init__(self, fetcher: TierFetcher, *args: Any, **kwargs: Any) -> None:
        """Takes what ``ExpertStore`` takes."""
        super().__init__(fetcher, *args, **kwargs)
        self.fetcher = fetcher

    def lease(
        self, keys: Sequence[ExpertKey], *, streaming: bool = False, above: Read | None = None
    ) -> Lease[W]:
        """As ``ExpertStore.lease``."""
        return TierLease(self, keys, streaming=streaming, above=above)

    def let_go(self) -> None:
        """As ``ExpertStore.let_go``."""
        if not self.fetcher.is_within_lower():
            super().let_go()
