"""Checkpoints for measurements on a GPU: whole layers of a published shape, drawn there in seconds.

Outputs of attention and experts are not scaled down as in `family_plans`: what experts compute
reaches the logits, so that outputs can be compared. Embeddings still outweigh what few layers add,
so routing depends on the token, and it is even.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from moe_runtime.benchmarks.synthetic.checkpoint_writer import write_checkpoint
from moe_runtime.benchmarks.synthetic.drawn_tensors import TensorPlan
from moe_runtime.benchmarks.synthetic.family_plans import SMALL_STD, WEIGHT_STD
from moe_runtime.benchmarks.synthetic.model_shapes import (
    BF16_BYTES,
    QWEN3_30B_BF16,
    SHAPES,
    ModelShape,
    Qwen3Shape,
)

DEVICE_SHAPES: dict[str, ModelShape] = {
    shape.name: shape for shape in (SHAPES["olmoe-1b-7b"], QWEN3_30B_BF16)
}
TINY = Qwen3Shape(
    name="tiny",
    num_layers=2,
    num_experts=8,
    top_k=2,
    model_width=64,
    expert_width=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    vocab_size=320,
    shard_bytes=10**6,
)
MEMORY_FOLDER = Path("/dev/shm")


def shape_of(name: str, num_layers: int, *, is_tiny: bool) -> ModelShape:
    """The shape of a name with fewer layers, or the one of a rehearsal."""
    return TINY if is_tiny else replace(DEVICE_SHAPES[name], num_layers=num_layers)


def active_bytes(shape: ModelShape) -> int:
    """Bytes of the weights that a decoded token reads: of the embeddings its row alone."""
    experts = shape.num_layers * shape.top_k * shape.expert_bytes
    rows_not_read = (shape.vocab_size - 1) * shape.model_width * BF16_BYTES
    return experts + shape.dense_bytes - rows_not_read


@contextlib.contextmanager
def drawn_checkpoint(shape: ModelShape, device: str) -> Iterator[Path]:
    """The checkpoint's folder, in memory where it fits twice; all beside it is removed, too."""
    place = MEMORY_FOLDER
    if not place.is_dir() or shutil.disk_usage(place).free < 2 * shape.total_bytes:
        place = Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="moe-benchmark-", dir=place) as folder:
        write_checkpoint(shape, Path(folder, "model"), make=_drawn_on(device))
        yield Path(folder, "model")


def _drawn_on(device: str) -> Any:
    """Draws weights one after another on a device: a function of their order, too."""
    generator = torch.Generator(device).manual_seed(0)

    def make(plan: TensorPlan, seed: int) -> list[Any]:
        del seed
        values = torch.ones(plan.shape, dtype=torch.bfloat16, device=device)
        if plan.std is not None:
            std = WEIGHT_STD if plan.std == SMALL_STD else plan.std
            values.normal_(std=std, generator=generator)
        return [values.cpu().view(torch.uint16).numpy()]

    return make
