"""LoRA adapters as PEFT writes them: their settings, and the tensors in their files.

Shape suffixes: I inputs, O outputs of a layer, L rank, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from moe_runtime.checkpoints.safetensors_index import TORCH_DTYPES, read_header
from moe_runtime.checkpoints.strict_json import clipped, parse_object
from moe_runtime.config import is_number
from moe_runtime.digests import check_digests, digest_of_file
from moe_runtime.errors import CheckpointError, UnsupportedModelError, blamed_on
from moe_runtime.files import read_bounded

_MAX_BYTES = 1 << 22
_MAX_SCALE = 2.0**127  # products are in fp32


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_rank(value: Any) -> bool:
    return is_number(value, Integral) and value >= 1


def _is_scale(value: Any) -> bool:
    return is_number(value) and abs(value) < _MAX_SCALE


def _are_indices(value: Any) -> bool:
    return all(is_number(one, Integral) for one in (value if isinstance(value, list) else [value]))


def _are_names(value: Any) -> bool:
    return all(isinstance(one, str) for one in (value if isinstance(value, list) else [value]))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and _are_names(value)


def _by_name(is_sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(is_sound, value.values()))


_RANK, _SCALE = "a whole number from 1 on", "a finite number"
APPLIED: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "r": (_RANK, _is_rank),
    "lora_alpha": (_SCALE, _is_scale),
    "use_rslora": ("true or false", _is_bool),
    "rank_pattern": (f"{_RANK} by pattern", _by_name(_is_rank)),
    "alpha_pattern": (f"{_SCALE} by pattern", _by_name(_is_scale)),
    "target_modules": ("names or a pattern", _are_names),
    "exclude_modules": ("names or a pattern", _are_names),
    "layers_to_transform": ("numbers of layers", _are_indices),
    "layers_pattern": ("names", _are_names),
    "target_parameters": ("a list of names", _is_list),
    "use_dora": ("true or false", _is_bool),
}
"""Settings that are applied, and their values."""
IGNORED = frozenset(
    {
        # origin and purpose
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        # only for training and initial values
        *("inference_mode", "lora_dropout", "runtime_config"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        # only for other layers than linear ones, or for a refused setting
        *("fan_in_fan_out", "megatron_core", "qalora_group_size"),
    }
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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
"""Settings that change what an adapter computes, and their values that change nothing."""

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class AdapterSettings:
    """The layers that have an adapter, with rank and scale, as PEFT reads its configuration."""

    def __init__(self, file: Path) -> None:
        self._file = file
        with blamed_on(f"{file}: cannot be read as an object of JSON"):
            found = parse_object(read_bounded(file, max_bytes=_MAX_BYTES))
        self._values = found
        self._require_sound()
        self._parameters = found.get("target_parameters") or ()
        self._targets: Any = found.get("target_modules")
        if self._targets is None and not self._parameters:
            raise self._refusal("target_modules", "names or a pattern")
        self._targets = [] if self._targets is None else self._targets
        self._excluded = found.get("exclude_modules") or ()
        self._layers = found.get("layers_to_transform")
        patterns = found.get("layers_pattern") or ()
        self._layer_patterns = (patterns,) if isinstance(patterns, str) else patterns
        if isinstance(self._targets, str) and (self._layers is not None or patterns):
            raise self._refusal("target_modules", "a list of names with layers_to_transform")
        if patterns and self._layers is None:
            raise self._refusal("layers_pattern", "given together with layers_to_transform")
        self._rank, self._alpha = found.get("r", 8), found.get("lora_alpha", 8)
        self._ranks, self._alphas = found.get("rank_pattern"), found.get("alpha_pattern")
        self._is_root = bool(found.get("use_rslora"))
        self.has_magnitudes = bool(found.get("use_dora"))
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
            alpha = _of_pattern(self._alphas, layer, self._alpha)
        if rank != expected:
            raise CheckpointError(
                f"{self._file}: r or rank_pattern says rank {expected} for {layer}, but its "
                f"matrices have rank {rank}"
            )
        return alpha / (math.sqrt(rank) if self._is_root else rank)

    def _require_sound(self) -> None:
        if self._values.get("peft_type") is None:
            raise self._refusal("peft_type", '"LORA"')
        for name, value in self._values.items():
            if value is None and name not in ("r", "lora_alpha"):
                continue
            if name in APPLIED:
                expected, is_sound = APPLIED[name]
                if not is_sound(value):
                    raise self._refusal(name, expected)
            elif name in NEUTRAL:
                if value not in NEUTRAL[name]:
                    raise UnsupportedModelError(
                        f"{self._file}: {name} is {clipped(value)}, so the adapter is more than "
                        "products of low rank; merge the adapter into a checkpoint of its own"
                    )
            elif name not in IGNORED:
                raise UnsupportedModelError(
                    f"{self._file}: {clipped(name)} is a setting that is not known here, so the "
                    "adapter may compute something else; remove it if it has no effect, or merge "
                    "the adapter into a checkpoint of its own"
                )

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


def _of_pattern(values: Mapping[str, Any] | None, layer: str, otherwise: Any) -> Any:
    for pattern, value in (values or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return otherwise


def _is_named(layer: str, names: Any) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, layer) is not None if names else False
    return any(layer == name or layer.endswith(f".{name}") for name in names)


_MAGNITUDES = "magnitude_vector"
_TENSOR = re.compile(
    rf"base_model\.model\.(?P<place>.+)\.lora_(?:(?P<part>[AB])\.weight|(?P<vector>{_MAGNITUDES}))"
)
WRAPPED = ".base_layer"
"""PEFT wraps a module once for each of its parameters with an adapter."""


class LowRankShape(NamedTuple):
    """Sizes of the matrices ``[rank, inputs]`` and ``[outputs, rank]``, and with DoRA of a vector
    ``[outputs]``."""

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
        stacked: pairs for parameters of experts modules, by module, with `WRAPPED` once for every
            parameter that comes after it.

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
        config = self.folder / "adapter_config.json"
        return digest_of_file(config) + digest_of_file(self._file)

    def workspace_bytes(self, num_rows: int) -> int:
        """Bytes that a pass of so many tokens needs in addition to the model's."""
        widest = max((inputs + 2 * outputs for inputs, outputs in self.widths.values()), default=0)
        return 4 * num_rows * widest

    def tensors(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """The matrices ``[L, I]`` and ``[O, L]``, with DoRA also magnitudes ``[O]``, by layer.

        Copies, since a mapped file that is cut short would end the process; for layers in fp32.
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
                    f"{self._file}: {name} is not an adapter of a linear layer or experts; merge "
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
