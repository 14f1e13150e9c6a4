"""How fast the link to a device is, measured while experts are copied there."""

FORGET = 0.9
"""What a copy leaves of the weight of those before it: the last ten or so count."""


class CopySpeed:
    """Running mean of what a byte takes on the link alone, without the wait for what is read first.

    Attributes:
        seconds_per_byte: 0 before the first copy ended.
    """

    def __init__(self) -> None:
        self.seconds_per_byte = 0.0
        self._last_s = 0.0

    def ended(self, num_bytes: int, *, begun_s: float, now_s: float) -> None:
        """A copy ended that was queued at some time; one copy follows the other."""
        found = max(0.0, now_s - max(begun_s, self._last_s)) / max(1, num_bytes)
        before = self.seconds_per_byte or found
        self._last_s, self.seconds_per_byte = now_s, before + (found - before) * (1 - FORGET)
