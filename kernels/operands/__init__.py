"""Checks of operands, dtypes of sums, devices by name, and activations, for all operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor


def precise_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """A context without autocast.

    It enters nothing if autocast is off: an interrupt in torch's own `__exit__` would make autocast
    keep narrow copies of weights until the process ends.
    """
    is_on = torch.is_autocast_enabled(device_type)
    return torch.autocast(device_type, enabled=False) if is_on else nullcontext()


def find_device(device: str | torch.device, name: str = "device") -> torch.device:
    """The device that the option `name` means; "auto" is a GPU if there is one.

    Raises:
        ValueError: It is no device, or a GPU that torch does not see here.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ValueError(f"{name} must be auto, cpu, cuda or cuda:N, got {device!r}") from None
    if place.type == "cuda" and (place.index or 0) >= (count := torch.cuda.device_count()):
        here = f"GPUs up to cuda:{count - 1}" if count else "no GPU"
        raise ValueError(f"{name} {device}: torch sees {here} here; use cpu or auto")
    return place


def find_devices(device: str | torch.device, name: str = "device") -> list[torch.device]:
    """The devices that an option means: one, or several GPUs of one model, such as
    "cuda:0,cuda:1".

    Raises:
        ValueError: As from `find_device`, or the GPUs are not different ones of one model.
    """
    parts = device.split(",") if isinstance(device, str) else [device]
    places = [find_device(part, name) for part in parts]
    if len(places) > 1:
        if any(place.type != "cuda" for place in places) or len({*places}) < len(places):
            raise ValueError(f"{name} {device}: name different GPUs, such as cuda:0,cuda:1")
        models = {torch.cuda.get_device_name(place) for place in places}
        if len(models) > 1:  # their kernels sum in other orders
            found = " and ".join(sorted(models))
            raise ValueError(f"{name} {device}: name GPUs of one model, got {found}")
    return places


def check_choice(impl: str, impls: Sequence[str]) -> None:
    """Raises ValueError for an unknown implementation."""
    if impl not in impls:
        raise ValueError(f"impl must be one of {', '.join(impls)}, got {impl!r}")


def check_shape(name: str, tensor: Tensor, shape: Sequence[int], reason: str = "") -> None:
    """Raises ValueError for another shape; `reason` explains, as in "for this topology"."""
    if tuple(tensor.shape) != tuple(shape):
        why = f" {reason}" if reason else ""
        raise ValueError(f"{name} must be {list(shape)}{why}, got {list(tensor.shape)}")


def check_like(name: str, tensor: Tensor, like: Tensor, other: str) -> None:
    """Raises ValueError for another dtype or device than that of `like`, called `other`."""
    if tensor.dtype != like.dtype or tensor.device != like.device:
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} like {other}, got {tensor.dtype} on "
            f"{tensor.device}"
        )


