"""Bytes of a step, skipped steps, loss scales, and changes of tiers."""

import contextlib
from pathlib import Path

import pytest
import torch
from offloaded_models import (
    EXPERTS,
    LAYERS,
    assert_same_parameters,
    assert_trains_as_in_memory,
    batches,
    freeze,
    here,
    offloaded,
    stack,
    train_in_memory,
    train_offloaded,
)

import moe_runtime
from moe_runtime.errors import CapacityError, CheckpointError
from moe_runtime.lab import record_tiers
from moe_runtime.training.offload import OffloadedTraining
from moe_runtime.training.offload.passes import MicroBatchWindow
from moe_runtime.types import ExpertKey

PLAIN = moe_runtime.AdamW()


def every_expert(num: int) -> list[list[torch.Tensor]]:
    """Windows of two micro-batches whose tokens visit every expert of every layer."""
    inputs = batches(2 * num, tokens=400)
    return [inputs[2 * i : 2 * i + 2] for i in range(num)]


@pytest.mark.parametrize(
    ("settings", "read", "written"),
    [
        # forward: the weights; backward: weights and moments in, the same out
        (moe_runtime.AdamW(), 1 + 3, 3),
        # with the norm first: weights twice, the gradient out; then everything in, the state out
        (moe_runtime.AdamW(clip_norm=1.0), 1 + 1 + 4, 1 + 3),
        # a step late, nothing waits for the norm: a gradient is part of the state, in and out
        (moe_runtime.AdamW(clip_norm=1.0, delayed_update_after=0), 1 + 4, 4),
    ],
)
def test_bytes_of_a_step(tmp_path, settings, read, written):
    """Each expert crosses once per direction and window, for any number of micro-batches."""
    model = stack()
    training = offloaded(model, settings, tmp_path, experts_in_memory=0)
    train_offloaded(training, model.loss, every_expert(1))
    before = training.stats().traffic
    train_offloaded(training, model.loss, every_expert(2))
    after = training.stats().traffic
    section = training.optimizer.records.experts[ExpertKey(0, 0)].layout.section_bytes
    experts = LAYERS * EXPERTS
    assert after.needed_bytes - before.needed_bytes == 2 * read * experts * section
    assert after.written_bytes - before.written_bytes == 2 * written * experts * section
    assert after.resident_bytes == 0
    # what is not read is what still lay in a slot: at most the ring, at each turn of the way
    slots = training.memory.ring_slots
    reused = after.reused_bytes - before.reused_bytes
    assert 0 <= reused <= 2 * 3 * slots * 4 * section
    training.close()


@pytest.mark.parametrize("frozen", [None, "layers"])
def test_a_step_needs_a_backward_pass_and_an_open_training(tmp_path, frozen):
    model = stack()
    freeze(model, frozen)
    training = offloaded(model, PLAIN, tmp_path, experts_in_memory=0.5)
    for num_steps in range(2):
        with pytest.raises(RuntimeError, match="needs a backward pass"):
            training.step()
        assert training.num_steps == num_steps
        model.loss(batches(1)[0]).backward()
        training.step()
    training.close()
    for use in (training.step, lambda: training.backward([lambda: model.loss(batches(1)[0])])):
        with pytest.raises(RuntimeError, match="the training is closed"):
            use()


@pytest.mark.parametrize(("share", "clip_norm"), [(0.0, 1.0), (0.5, 0.0), (1.0, 1.0)])
def test_step_with_a_bad_gradient_is_taken_back(tmp_path, share, clip_norm):
    """The bad gradients are found after later experts were updated."""
    settings = moe_runtime.AdamW(clip_norm=clip_norm)
    good = every_expert(3)
    model, expected = stack(), stack()
    training = offloaded(model, settings, tmp_path, experts_in_memory=share)
    other = tmp_path / "other"
    other.mkdir()
    reference = offloaded(expected, settings, other, experts_in_memory=share)
    train_offloaded(training, model.loss, good[:2])
    train_offloaded(reference, expected.loss, good[:2])

    def bad_at_the_bottom(x: torch.Tensor) -> torch.Tensor:
        x = model.first(x)
        for number, layer in enumerate(model.layers):
            y = layer(x)
            if number == 0:
                y.register_hook(lambda grad: torch.full_like(grad, torch.inf))
            x = x + y
        return model.last(x).square().mean()

    training.backward([lambda: bad_at_the_bottom(good[0][0])])
    outcome = training.step()
    training.check()
    assert "layers.0.experts.2" in outcome.bad_parameters
    assert not any(name.startswith(("layers.2", "last")) for name in outcome.bad_parameters)
    assert training.stats().skipped_steps == 1
    assert training.stats().steps == 2
    train_offloaded(training, model.loss, good[2:])
    train_offloaded(reference, expected.loss, good[2:])
    for layer in range(LAYERS):
        wanted = reference.stacked(layer)
        for name, found in training.stacked(layer).items():
            assert torch.equal(found, wanted[name]), (layer, name)
    for ours, theirs in zip(here(model).values(), here(expected).values(), strict=True):
        assert torch.equal(ours, theirs)
    training.close()
    reference.close()


