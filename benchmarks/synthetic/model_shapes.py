"""Shapes of models by name: their tensors, configurations and sizes.

Attention and expert outputs are scaled down and token embeddings up, so that routing depends on the
token; a plain random model would route nearly all tokens alike and flatter every cache.

Legend: V vocabulary, D model width, F expert width, E experts, K top-k, L layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from moe_runtime.config import require_known

S = TypeVar("S", bound=Any)
BF16_BYTES = 2
FP8_BLOCK = 128
MXFP4_GROUP = 32
WEIGHT_STD = 0.02
EMBEDDING_STD = 1.0
SMALL_STD = WEIGHT_STD * 1e-3
MAX_POSITIONS = 16384
ITEM_BYTES = {"BF16": BF16_BYTES, "F8_E4M3": 1, "U8": 1}
Stored = Literal["bf16", "fp8", "mxfp4"]
Config = dict[str, object]


class StoredPart(NamedTuple):
    """A tensor of the file, as its header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One weight to write; `std` None stands for a tensor of ones (normalisation weights)."""

    name: str
    shape: tuple[int, ...]
    std: float | None
    stored: Stored = "bf16"

    @property
    def parts(self) -> tuple[StoredPart, ...]:
        if self.stored == "bf16":
            return (StoredPart(self.name, "BF16", self.shape),)
        if self.stored == "fp8":
            rows, cols = self.shape
            blocks = (-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK))
            return (
                StoredPart(self.name, "F8_E4M3", self.shape),
                StoredPart(f"{self.name}_scale_inv", "BF16", blocks),
            )
        *lead, cols = self.shape
        groups = cols // MXFP4_GROUP
        return (
            StoredPart(f"{self.name}_blocks", "U8", (*lead, groups, MXFP4_GROUP // 2)),
            StoredPart(f"{self.name}_scales", "U8", (*lead, groups)),
        )

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of an OLMoE checkpoint: multi-head attention, every block a Mixture of Experts."""

    name: str
    num_layers: int
    num_experts: int
    top_k: int
    model_width: int
    expert_width: int
    num_heads: int
    vocab_size: int
    shard_bytes: int
    stored: ClassVar[Stored] = "bf16"

    def tensors(self) -> Iterator[TensorPlan]:
        """Every weight in the order of layers."""
        table = (self.vocab_size, self.model_width)
        yield TensorPlan("model.embed_tokens.weight", table, EMBEDDING_STD)
        for layer in range(self.num_layers):
            yield from self.layer(f"model.layers.{layer}")
        yield TensorPlan("model.norm.weight", (self.model_width,), None)
        yield TensorPlan("lm_head.weight", table, WEIGHT_STD)

    def layer(self, prefix: str) -> Iterator[TensorPlan]:
        yield from self._block(prefix)
        yield from self._attention(prefix)
        for part in "qk":
            yield TensorPlan(f"{prefix}.self_attn.{part}_norm.weight", (self.norm_width,), None)

    @property
    def query_width(self) -> int:
        """Rows of the projection of queries."""
        return self.model_width

    @property
    def kv_width(self) -> int:
        """Rows of the projection of keys, and of that of values."""
        return self.model_width

    @property
    def norm_width(self) -> int:
        """Numbers that queries and keys are normalised over."""
        return self.model_width

    def config(self) -> Config:
        return self._common() | {
            "architectures": ["OlmoeForCausalLM"],
            "attention_bias": False,
            "clip_qkv": None,
            "model_type": "olmoe",
            "norm_topk_prob": False,
            "num_experts": self.num_experts,
            "num_key_value_heads": self.num_heads,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
        }

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, scales and biases included."""
        of_layer = [one.num_bytes for one in self.layer("") if ".experts" in one.name]
        return sum(of_layer) // self.num_experts

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything that is not an expert."""
        return sum(one.num_bytes for one in self.tensors() if ".experts" not in one.name)

    @property
    def total_bytes(self) -> int:
        return self.num_layers * self.num_experts * self.expert_bytes + self.dense_bytes

    def describe(self) -> dict[str, int | str]:
        sizes = ("expert_bytes", "dense_bytes", "total_bytes")
        return asdict(self) | {name: getattr(self, name) for name in sizes}

    def _block(self, prefix: str) -> Iterator[TensorPlan]:
        width, hidden, stored = self.model_width, self.expert_width, self.stored
        yield TensorPlan(f"{prefix}.input_layernorm.weight", (width,), None)
        for expert in range(self.num_experts):
            stem = f"{prefix}.mlp.experts.{expert}"
            yield TensorPlan(f"{stem}.down_proj.weight", (width, hidden), SMALL_STD, stored)
            yield TensorPlan(f"{stem}.gate_proj.weight", (hidden, width), WEIGHT_STD, stored)
            yield TensorPlan(f"{stem}.up_proj.weight", (hidden, width), WEIGHT_STD, stored)
        yield TensorPlan(f"{prefix}.mlp.gate.weight", (self.num_experts, width), WEIGHT_STD)
        yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (width,), None)

    def _attention(self, prefix: str) -> Iterator[TensorPlan]:
        width, stem, stored = self.model_width, f"{prefix}.self_attn", self.stored
        for part, rows in (("q", self.query_width), ("k", self.kv_width), ("v", self.kv_width)):
            yield TensorPlan(f"{stem}.{part}_proj.weight", (rows, width), WEIGHT_STD, stored)
        yield TensorPlan(f"{stem}.o_proj.weight", (width, self.query_width), SMALL_STD, stored)

    def _common(self) -> Config:
        return {
            "attention_dropout": 0.0,
            "eos_token_id": self.vocab_size - 1,
            "hidden_act": "silu",
            "hidden_size": self.model_width,
            "initializer_range": WEIGHT_STD,
            "intermediate_size": self.expert_width,
            "max_position_embeddings": MAX_POSITIONS,
            "num_attention_heads": self.num_heads,
            "num_experts_per_tok": self.top_k,
            "num_hidden_layers": self.num_layers,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-05,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


@dataclass(frozen=True, kw_only=True)
class GroupedShape(ModelShape):
    """Sizes of a checkpoint whose queries share keys and values."""

    head_dim: int
    num_kv_heads: int

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def norm_width(self) -> int:
        return self.head_dim

    def _common(self) -> Config:
        heads = {"head_dim": self.head_dim, "num_key_value_heads": self.num_kv_heads}
        return super()._common() | heads


class Qwen3Shape(GroupedShape):
    """Qwen3-MoE in bf16."""

    def config(self) -> Config:
        return self._common() | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "moe_intermediate_size": self.expert_width,
            "norm_topk_prob": True,
            "num_experts": self.num_experts,
            "rope_theta": 1000000.0,
            "use_sliding_window": False,
        }


