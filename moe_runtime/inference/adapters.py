"""LoRA adapters on layers and experts; each sequence of a pass may have its own.

Source: Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (2023).

Shape suffixes: I inputs, O outputs of a layer, L rank, N rows, E experts.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_runtime.checkpoints.adapter_files import WRAPPED, AdapterFolder
from moe_runtime.checkpoints.expert_map import expert_rows
from moe_runtime.config import format_bytes
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.kernels.expert_mlp.low_rank import LowRankExpert, LowRankFactors


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """The adapter of one linear layer: adds ``scale * (x @ A.T) @ B.T`` to the output.

    With DoRA, the output without its bias is then multiplied by ``factors_O``.
    Source: Liu et al., "DoRA: Weight-Decomposed Low-Rank Adaptation" (2024).
    """

    first_LI: torch.Tensor
    second_OL: torch.Tensor
    scale: float
    factors_O: torch.Tensor | None = None
    bias_O: torch.Tensor | None = None

    def add_to(self, output_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
        """Changes ``output_NO`` in place; both are fp32, as in PEFT."""
        low_NL = torch.nn.functional.linear(x_NI, self.first_LI)
        output_NO.add_(torch.nn.functional.linear(low_NL, self.second_OL), alpha=self.scale)
        if self.factors_O is not None:
            output_NO.mul_(self.factors_O)
            if self.bias_O is not None:
                output_NO.add_(self.bias_O * (1 - self.factors_O))


class RowAdapters:
    """Adapters of a layer's experts for the rows of a pass.

    Args:
        parts: rows, with the adapters of each expert.
        num_rows: of the pass; None if there is one part, for all rows.
        owner: thread whose passes have adapters; None for all threads.
    """

    def __init__(
        self,
        parts: Items[tuple[slice, Items[LowRankExpert]]],
        num_rows: int | None,
        owner: int | None,
    ) -> None:
        self._parts = parts
        self._num_rows = num_rows
        self._owner = owner
        self._of_token: list[Items[LowRankExpert] | None] = [None] * (num_rows or 0)
        for rows, own in parts if num_rows is not None else ():
            self._of_token[rows] = [own] * (rows.stop - rows.start)

    @property
    def is_for_all(self) -> bool:
        return self._owner is None

    def of_rows(
        self, num_tokens: int, experts: Iterable[int], counts: Iterable[int], tokens: Items[int]
    ) -> list[LowRankExpert | None] | None:
        """The adapters of rows sorted by expert; None if no row has one."""
        if self._owner not in (None, threading.get_ident()):
            return None
        runs = zip(experts, counts, strict=True)
        each = [expert for expert, count in runs for _ in range(count)]
        if self._num_rows is None:
            own = self._parts[0][1]
            return [own[expert] for expert in each]
        if num_tokens != self._num_rows:
            raise ValueError(
                f"experts with adapters have {num_tokens} rows of a pass of {self._num_rows}"
            )
        chosen = [self._of_token[token] for token in tokens]
        if not any(chosen):
            return None
        pairs = zip(chosen, each, strict=True)
        return [None if own is None else own[expert] for own, expert in pairs]


_NORM_ROWS = 256

_Part = LowRankPair | list[LowRankExpert]
_Parts = list[tuple[torch.nn.Module, _Part]]


class Adapters:
    """Adapters of one model. Up to ``max_bytes`` of the last used ones stay in memory.

    Hooks apply them during a pass only: a pass without adapters has the bits of the plain model.
    """

    def __init__(
        self,
        model: Any,
        folders: Mapping[str, AdapterFolder],
        *,
        max_bytes: int | None = None,
        takes_more: bool = False,
    ) -> None:
        """Compares the adapters with the model; reads no tensors.

        ``max_bytes`` is by default the size of all. With ``takes_more`` it includes the workspace
        of passes with the widest adapter.

        Raises:
            UnsupportedModelError: an adapter is for another model, or for a layer that is not
                linear.
            ValueError: one adapter needs more than ``max_bytes``.
        """
        self._folders: dict[str, AdapterFolder] = {}
        self._takes_more = takes_more
        self._model = model
        self._numbers: dict[str, int] = {}
        self._modules = dict(model.named_modules())
        self._alone: set[str] = set()
        self.max_bytes = resident_bytes(folders, max_bytes, takes_more=takes_more)
        for name, folder in folders.items():
            self.add(name, folder)
        self._resident: dict[str, _Parts | None] = {}  # in order of the last use
        self._users: dict[Hashable, str] = {}
        self.num_reads = 0

    def add(self, name: str, folder: AdapterFolder) -> None:
        """Adds an adapter, from any thread; its tensors are read at first use. Raises as the
        constructor."""
        require_fit(self._model, folder)
        for layer in folder.widths:
            owner, _, own_name = layer.rpartition(".")
            if own_name == "kv_b_proj" and hasattr(self._modules[owner], "expand_kv"):
                self._alone.add(name)
        self._folders[name] = folder
        if (needed := self._num_bytes({name})) > self.max_bytes:
            raise _too_large(name, needed, self.max_bytes)
        self._numbers[name] = len(self._numbers) + 1

    def number(self, name: str | None) -> int:
        """The number of an adapter, from 1; 0 for None. Raises ValueError: the name is unknown."""
        if name is None:
            return 0
        if name not in self._numbers:
            raise ValueError(f"the engine has no adapter {name!r}")
        return self._numbers[name]

    def goes_alone(self, name: str | None) -> bool:
        """Whether a sequence with this adapter needs a pass of its own: latent attention expands
        the cached latents of each sequence in turn."""
        return name in self._alone

    def reserve(self, sequence: Hashable, name: str | None) -> bool:
        """Reserves memory for a sequence's adapter; returns whether there was enough."""
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
        self._users.pop(sequence, None)

    def read(self, name: str | None) -> None:
        """Reads an adapter with reserved memory, unless it is resident."""
        if name is not None and self._resident[name] is None:
            try:
                tensors = self._folders[name].tensors()
            except CheckpointError as error:
                # clients see this error; it must not name the server's files
                raise CheckpointError(
                    f"the adapter {name!r} cannot be read from its files any more; look whether "
                    "they are still there and as they were when the server started"
                ) from error
            self._resident[name] = self._bound(self._folders[name], tensors)
            self.num_reads += 1

    @contextlib.contextmanager
    def applied(
        self, rows: Items[tuple[str | None, int]], *, everywhere: bool = False
    ) -> Iterator[None]:
        """Applies adapters to passes of this thread in a ``with`` block; ``everywhere``: of all
        threads.

        ``rows`` are names of adapters, or None, and their numbers of rows in order. A single name
        applies to all rows.
        """
        owner = None if everywhere else threading.get_ident()
        groups = [
            (name, sum(num_rows for _, num_rows in own))
            for name, own in itertools.groupby(rows, operator.itemgetter(0))
        ]
        total = sum(num_rows for _, num_rows in groups) if len(groups) > 1 else None
        with contextlib.ExitStack() as at_end:
            for module, parts in self._parts(groups).items():
                if isinstance(module, OffloadedExperts):
                    module.adapters = RowAdapters(parts, total, owner)
                    at_end.callback(setattr, module, "adapters", None)
                else:
                    hook = _adding(parts, total, owner)
                    at_end.callback(module.register_forward_hook(hook).remove)
            yield

    def check(self) -> None:
        """Asserts the invariants of the memory."""
        assert self._num_bytes(self._resident) <= self.max_bytes
        assert set(self._users.values()) <= self._resident.keys()

    def _num_bytes(self, names: Iterable[str]) -> int:
        folders = [self._folders[name] for name in names]
        whole = sum(folder.num_bytes for folder in folders)
        if self._takes_more:
            room = self._model._max_tokens
            whole += max((folder.workspace_bytes(room) for folder in folders), default=0)
        return whole

    def _parts(
        self, groups: Items[tuple[str | None, int]]
    ) -> dict[torch.nn.Module, list[tuple[slice, Any]]]:
        parts: dict[torch.nn.Module, list[tuple[slice, Any]]] = {}
        end = 0
        for name, num_rows in groups:
            rows = slice(end, end := end + num_rows)
            own = None if name is None else self._resident[name]
            for module, part in own or ():
                parts.setdefault(module, []).append((rows, part))
        return parts

    def _bound(
        self, folder: AdapterFolder, tensors: Mapping[str, tuple[torch.Tensor, ...]]
    ) -> _Parts:
        parts: _Parts = []
        for layer in folder.widths:
            module: Any = self._modules[layer]
            parts.append((module, _pair(module, tensors[layer], folder.scale(layer))))
        for module_name, places in places_of_experts(self._modules, folder).items():
            module = self._modules[module_name]
            assert isinstance(module, OffloadedExperts)
            own = {parameter: tensors[place] for place, parameter in places.items()}
            scales = {
                parameter: folder.settings.scale(
                    f"{module_name}.{parameter}", len(first) // module.num_experts
                )
                for parameter, (first, _) in own.items()
            }
            parts.append((module, experts_of(module, own, scales)))
        return parts