def test_interrupted_backward_leaves_the_state_of_the_last_step(tmp_path):
    inputs = every_expert(3)
    expected, model = stack(), stack()
    train_in_memory(expected, inputs, PLAIN)
    training = offloaded(model, PLAIN, tmp_path, experts_in_memory=0.3)
    train_offloaded(training, model.loss, inputs[:1])

    def fails(x: torch.Tensor) -> torch.Tensor:
        hidden = model.first(x)
        hidden.register_hook(lambda grad: (_ for _ in ()).throw(KeyboardInterrupt))
        for layer in model.layers:
            hidden = hidden + layer(hidden)
        return model.last(hidden).square().mean()

    for parts in ([fails], [model.loss, fails]):
        with pytest.raises(KeyboardInterrupt):
            training.backward([lambda part=part: part(inputs[1][0]) for part in parts])
        training.check()
    # the schedule of the helper begins anew: go on by hand
    for step in (1, 2):
        rate = 0.02 / (1 + step)
        parts = [lambda x=x: model.loss(x) / 2 for x in inputs[step]]
        training.backward(parts, rate=rate)
        training.step(rate)
    assert_same_parameters(training, expected)
    training.close()


def test_micro_batches_must_take_the_same_way(tmp_path):
    model = stack()
    training = offloaded(model, PLAIN, tmp_path, experts_in_memory=0)
    x = batches(1)[0]
    with pytest.raises(RuntimeError, match="same layers"):
        training.backward([lambda: model.loss(x), lambda: model.last(model.first(x)).sum()])
    training.close()


@pytest.mark.parametrize("scale", [1024.0, "dynamic"])
def test_loss_scale_of_a_power_of_two_changes_no_bit(tmp_path, scale):
    settings = moe_runtime.AdamW(loss_scale=scale)
    assert_trains_as_in_memory(tmp_path, settings, every_expert(2), experts_in_memory=0.5)


def test_dynamic_loss_scale_halves_after_a_bad_step(tmp_path):
    model = stack()
    settings = moe_runtime.AdamW(loss_scale="dynamic")
    training = offloaded(model, settings, tmp_path, experts_in_memory=0.5)
    training.backward([lambda: model.loss(batches(1)[0]) * torch.inf])
    assert training.step().bad_parameters
    assert training.optimizer.loss_scale.value == 2**15
    training.close()


def test_tiers_follow_the_load(tmp_path, monkeypatch):
    """Experts without tokens leave the memory to others."""
    monkeypatch.setattr(record_tiers, "TIER_CHANGE_STEPS", 8)
    model, expected = stack(), stack()
    for trained in (model, expected):
        for layer in trained.layers:
            with torch.no_grad():
                # of each pair one score is positive, so the last two are never among the best
                layer.gate.weight[1] = -layer.gate.weight[0]
                layer.gate.weight[3] = -layer.gate.weight[2]
                layer.gate.weight[4:] = 0
                layer.gate.weight.requires_grad_(False)
    inputs = [[x] for x in batches(10, tokens=4)]
    training = offloaded(model, PLAIN, tmp_path, experts_in_memory=0.4)
    experts = training.optimizer.records.experts
    before = [key for key, e in experts.items() if e.resident_slot is not None]
    train_in_memory(expected, inputs, PLAIN)
    train_offloaded(training, model.loss, inputs)
    after = [key for key, e in experts.items() if e.resident_slot is not None]
    assert before == [ExpertKey(layer, EXPERTS - 1) for layer in range(LAYERS)]
    assert all(key.expert < EXPERTS - 1 for key in after)
    assert len(before) == len(after)
    assert_same_parameters(training, expected)
    training.close()


def test_budget_too_small_names_the_smallest(tmp_path):
    def offload(host_memory: int, folder: Path | None) -> OffloadedTraining:
        return moe_runtime.offload_training(
            stack(), host_memory=host_memory, activation_memory=1000, storage_dir=folder
        )

    with pytest.raises(CapacityError, match="smallest that works") as failure:
        offload(50_000, tmp_path)
    smallest = failure.value.smallest_bytes
    assert smallest is not None
    training = offload(smallest, tmp_path)
    assert training.memory.ring_slots == 3
    training.close()
    with pytest.raises(CapacityError):
        offload(smallest - 1, tmp_path)
    with pytest.raises(CapacityError, match="storage_dir"):
        offload(smallest, None)


def test_folder_must_exist(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        offloaded(stack(), PLAIN, tmp_path / "absent", experts_in_memory=0)


def test_no_handler_of_a_micro_batch_hides_an_error_of_the_experts():
    def fails(entries: object) -> list[object]:
        raise CheckpointError("an expert cannot be read")

    def part() -> None:
        with contextlib.suppress(Exception):
            window.meet(0, None, fails)

    window = MicroBatchWindow(torch.nn.Identity(), [part, part])
    with pytest.raises(CheckpointError, match="an expert cannot be read"):
        window.run()
