"""The same bits, and the bytes of each route, for every tier of experts."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from offloaded_models import (
    HIDDEN,
    WIDTH,
    Stack,
    assert_same_parameters,
    batches,
    offloaded,
    rate_of,
    stack,
    train_in_memory,
    train_offloaded,
)

import moe_runtime
from moe_runtime.lab import record_tiers
from moe_runtime.lab.record_tiers import TIER_CHANGE_STEPS
from moe_runtime.training.offload.compute_copies import ComputeCopies
from moe_runtime.types import ExpertKey

SETTINGS = moe_runtime.AdamW(weight_decay=0.1, betas=(0.9, 0.95))
STEPS, LAYERS, EXPERTS = 6, 2, 4
WEIGHTS = 3 * WIDTH * HIDDEN + 2 * HIDDEN + WIDTH
"""Parameters of an expert with biases."""
SHARES = (0.0, 0.5, 1.0)
THREADS = (1, 3, 8)


def small() -> Stack:
    return stack(bias=True, num_layers=LAYERS, num_experts=EXPERTS)


def windows(num: int, micro_batches: int, tokens: int = 3) -> list[list[torch.Tensor]]:
    """So few tokens that most steps leave out some experts."""
    inputs = batches(num * micro_batches, tokens=tokens)
    return [inputs[i * micro_batches : (i + 1) * micro_batches] for i in range(num)]


def copies_of(share: float, element_bytes: int) -> int:
    """Room for copies of a share of the experts."""
    return round(share * LAYERS * EXPERTS) * element_bytes * WEIGHTS


@pytest.fixture(scope="module")
def in_memory() -> dict[int, tuple[list[float], Stack]]:
    """By number of micro-batches: losses of all steps, and the model after them."""
    found = {}
    for micro_batches in (1, 2):
        model = small()
        losses = train_in_memory(model, windows(STEPS, micro_batches), SETTINGS)
        found[micro_batches] = losses, model
    return found


@pytest.mark.parametrize("memory", range(3), ids=["disk", "disk+memory", "memory"])
@pytest.mark.parametrize("device", range(3), ids=["", "+some-on-device", "+all-on-device"])
def test_same_bits_as_in_memory(tmp_path, in_memory, device, memory, monkeypatch):
    """Every combination of tiers; threads and micro-batches cover all pairs of choices."""
    monkeypatch.setattr(record_tiers, "TIER_CHANGE_STEPS", 3)
    io_threads, micro_batches = THREADS[(device + memory) % 3], 1 + (device + memory) % 2
    training = offloaded(
        model := small(),
        SETTINGS,
        tmp_path,
        experts_in_memory=SHARES[memory],
        io_threads=io_threads,
        direct=io_threads > 1,
        copy_memory=copies_of(SHARES[device], 4),
    )
    losses, expected = in_memory[micro_batches]
    assert train_offloaded(training, model.loss, windows(STEPS, micro_batches)) == losses
    assert_same_parameters(training, expected)
    stats = training.stats()
    tiers = stats.resident_experts / stats.num_experts
    assert (tiers == 0, tiers == 1) == (memory == 0, memory == 2) or memory == 1
    assert (stats.traffic.read_bytes > 0) == (memory < 2)
    assert (stats.link.kept_bytes > 0) == (device > 0)
    training.close()


@pytest.mark.parametrize(
    ("device", "micro_batches", "there", "back"),
    [
        # ZeRO-Offload: weights in bf16 once, gradients in bf16 once, four bytes in all
        (1.0, 1, 2, 2),
        # no copy stays: weights in either direction of the window; several micro-batches are summed
        # in fp32 before their gradient crosses, once
        (0.0, 3, 2 + 2, 4),
    ],
)
def test_bytes_across_the_link(device, micro_batches, there, back):
    """Closed forms, in bytes a parameter and step, of products in bf16 and every expert in use."""
    expected, model = small(), small()
    inputs = windows(3, micro_batches, tokens=100)
    for trained in (expected, model):
        trained.loss = partial(_in_bf16, trained.loss)  # type: ignore[method-assign]
    copies = copies_of(device, 2)
    training = offloaded(model, SETTINGS, None, experts_in_memory=1, copy_memory=copies)
    train_offloaded(training, model.loss, inputs)
    parameters = LAYERS * EXPERTS * WEIGHTS
    link = training.stats().link
    assert link.to_device_bytes == len(inputs) * there * parameters
    assert link.from_device_bytes == len(inputs) * back * parameters
    train_in_memory(expected, inputs, SETTINGS)
    assert_same_parameters(training, expected)
    training.close()


def _in_bf16(loss: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss(x)


def test_copies_are_forgotten_with_the_step_that_made_them(tmp_path):
    """A step is rolled back after a forward pass in between; another step follows."""
    inputs = windows(3, 1)
    expected, model = small(), small()
    train_in_memory(expected, inputs, SETTINGS)
    training = offloaded(
        model, SETTINGS, tmp_path, experts_in_memory=0, copy_memory=copies_of(1, 4)
    )
    train_offloaded(training, model.loss, inputs[:1])
    other = torch.randn(50, 8)
    training.backward([partial(model.loss, other)], rate=rate_of(1))
    with torch.no_grad():
        model(other)
    model.first.weight.grad.fill_(torch.inf)  # type: ignore[union-attr]
    assert training.step(rate_of(1)).bad_parameters == ("first.weight",)
    for step in (1, 2):
        training.backward([partial(model.loss, inputs[step][0])], rate=rate_of(step))
        training.step(rate_of(step))
    assert_same_parameters(training, expected)
    training.close()


def test_copies_follow_the_use():
    """With room for one copy, the used expert gets it after a window of steps."""
    keys = [ExpertKey(0, expert) for expert in range(4)]
    tensor = torch.ones(8)
    copies = ComputeCopies(keys, 32)
    for step in range(TIER_CHANGE_STEPS + 3):
        copies.weights(keys[1], step, [tensor], tensor)
        copies.weights(keys[1], step, [tensor], tensor)
        copies.after_step()
        assert copies.kept_bytes <= 32
    assert copies.traffic.kept_bytes == 3 * 32
    assert copies.traffic.to_device_bytes == (2 * TIER_CHANGE_STEPS + 3) * 32
