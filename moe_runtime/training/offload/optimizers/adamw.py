"""Settings of the optimizer of offloaded training, and the scale of its losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from moe_runtime.config import nearest, require_types
from moe_runtime.training.offload.optimizers.moments import MomentStorage
from moe_runtime.training.offload.states.records import RecordLayout, Sections, StateFormat
from moe_runtime.training.stored_values import AMOUNT, COUNT, require_kinds

Untouched = Literal["dense_exact", "sparse_skip"]
Clip = Literal["two_phase", "delayed"]

NUMBER = (int, float)
_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("lr", "eps", "weight_decay", "clip_norm", "galore_scale"), NUMBER),
    **dict.fromkeys(("galore_rank", "galore_refresh"), (int,)),
    "betas": (tuple, list),
    "delayed_update_after": (int, type(None)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """Settings of the optimizer.

    Values out of range raise a `ValueError`, those of another type a `TypeError`.

    Attributes:
        lr: learning rate of steps that name no other.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices; norms and biases do not decay.
        clip_norm: largest global norm of the gradients; 0 does not clip.
        clip: `two_phase` knows the norm of this step's gradients before any expert is updated, so
            gradients wait in the expert's tier until the backward pass is over. `delayed` scales by
            the norm of the step before (not at all in the first), and updates at once.
        untouched: experts that got no tokens: `dense_exact` treats their gradient as zero, as an
            optimizer of stacked parameters does; `sparse_skip` leaves them as they are, moments and
            step count included, as `torch.optim.AdamW` leaves a parameter without gradient.
        loss_scale: what losses are multiplied by before, and gradients divided by after the
            backward pass; `"dynamic"` halves it after every skipped step and doubles it after
            2,000 good ones, beginning with 65,536.
        delayed_update_after: steps after which experts' updates come one step late (ZeRO-Offload):
            from then on a step updates experts with the gradients of the step before, inside the
            backward pass also where a norm has to be known first. Parameters that stay with the
            model are updated at once, and the last gradients of a run are not used. None never
            delays; the paper waits for 40 steps.
        moments: how experts' moments are stored: `full` in the parameters' dtype; `bf16` rounded
            without bias; `fp8` with COAT's dynamic range expansion, 1 1/16 bytes
            an element. Only `full` gives the bits of AdamW in memory.
        galore_rank: experts' matrices have moments in a subspace of this rank (GaLore); 0 for none.
        galore_scale: factor of the steps that come out of a subspace.
        galore_refresh: an expert's updates after which its subspaces are chosen anew.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 0.0
    clip: Clip = "two_phase"
    untouched: Untouched = "dense_exact"
    loss_scale: float | Literal["dynamic"] = 1.0
    delayed_update_after: int | None = None
    moments: MomentStorage = "full"
    galore_rank: int = 0
    galore_scale: float = 0.25
    galore_refresh: int = 200

    def __post_init__(self) -> None:
        require_types(_TYPES, {name: getattr(self, name) for name in _TYPES})
        betas = {f"betas[{place}]": beta for place, beta in enumerate(self.betas)}
        require_types(dict.fromkeys(betas, NUMBER), betas)
        if not (self.lr >= 0 and math.isfinite(self.lr)):
            raise ValueError(f"lr must be at least 0, got {self.lr}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers in [0, 1), got {self.betas}")
        for name in ("weight_decay", "clip_norm", "eps"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        known = {"clip": Clip, "untouched": Untouched, "moments": MomentStorage}
        for name, choices in known.items():
            if (value := getattr(self, name)) not in get_args(choices):
                raise ValueError(f"{name} is {value!r}; {nearest(str(value), get_args(choices))}")
        if self.delayed_update_after is not None and self.delayed_update_after < 0:
            raise ValueError(
                f"delayed_update_after must be at least 0, got {self.delayed_update_after}"
            )
        if self.galore_rank < 0:
            raise ValueError(f"galore_rank must be at least 0, got {self.galore_rank}")
        if self.galore_refresh < 1:
            raise ValueError(f"galore_refresh must be at least 1, got {self.galore_refresh}")
        if not (self.galore_scale > 0 and math.isfinite(self.galore_scale)):
            raise ValueError(f"galore_scale must be positive, got {self.galore_scale}")
        if self.loss_scale != "dynamic" and not (
            isinstance(self.loss_scale, int | float) and 0 < self.loss_scale < math.inf
        ):
            raise ValueError(
                f"loss_scale must be a positive number or 'dynamic', got {self.loss_scale!r}"
            )

    @property
    def waits_for_norm(self) -> bool:
        """Whether no expert may be updated before all gradients are known."""
        return self.clip_norm > 0 and self.clip == "two_phase"

    @property
    def state_format(self) -> StateFormat:
        """What an expert's record holds under these settings."""
        return StateFormat(
            moments=self.moments,
            rank=self.galore_rank,
            keeps_gradient=self.delayed_update_after is not None,
        )

    def is_delayed(self, step: int) -> bool:
        """Whether a step (the first is 0) keeps its gradients for the step after."""
        return self.delayed_update_after is not None and step >= self.delayed_update_after

    def update_number(self, step: int) -> int | None:
        """Which update of AdamW a step takes, counted from 1; None for the one that has none."""
        if not self.is_delayed(step):
            return step + 1
        return None if step == self.delayed_update_after else step


def bytes_of_step(layout: RecordLayout, settings: AdamW) -> tuple[int, int]:
    """What an expert on the disk that got tokens has read and written in a step, at most.

    Forward, its parameters are read. When its update is part of the backward pass, its state is
    read and written there; when the norm of all gradients comes first, the backward pass reads the
    parameters and writes the gradient, and the update reads everything and writes the state. With
    delayed updates, once they have begun, the gradient is part of the state and nothing waits.
    Parameters alone, in training without gradients, are read and written once; frozen ones are read
    for either pass.
    """
    parameters, state = layout.bytes_of(Sections.PARAMETERS), layout.state_bytes
    if not layout.trained:
        return 2 * parameters, 0
    if not layout.state.trains:
        return parameters, parameters
    if settings.waits_for_norm and settings.delayed_update_after is None:
        gradient = layout.bytes_of(Sections.GRADIENT)
        return 2 * parameters + state + gradient, gradient + state
    return parameters + state, state


class LossScale:
    """The factor of the losses, and how it moves."""

    def __init__(self, setting: float | Literal["dynamic"]) -> None:
        self._is_dynamic = setting == "dynamic"
        self.value = 65_536.0 if setting == "dynamic" else float(setting)
        self._good_steps = 0

    def after_step(self, *, was_skipped: bool) -> None:
        """Halves after a skipped step, doubles after 2,000 good ones in a row, if dynamic."""
        if not self._is_dynamic:
            return
        self._good_steps = 0 if was_skipped else self._good_steps + 1
        if was_skipped:
            self.value = max(1.0, self.value / 2)
        elif self._good_steps == 2000:
            self.value, self._good_steps = self.value * 2, 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_kinds(state, {"value": AMOUNT, "good_steps": COUNT}, "the checkpoint's loss_scale")
        self.value, self._good_steps = float(state["value"]), state["good_steps"]
