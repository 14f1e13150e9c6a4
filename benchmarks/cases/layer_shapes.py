"""Sizes of layers of experts by name, without torch: other names are refused at once."""

from typing import NamedTuple

from moe_runtime.benchmarks.synthetic.model_shapes import SHAPES


class LayerSizes(NamedTuple):
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
    # Of which steps of 8 sequences of 256 tokens have 2,000 tokens an expert: products are the
    # limit of offloaded training. Steps of 32 tokens of the other have 8: the disk is.
    "many": LayerSizes(32, 28, 128, 384),
    "few": LayerSizes(16, 4, 256, 1024),
}
