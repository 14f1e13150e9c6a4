"""When a run has diverged: losses that are no numbers, and gradients that stay infinite."""

from __future__ import annotations

import math

MOST_SKIPPED = 10
LOWER = "lower optimizer.peak_rate or raise optimizer.warmup_steps"


class SkippedSteps:
    """Steps that changed nothing, as their gradients were not finite.

    Attributes:
        total: of this process.
        in_a_row: since the last step that was taken.
    """

    def __init__(self) -> None:
        """None yet."""
        self.total = self.in_a_row = 0

    def count(
        self, bad_parameters: tuple[str, ...], *, step: int, first: int, last: int, has_loss: bool
    ) -> None:
        """Counts one step.

        Args:
            bad_parameters: those whose gradients were not finite; none where the step was taken.
            step: its number.
            first: of the steps of this process.
            last: step of the run.
            has_loss: whether its loss is a number.

        Raises:
            ValueError: the run cannot go on, or has come to nothing.
        """
        if not bad_parameters:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        if not has_loss and self.total > step - first:
            raise ValueError(
                f"the loss of step {step} is no number, and no weight was changed before it: those "
                "that are begun with give none; `moe-runtime inspect MODEL --verify` names the "
                "ones of a model, and of a run an earlier checkpoint may be whole"
            )
        if not has_loss and step == last:
            raise ValueError(f"the loss of the last step, {last}, is no number; {LOWER}")
        # who goes on with a run whose last steps overflow has steps that were taken
        most = min(MOST_SKIPPED, last) if first == 1 else MOST_SKIPPED
        if self.in_a_row >= most:
            raise ValueError(
                f"the gradients of {most} steps in a row were not finite (the last in "
                f"{bad_parameters[0]} and {len(bad_parameters) - 1} others); {LOWER}"
            )


def require_number(loss: float, step: int) -> float:
    """The mean loss of held-out text.

    Raises:
        ValueError: it is no number.
    """
    if math.isfinite(loss):
        return loss
    raise ValueError(f"the loss of held-out text is no number after step {step}; {LOWER}")
