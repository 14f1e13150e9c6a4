"""What a host that computes on a device waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Asked(TorchFunctionMode):
    """The calls that wait until the device has computed a number, or a shape.

    Attributes:
        calls: their names.
        on_host: memory of which the host may ask; kept, so that its addresses are nobody else's.
    """

    NAMES = frozenset(
        {"tolist", "item", "cpu", "numpy", "nonzero", "unique", "equal", "masked_select"}
        | {"__bool__", "__int__", "__index__", "__float__", "__array__"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.on_host: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.NAMES and not self._is_on_host(args[0]):
            self.calls.append(name)
        return func(*args, **(kwargs or {}))

    def _is_on_host(self, tensor: Any) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(known.untyped_storage().data_ptr() == storage for known in self.on_host)
