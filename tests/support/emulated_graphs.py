"""Graphs of a device that computes on the host: torch's operations and Triton's launches, in order.

As on a GPU, recording computes nothing: what it wrote is put back, and what it made is poison until
a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from accelerator import WAITS
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from moe_runtime.memory.device.cuda_device import NOT_TOLD

# whose name in its package is that of a function
launching = import_module("moe_runtime.kernels.triton_support")

MOST_COUNTED = 16
"""Numbers of a tensor that a kernel may count in; larger ones it only fills."""


class EmulatedGraph:
    """Work in the order in which it was queued; ``made`` is what the recording made, by address."""

    def __init__(self, made: dict[int, torch.Tensor]) -> None:
        self.made = made
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        for each in self.work:
            each()


class EmulatedTold:
    """Tells as late as it may: when somebody waits."""

    def __init__(self, device: Any, numbers: torch.Tensor, *values: torch.Tensor) -> None:
        self._device, self._sources = device, (numbers, *values)
        with torch.inference_mode(False):  # any thread may look
            self.numbers, *self.values = map(torch.zeros_like, self._sources)
        self._pending: list[Any] = []

    def begin(self) -> None:
        self._pending = [self._device.download(source) for source in self._sources]

    def query(self) -> bool:
        if not all(event.query() for _, event in self._pending):
            return False
        for there, (found, _) in zip((self.numbers, *self.values), self._pending, strict=False):
            there.copy_(found)
        self._pending = []
        return NOT_TOLD not in self.numbers.flatten().tolist()

    def synchronize(self) -> None:
        for _, event in self._pending:
            event.synchronize()
        assert self.query(), "waits for what no graph tells"

    def settle(self) -> None:
        if self._pending:
            self.synchronize()

    def forget(self) -> None:
        assert not self._pending, "a replay may write here still"
        self.numbers.fill_(NOT_TOLD)
        for value in self.values:
            value.fill_(torch.nan if value.is_floating_point() else 0)


class EmulatedRecorder(TorchDispatchMode):
    """Records what is computed within a ``with`` block."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self._device = device
        self._made: dict[int, torch.Tensor] = {}  # by the addresses of their memory
        self._graph: EmulatedGraph | None = None
        self.begin()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        start = launching._launch
        self._patch = patch.object(
            launching, "_launch", lambda *what: self._record(lambda: start(*what), what[-1])
        )

    def __enter__(self) -> EmulatedRecorder:
        super().__enter__()
        self._patch.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        self._patch.stop()
        super().__exit__(*failure)
        for there, before in self._before.values():
            there.copy_(before)
        for made in self._made.values():
            made.fill_(torch.nan if made.is_floating_point() else 0)

    def tell(self, *sources: torch.Tensor) -> EmulatedTold:
        # whoever looks may do so outside of inference mode
        with _disable_current_modes(), torch.inference_mode(False):
            told = EmulatedTold(self._device, *sources)
        assert self._graph is not None
        self._graph.work.append(told.begin)
        return told

    def cut(self) -> EmulatedGraph:
        done = self.end()
        self.begin()
        return done

    def begin(self) -> None:
        self._graph = EmulatedGraph(self._made)
        self._device.graphs.add(self._graph)

    def end(self) -> EmulatedGraph:
        done, self._graph = self._graph, None
        assert done is not None
        return done

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._graph is None:  # between two graphs
            return func(*args, **kwargs)
        if func._schema.name in WAITS:
            raise RuntimeError(f"{func} cannot be recorded")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func._schema.is_mutable:
            for tensor in given:
                self._keep(tensor)
        found = func(*args, **kwargs)
        known = {_address(tensor) for tensor in given}
        made = [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        fresh = [tensor if _address(tensor) not in known else None for tensor in made]
        for tensor in fresh:
            if tensor is not None:
                self._made[_address(tensor)] = tensor

        def compute() -> None:
            again = func(*args, **kwargs)
            for tensor, value in zip(fresh, tree_leaves(again), strict=True):
                if tensor is not None:
                    tensor.copy_(value)

        self._graph.work.append(compute)
        return found

    def _record(self, launch: Callable[[], object], arguments: dict[str, Any]) -> None:
        if self._graph is None:
            launch()
            return
        with _disable_current_modes():
            for value in arguments.values():
                if isinstance(value, torch.Tensor) and value.numel() <= MOST_COUNTED:
                    self._keep(value)
            launch()
        self._graph.work.append(launch)

    def _keep(self, tensor: torch.Tensor) -> None:
        address = _address(tensor)
        if address not in self._made and address not in self._before:
            self._before[address] = tensor, tensor.clone()


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