class LoadedAdapter:
    """The adapter of all passes of a loaded model.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModelError: the adapter is not low-rank, or ``place`` is a GPU.
    """

    def __init__(self, folder: str | Path, place: torch.device) -> None:
        if place.type != "cpu":
            raise UnsupportedModelError(
                f"{folder}: adapters are computed on the CPU so far, got the device {place}; give "
                "the device cpu, or merge the adapter into a checkpoint of its own"
            )
        self._folder = AdapterFolder(Path(folder))

    def bytes_beside(self, model: Any, num_tokens: int) -> int:
        """Bytes of the adapter and of passes of ``num_tokens``. Raises UnsupportedModelError or
        CheckpointError: it is not for this model."""
        require_fit(model, self._folder)
        return self._folder.num_bytes + self._folder.workspace_bytes(num_tokens)

    def apply(self, model: Any) -> None:
        """Reads the adapter and applies it to all later passes."""
        adapters = Adapters(model, {"": self._folder})
        adapters.reserve(self, "")
        adapters.read("")
        kept = adapters.applied([("", 0)], everywhere=True)
        kept.__enter__()  # as long as the model lives
        vars(model).update(_adapter=self._folder.folder, _adapter_hooks=kept)


def resident_bytes(
    folders: Mapping[str, AdapterFolder], max_bytes: int | None, *, takes_more: bool = False
) -> int:
    """Memory of one model's adapters: of all together, ``max_bytes`` at most."""
    sizes = {name: folder.num_bytes for name, folder in folders.items()}
    whole = sum(sizes.values())
    if max_bytes is None:
        return whole
    largest = max(sizes, key=sizes.__getitem__, default=None)
    if largest is not None and sizes[largest] > max_bytes:
        raise _too_large(largest, sizes[largest], max_bytes)
    return max_bytes if takes_more else min(whole, max_bytes)


