"""Sizes of layers of experts by name, without torch: other names are refused at once."""

from dataclasses import dataclass
from typing import NamedTuple

from moe_runtime.config import require_known


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """One layer's experts: E, K, D, F, and the transformers model that has them."""

    model_type: str
    experts_class: str
    num_experts: int
    top_k: int
    dim_model: int
    dim_hidden: int


class LayerSizes(NamedTuple):
    num_experts: int
    top_k: int
    dim_model: int
    dim_hidden: int


LAYER_SHAPES = {
    "olmoe-1b-7b": ExpertsShape("olmoe", "OlmoeExperts", 64, 8, 2048, 1024),
    "qwen3-30b-a3b": ExpertsShape("qwen3_moe", "Qwen3MoeExperts", 128, 8, 2048, 768),
    "mixtral-8x7b": ExpertsShape("mixtral", "MixtralExperts", 8, 2, 4096, 14336),
    "gpt-oss-20b": ExpertsShape("gpt_oss", "GptOssExperts", 32, 4, 2880, 2880),
}

TRAINING_SHAPES = {
    "pocket": LayerSizes(16, 2, 256, 128),
    "small": LayerSizes(64, 8, 512, 256),
    "300m": LayerSizes(64, 4, 512, 512),
    "qwen3-30b-a3b": LayerSizes(128, 8, 2048, 768),
    # Of which steps of 8 sequences of 256 tokens have 2,000 tokens an expert: products are the
    # limit of offloaded training. Steps of 32 tokens of the other have 8: the disk is.
    "many": LayerSizes(32, 28, 128, 384),
    "few": LayerSizes(16, 4, 256, 1024),
}
"""Experts a layer, top-k, model width and expert width."""


def sizes_of_shape(name: str) -> LayerSizes:
    require_known("shape", name, LAYER_SHAPES)
    shape = LAYER_SHAPES[name]
    return LayerSizes(shape.num_experts, shape.top_k, shape.dim_model, shape.dim_hidden)
