"""Activations that are kept, recomputed or swapped give the same bits, and the plan is followed."""

import errno
import gc
import os
from pathlib import Path

import pytest
import torch
from offloaded_models import (
    LAYERS,
    assert_same_parameters,
    batches,
    offloaded,
    stack,
    train_in_memory,
    train_offloaded,
)

import moe_runtime
from moe_runtime.errors import CapacityError
from moe_runtime.training.offload import activations as activation_swap
from moe_runtime.training.offload.activations import (
    SLOT_BYTES,
    ActivationPolicy,
    ActivationSwap,
    Pass,
    Swapped,
)

SETTINGS = moe_runtime.AdamW(weight_decay=0.1)


@pytest.mark.parametrize("kind", ["keep", "recompute", "swap", "auto"])
def test_the_same_bits(tmp_path, monkeypatch, kind):
    # small slots, so that these tensors are swapped and exceed the buffers
    monkeypatch.setattr(activation_swap, "SLOT_BYTES", 4096)
    monkeypatch.setattr(ActivationSwap.__init__, "__kwdefaults__", {
        "io_threads": 2, "direct": True, "buffer_bytes": 8192, "smallest_bytes": 64,
    })  # fmt: skip
    inputs = [[x, y] for x, y in zip(batches(3, 40), batches(3, 25), strict=True)]
    expected, model = stack(), stack()
    train_in_memory(expected, inputs, SETTINGS)
    training = offloaded(model, SETTINGS, tmp_path, experts_in_memory=0.3, activations=kind)
    train_offloaded(training, model.loss, inputs)
    assert_same_parameters(training, expected)
    if kind != "auto":
        assert training.activations.choices == [kind] * LAYERS
    assert bool(list(tmp_path.glob("activations.scratch"))) == (kind in ("swap", "auto"))
    training.close()
    assert not list(tmp_path.glob("activations.scratch"))


def test_the_plan_of_the_first_step_is_followed(tmp_path):
    """The layer that is slowest to recompute is kept; the budget has room for one of three."""
    policy = ActivationPolicy("auto", [False] * 3, None, budget_bytes=1000)
    assert policy.choices == ["recompute"] * 3
    for layer, seconds in enumerate((1.0, 5.0, 2.0)):
        policy.observe("forward", layer, Pass(seconds, 900, 0.5, 0, 0))
        policy.observe("backward", layer, Pass(3 * seconds, 0, 0.5, 0, 0))
    policy.finish_step()
    assert policy.choices == ["recompute", "keep", "recompute"]
    policy.finish_step()
    assert policy.choices == ["recompute", "keep", "recompute"]


def swap_of(folder: Path, buffer_bytes: int = 3 * SLOT_BYTES) -> ActivationSwap:
    return ActivationSwap(folder, buffer_bytes=buffer_bytes)


def test_tensors_come_back_in_any_order_and_leave_no_slot_behind(tmp_path):
    swap = swap_of(tmp_path)
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(length, 257, generator=generator).to(dtype)
        for length, dtype in ((1200, torch.float32), (4100, torch.bfloat16), (5000, torch.float32))
    ]
    held = [swap.pack(tensor) for tensor in tensors]
    assert all(isinstance(x, Swapped) for x in held)
    assert swap.pack(small := torch.ones(3)) is small
    for index in (2, 0, 1, 0):
        assert torch.equal(swap.unpack(held[index]), tensors[index])
    assert min(swap.measure()) > 0
    held.clear()
    # a thread may still have the last one in hand
    swap.close()
    gc.collect()
    assert not swap._file._holds


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    swap = swap_of(tmp_path)

    def fails(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwritev", fails)
    held = swap.pack(torch.zeros(SLOT_BYTES))
    with pytest.raises(CapacityError, match="no room on the disk"):
        swap.measure()
    with pytest.raises(CapacityError, match="no room on the disk"):
        swap.unpack(held)
    swap.close()


def test_unusable_kinds():
    with pytest.raises(ValueError, match="did you mean 'recompute'"):
        ActivationPolicy("recompue", [False])
    with pytest.raises(ValueError, match="storage_dir"):
        ActivationPolicy("swap", [False])
