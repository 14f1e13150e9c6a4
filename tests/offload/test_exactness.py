"""Offloaded training gives the bits of training in memory, wherever experts live."""

from pathlib import Path

import pytest
import torch
from offloaded_models import (
    assert_same_parameters,
    batches,
    offloaded,
    stack,
    train_in_memory,
    train_offloaded,
)

import moe_runtime

DECAYING = moe_runtime.AdamW(weight_decay=0.1, betas=(0.9, 0.95))


def windows(num: int, micro_batches: int) -> list[list[torch.Tensor]]:
    inputs = batches(num * micro_batches)
    return [inputs[i * micro_batches : (i + 1) * micro_batches] for i in range(num)]


@pytest.mark.parametrize(
    ("experts_in_memory", "micro_batches", "io_threads"),
    [(0, 1, 1), (0, 3, 4), (0.5, 1, 2), (0.5, 2, 3), (1, 1, 1), (1, 3, 1)],
)
def test_fifty_steps(
    tmp_path: Path, experts_in_memory: float, micro_batches: int, io_threads: int
) -> None:
    steps = windows(50, micro_batches)
    expected = stack(bias=True)
    losses = train_in_memory(expected, steps, DECAYING)
    model = stack(bias=True)
    training = offloaded(
        model, DECAYING, tmp_path, experts_in_memory=experts_in_memory, io_threads=io_threads
    )
    assert train_offloaded(training, model.loss, steps) == losses
    assert_same_parameters(training, expected)
    training.close()
