"""How fast the link to a device is, measured while experts are copied there."""

from moe_runtime.memory.device.device import Copy

FORGET = 0.9
"""What a copy leaves of the weight of those before it: the last ten or so count."""


class CopySpeed:
    """Running mean of what a byte takes on the link alone, by the copies' own events.

    What a copy waits for is left out: a read, products that still use the slot, other copies.

    Attributes:
        seconds_per_byte: 0 before the first copy ended.
    """

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self._last: Copy | None = None

    def ended(self, num_bytes: int, copy: Copy) -> None:
        """A copy ended."""
        found = copy.seconds_after(self._last) / max(1, num_bytes)
        before = self.seconds_per_byte or found
        self._last, self.seconds_per_byte = copy, before + (found - before) * (1 - FORGET)
