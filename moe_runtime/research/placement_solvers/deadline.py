"""How long a search may go on."""

import math
import time
from collections.abc import Callable


class Deadline:
    """A moment after which the best that was found counts.

    Args:
        seconds: until then; infinite by default.
        clock: seconds from any moment on.
    """

    def __init__(
        self, seconds: float = math.inf, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._end = clock() + seconds

    @property
    def left_s(self) -> float:
        """Seconds that are left; 0 once there are none."""
        return max(0.0, self._end - self._clock())

    @property
    def has_passed(self) -> bool:
        """Whether the search must end."""
        return self.left_s <= 0

    def part(self, share: float) -> "Deadline":
        """A deadline after a share of what is left."""
        return Deadline(share * self.left_s, clock=self._clock)
