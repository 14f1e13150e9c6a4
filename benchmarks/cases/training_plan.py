"""What the case ``training`` asks of every system: a model, its tokens, its shapes by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_runtime.benchmarks.experts.layer_shapes import LayerSizes
from moe_runtime.benchmarks.suite.runner import Number
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel

METRIC = "step_s"
_CPU = torch.device("cpu")
_VOCABULARY = 4096
# Weight, gradient and two moments in fp32.
_STATE_BYTES = 16
# Eager's backward fills a gradient of all experts for each of them.
_FEW = 16


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What is asked of every system.

    Attributes:
        sizes: of a layer of experts; every layer has them.
        layers: of the model.
        sequences, context: of a step.
        dtype: of products; bfloat16 under autocast, weights and states are float32.
        host_memory: budget of the offloaded training in bytes; None leaves it out.
        device: where the systems of this process compute.
    """

    sizes: LayerSizes
    layers: int
    sequences: int
    context: int
    dtype: torch.dtype
    host_memory: int | None = None
    device: torch.device = _CPU

    def config(self) -> LanguageModelConfig:
        """The model: attention of heads 64 wide, no auxiliary loss."""
        width = self.sizes.dim_model
        heads = max(1, width // 64)
        return LanguageModelConfig(
            hidden_size=width,
            num_layers=self.layers,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=width // heads,
            max_positions=self.context,
            vocab_size=_VOCABULARY,
            moe=ExpertsConfig(
                num_experts=self.sizes.num_experts,
                top_k=self.sizes.top_k,
                intermediate_size=self.sizes.dim_hidden,
                loss_weights={},
            ),
        )

    def windows(self, step: int) -> Tensor:
        """Tokens ``[B, C + 1]`` of a step, as unevenly frequent as words are."""
        generator = torch.Generator().manual_seed(step)
        shares = 1 / torch.arange(1, _VOCABULARY + 1, dtype=torch.float64)
        size = self.sequences * (self.context + 1)
        drawn = torch.multinomial(shares, size, replacement=True, generator=generator)
        return drawn.view(self.sequences, -1)

    def found(self, seconds: float) -> Mapping[str, Number]:
        """The metrics of a step."""
        return {METRIC: seconds, "tokens_per_s": self.sequences * self.context / seconds}

    def peers(self) -> list[str]:
        """Implementations of transformers that take part."""
        return ["grouped_mm", "eager"] if self.sizes.num_experts <= _FEW else ["grouped_mm"]

    def needed_bytes(self, num_programs: int = 0) -> int:
        """Weights, gradients and moments of all systems in memory.

        Args:
            num_programs: peers in processes of their own, which may hold weights and gradients
                twice.
        """
        with torch.device("meta"):
            one, two = (
                sum(part.numel() for part in LanguageModel(config).parameters())
                for config in (replace(self.config(), num_layers=count) for count in (1, 2))
            )
        count = one + (self.layers - 1) * (two - one)
        num_systems = 1 + len(self.peers()) + 2 * num_programs
        return _STATE_BYTES * count * num_systems + (self.host_memory or 0)
