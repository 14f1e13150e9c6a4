"""Model shapes by name: tensors, configurations and sizes, from ``families.json``.

Attention and expert outputs are scaled down and token embeddings up, so that routing depends on the
token; a plain random model would route nearly all tokens alike and flatter every cache.

A row of a family is a tensor's name, its dimensions, its scale, ``coded`` where the family stores
it quantised, and its names in a GGUF file. Dimensions: V vocabulary, D model width, F expert width,
E experts, K top-k, L layers, H heads, A heads of keys, d head, Q queries, KV keys, N norms.

Checkpoints are written one weight at a time, with the layout that Hugging Face publishes. Weights
are Gaussian numbers, stored in bf16 or quantised to FP8 or MXFP4: codes have the statistics of real
ones.
"""

import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from safetensors import safe_open

from moe_runtime.benchmarks.synthetic.texts import write_tokenizer
from moe_runtime.config import require_known

S = TypeVar("S", bound=Any)
BF16_BYTES = 2
FP8_BLOCK = 128
MXFP4_GROUP = 32
WEIGHT_STD = 0.02
EMBEDDING_STD = 1.0
SMALL_STD = WEIGHT_STD * 1e-3
ITEM_BYTES = {"BF16": BF16_BYTES, "F8_E4M3": 1, "U8": 1}
FAMILIES: dict[str, Any] = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
_SCALES = {"one": None, "std": WEIGHT_STD, "small": SMALL_STD}


