"""Files of adapters of low rank (LoRA), as PEFT writes them: settings, and which tensors there are.

Shape suffixes: I inputs, O outputs of a layer, L rank, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, read_header
from moe_runtime.checkpoints.strict_json import clipped, parse_object
from moe_runtime.digests import check_digests, digest_of_file
from moe_runtime.errors import CheckpointError, UnsupportedModelError, blamed_on
from moe_runtime.files import read_bounded

OBEYED = frozenset(
    {
        *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
        *("target_parameters", "use_dora"),
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
    **dict.fromkeys(("lora_bias", "use_qalora", "ensure_weight_tying"), (False,)),
    **dict.fromkeys(("modules_to_save", "layer_replication"), ([],)),
    **dict.fromkeys(("trainable_token_indices", "alora_invocation_tokens", "megatron_config"), ()),
    **dict.fromkeys(("velora_config", "monteclora_config", "kasa_config", "arrow_config"), ()),
    "use_bdlora": (),
    "bias": ("none",),
    "peft_type": ("LORA",),
    # the others subtract the first product from the base weights
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", "mica"),
}
"""Settings that change what an adapter computes, and the values with which they do not."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
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
        self._parameters = self._value("target_parameters", "a list of names", _is_list) or ()
        if self._targets is None and self._parameters:
            self._targets = []
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
        self.has_magnitudes = self._value("use_dora", "true or false", _is_bool) or False
        if self.has_magnitudes and self._parameters:
            raise self._refusal("use_dora", "false with target_parameters, as in PEFT")

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

    def targets_parameter(self, name: str) -> bool:
        """Whether a stacked parameter of experts has an adapter."""
        return _is_named(name, self._parameters)

    def targets_within(self, module: str) -> bool:
        """Whether a parameter of a module may have an adapter."""
        return _is_named(module, [name.rpartition(".")[0] for name in self._parameters])

    def scale(self, layer: str, rank: int) -> float:
        """The factor of an adapter's product, by the name of a layer or parameter."""
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
                    f"{self._file}: {name} is {clipped(value)}, so the adapter is more than "
                    "products of low rank; merge the adapter into a checkpoint of its own"
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


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and _is_names(value)


def _by_name(is_sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_sound, value.values()))


_MAGNITUDES = "magnitude_vector"
_TENSOR = re.compile(
    rf"base_model\.model\.(?P<place>.+)\.lora_(?:(?P<part>[AB])\.weight|(?P<vector>{_MAGNITUDES}))"
)
WRAPPED = ".base_layer"
"""PEFT wraps a module once for each of its parameters that has an adapter."""


class LowRankShape(NamedTuple):
    """Of a pair of matrices: ``[rank, inputs]`` and ``[outputs, rank]``; with DoRA, and a vector of
    ``outputs``."""

    rank: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    has_magnitudes: bool

    @property
    def num_values(self) -> int:
        return self.rank * (self.inputs + self.outputs) + self.has_magnitudes * self.outputs