class Qwen3Fp8Shape(Qwen3Shape):
    """Qwen3-MoE as its publisher quantises it: FP8 in blocks of 128 x 128, scales in bf16."""

    stored: ClassVar[Stored] = "fp8"

    def config(self) -> Config:
        return super().config() | {
            "quantization_config": {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": ["lm_head"],
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            }
        }


class MixtralShape(GroupedShape):
    """Mixtral in bf16."""

    def layer(self, prefix: str) -> Iterator[TensorPlan]:
        width, hidden, block = self.model_width, self.expert_width, f"{prefix}.block_sparse_moe"
        yield TensorPlan(f"{prefix}.input_layernorm.weight", (width,), None)
        for expert in range(self.num_experts):
            stem = f"{block}.experts.{expert}"
            yield TensorPlan(f"{stem}.w1.weight", (hidden, width), WEIGHT_STD)
            yield TensorPlan(f"{stem}.w2.weight", (width, hidden), SMALL_STD)
            yield TensorPlan(f"{stem}.w3.weight", (hidden, width), WEIGHT_STD)
        yield TensorPlan(f"{block}.gate.weight", (self.num_experts, width), WEIGHT_STD)
        yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (width,), None)
        yield from self._attention(prefix)

    def config(self) -> Config:
        return self._common() | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": self.num_experts,
            "rope_theta": 1000000.0,
            "sliding_window": None,
        }


