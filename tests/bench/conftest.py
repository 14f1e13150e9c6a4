"""A synthetic checkpoint of a few hundred kilobytes."""

from pathlib import Path

import pytest

from moe_runtime.benchmarks.synthetic.checkpoint_writer import write_checkpoint
from moe_runtime.benchmarks.synthetic.model_shapes import ModelShape


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    """Small enough for a second, large enough for several shards and a split expert."""
    return ModelShape(
        name="olmoe-test",
        num_layers=2,
        num_experts=6,
        top_k=2,
        model_width=64,
        expert_width=32,
        num_heads=2,
        vocab_size=320,
        shard_bytes=70_000,
    )


@pytest.fixture(scope="session")
def checkpoint(shape: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / shape.name
    write_checkpoint(shape, folder, seed=3)
    return folder