ActivationName = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
ACTIVATION_NAMES: tuple[ActivationName, ...] = get_args(ActivationName)


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """A gate as a formula that covers every gate in transformers 5.

    With a gate: ``g = min(gate, limit)``, ``u = clamp(up, -limit, limit)``, ``hidden = function(g)
    * (u + up_offset)``. Without one: ``hidden = function(up)``. All fields are exact in every
    implementation; infinity switches off.

    Attributes:
        function: ``silu`` is ``g * sigmoid(alpha * g)``; ``relu2`` is ``relu(g) ** 2``.
        alpha: Slope of the sigmoid in ``silu`` (gpt-oss: 1.702).
        limit: Bound of gate and up (gpt-oss, DeepSeek-V4, MiniMax-M3).
        up_offset: Added to up (gpt-oss: 1).
        gate_softcap: ``c`` of ``c * tanh(g / c)``, which replaces the factor ``g`` in ``silu`` but
            not the sigmoid's argument (Inkling 2).
        up_softcap: ``c`` of ``c * tanh(u / c)``, which replaces ``u``.
        clamps_after: Whether ``min(., limit)`` applies to ``function(gate)`` instead of its
            argument (Step 3).
    """

    function: ActivationName = "silu"
    alpha: float = 1.0
    limit: float = math.inf
    up_offset: float = 0.0
    gate_softcap: float = math.inf
    up_softcap: float = math.inf
    clamps_after: bool = False

    def __post_init__(self) -> None:
        if self.function not in ACTIVATION_NAMES:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATION_NAMES)}, got {self.function!r}"
            )
        for name in ("limit", "gate_softcap", "up_softcap"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.function != "silu" and (self.alpha != 1 or self.gate_softcap != math.inf):
            raise ValueError(f"alpha and gate_softcap belong to silu, not to {self.function}")

    @property
    def is_plain(self) -> bool:
        """Whether the formula is ``function(gate) * up``."""
        return self == ActivationSpec(self.function)

    def numbers(self) -> list[float]:
        """All fields but the first as numbers."""
        return [float(getattr(self, field.name)) for field in fields(self)[1:]]

    @classmethod
    def from_numbers(cls, function: str, numbers: Sequence[float]) -> ActivationSpec:
        """The inverse of `numbers`."""
        *values, clamps_after = numbers
        return cls(function, *values, clamps_after=bool(clamps_after))  # type: ignore[arg-type]

    def __call__(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """``[..., F]`` of equally shaped gate and up, in their dtype, differentiable."""
        if gate is None:
            return self._function(up)
        if not self.clamps_after:
            gate = gate if self.limit == math.inf else gate.clamp(max=self.limit)
        hidden = self._function(gate)
        if self.clamps_after:
            hidden = hidden.clamp(max=self.limit)
        if self.limit != math.inf:
            up = up.clamp(min=-self.limit, max=self.limit)
        return hidden * (_softcap(up, self.up_softcap) + self.up_offset)

    def backward(
        self, gate: Tensor | None, up: Tensor, grad: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Gradients of gate and up for the gradient of the hidden values, all in one dtype."""
        if gate is None:
            return None, grad * self._derivative(up)
        low = gate if self.clamps_after else gate.clamp(max=self.limit)
        function, slope = self._function(low), self._derivative(low)
        if self.clamps_after:
            passes = function <= self.limit
            function = function.clamp(max=self.limit)
        else:
            passes = gate <= self.limit
        bounded = up.clamp(min=-self.limit, max=self.limit)
        factor = _softcap(bounded, self.up_softcap) + self.up_offset
        up_slope = _softcap_slope(bounded, self.up_softcap) * (up.abs() <= self.limit)
        return grad * factor * slope * passes, grad * function * up_slope

    def _function(self, x: Tensor) -> Tensor:
        if self.function != "silu":
            return _FUNCTIONS[self.function](x)
        if self.alpha == 1 and self.gate_softcap == math.inf:
            return F.silu(x)
        return _softcap(x, self.gate_softcap) * torch.sigmoid(self.alpha * x)

    def _derivative(self, x: Tensor) -> Tensor:
        if self.function != "silu":
            return _DERIVATIVES[self.function](x)
        sigmoid = torch.sigmoid(self.alpha * x)
        capped = _softcap(x, self.gate_softcap)
        slope = _softcap_slope(x, self.gate_softcap)
        return sigmoid * (slope + self.alpha * capped * (1 - sigmoid))


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def _gelu_slope(x: Tensor) -> Tensor:
    density = torch.exp(-0.5 * x.square()) / math.sqrt(2 * math.pi)
    return 0.5 * (1 + torch.erf(x / math.sqrt(2))) + x * density


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    tanh = torch.tanh(scale * (x + cubic * x**3))
    inner_slope = scale * (1 + 3 * cubic * x.square())
    return 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh.square()) * inner_slope


_DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": _gelu_slope,
    "gelu_tanh": _gelu_tanh_slope,
    "relu": lambda x: (x > 0).to(x.dtype),
    "relu2": lambda x: 2 * F.relu(x),
}


def _softcap_slope(x: Tensor, cap: float) -> Tensor:
    return torch.ones_like(x) if cap == math.inf else 1 - torch.tanh(x / cap).square()


def _softcap(x: Tensor, cap: float) -> Tensor:
    return x if cap == math.inf else torch.tanh(x / cap) * cap


PreactivationFunction = Callable[[Tensor], Tensor]
"""Takes pre-activations as they lie, ``[R, 2F]`` (``[R, F]`` without gate), returns ``[R, F]``."""

Activation = ActivationName | ActivationSpec | PreactivationFunction


class GateLayout(NamedTuple):
    """The layout of pre-activations ``[R, Z]``: gate and up (Z = 2F) or up alone.

    With `is_concatenated` all gate values of a row come first; otherwise gate and up alternate.
    """

    has_gate: bool = True
    is_concatenated: bool = True

    def split(self, z_RZ: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gate and up ``[R, F]``, as views; gate is None where there is none."""
        if not self.has_gate:
            return None, z_RZ
        if self.is_concatenated:
            gate, up = z_RZ.chunk(2, dim=-1)
            return gate, up
        return z_RZ[..., 0::2], z_RZ[..., 1::2]