class AdapterFolder:
    """The files of one adapter, checked without the model.

    Attributes:
        widths: inputs and outputs of layers, by their names.
        stacked: pairs for parameters of experts modules, by the names of these, with `WRAPPED` once
            for every parameter that the module has behind.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModelError: the adapter is more than pairs of matrices.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config, self._file = (folder / name for name in ADAPTER_FILES)
        for file in (config, self._file):
            if not file.is_file():
                raise CheckpointError(
                    f"{folder}: expected the folder of an adapter as PEFT writes it, but there is "
                    f"no {file.name}"
                )
        check_digests(folder)
        self.settings = AdapterSettings(config)
        self._state = self._state_of_file()
        self.widths: dict[str, tuple[int, int]] = {}
        self.stacked: dict[str, LowRankShape] = {}
        self._scales: dict[str, float] = {}
        self.num_bytes = 0
        for place, shape in self._read_shapes().items():
            if self.settings.targets(place):
                self._scales[place] = self.settings.scale(place, shape.rank)
                self.widths[place] = shape.inputs, shape.outputs
                self.num_bytes += 4 * shape.num_values
            elif self.settings.targets_within(place.replace(WRAPPED, "")):
                self.stacked[place] = shape
                self.num_bytes += shape.dtype.itemsize * shape.num_values
            else:
                raise CheckpointError(
                    f"{self._file}: has matrices for {place}, which PEFT would ignore: "
                    "target_modules, target_parameters, exclude_modules or layers_to_transform of "
                    "adapter_config.json leave it out; mend the settings, or remove the matrices"
                )

    def scale(self, layer: str) -> float:
        return self._scales[layer]

    def digest(self) -> str:
        """Of both files."""
        config = self.folder / "adapter_config.json"
        return digest_of_file(config) + digest_of_file(self._file)

    def workspace_bytes(self, num_rows: int) -> int:
        """Memory of a pass of so many tokens in addition to that of the model."""
        widest = max((inputs + 2 * outputs for inputs, outputs in self.widths.values()), default=0)
        return 4 * num_rows * widest

    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """The matrices ``[L, I]`` and ``[O, L]``, with DoRA magnitudes ``[O]`` too, by the names in
        ``widths`` and ``stacked``.

        They are copies: a mapped file that is cut short would end the process. Those of layers are
        in fp32.
        """
        found = {}
        with blamed_on(f"{self._file}: cannot be read"):
            self._require_same_file()  # a pipe in its place would be waited for
            with safe_open(self._file, framework="pt") as tensors:
                self._require_same_file()
                for place in (*self.widths, *self.stacked):
                    dtype = torch.float32 if place in self.widths else self.stacked[place].dtype
                    name = f"base_model.model.{place}.lora_"
                    parts = [f"{name}A.weight", f"{name}B.weight"]
                    parts += [f"{name}{_MAGNITUDES}"] * self.settings.has_magnitudes
                    found[place] = tuple(
                        tensors.get_tensor(part).to(dtype, copy=True) for part in parts
                    )
        return found

    def _require_same_file(self) -> None:
        if self._state_of_file() != self._state:
            raise CheckpointError(f"{self._file}: has changed; load it anew")

    def _state_of_file(self) -> tuple[int, int]:
        state = self._file.stat()
        return state.st_size, state.st_mtime_ns

    def _read_shapes(self) -> dict[str, LowRankShape]:
        parts: dict[str, dict[str, tuple[int, ...]]] = {}
        dtypes: dict[str, set[str]] = {}
        for name, tensor in sorted(read_header(self._file).items()):
            match = _TENSOR.fullmatch(name)
            if match is None or (match["vector"] and not self.settings.has_magnitudes):
                raise UnsupportedModelError(
                    f"{self._file}: {name} is no adapter of a linear layer or of experts; merge "
                    "the adapter into a plain checkpoint, or train one without it"
                )
            num_dims, kind = (1, "vector") if match["vector"] else (2, "matrix")
            if len(tensor.shape) != num_dims or tensor.dtype not in ("F32", "F16", "BF16"):
                raise CheckpointError(
                    f"{self._file}: {name} must be a {kind} of F32, F16 or BF16, got "
                    f"{tensor.dtype} of {list(tensor.shape)}"
                )
            own = parts.setdefault(match["place"], {})
            own[match["part"] or _MAGNITUDES] = tuple(tensor.shape)
            if match["part"]:
                dtypes.setdefault(match["place"], set()).add(tensor.dtype)
        if not parts:
            raise CheckpointError(f"{self._file}: has no adapter")
        found = {}
        for place, own in parts.items():
            if not {"A", "B"} <= own.keys() or own["A"][0] != own["B"][1] or len(dtypes[place]) > 1:
                raise CheckpointError(
                    f"{self._file}: {place}.lora_{min(own)} needs another matrix of its rank and "
                    "type"
                )
            (rank, inputs), (outputs, _) = own["A"], own["B"]
            has_magnitudes = self.settings.has_magnitudes
            if has_magnitudes and own.get(_MAGNITUDES) != (outputs,):
                raise CheckpointError(
                    f"{self._file}: {place}.lora_{_MAGNITUDES} of {outputs} values is needed with "
                    f"use_dora, found {own.get(_MAGNITUDES, 'none')}"
                )
            dtype = TORCH_DTYPES[dtypes[place].pop()]
            found[place] = LowRankShape(rank, inputs, outputs, dtype, has_magnitudes)
        return found
