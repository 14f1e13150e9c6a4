"""A modelled link between an expert tier and the one below: one queue, demands first."""

from dataclasses import dataclass

from moe_runtime.types import ExpertKey


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What moving and computing costs.

    Attributes:
        bytes_per_s: bandwidth of the link.
        latency_s: seconds that a transfer takes beside its bytes.
        expert_bytes: bytes of one expert.
        layer_s: seconds that a layer computes beside its experts.
        expert_s: seconds that one expert computes.
        known_ahead_s: of `layer_s`, seconds that follow the choice of the experts and need none of
            them: shared experts, and with ScMoE's shortcut the attention and more.
    """

    bytes_per_s: float
    latency_s: float
    expert_bytes: int
    layer_s: float
    expert_s: float
    known_ahead_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s <= 0 or self.expert_bytes <= 0:
            raise ValueError(
                f"bandwidth and expert size must be positive, got {self.bytes_per_s} bytes/s and "
                f"{self.expert_bytes} bytes"
            )
        if min(self.latency_s, self.layer_s, self.expert_s) < 0:
            raise ValueError("latency and compute times must not be negative")
        if not 0 <= self.known_ahead_s <= self.layer_s:
            raise ValueError(
                f"known_ahead_s must be a part of layer_s={self.layer_s}, got {self.known_ahead_s}"
            )

    @property
    def transfer_s(self) -> float:
        """Seconds that one expert takes on an idle link."""
        return self.latency_s + self.expert_bytes / self.bytes_per_s


class LinkModel:
    """One transfer at a time. Demands go first and interrupt a prefetch, which goes on later.

    Args:
        machine: what a transfer costs.
    """

    def __init__(self, machine: Machine) -> None:
        self._transfer_s = machine.transfer_s
        self._free_at = 0.0
        self._queue: dict[ExpertKey, float] = {}  # seconds left, in the order of service
        self._arrived: set[ExpertKey] = set()

    def advance(self, now_s: float) -> None:
        """Serves prefetches until a moment."""
        while self._queue and self._free_at < now_s:
            key, left_s = next(iter(self._queue.items()))
            served_s = min(left_s, now_s - self._free_at)
            self._free_at += served_s
            if served_s < left_s:
                self._queue[key] = left_s - served_s
            else:
                del self._queue[key]
                self._arrived.add(key)
        self._free_at = max(self._free_at, now_s)

    def prefetch(self, key: ExpertKey) -> None:
        """Queues a transfer behind all others."""
        self._queue[key] = self._transfer_s

    def has_begun(self, key: ExpertKey) -> bool:
        """Whether some of a queued expert was transferred."""
        return self._queue.get(key, self._transfer_s) < self._transfer_s

    def cancel(self, key: ExpertKey) -> None:
        """Takes a queued transfer back."""
        self._queue.pop(key, None)
        self._arrived.discard(key)

    def has_arrived(self, key: ExpertKey) -> bool:
        """Whether a prefetched expert is complete."""
        return key in self._arrived

    def demand(self, keys: list[ExpertKey], now_s: float) -> float:
        """Transfers experts that a layer waits for; what is left of queued ones comes first.

        Returns:
            When the last of them arrives.
        """
        self.advance(now_s)
        left = [self._queue.pop(key, self._transfer_s) for key in keys]
        self._free_at += sum(left)
        return self._free_at if keys else now_s
