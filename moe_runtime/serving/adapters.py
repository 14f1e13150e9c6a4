"""Adapters of low rank (LoRA) beside a loaded model: each sequence of a pass may have its own.

Source: Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (2023): one pass for
sequences of many adapters, which share memory and are read when they are asked for.

Shape suffixes: I inputs, O outputs of a layer, N rows.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import torch

from moe_runtime.config import format_bytes
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.serving.adapter_folder import AdapterFolder, LowRankPair

_Pairs = list[tuple[torch.nn.Module, LowRankPair]]


class Adapters:
    """Adapters of one model.

    They are added to the outputs of layers, by hooks that stay for a pass alone: a pass without one
    goes the way and has the bits that it has in a model without adapters.

    One is in memory while a sequence has it, and afterwards until the memory is needed for
    another; those used last stay longest.

    Attributes:
        max_bytes: of those that are in memory at a time.
        num_reads: times that one was read from its files.
    """

    def __init__(
        self,
        model: Any,
        folders: Mapping[str, AdapterFolder],
        *,
        max_bytes: int | None = None,
    ) -> None:
        """Compares the adapters with the model, and reads none.

        Args:
            model: a loaded model, on the CPU.
            folders: by the names of the adapters.
            max_bytes: of those that are in memory at a time; that of all when omitted.

        Raises:
            UnsupportedModelError: one is for another model, or for layers that are not linear.
            ValueError: ``max_bytes`` is less than one of them needs.
        """
        self._folders = folders
        self.max_bytes = resident_bytes(folders, max_bytes)
        self._numbers = {name: number for number, name in enumerate(folders, 1)}
        self._modules = dict(model.named_modules())
        self._alone: set[str] = set()
        for name, folder in folders.items():
            for layer, widths in folder.widths.items():
                _require_linear(model, self._modules.get(layer), layer, widths, folder.folder)
                owner, _, own_name = layer.rpartition(".")
                if own_name == "kv_b_proj" and hasattr(self._modules[owner], "expand_kv"):
                    self._alone.add(name)
            _require_all(model, self._modules, folder)
        self._resident: dict[str, _Pairs | None] = {}  # those used last are last
        self._users: dict[Hashable, str] = {}
        self.num_reads = 0

    def number(self, name: str | None) -> int:
        """Counts adapters from 1; 0 is the model without any.

        Raises:
            ValueError: there is no adapter of that name.
        """
        if name is None:
            return 0
        if name not in self._numbers:
            raise ValueError(f"the engine has no adapter {name!r}")
        return self._numbers[name]

    def goes_alone(self, name: str | None) -> bool:
        """Whether a sequence with it shares no pass: one layer takes all cached tokens of each
        sequence in turn (the latents of multi-head latent attention), and not a row of each."""
        return name in self._alone

    def reserve(self, sequence: Hashable, name: str | None) -> bool:
        """Gives a sequence's adapter its memory, if it can be had.

        Returns:
            Whether it has it now; if not, everything is as it was.
        """
        if name is None:
            return True
        in_use = set(self._users.values())
        if self._num_bytes({*in_use, name}) > self.max_bytes:
            return False
        pairs = self._resident.pop(name, None)
        for other in [one for one in self._resident if one not in in_use]:
            if self._num_bytes({*self._resident, name}) <= self.max_bytes:
                break
            del self._resident[other]
        self._resident[name] = pairs
        self._users[sequence] = name
        return True

    def release(self, sequence: Hashable) -> None:
        """A sequence has no adapter any more."""
        self._users.pop(sequence, None)

    def read(self, name: str | None) -> None:
        """Reads an adapter that has its memory, unless it is there.

        Raises:
            CheckpointError: it cannot be read.
        """
        if name is not None and self._resident[name] is None:
            try:
                pairs = self._folders[name].pairs()
            except CheckpointError as error:
                # clients are told of it, and not where the server has its files
                raise CheckpointError(
                    f"the adapter {name!r} cannot be read from its files any more; look whether "
                    "they are still there and as they were when the server started"
                ) from error
            self._resident[name] = [(self._modules[layer], pair) for layer, pair in pairs.items()]
            self.num_reads += 1

    @contextlib.contextmanager
    def applied(self, rows: Items[tuple[str | None, int]]) -> Iterator[None]:
        """Passes of this thread have adapters within the block.

        Args:
            rows: names of adapters that were read, None for none, and of how many rows of the pass
                in turn; one name alone is for all rows, whatever their number.
        """
        groups = [
            (name, sum(num_rows for _, num_rows in own))
            for name, own in itertools.groupby(rows, operator.itemgetter(0))
        ]
        total = sum(num_rows for _, num_rows in groups) if len(groups) > 1 else None
        with contextlib.ExitStack() as at_end:
            for module, parts in self._parts(groups).items():
                at_end.callback(module.register_forward_hook(_adding(parts, total)).remove)
            yield

    def check(self) -> None:
        """Proves that memory and what is in it agree.

        Raises:
            AssertionError: they do not.
        """
        assert self._num_bytes(self._resident) <= self.max_bytes
        assert set(self._users.values()) <= self._resident.keys()

    def _num_bytes(self, names: Iterable[str]) -> int:
        return sum(self._folders[name].num_bytes for name in names)

    def _parts(
        self, groups: Items[tuple[str | None, int]]
    ) -> dict[torch.nn.Module, list[tuple[slice, LowRankPair]]]:
        """What is added to which rows of each adapted layer."""
        parts: dict[torch.nn.Module, list[tuple[slice, LowRankPair]]] = {}
        end = 0
        for name, num_rows in groups:
            rows = slice(end, end := end + num_rows)
            own = None if name is None else self._resident[name]
            for module, pair in own or ():
                parts.setdefault(module, []).append((rows, pair))
        return parts


def resident_bytes(folders: Mapping[str, AdapterFolder], max_bytes: int | None) -> int:
    """What adapters of one model have of memory.

    Args:
        folders: of the adapters, by name.
        max_bytes: of those that are in memory at a time; that of all when omitted.

    Raises:
        ValueError: ``max_bytes`` is less than one of them needs.
    """
    sizes = {name: folder.num_bytes for name, folder in folders.items()}
    whole = sum(sizes.values())
    if max_bytes is None:
        return whole
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if largest is not None and sizes[largest] > max_bytes:
        raise ValueError(
            f"the adapter {largest!r} needs {format_bytes(sizes[largest], up=True)}, but adapters "
            f"have {format_bytes(max_bytes)} of memory; give them as much"
        )
    return min(whole, max_bytes)


def _adding(parts: Items[tuple[slice, LowRankPair]], num_rows: int | None) -> Any:
    """A hook that adds to rows of a layer's output what adapters have for them.

    Args:
        parts: rows and what is for them.
        num_rows: of a pass; None if the one part is for all rows, whatever their number.
    """
    owner = threading.get_ident()

    def add(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        # the model may be somebody's who calls it meanwhile, and waits for its turn
        if threading.get_ident() != owner:
            return None
        x_NI, output_NO = inputs[0].flatten(0, -2).float(), output.flatten(0, -2).float()
        if num_rows is None:
            parts[0][1].add_to(output_NO, x_NI)
        elif len(x_NI) != num_rows:
            raise ValueError(f"a layer with adapters has {len(x_NI)} rows of a pass of {num_rows}")
        else:
            for rows, pair in parts:
                pair.add_to(output_NO[rows], x_NI[rows])
        return output_NO.to(output.dtype).view(output.shape)

    return add


def _require_all(model: Any, modules: Mapping[str, torch.nn.Module], folder: AdapterFolder) -> None:
    """Refuses an adapter without matrices for a layer that its settings name."""
    output = model.get_output_embeddings() if folder.widths else None
    for layer, module in modules.items():
        is_linear = isinstance(module, torch.nn.Linear) and module is not output
        if is_linear and layer not in folder.widths and folder.settings.targets(layer):
            raise CheckpointError(
                f"{folder.folder}: its settings name {layer} of the model, for which it has no "
                "matrices, and PEFT would begin with new ones; give the whole adapter, or name "
                "fewer layers in target_modules of adapter_config.json"
            )


def _require_linear(
    model: Any, module: Any, layer: str, widths: tuple[int, int], folder: Path
) -> None:
    """Refuses an adapter of what is not there, is not linear, or has other widths."""
    expected = "expected a linear layer beside the experts"
    if not isinstance(module, torch.nn.Linear) or module is model.get_output_embeddings():
        found = "no such layer" if module is None else type(module).__name__
        raise UnsupportedModelError(
            f"{folder}: {layer}.lora_A is beside {found} of the model, {expected}; merge the "
            "adapter into a checkpoint of its own"
        )
    if widths != (module.in_features, module.out_features):
        raise UnsupportedModelError(
            f"{folder}: {layer}.lora_A and lora_B are for {widths[0]} inputs and {widths[1]} "
            f"outputs, but the model's layer has {module.in_features} and {module.out_features}; "
            "give the model that the adapter was trained for"
        )
