"""Adapters of low rank (LoRA): each sequence of a pass may have its own.

Source: Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (2023).

Shape suffixes: I inputs, O outputs of a layer, N rows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from moe_runtime.checkpoints.safetensors_index import read_header
from moe_runtime.checkpoints.strict_json import clipped, parse_object
from moe_runtime.config import format_bytes
from moe_runtime.digests import check_digests
from moe_runtime.errors import CheckpointError, UnsupportedModelError, blamed_on
from moe_runtime.files import read_bounded

OBEYED = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    }
)
WITHOUT_EFFECT = frozenset(
    {
        # where the adapter comes from, and what it is for
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        # of training, or of the first values alone
        *("inference_mode", "lora_dropout", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # of other layers than linear ones, or of a setting that is refused
        *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
    }
)
REFUSED: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("use_dora", "lora_bias", "use_qalora", "ensure_weight_tying"), (False,)),
    **dict.fromkeys(("modules_to_save", "target_parameters", "layer_replication"), ([],)),
    **dict.fromkeys(("trainable_token_indices", "alora_invocation_tokens", "megatron_config"), ()),
    **dict.fromkeys(("velora_config", "monteclora_config", "kasa_config", "arrow_config"), ()),
    "use_bdlora": (),
    "bias": ("none",),
    "peft_type": ("LORA",),
    # the others subtract the first product from the base weights
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Settings that change what an adapter computes, and the values with which they do not."""

_MAX_BYTES = 1 << 22
_MAX_SCALE = 2.0**127
"""Products are in fp32."""


class AdapterSettings:
    """Which layers have an adapter, of which rank and scale; as PEFT reads its configuration."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with blamed_on(f"{file}: cannot be read as an object of JSON"):
            found = parse_object(read_bounded(file, max_bytes=_MAX_BYTES))
        self._values = found
        self._require_known()
        self._targets = self._value("target_modules", "names or a pattern", _is_names)
        if self._targets is None:
            raise self._refusal("target_modules", "names or a pattern")
        self._excluded = self._value("exclude_modules", "names or a pattern", _is_names) or ()
        self._layers = self._value("layers_to_transform", "numbers of layers", _is_indices)
        patterns = self._value("layers_pattern", "names", _is_names) or ()
        self._layer_patterns = (patterns,) if isinstance(patterns, str) else patterns
        if isinstance(self._targets, str) and (self._layers is not None or patterns):
            raise self._refusal("target_modules", "a list of names with layers_to_transform")
        if patterns and self._layers is None:
            raise self._refusal("layers_pattern", "given together with layers_to_transform")
        rank, alpha = "a whole number from 1 on", "a finite number"
        self._rank = self._value("r", rank, _is_rank, 8)
        self._alpha = self._value("lora_alpha", alpha, _is_number, 8)
        self._ranks = self._value("rank_pattern", f"{rank} by pattern", _by_name(_is_rank)) or {}
        self._alphas = self._value("alpha_pattern", f"{alpha} by pattern", _by_name(_is_number))
        self._is_root = self._value("use_rslora", "true or false", _is_bool) or False

    def targets(self, layer: str) -> bool:
        """Whether a linear layer has an adapter; not for the output layer."""
        targets = self._targets
        with blamed_on(f"{self._file}: a pattern cannot be used"):
            if _is_named(layer, self._excluded):
                return False
            if isinstance(targets, str) and targets.lower() == "all-linear":
                return True
            return _is_named(layer, targets) and (
                isinstance(targets, str) or layer in targets or self._is_of_layers(layer)
            )

    def scale(self, layer: str, rank: int) -> float:
        """The factor of an adapter's product."""
        with blamed_on(f"{self._file}: a pattern cannot be used"):
            expected = _of_pattern(self._ranks, layer, self._rank)
            alpha = _of_pattern(self._alphas or {}, layer, self._alpha)
        if rank != expected:
            raise CheckpointError(
                f"{self._file}: r or rank_pattern says rank {expected} for {layer}, but its "
                f"matrices have rank {rank}"
            )
        return alpha / (math.sqrt(rank) if self._is_root else rank)

    def _require_known(self) -> None:
        if self._values.get("peft_type") is None:
            raise self._refusal("peft_type", '"LORA"')
        for name, value in self._values.items():
            if value is None or name in OBEYED or name in WITHOUT_EFFECT:
                continue
            if name not in REFUSED:
                raise UnsupportedModelError(
                    f"{self._file}: {clipped(name)} is a setting that is not known here, so the "
                    "adapter may compute something else; remove it if it has no effect, or merge "
                    "the adapter into a checkpoint of its own"
                )
            if value not in REFUSED[name]:
                raise UnsupportedModelError(
                    f"{self._file}: {name} is {clipped(value)}, which no request can be served "
                    "with; merge the adapter into a checkpoint of its own"
                )

    def _value(
        self, name: str, expected: str, is_sound: Callable[[Any], bool], absent: Any = None
    ) -> Any:
        value = self._values.get(name, absent)
        if value is None and absent is None:
            return None
        if not is_sound(value):
            raise self._refusal(name, expected)
        return value

    def _refusal(self, name: str, expected: str) -> CheckpointError:
        found = clipped(self._values[name]) if name in self._values else "nothing"
        return CheckpointError(f"{self._file}: {name} must be {expected}, found {found}")

    def _is_of_layers(self, layer: str) -> bool:
        layers = self._layers
        if layers is None or layers == []:
            return True
        # as PEFT: the first number in a name, or the one that follows a pattern
        patterns = [rf"(?:^|.*?\.){pattern}" for pattern in self._layer_patterns]
        for pattern in patterns or [r".*?\.[^.]*"]:
            if match := re.match(rf"{pattern}\.(?P<index>\d+)\.", layer):
                return int(match["index"]) in (layers if isinstance(layers, list) else [layers])
        return False


