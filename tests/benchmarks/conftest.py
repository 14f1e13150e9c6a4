"""Makes the benchmarks' own package `harness` importable, as it is for `benchmarks/generate.py`."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from harness.checkpoints import write_checkpoint  # noqa: E402
from harness.shapes import Shape  # noqa: E402


@pytest.fixture(scope="session")
def shape() -> Shape:
    """Small enough for a second, large enough for several shards and a split expert."""
    return Shape(
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
def checkpoint(shape: Shape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / shape.name
    write_checkpoint(shape, folder, seed=3)
    return folder
