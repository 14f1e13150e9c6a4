"""What becomes of each layer's activations between forward and backward: kept, recomputed, swapped.

Kept activations take memory, recomputed ones time of the backward pass, swapped ones time of the
disk, which hides behind computation as far as that goes:

    T = max(forward, disk + swapped / write speed)
      + max(backward + recomputed, disk + swapped / read speed)

where `disk` is the time that experts keep it busy anyway. Both maxima are linear in the choices, so
the best plan within a budget of memory is a small integer programme.

Source: Liao et al., "Adding NVMe SSDs to Enable and Accelerate 100B Model Fine-tuning on a Single
GPU" (Fuyou, 2024); its model, solved exactly instead of by a sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_runtime.lab.programme import Programme

ActivationChoice = Literal["keep", "recompute", "swap"]

_SOLVER_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerActivations:
    """Measured of one layer.

    Attributes:
        num_bytes: what its backward pass needs and could compute again.
        recompute_s: seconds to compute that again.
    """

    num_bytes: int
    recompute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSpeeds:
    """Measured of a step and of the disk.

    Attributes:
        forward_s: seconds of computation of the forward pass.
        backward_s: of the backward pass, nothing computed again.
        forward_disk_s: seconds that experts keep the disk busy in the forward pass.
        backward_disk_s: likewise in the backward pass.
        write_bytes_per_s: of the disk.
        read_bytes_per_s: of the disk.
        swaps: whether there is a disk to swap to.
    """

    forward_s: float
    backward_s: float
    forward_disk_s: float = 0.0
    backward_disk_s: float = 0.0
    write_bytes_per_s: float = 1.0
    read_bytes_per_s: float = 1.0
    swaps: bool = True

    def __post_init__(self) -> None:
        if not (self.write_bytes_per_s > 0 and self.read_bytes_per_s > 0):
            raise ValueError(
                "write_bytes_per_s and read_bytes_per_s must be positive, got "
                f"{self.write_bytes_per_s} and {self.read_bytes_per_s}"
            )


def memory_bytes(
    layers: Sequence[LayerActivations], choices: Sequence[ActivationChoice], staging_bytes: int
) -> int:
    """Memory of kept activations, and of the buffers of the others where any are swapped."""
    kept = sum(x.num_bytes for x, choice in zip(layers, choices, strict=True) if choice == "keep")
    return kept + (staging_bytes if "swap" in choices else 0)


def plan_activations(
    layers: Sequence[LayerActivations],
    speeds: StepSpeeds,
    *,
    budget_bytes: int,
    staging_bytes: int = 0,
) -> list[ActivationChoice]:
    """The choices with the least predicted time whose memory fits a budget.

    Args:
        layers: in the order of the model.
        speeds: measured.
        budget_bytes: for kept activations and buffers of swapped ones.
        staging_bytes: those buffers.

    Returns:
        One choice for each layer; recomputing everything always fits.
    """
    everything: list[ActivationChoice] = ["recompute"] * len(layers)
    if not layers:
        return everything
    plan = Programme()
    keeps, swaps = plan.binaries(len(layers)), plan.binaries(len(layers))
    (any_swap,) = plan.binaries(1)
    forward, backward = plan.reals(2)
    plan.cost(forward, 1.0)
    plan.cost(backward, 1.0)
    plan.between(speeds.forward_s, [(1.0, forward)], float("inf"))
    rows = list(zip(layers, keeps, swaps, strict=True))
    written = [(x.num_bytes / speeds.write_bytes_per_s, swap) for x, _, swap in rows]
    plan.at_most([*written, (-1.0, forward)], -speeds.forward_disk_s)
    read = [(x.num_bytes / speeds.read_bytes_per_s, swap) for x, _, swap in rows]
    plan.at_most([*read, (-1.0, backward)], -speeds.backward_disk_s)
    # what is neither kept nor swapped is computed again
    saved = [(-x.recompute_s, choice) for x, *choices in rows for choice in choices]
    again_s = sum(x.recompute_s for x in layers)
    plan.at_most([*saved, (-1.0, backward)], -speeds.backward_s - again_s)
    scale = 1.0 / max(1, budget_bytes, sum(x.num_bytes for x in layers))
    kept = [(x.num_bytes * scale, keep) for x, keep, _ in rows]
    plan.at_most([*kept, (staging_bytes * scale, any_swap)], budget_bytes * scale)
    for _, keep, swap in rows:
        plan.at_most([(1.0, keep), (1.0, swap)], 1.0)
        plan.at_most([(1.0, swap), (-1.0, any_swap)], 0.0)
        if not speeds.swaps:
            plan.equal([(1.0, swap)], 0.0)
    found = plan.solve(time_limit_s=_SOLVER_S)
    if found is None:
        return everything
    choices: list[ActivationChoice] = [
        "keep" if found.values[keep] > 0.5 else "swap" if found.values[swap] > 0.5 else "recompute"
        for _, keep, swap in rows
    ]
    # the solver's tolerance is a share of the budget: a byte too much is too much
    fits = memory_bytes(layers, choices, staging_bytes) <= budget_bytes
    return choices if fits else everything
