"""Named model shapes that the benchmarks know how to make.

Legend: V vocabulary, D model width, F expert width, E experts, K top-k, L layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

BF16_BYTES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
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


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape(
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
        Shape(
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
        Shape(
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
    )
}