class StoredPart(NamedTuple):
    """A tensor of the file, as described by its header."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A weight to write; `std` None means a tensor of ones (normalisation weights)."""

    name: str
    shape: tuple[int, ...]
    std: float | None
    stored: str = "bf16"

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        name, (*lead, cols) = self.name, self.shape
        if self.stored == "fp8":
            blocks = tuple(-(-size // FP8_BLOCK) for size in self.shape)
            scales = StoredPart(f"{name}_scale_inv", "BF16", blocks)
            return (StoredPart(name, "F8_E4M3", self.shape), scales)
        if self.stored == "mxfp4":
            groups = (*lead, cols // MXFP4_GROUP)
            codes = StoredPart(f"{name}_blocks", "U8", (*groups, MXFP4_GROUP // 2))
            return (codes, StoredPart(f"{name}_scales", "U8", groups))
        return (StoredPart(name, "BF16", self.shape),)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


def facts_of(family: str) -> dict[str, Any]:
    """The facts of a family, merged over those of its base."""
    own = FAMILIES[family]
    if family == "common":
        return own
    base = facts_of(own.get("base", "common"))
    tables = {key: base[key] | own.get(key, {}) for key in ("config", "gguf")}
    if isinstance(layer := own.get("layer"), str):
        tables["layer"] = FAMILIES[layer]["layer"]
    return base | own | tables


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a checkpoint in which every block is a Mixture of Experts. Without key heads each
    query has its own."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    model_width: int
    expert_width: int
    num_heads: int
    vocab_size: int
    shard_bytes: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    family: str = "olmoe"

    def sizes(self) -> dict[str, Any]:
        width, dim, hidden = self.model_width, self.head_dim, self.expert_width
        heads, keys = self.num_heads, self.num_kv_heads or self.num_heads
        grouped = (heads * dim, keys * dim, dim) if dim else (width, width, width)
        return {
            **{"V": self.vocab_size, "D": width, "F": hidden, "2F": 2 * hidden},
            **{"E": self.num_experts, "K": self.top_k, "L": self.num_layers, "H": heads},
            **{"A": keys, "d": dim, **dict(zip(("Q", "KV", "N"), grouped, strict=True))},
            **{"last": self.vocab_size - 1, "name": self.name},
            "layer_types": [
                ("sliding_attention", "full_attention")[layer % 2]
                for layer in range(self.num_layers)
            ],
        }

    def tensors(self) -> Iterator[TensorPlan]:
        """Every weight in layer order."""
        table = (self.vocab_size, self.model_width)
        yield TensorPlan("model.embed_tokens.weight", table, EMBEDDING_STD)
        for layer in range(self.num_layers):
            yield from self.layer(f"model.layers.{layer}.")
        yield TensorPlan("model.norm.weight", (self.model_width,), None)
        yield TensorPlan("lm_head.weight", table, WEIGHT_STD)

    def layer(self, prefix: str) -> Iterator[TensorPlan]:
        facts, sizes = facts_of(self.family), self.sizes()
        rows = [row.split() for row in facts["layer"]]
        each = [row for row in rows if "{e}" in row[0]]
        for row in rows:
            if row in each[1:]:
                continue
            for expert in range(self.num_experts if row in each else 1):
                for name, dims, scale, *more in each if row in each else [row]:
                    shape = tuple(sizes[dim] for dim in dims.split(","))
                    stored = facts["stored"] if more[:1] == ["coded"] else "bf16"
                    full = prefix + name.format(e=expert)
                    yield TensorPlan(full, shape, _SCALES[scale], stored)

    def config(self) -> dict[str, Any]:
        return filled(facts_of(self.family)["config"], self.sizes())

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, with scales and biases."""
        of_layer = [one.num_bytes for one in self.layer("") if ".experts" in one.name]
        return sum(of_layer) // self.num_experts

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything but the experts."""
        around = 2 * BF16_BYTES * self.vocab_size * self.model_width + BF16_BYTES * self.model_width
        of_layer = [one.num_bytes for one in self.layer("") if ".experts" not in one.name]
        return around + self.num_layers * sum(of_layer)

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.num_experts * self.expert_bytes + self.dense_bytes

    def write(self, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
        """Write a checkpoint; ``progress`` gets the bytes written and the total."""
        write_checkpoint(self, folder, progress=progress)

    def write_settings(self, folder: Path) -> None:
        """Write everything but the weights: configuration and tokenizer."""
        write_tokenizer(folder, self.vocab_size)
        (folder / "config.json").write_text(_as_json(self.config()))
        (folder / "generation_config.json").write_text(_as_json({"do_sample": False}))

    def describe(self) -> dict[str, int | str]:
        sizes = ("expert_bytes", "dense_bytes", "total_bytes")
        return asdict(self) | {name: getattr(self, name) for name in sizes}


def filled(table: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """A table of a family with sizes in place of ``$D`` and the like."""
    return {
        key: sizes[value[1:]] if isinstance(value, str) and value[:1] == "$" else value
        for key, value in table.items()
    }


_SIZES = (
    *("family", "name", "num_layers", "num_experts", "top_k", "model_width", "expert_width"),
    *("num_heads", "vocab_size", "shard_bytes", "num_kv_heads", "head_dim"),
)
_MB, _GB = 10**6, 10**9


def make_shape(*sizes: Any) -> ModelShape:
    """A shape from its sizes in the order of ``_SIZES``; the last two only if heads share keys."""
    return ModelShape(**dict(zip(_SIZES, sizes, strict=False)))


_QWEN3 = (48, 128, 8, 2048, 768, 32, 151936, 4 * _GB, 4, 128)
SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        make_shape("olmoe", "olmoe-1b-7b", 16, 64, 8, 2048, 1024, 16, 50304, 5 * _GB),
        make_shape("olmoe", "olmoe-small", 8, 32, 4, 1024, 512, 8, 50304, 400 * _MB),
        make_shape("olmoe", "olmoe-tiny", 4, 16, 4, 256, 128, 4, 4096, 8 * _MB),
        make_shape("qwen3_moe", "qwen3-30b-a3b", *_QWEN3),
        make_shape("mixtral", "mixtral-8x7b", 32, 8, 2, 4096, 14336, 32, 32000, 5 * _GB, 8, 128),
        make_shape("qwen3_moe_fp8", "qwen3-30b-a3b-fp8", *_QWEN3),
        # A quarter of the layers, for disks without room for two files of 30 GB.
        make_shape("qwen3_moe_fp8", "qwen3-30b-a3b-fp8-12-layers", 12, *_QWEN3[1:]),
        make_shape("qwen3_moe_fp8", "qwen3-tiny-fp8", 3, 16, 4, 256, 128, 4, 4096, 3 * _MB, 2, 64),
        make_shape("gpt_oss", "gpt-oss-20b", 24, 32, 4, 2880, 2880, 64, 201088, 5 * _GB, 8, 64),
        make_shape("gpt_oss", "gpt-oss-tiny", 4, 16, 4, 256, 160, 4, 4096, 4 * _MB, 2, 64),
    )
}


class LayerSizes(NamedTuple):
    """Sizes of a layer of experts."""

    num_experts: int
    top_k: int
    dim_model: int
    dim_hidden: int


LAYER_SHAPES = {
    name: LayerSizes(one.num_experts, one.top_k, one.model_width, one.expert_width)
    for name, one in SHAPES.items()
    if name in ("olmoe-1b-7b", "qwen3-30b-a3b", "mixtral-8x7b", "gpt-oss-20b")
}
TRAINING_SHAPES = {
    "pocket": LayerSizes(16, 2, 256, 128),
    "small": LayerSizes(64, 8, 512, 256),
    "300m": LayerSizes(64, 4, 512, 512),
    "qwen3-30b-a3b": LayerSizes(128, 8, 2048, 768),
    # Steps of 8 sequences of 256 tokens give 2,000 tokens per expert of the first: products limit
    # offloaded training. Steps of 32 tokens give 8 per expert of the second: the disk does.
    "many": LayerSizes(32, 28, 128, 384),
    "few": LayerSizes(16, 4, 256, 1024),
}


def with_layers(shapes: Mapping[str, S], name: str, num_layers: int | None) -> S:
    """A named shape, optionally with fewer layers, which its name then says."""
    require_known("shape", name, tuple(shapes))
    shape = shapes[name]
    if num_layers is not None and not 1 <= num_layers <= shape.num_layers:
        raise ValueError(
            f"--layers must be from 1 to {shape.num_layers}, which {name} has, got {num_layers}"
        )
    if num_layers in (None, shape.num_layers):
        return shape
    return replace(shape, name=f"{name}-{num_layers}-layers", num_layers=num_layers)


INDEX_NAME = "model.safetensors.index.json"


def make_parts(plan: TensorPlan, seed: int) -> list[np.ndarray]:
    """The contents of `plan.parts`; depends only on seed and name, not on the order."""
    import torch

    # transformers' lazy modules cannot be imported by several threads
    store = _fp8() if plan.stored == "fp8" else {"bf16": _bf16, "mxfp4": _mxfp4}[plan.stored]
    rows, cols = math.prod(plan.shape[:-1]), plan.shape[-1]

    def portion(first: int) -> tuple[Any, ...]:
        size = (min(FP8_BLOCK, rows - first), cols)
        return store(torch.from_numpy(_values(plan, seed, first, size)))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        portions = zip(*pool.map(portion, range(0, rows, FP8_BLOCK)), strict=True)
        whole = [torch.cat(part) for part in portions]
    bits = {1: torch.uint8, 2: torch.uint16}
    return [one.view(bits[one.element_size()]).numpy() for one in whole]


def _values(plan: TensorPlan, seed: int, first: int, size: tuple[int, int]) -> np.ndarray:
    if plan.std is None:
        return np.ones(size, dtype=np.float32)
    bits = np.random.SFC64([seed, zlib.crc32(plan.name.encode()), first])
    values = np.random.Generator(bits).standard_normal(size, dtype=np.float32)
    values *= np.float32(plan.std)
    return values


def _bf16(values: Any) -> tuple[Any]:
    return (values.bfloat16(),)


def _fp8() -> Callable[[Any], tuple[Any, Any]]:
    """transformers' FP8 quantiser, which needs whole blocks; scales are rounded to bf16."""
    from types import SimpleNamespace

    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings: Any = SimpleNamespace(quantization_config=FineGrainedFP8Config())

    def store(values: Any) -> tuple[Any, Any]:
        parts = Fp8Quantize(settings)._quantize_one("weight", values)
        return parts["weight"], parts["weight_scale_inv"].bfloat16()

    return store


def _mxfp4(values: Any) -> tuple[Any, Any]:
    from moe_runtime.kernels.quantized import WeightFormat
    from moe_runtime.kernels.quantized.rounding import quantize

    found = quantize(values, WeightFormat("e2m1", "e8m0", group_cols=MXFP4_GROUP))
    return found.codes, found.scales


def write_checkpoint(
    shape: ModelShape,
    folder: Path,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    make: Callable[[TensorPlan, int], Sequence[Any]] = make_parts,
) -> None:
    """Write the checkpoint of `shape` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = _split_into_shards(list(shape.tensors()), shape.shard_bytes)
    weight_map: dict[str, str] = {}
    done = 0
    for number, plans in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, offsets = _safetensors_header([part for plan in plans for part in plan.parts])
        with (folder / file_name).open("wb") as file:
            file.write(header)
            for plan in plans:
                for part, content in zip(plan.parts, make(plan, seed), strict=True):
                    file.seek(offsets[part.name])
                    file.write(content.data)
                    weight_map[part.name] = file_name
                done += plan.num_bytes
                if progress is not None:
                    progress(done, shape.total_bytes)
    shape.write_settings(folder)
    index = {"metadata": {"total_size": shape.total_bytes, "seed": seed}, "weight_map": weight_map}
    (folder / INDEX_NAME).write_text(_as_json(index))


def _split_into_shards(plans: list[TensorPlan], shard_bytes: int) -> list[list[TensorPlan]]:
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for plan in plans:
        if shards[-1] and size + plan.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(plan)
        size += plan.num_bytes
    return shards


def _safetensors_header(parts: Sequence[StoredPart]) -> tuple[bytes, dict[str, int]]:
    """The header of a file, and the first byte of each tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for part in sorted(parts, key=lambda part: -ITEM_BYTES[part.dtype]):
        begins[part.name], end = end, end + part.num_bytes
        entries[part.name] = {
            "dtype": part.dtype,
            "shape": list(part.shape),
            "data_offsets": [begins[part.name], end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Pad with spaces to a multiple of eight bytes, as safetensors does, so that tensors start where
    # they do in published checkpoints.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + begin for name, begin in begins.items()}


def _as_json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """The place of a tensor in a file, and its shape."""

    path: Path
    name: str
    shape: tuple[int, ...]

    def read_bits(self) -> np.ndarray:
        """Read the tensor: bf16 as uint16, codes of one byte as uint8."""
        import torch

        with safe_open(self.path, framework="pt") as file:
            tensor: Any = file.get_tensor(self.name)
        return tensor.view({1: torch.uint8, 2: torch.uint16}[tensor.element_size()]).numpy()


def locate_tensors(folder: Path) -> dict[str, TensorPlace]:
    """The place of every tensor of the sharded checkpoint in `folder`, by name."""
    weight_map: dict[str, str] = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    places: dict[str, TensorPlace] = {}
    for path in sorted({folder / name for name in weight_map.values()}):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 -- it has no iteration of its own
                places[name] = TensorPlace(path, name, tuple(file.get_slice(name).get_shape()))
    return places
