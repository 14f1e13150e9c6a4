"""Model shapes by name, of which `write_checkpoint` makes checkpoints.

Legend: V vocabulary, D model width, F expert width, E experts, K top-k, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from moe_runtime.config import require_known

S = TypeVar("S", bound=Any)
BF16_BYTES = 2
FP8_BLOCK = 128
MXFP4_GROUP = 32


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

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down projection in bf16."""
        return 3 * self.model_width * self.expert_width * BF16_BYTES

    @property
    def experts_bytes(self) -> int:
        """Bytes of all the experts of all layers."""
        return self.num_layers * self.num_experts * self.expert_bytes

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything that is not an expert."""
        attention = 4 * self.model_width**2 + 4 * self.model_width
        router = self.num_experts * self.model_width
        tables = 2 * self.vocab_size * self.model_width + self.model_width
        return (self.num_layers * (attention + router) + tables) * BF16_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of the checkpoint."""
        return self.experts_bytes + self.dense_bytes

    def describe(self) -> dict[str, int | str]:
        """The sizes as plain values, for reports."""
        return {
            **asdict(self),
            "expert_bytes": self.expert_bytes,
            "dense_bytes": self.dense_bytes,
            "total_bytes": self.total_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class GroupedShape(ModelShape):
    """Sizes of a checkpoint whose queries share keys and values.

    Attributes:
        head_dim: Width of a head.
        num_kv_heads: Heads of keys, and of values.
    """

    head_dim: int
    num_kv_heads: int

    @property
    def query_width(self) -> int:
        """Rows of the projection of queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of the projection of keys, and of that of values."""
        return self.num_kv_heads * self.head_dim

    @property
    def table_bytes(self) -> int:
        """Bytes of embedding, output and the norm before it."""
        return (2 * self.vocab_size + 1) * self.model_width * BF16_BYTES


class Qwen3Shape(GroupedShape):
    """Qwen3-MoE in bf16."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything that is not an expert."""
        width = self.model_width
        attention = 2 * self.query_width * width + 2 * self.kv_width * width
        plain = self.num_experts * width + 2 * width + 2 * self.head_dim
        return self.num_layers * (attention + plain) * BF16_BYTES + self.table_bytes


class Qwen3Fp8Shape(Qwen3Shape):
    """Qwen3-MoE as its publisher quantises it: FP8 in blocks of 128 x 128, scales in bf16."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, scales included."""
        return 3 * fp8_bytes(self.model_width, self.expert_width)

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything that is not an expert."""
        width = self.model_width
        attention = 2 * fp8_bytes(self.query_width, width) + 2 * fp8_bytes(self.kv_width, width)
        plain = self.num_experts * width + 2 * width + 2 * self.head_dim
        return self.num_layers * (attention + plain * BF16_BYTES) + self.table_bytes


class MixtralShape(GroupedShape):
    """Mixtral in bf16."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything that is not an expert."""
        width = self.model_width
        attention = 2 * self.query_width * width + 2 * self.kv_width * width
        plain = self.num_experts * width + 2 * width
        return self.num_layers * (attention + plain) * BF16_BYTES + self.table_bytes


class GptOssShape(GroupedShape):
    """gpt-oss: experts stacked in MXFP4, everything else in bf16."""

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, scales and biases included."""
        width, hidden = self.model_width, self.expert_width
        codes_and_scales = 3 * width * hidden * (MXFP4_GROUP // 2 + 1) // MXFP4_GROUP
        return codes_and_scales + (2 * hidden + width) * BF16_BYTES

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything that is not an expert."""
        width, queries = self.model_width, self.query_width
        attention = 2 * queries * width + 2 * self.kv_width * width
        biases = queries + 2 * self.kv_width + width + self.num_heads
        router = self.num_experts * (width + 1)
        layer = attention + biases + router + 2 * width
        return self.num_layers * layer * BF16_BYTES + self.table_bytes


def fp8_bytes(rows: int, cols: int) -> int:
    """Bytes of a matrix in FP8 with a bf16 scale for each block."""
    return rows * cols + -(-rows // FP8_BLOCK) * -(-cols // FP8_BLOCK) * BF16_BYTES


QWEN3_30B_BF16 = Qwen3Shape(
    name="qwen3-30b-a3b",
    num_layers=48,
    num_experts=128,
    top_k=8,
    model_width=2048,
    expert_width=768,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    vocab_size=151936,
    shard_bytes=4 * 10**9,
)
QWEN3_30B = replace(Qwen3Fp8Shape(**vars(QWEN3_30B_BF16)), name="qwen3-30b-a3b-fp8")
SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="olmoe-1b-7b",
            num_layers=16,
            num_experts=64,
            top_k=8,
            model_width=2048,
            expert_width=1024,
            num_heads=16,
            vocab_size=50304,
            shard_bytes=5 * 10**9,
        ),
        ModelShape(
            name="olmoe-small",
            num_layers=8,
            num_experts=32,
            top_k=4,
            model_width=1024,
            expert_width=512,
            num_heads=8,
            vocab_size=50304,
            shard_bytes=400 * 10**6,
        ),
        ModelShape(
            name="olmoe-tiny",
            num_layers=4,
            num_experts=16,
            top_k=4,
            model_width=256,
            expert_width=128,
            num_heads=4,
            vocab_size=4096,
            shard_bytes=8 * 10**6,
        ),
        QWEN3_30B_BF16,
        MixtralShape(
            name="mixtral-8x7b",
            num_layers=32,
            num_experts=8,
            top_k=2,
            model_width=4096,
            expert_width=14336,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            vocab_size=32000,
            shard_bytes=5 * 10**9,
        ),
        QWEN3_30B,
        # A quarter of the layers: for a machine whose disk has no room for two files of 30 GB.
        replace(QWEN3_30B, name="qwen3-30b-a3b-fp8-12-layers", num_layers=12),
        Qwen3Fp8Shape(
            name="qwen3-tiny-fp8",
            num_layers=3,
            num_experts=16,
            top_k=4,
            model_width=256,
            expert_width=128,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            vocab_size=4096,
            shard_bytes=3 * 10**6,
        ),
        GptOssShape(
            name="gpt-oss-20b",
            num_layers=24,
            num_experts=32,
            top_k=4,
            model_width=2880,
            expert_width=2880,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            vocab_size=201088,
            shard_bytes=5 * 10**9,
        ),
        GptOssShape(
            name="gpt-oss-tiny",
            num_layers=4,
            num_experts=16,
            top_k=4,
            model_width=256,
            expert_width=160,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            vocab_size=4096,
            shard_bytes=4 * 10**6,
        ),
    )
}


def shape_of_name(name: str, num_layers: int | None = None) -> ModelShape:
    """A shape of `SHAPES`, with fewer layers if wanted, which its name says then.

    Raises:
        ValueError: there is none of that name, or it has not as many layers.
    """
    require_known("shape", name, tuple(SHAPES))
    return with_layers(SHAPES, name, num_layers)


def with_layers(shapes: Mapping[str, S], name: str, num_layers: int | None) -> S:
    """One of some shapes, with fewer layers if wanted, which its name says then.

    Raises:
        ValueError: it has not as many.
    """
    shape = shapes[name]
    if num_layers is not None and not 1 <= num_layers <= shape.num_layers:
        raise ValueError(
            f"--layers must be from 1 to {shape.num_layers}, which {name} has, got {num_layers}"
        )
    if num_layers in (None, shape.num_layers):
        return shape
    return replace(shape, name=f"{name}-{num_layers}-layers", num_layers=num_layers)
