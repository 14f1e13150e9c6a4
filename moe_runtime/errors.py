"""The errors of the runtime: one class for each way the world can fail to be as expected.

Mistakes of the caller are ``ValueError`` or ``TypeError``. What lies outside a caller's hands
(files, memory, models that nobody has taught us yet, other processes) raises one of the classes
below, so that a command line can turn every one of them into a single line and an exit code.
"""


class MoERuntimeError(Exception):
    """Base of all errors that the runtime raises about the state of the world."""


class CheckpointError(MoERuntimeError):
    """A checkpoint is missing, damaged, inconsistent, or could not be read."""


class UnsupportedModelError(MoERuntimeError):
    """The checkpoint is sound, but its model is not one that the runtime can serve."""


class UnsupportedUseError(MoERuntimeError):
    """A loaded model was asked for something that it cannot do; says what to do instead."""


class CapacityError(MoERuntimeError):
    """Memory does not suffice.

    Attributes:
        smallest_bytes: the smallest budget in bytes that would work, where it is known.
    """

    def __init__(self, message: str, *, smallest_bytes: int | None = None) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class RankFailureError(MoERuntimeError):
    """Another process of the group died, stalled, or runs something else.

    Attributes:
        ranks: the ranks (of the group) at fault, as far as they are known.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class MoERuntimeWarning(UserWarning):
    """What a caller should know although nothing failed."""