def _of_pattern(values: Mapping[str, Any], layer: str, otherwise: Any) -> Any:
    """The value of the first pattern that is the end of a name."""
    for pattern, value in values.items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return otherwise


def _is_named(layer: str, names: Any) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None if names else False
    return any(layer == name or layer.endswith(f".{name}") for name in names)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return _is_whole(value) and value >= 1


def _is_number(value: Any) -> bool:
    return (_is_whole(value) or isinstance(value, float)) and abs(value) < _MAX_SCALE


def _is_indices(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, list) and all(map(_is_whole, value)))


def _is_names(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return all(isinstance(name, str) for name in names)


def _by_name(is_sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_sound, value.values()))


_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<part>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LowRankPair:
    """What an adapter adds to the output of one linear layer: ``scale * (x @ A.T) @ B.T``."""

    first_RI: torch.Tensor
    second_OR: torch.Tensor
    scale: float

    def add_to(self, output_NO: torch.Tensor, x_NI: torch.Tensor) -> None:
        """Adds it in place; both are in fp32, as in PEFT."""
        low_NR = torch.nn.functional.linear(x_NI, self.first_RI)
        output_NO.addmm_(low_NR, self.second_OR.T, alpha=self.scale)


class AdapterFolder:
    """The files of one adapter, checked without the model; ``widths`` are inputs and outputs by
    layer.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModelError: the adapter is more than pairs of matrices for linear layers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = folder / "adapter_config.json"
        self._file = folder / "adapter_model.safetensors"
        for file in (config, self._file):
            if not file.is_file():
                raise CheckpointError(
                    f"{folder}: expected the folder of an adapter as PEFT writes it, but there is "
                    f"no {file.name}"
                )
        check_digests(folder)
        self.settings = AdapterSettings(config)
        self._state = self._state_of_file()
        self._layers = self._read_layers()
        self._scales: dict[str, float] = {}
        self.widths: dict[str, tuple[int, int]] = {}
        self.num_bytes = 0
        for layer, parts in self._layers.items():
            (rank, inputs), (outputs, _) = parts["A"], parts["B"]
            self._scales[layer] = self.settings.scale(layer, rank)
            self.widths[layer] = inputs, outputs
            self.num_bytes += 4 * rank * (inputs + outputs)

    def workspace_bytes(self, num_rows: int) -> int:
        """Memory of a pass of so many tokens in addition to that of the model."""
        return 4 * num_rows * max(inputs + 2 * outputs for inputs, outputs in self.widths.values())

    def pairs(self) -> dict[str, LowRankPair]:
        """The matrices, in fp32, by the names of their layers.

        They are copies: a mapped file that is cut short would end the process.
        """
        found = {}
        with blamed_on(f"{self._file}: cannot be read"):
            self._require_same_file()  # a pipe in its place would be waited for
            with safe_open(self._file, framework="pt") as tensors:
                self._require_same_file()
                for layer in self._layers:
                    name = f"base_model.model.{layer}.lora_"
                    first, second = (
                        tensors.get_tensor(f"{name}{part}.weight").to(torch.float32, copy=True)
                        for part in "AB"
                    )
                    found[layer] = LowRankPair(first, second, self._scales[layer])
        return found

    def _require_same_file(self) -> None:
        if self._state_of_file() != self._state:
            raise CheckpointError(f"{self._file}: has changed; start the server anew")

    def _state_of_file(self) -> tuple[int, int]:
        state = self._file.stat()
        return state.st_size, state.st_mtime_ns

    def _read_layers(self) -> dict[str, dict[str, tuple[int, ...]]]:
        layers: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, tensor in sorted(read_header(self._file).items()):
            match = _TENSOR.fullmatch(name)
            if match is None or ".base_layer" in name:
                raise UnsupportedModelError(
                    f"{self._file}: {name} is no adapter of a linear layer beside the experts; "
                    "merge the adapter into a plain checkpoint, or train one of attention alone"
                )
            if len(tensor.shape) != 2 or tensor.dtype not in ("F32", "F16", "BF16"):
                raise CheckpointError(
                    f"{self._file}: {name} must be a matrix of F32, F16 or BF16, got "
                    f"{tensor.dtype} of {list(tensor.shape)}"
                )
            layers.setdefault(match["layer"], {})[match["part"]] = tuple(tensor.shape)
        if not layers:
            raise CheckpointError(f"{self._file}: has no adapter")
        for layer, parts in layers.items():
            if len(parts) < 2 or parts["A"][0] != parts["B"][1]:
                raise CheckpointError(
                    f"{self._file}: {layer}.lora_{min(parts)} needs another matrix of its rank"
                )
            if not self.settings.targets(layer):
                raise CheckpointError(
                    f"{self._file}: has matrices for {layer}, which PEFT would ignore: "
                    "target_modules, exclude_modules or layers_to_transform of "
                    "adapter_config.json leave that layer out; mend the settings, or remove the "
                    "matrices"
                )
        return layers


_Pairs = list[tuple[torch.nn.Module, LowRankPair]]


class Adapters:
    """Adapters of one model, ``max_bytes`` of them in memory, those used last.

    Hooks add them to the outputs of layers during a pass only: a pass without adapters has the bits
    of a model without any.
    """

    def __init__(
        self, model: Any, folders: Mapping[str, AdapterFolder], *, max_bytes: int | None = None
    ) -> None:
        """Compares the adapters with the model, and reads none. ``max_bytes`` is that of all when
        omitted.

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
        """Counts adapters from 1; 0 is the model without any. Refuses unknown names."""
        if name is None:
            return 0
        if name not in self._numbers:
            raise ValueError(f"the engine has no adapter {name!r}")
        return self._numbers[name]

    def goes_alone(self, name: str | None) -> bool:
        """Whether a sequence with it shares no pass: multi-head latent attention expands the cached
        latents of each sequence in turn.
        """
        return name in self._alone

    def reserve(self, sequence: Hashable, name: str | None) -> bool:
        """Reserves memory for a sequence's adapter; gives whether that succeeded."""
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
        """Reads an adapter whose memory is reserved, unless it is there."""
        if name is not None and self._resident[name] is None:
            try:
                pairs = self._folders[name].pairs()
            except CheckpointError as error:
                # clients see this error, which must not name the server's files
                raise CheckpointError(
                    f"the adapter {name!r} cannot be read from its files any more; look whether "
                    "they are still there and as they were when the server started"
                ) from error
            self._resident[name] = [(self._modules[layer], pair) for layer, pair in pairs.items()]
            self.num_reads += 1

    @contextlib.contextmanager
    def applied(self, rows: Items[tuple[str | None, int]]) -> Iterator[None]:
        """Adds adapters to the passes of this thread within the block.

        ``rows`` are names of adapters, or None, and how many rows of the pass each has in turn; one
        name alone is for all rows.
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
        """Asserts that memory and what is in it agree."""
        assert self._num_bytes(self._resident) <= self.max_bytes
        assert set(self._users.values()) <= self._resident.keys()

    def _num_bytes(self, names: Iterable[str]) -> int:
        return sum(self._folders[name].num_bytes for name in names)

    def _parts(
        self, groups: Items[tuple[str | None, int]]
    ) -> dict[torch.nn.Module, list[tuple[slice, LowRankPair]]]:
        parts: dict[torch.nn.Module, list[tuple[slice, LowRankPair]]] = {}
        end = 0
        for name, num_rows in groups:
            rows = slice(end, end := end + num_rows)
            own = None if name is None else self._resident[name]
            for module, pair in own or ():
                parts.setdefault(module, []).append((rows, pair))
        return parts


def resident_bytes(folders: Mapping[str, AdapterFolder], max_bytes: int | None) -> int:
    """Memory of one model's adapters: ``max_bytes`` at most, that of all where it is None."""
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
    """A forward hook that adds parts to rows of a layer's output; without ``num_rows``, the one
    part to all of them."""
    owner = threading.get_ident()

    def add(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        # another thread may call the model meanwhile, without adapters
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