def _too_large(name: str, num_bytes: int, max_bytes: int) -> ValueError:
    return ValueError(
        f"the adapter {name!r} needs {format_bytes(num_bytes, up=True)}, but adapters have "
        f"{format_bytes(max_bytes)} of memory; give them as much"
    )


def _pair(module: Any, tensors: Items[torch.Tensor], scale: float) -> LowRankPair:
    first_LI, second_OL, *magnitudes = tensors
    if not magnitudes:
        return LowRankPair(first_LI, second_OL, scale)
    norms = [  # in parts: a whole weight in fp32 may be large
        torch.addmm(weight_OI.float(), some_OL, first_LI, alpha=scale).norm(dim=1)
        for weight_OI, some_OL in zip(
            module.weight.detach().split(_NORM_ROWS), second_OL.split(_NORM_ROWS), strict=True
        )
    ]
    factors_O = magnitudes[0] / torch.cat(norms)
    return LowRankPair(first_LI, second_OL, scale, factors_O, module.bias)


def _adding(
    parts: Items[tuple[slice, LowRankPair]], num_rows: int | None, owner: int | None
) -> Any:
    """A forward hook that applies parts to rows of a layer's output. Without ``num_rows`` the only
    part applies to all rows. ``owner`` limits it to one thread."""

    def add(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        # other threads may call the model without adapters
        if owner not in (None, threading.get_ident()):
            return None
        x_NI, output_NO = inputs[0].flatten(0, -2).float(), output.flatten(0, -2).float()
        if num_rows is None:
            # a copy: the backward pass may need the layer's own output
            output_NO = output_NO.clone() if torch.is_grad_enabled() else output_NO
            parts[0][1].add_to(output_NO, x_NI)
        elif len(x_NI) != num_rows:
            raise ValueError(f"a layer with adapters has {len(x_NI)} rows of a pass of {num_rows}")
        else:
            for rows, pair in parts:
                pair.add_to(output_NO[rows], x_NI[rows])
        return output_NO.to(output.dtype).view(output.shape)

    return add


def experts_of(
    module: OffloadedExperts,
    pairs: Mapping[str, tuple[torch.Tensor, ...]],
    scales: Mapping[str, float],
) -> list[LowRankExpert]:
    """The adapter of each expert, from adapters of stacked parameters.

    PEFT's first matrix is ``[E * L, I]``. The columns of its second, ``[O, L * E]``, alternate
    between experts.
    """
    num_experts = module.num_experts
    shapes = {name: torch.empty(module.expert_shapes[name], device="meta") for name in pairs}
    found: dict[str, list[LowRankFactors]] = {}
    for matrix, rows in expert_rows(module.replaced, shapes):
        first, second = pairs[rows.parameter]
        first_ELI = first.unflatten(0, (num_experts, -1))
        second_EOL = second.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
        if is_turned(module.replaced):
            first_ELI, second_EOL = second_EOL.mT, first_ELI.mT
        last = rows.start + rows.step * rows.count
        first_ELI = first_ELI.contiguous()
        second_EOL = second_EOL[:, rows.start : last : rows.step].contiguous()
        scale = scales[rows.parameter]
        factors = zip(first_ELI, second_EOL, strict=True)
        found[matrix] = [LowRankFactors(*pair, scale) for pair in factors]
    none = [None] * num_experts
    each = zip(*(found.get(name, none) for name in LowRankExpert._fields), strict=True)
    return [LowRankExpert(*own) for own in each]


def is_turned(experts: torch.nn.Module) -> bool:
    """Whether PEFT swaps the input and output dimensions of the experts' parameters."""
    return getattr(experts, "is_turned_for_adapters", False)


def places_of_experts(
    modules: Mapping[str, torch.nn.Module], folder: AdapterFolder
) -> dict[str, dict[str, str]]:
    """The adapted parameters of each experts module, by their names in the adapter's file.

    PEFT wraps a module once per parameter, the first one innermost.
    """
    found = {}
    for name, module in modules.items():
        if isinstance(module, OffloadedExperts):
            own = [
                parameter
                for parameter in module.expert_shapes
                if folder.settings.targets_parameter(f"{name}.{parameter}")
            ]
            last = len(own) - 1
            found[name] = {name + WRAPPED * (last - n): own[n] for n in range(len(own))}
    return {name: places for name, places in found.items() if places}


def require_fit(model: Any, folder: AdapterFolder) -> None:
    """Refuses an adapter for another model, or without matrices that its settings name."""
    modules = dict(model.named_modules())
    for layer, widths in folder.widths.items():
        _require_linear(model, modules.get(layer), layer, widths, folder.folder)
    _require_all(model, modules, folder)
    left = dict(folder.stacked)
    for name, places in places_of_experts(modules, folder).items():
        for place, parameter in places.items():
            if place not in left:
                raise _lacking(folder, f"{name}.{parameter}")
            _require_stacked(modules[name], f"{name}.{parameter}", left.pop(place), folder)
    for place in left:
        raise UnsupportedModelError(
            f"{folder.folder}: {place}.lora_A is on no linear layer and no experts of the model "
            "(routers take no adapters); merge the adapter into a checkpoint of its own"
        )


def _require_stacked(module: Any, name: str, shape: Any, folder: AdapterFolder) -> None:
    stacked = module.expert_shapes[name.rpartition(".")[2]]
    num_experts = module.num_experts
    widths = [*stacked[1:]] if module.replaced.is_transposed else [*stacked[:0:-1]]
    if is_turned(module.replaced):
        widths.reverse()
    if len(stacked) != 3 or [shape.inputs, shape.outputs] != widths or shape.rank % num_experts:
        raise UnsupportedModelError(
            f"{folder.folder}: the adapter of {name} has {shape.inputs} inputs, {shape.outputs} "
            f"outputs and {shape.rank} ranks, but the model's {num_experts} experts have "
            f"{' and '.join(map(str, widths))}; give the model that the adapter was trained for"
        )
    folder.settings.scale(name, shape.rank // num_experts)


def _lacking(folder: AdapterFolder, name: str) -> CheckpointError:
    return CheckpointError(
        f"{folder.folder}: its settings name {name} of the model, for which it has no matrices, "
        "and PEFT would begin with new ones; give the whole adapter, or name fewer layers in "
        "adapter_config.json"
    )


def _require_all(model: Any, modules: Mapping[str, torch.nn.Module], folder: AdapterFolder) -> None:
    output = model.get_output_embeddings() if folder.widths else None
    for layer, module in modules.items():
        is_linear = isinstance(module, torch.nn.Linear) and module is not output
        if is_linear and layer not in folder.widths and folder.settings.targets(layer):
            raise _lacking(folder, layer)


def _require_linear(
    model: Any, module: Any, layer: str, widths: tuple[int, int], folder: Path
) -> None:
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
