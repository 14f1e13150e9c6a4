"""An accelerator of torch on the host: a device type of its own, whose tensors are foreign here.

Torch lets a backend be written in Python. This one computes with the CPU's own kernels, so results
are those of the CPU to the bit; but a tensor that is not on the device raises when it meets one
that is, copies between the two are counted, and so is whatever makes the host wait.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "emulated"

_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "scaled_dot_product_attention")
"""What autocast computes in its type, as far as models here need it."""

WAITS = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero")
"""What a host that needs a value waits for."""

_AUTOCAST_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


class ForeignTensorError(RuntimeError):
    """A tensor of the host met one of the device, as a GPU would not let it."""


class Crossings:
    """What went over the link, and how often the host waited for the device.

    Attributes:
        to_device_bytes, from_device_bytes: by copies of either direction, as CUDA makes them: a
            copy that the host waits for changes types on the host, others on the device.
        num_waits: reads of values by the host.
        on_work: called with the name and the tensors of what the device computes.
        on_memory: called with the values of every tensor that there comes to be.
    """

    def __init__(self) -> None:
        self.on_memory: Callable[[Tensor], object] = lambda host: None
        self.on_work: Callable[[str, list[Tensor]], object] = lambda name, tensors: None
        self.to_device_bytes = self.from_device_bytes = self.num_waits = 0


CROSSINGS = Crossings()


class DeviceTensor(Tensor):
    """A tensor of the device; `host` holds its values."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(),
            dtype=host.dtype, layout=host.layout, device=torch.device(NAME, 0),
        )  # fmt: skip
        made.host = host
        CROSSINGS.on_memory(host)
        return made

    def __repr__(self) -> str:
        return f"DeviceTensor({self.host})"

    def tolist(self) -> Any:
        CROSSINGS.num_waits += 1
        return self.host.tolist()

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, *args, **(kwargs or {}))


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    tensors: list[Tensor] = []
    here_args = _taken(args, tensors)
    here_kwargs = {name: _taken(value, tensors) for name, value in kwargs.items()}
    wanted = kwargs.get("device")
    if wanted is not None:
        is_here = torch.device(wanted).type == NAME
    else:
        is_here = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
    name = func._schema.name
    if name in ("aten::copy_", "aten::_to_copy"):
        _count(args, kwargs, is_here)
    else:
        _refuse_foreigners(func, tensors)
        if is_here:
            CROSSINGS.on_work(name, tensors)
    if name in WAITS:
        CROSSINGS.num_waits += 1
    known = {id(t.host): t for t in tensors if isinstance(t, DeviceTensor)}
    return _wrapped(func(*here_args, **here_kwargs), known, is_here)


def _taken(value: Any, tensors: list[Tensor]) -> Any:
    """A value as the host has it; its tensors are added to a list.

    Operations take tensors, lists of them and plain values; walking those is ten times quicker
    than torch's trees of anything, and this runs for every operation.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return value.host if isinstance(value, DeviceTensor) else value
    if isinstance(value, (list, tuple)):
        return type(value)([_taken(part, tensors) for part in value])
    is_device = isinstance(value, torch.device) and value.type == NAME
    return torch.device("cpu") if is_device else value


def _wrapped(value: Any, known: dict[int, DeviceTensor], is_here: bool) -> Any:
    """A result; operands that it consists of stay who they are."""
    if isinstance(value, Tensor):
        found = known.get(id(value))
        if found is not None:
            return found
        return DeviceTensor(value) if is_here else value
    if isinstance(value, (list, tuple)):
        return type(value)([_wrapped(part, known, is_here) for part in value])
    return value


def _refuse_foreigners(func: Any, tensors: list[Tensor]) -> None:
    for tensor in tensors:
        # a number of the host may be an operand of what is computed element by element
        is_number = tensor.ndim == 0 and torch.Tag.pointwise in func.tags
        if not isinstance(tensor, DeviceTensor) and not is_number:
            shape = tuple(tensor.shape)
            raise ForeignTensorError(f"{func}: a tensor {shape} of the host meets the device")


def _count(args: Any, kwargs: Any, is_here: bool) -> None:
    """Counts a copy that crosses."""
    is_copy_into = len(args) > 1 and isinstance(args[1], Tensor)
    source = args[1] if is_copy_into else args[0]
    is_to_device = isinstance(args[0], DeviceTensor) if is_copy_into else is_here
    if isinstance(source, DeviceTensor) == is_to_device:
        return
    waits = not (kwargs.get("non_blocking") or (is_copy_into and len(args) > 2 and args[2]))
    dtype = args[0].dtype if is_copy_into else kwargs.get("dtype") or source.dtype
    crossing = dtype if waits == is_to_device else source.dtype
    num_bytes = source.numel() * crossing.itemsize
    if is_to_device:
        CROSSINGS.to_device_bytes += num_bytes
    else:
        CROSSINGS.from_device_bytes += num_bytes
    CROSSINGS.num_waits += waits and not is_to_device


class _Module:
    """What torch asks of a backend, as `torch.cuda` has it."""

    # who asks by name what torch computes on is told that it is the CPU, as for all other tests
    __name__ = "emulated.cpu"

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: object = NAME) -> _Module:
        """The one there is. Sharded checkpoints ask for it, also where they hold no such tensor."""
        return self

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Nothing is ever under way."""

    def manual_seed_all(self, seed: int) -> None:
        """Numbers are the host's."""

    def get_rng_state(self, device: object = NAME) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = NAME) -> None:
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@functools.cache
def _registered() -> tuple[torch.library.Library, ...]:
    # once in a process, which torch asks for
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    every = torch.library.Library("_", "IMPL")
    every.fallback(_run, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    for product in _PRODUCTS:
        aten.impl(product, _autocast(product), "AutocastPrivateUse1")
    return every, aten


def _autocast(name: str) -> Any:
    """A product whose operands get autocast's type first."""
    op = getattr(torch.ops.aten, name)

    def cast(value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.dtype == torch.float32
        return value.to(torch.get_autocast_dtype(NAME)) if is_number else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEY):
            return op(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return run


def accelerator() -> torch.device:
    """The device; tells torch of it. Skips the test where a GPU is: torch takes one accelerator."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is torch's one accelerator here, and none can be emulated beside it")
    _registered()
    return torch.device(NAME, 0)


PLACES = [NAME, pytest.param("cuda", marks=pytest.mark.gpu)]
"""Where tests of training on a device run: on a GPU if there is one, else on the emulated one."""


def place_of(name: str) -> torch.device:
    """The device of a name in `PLACES`."""
    return accelerator() if name == NAME else torch.device(name)