class GptOssShape(GroupedShape):
    """gpt-oss: experts stacked in MXFP4, everything else in bf16."""

    def layer(self, prefix: str) -> Iterator[TensorPlan]:
        width, hidden, experts = self.model_width, self.expert_width, self.num_experts
        stem, attention = f"{prefix}.mlp.experts", f"{prefix}.self_attn"
        yield TensorPlan(f"{prefix}.input_layernorm.weight", (width,), None)
        rows = (experts, 2 * hidden, width)
        yield TensorPlan(f"{stem}.gate_up_proj", rows, WEIGHT_STD, "mxfp4")
        yield TensorPlan(f"{stem}.gate_up_proj_bias", (experts, 2 * hidden), WEIGHT_STD)
        yield TensorPlan(f"{stem}.down_proj", (experts, width, hidden), SMALL_STD, "mxfp4")
        yield TensorPlan(f"{stem}.down_proj_bias", (experts, width), SMALL_STD)
        yield TensorPlan(f"{prefix}.mlp.router.weight", (experts, width), WEIGHT_STD)
        yield TensorPlan(f"{prefix}.mlp.router.bias", (experts,), SMALL_STD)
        yield TensorPlan(f"{prefix}.post_attention_layernorm.weight", (width,), None)
        yield from self._attention(prefix)
        widths = {"q": self.query_width, "k": self.kv_width, "v": self.kv_width}
        for part, num_rows in widths.items():
            yield TensorPlan(f"{attention}.{part}_proj.bias", (num_rows,), WEIGHT_STD)
        yield TensorPlan(f"{attention}.o_proj.bias", (width,), SMALL_STD)
        yield TensorPlan(f"{attention}.sinks", (self.num_heads,), WEIGHT_STD)

    def config(self) -> Config:
        kinds = ("sliding_attention", "full_attention")
        kept = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens")
        return self._common() | {
            "architectures": ["GptOssForCausalLM"],
            "attention_bias": True,
            "layer_types": [kinds[layer % 2] for layer in range(self.num_layers)],
            "model_type": "gpt_oss",
            "num_local_experts": self.num_experts,
            "quantization_config": {
                "modules_to_not_convert": [*kept, "lm_head"],
                "quant_method": "mxfp4",
            },
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        }


_SIZES = (
    *("name", "num_layers", "num_experts", "top_k", "model_width", "expert_width"),
    *("num_heads", "vocab_size", "shard_bytes", "num_kv_heads", "head_dim"),
)
_MB, _GB = 10**6, 10**9


def _shape(kind: type[ModelShape], *sizes: str | int) -> Any:
    """A shape from its sizes in the order of ``_SIZES``, the last two of a `GroupedShape` alone."""
    return kind(**dict(zip(_SIZES, sizes, strict=False)))  # type: ignore[arg-type]


QWEN3_30B_BF16: Qwen3Shape = _shape(
    Qwen3Shape, "qwen3-30b-a3b", 48, 128, 8, 2048, 768, 32, 151936, 4 * _GB, 4, 128
)
QWEN3_30B = replace(Qwen3Fp8Shape(**vars(QWEN3_30B_BF16)), name="qwen3-30b-a3b-fp8")
SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _shape(ModelShape, "olmoe-1b-7b", 16, 64, 8, 2048, 1024, 16, 50304, 5 * _GB),
        _shape(ModelShape, "olmoe-small", 8, 32, 4, 1024, 512, 8, 50304, 400 * _MB),
        _shape(ModelShape, "olmoe-tiny", 4, 16, 4, 256, 128, 4, 4096, 8 * _MB),
        QWEN3_30B_BF16,
        _shape(MixtralShape, "mixtral-8x7b", 32, 8, 2, 4096, 14336, 32, 32000, 5 * _GB, 8, 128),
        QWEN3_30B,
        # A quarter of the layers: for a machine whose disk has no room for two files of 30 GB.
        replace(QWEN3_30B, name="qwen3-30b-a3b-fp8-12-layers", num_layers=12),
        _shape(Qwen3Fp8Shape, "qwen3-tiny-fp8", 3, 16, 4, 256, 128, 4, 4096, 3 * _MB, 2, 64),
        _shape(GptOssShape, "gpt-oss-20b", 24, 32, 4, 2880, 2880, 64, 201088, 5 * _GB, 8, 64),
        _shape(GptOssShape, "gpt-oss-tiny", 4, 16, 4, 256, 160, 4, 4096, 4 * _MB, 2, 64),
    )
}


def shape_of_name(name: str, num_layers: int | None = None) -> ModelShape:
    """A shape of `SHAPES`, with fewer layers if wanted, which its name says then."""
    require_known("shape", name, tuple(SHAPES))
    return with_layers(SHAPES, name, num_layers)


def with_layers(shapes: Mapping[str, S], name: str, num_layers: int | None) -> S:
    """One of some shapes, with fewer layers if wanted, which its name says then."""
    shape = shapes[name]
    if num_layers is not None and not 1 <= num_layers <= shape.num_layers:
        raise ValueError(
            f"--layers must be from 1 to {shape.num_layers}, which {name} has, got {num_layers}"
        )
    if num_layers in (None, shape.num_layers):
        return shape
    return replace(shape, name=f"{name}-{num_layers}-layers", num_layers=num_layers)
