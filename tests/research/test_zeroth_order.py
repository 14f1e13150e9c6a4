"""ZO2: the bits of MeZO in memory, every expert moved once in each direction."""

from functools import partial
from pathlib import Path

import pytest
import torch
from offloaded_models import EXPERTS, LAYERS, Stack, batches, here, rate_of, stack

from moe_runtime.errors import CheckpointError
from moe_runtime.research.zeroth_order import (
    ZerothOrder,
    ZerothOrderTraining,
    direction,
    offload_zeroth_order,
)

SETTINGS = ZerothOrder(eps=1e-2, weight_decay=0.1, seed=11)


def slices(model: Stack) -> dict[str, torch.Tensor]:
    """Every trained tensor that has a direction, by the name that it is drawn by."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if ".experts." not in name:
            found[name] = parameter.data
            continue
        found |= {f"{name}.{e}": parameter.data[e] for e in range(EXPERTS)}
    return found


def mezo(
    model: Stack, windows: list[list[torch.Tensor]], settings: ZerothOrder
) -> tuple[list[float], int]:
    """MeZO as its authors write it: all parameters to one side, to the other, back, and down."""
    losses, unrouted = [], 0
    for step, window in enumerate(windows):
        tensors = slices(model)
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        along = {n: direction(t, seed=settings.seed, step=step, name=n) for n, t in tensors.items()}
        sums, routed = [], set()
        for scale in (1, -2):
            for name, tensor in tensors.items():
                tensor.copy_(tensor + scale * along[name] * settings.eps)
            total = 0.0
            for x in window:
                total += float(model.loss(x).detach() / len(window))
                for number, layer in enumerate(model.layers):
                    counts = layer.aux.routing.counts_E
                    routed |= {f"layers.{number}.experts.{e}" for e in range(EXPERTS) if counts[e]}
            sums.append(total)
        slope = (sums[0] - sums[1]) / (2 * settings.eps)
        for name, tensor in tensors.items():
            tensor.copy_(tensor + along[name] * settings.eps)
            decay = settings.weight_decay if tensor.ndim >= 2 else 0.0
            move = slope * along[name] + (decay * tensor if decay else 0)
            tensor.copy_(tensor - rate_of(step) * move)
            path, _, expert = name.rpartition(".")
            is_away = ".experts." in name and f"{path.rpartition('.')[0]}.{expert}" not in routed
            unrouted += is_away
            if is_away and settings.untouched == "sparse_skip":
                tensor.copy_(before[name])
        losses.append(sum(sums) / 2)
    return losses, unrouted


def offloaded(
    model: Stack, folder: Path | None, share: float, settings: ZerothOrder, **options: bool
) -> ZerothOrderTraining:
    """With a budget that holds a share of the experts."""
    record = 4096 * 2
    slots = max(3, round(share * LAYERS * EXPERTS))
    dense = 4 * 4 * sum(p.numel() for n, p in model.named_parameters() if ".experts." not in n)
    return offload_zeroth_order(
        model,
        host_memory=dense + 2**16 + (slots + 1) * record,
        activation_memory=2**16,
        storage_dir=folder,
        optimizer=settings,
        **options,
    )


def take(training: ZerothOrderTraining, window: list[torch.Tensor], step: int) -> float:
    parts = [partial(_part, training.model, x, len(window)) for x in window]
    losses = training.backward(parts, rate=rate_of(step))
    # no graph was made: activations live as long as they are needed
    assert not any(loss.requires_grad for loss in losses)
    measured = training.step(rate_of(step))
    training.check()
    return measured.loss


def _part(model: Stack, x: torch.Tensor, parts: int) -> torch.Tensor:
    return model.loss(x) / parts


def assert_same(training: ZerothOrderTraining, expected: Stack) -> None:
    named = dict(expected.named_parameters())
    for name, parameter in here(training.model).items():
        assert torch.equal(parameter, named[name]), name
    for layer in range(LAYERS):
        for name, stacked in training.stacked(layer).items():
            assert torch.equal(stacked, named[f"layers.{layer}.experts.{name}"]), (layer, name)


def windows(num: int, micro_batches: int) -> list[list[torch.Tensor]]:
    inputs = batches(num * micro_batches, tokens=3)
    return [inputs[i * micro_batches : (i + 1) * micro_batches] for i in range(num)]


@pytest.mark.parametrize(
    ("share", "micro_batches", "untouched", "steps"),
    [
        (0.0, 1, "dense_exact", 6),
        (0.5, 2, "dense_exact", 4),
        (1.0, 1, "dense_exact", 3),
        (0.3, 1, "sparse_skip", 6),
    ],
)
def test_same_bits_as_mezo_in_memory(tmp_path, share, micro_batches, untouched, steps):
    settings = ZerothOrder(eps=1e-2, weight_decay=0.1, seed=11, untouched=untouched)
    inputs = windows(steps, micro_batches)
    expected, model = stack(bias=True), stack(bias=True)
    losses, unrouted = mezo(expected, inputs, settings)
    assert unrouted > 0
    training = offloaded(model, tmp_path, share, settings)
    assert [take(training, window, step) for step, window in enumerate(inputs)] == losses
    assert_same(training, expected)
    training.close()


@pytest.mark.parametrize(
    ("frozen", "share"),
    [
        *((".experts.", 0.0), ("layers.1.experts.", 1.0), ("experts.down_proj", 0.0)),
        *(("layers.1.experts.down", 1.0), ("gate.", 0.0)),
    ],
)
def test_what_is_frozen_keeps_its_bits(tmp_path, frozen, share):
    inputs = windows(2, 2)
    expected, model = stack(bias=True), stack(bias=True)
    for one in (expected, model):
        for name, parameter in one.named_parameters():
            parameter.requires_grad_(frozen not in name)
    first = {n: p.clone() for n, p in expected.named_parameters() if not p.requires_grad}
    assert first
    losses, _ = mezo(expected, inputs, SETTINGS)
    training = offloaded(model, tmp_path, share, SETTINGS)
    written = training.stats().traffic.written_bytes
    assert [take(training, window, step) for step, window in enumerate(inputs)] == losses
    assert_same(training, expected)
    named = dict(expected.named_parameters())
    assert all(torch.equal(named[name], before) for name, before in first.items())
    if frozen == ".experts.":
        assert training.stats().traffic.written_bytes == written
    training.close()


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_move_nothing(tmp_path, factor):
    model = stack(bias=True)
    model.layers[1].experts.requires_grad_(False)
    training = offloaded(model, tmp_path, 0.3, SETTINGS)
    (window,) = windows(1, 1)
    take(training, window, 0)
    before = [training.stacked(layer) for layer in range(LAYERS)]
    training.backward([lambda: model.loss(window[0]) * factor])
    measured = training.step()
    assert measured.is_skipped
    assert measured.bad_parameters
    assert training.skipped_steps == 1
    for layer, stacked in enumerate(before):
        moved = training.stacked(layer)
        for name, tensor in stacked.items():
            # moved to both sides and back, in as many roundings
            assert_close = torch.equal if layer == 1 else torch.allclose
            assert assert_close(moved[name], tensor), (layer, name)
    take(training, window, 2)
    assert all(t.isfinite().all() for t in training.stacked(0).values())
    training.close()


def test_each_expert_moves_once_in_each_direction(tmp_path):
    """However many micro-batches, and both forward passes; no moments, no gradients."""
    training = offloaded(stack(), tmp_path, 0.0, SETTINGS)
    inputs = [batches(2, tokens=400) for _ in range(3)]
    take(training, inputs[0], 0)
    before = training.records.traffic
    needed, written = before.needed_bytes, before.written_bytes
    for step, window in enumerate(inputs[1:], start=1):
        take(training, window, step)
    layout = training.records.experts[0, 0].layout
    assert layout.record_bytes == layout.section_bytes
    once = 2 * LAYERS * EXPERTS * layout.section_bytes
    assert training.records.traffic.needed_bytes - needed == once
    assert training.records.traffic.written_bytes - written == once
    training.close()


def test_resumes_under_another_budget(tmp_path):
    inputs = windows(6, 1)
    expected = stack()
    losses, _ = mezo(expected, inputs, SETTINGS)
    training = offloaded(model := stack(), tmp_path, 0.3, SETTINGS)
    found = [take(training, window, step) for step, window in enumerate(inputs[:3])]
    state = {"own": training.state_dict(), "model": model.state_dict()}
    saved: dict[str, dict] = {}
    training.write(state, lambda copied: copied["own"], saved.update)
    training.close()
    other = offloaded(stack(), tmp_path, 0.3, ZerothOrder(), resumes=True)
    with pytest.raises(CheckpointError, match="seed"):
        other.load_state_dict(saved["own"])
    other.close()
    training = offloaded(model := stack(), tmp_path, 0.7, SETTINGS, resumes=True)
    training.load_state_dict(saved["own"])
    model.load_state_dict(saved["model"])
    found += [take(training, window, step) for step, window in enumerate(inputs[3:], start=3)]
    assert found == losses
    assert_same(training, expected)
    training.close()


def test_backward_and_step_take_turns():
    training = offloaded(model := stack(), None, 1.0, SETTINGS)
    with pytest.raises(RuntimeError, match="before backward"):
        training.step()
    training.backward([partial(model.loss, batches(1)[0])], rate=1e-3)
    with pytest.raises(RuntimeError, match="twice before step"):
        training.backward([partial(model.loss, batches(1)[0])])
    with pytest.raises(ValueError, match=r"a rate of 0\.001"):
        training.step(1e-2)
    training.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"eps": 0.0}, "eps"), ({"lr": -1.0}, "lr"), ({"untouched": "sparse"}, "did you mean")],
)
def test_unusable_options(options, message):
    with pytest.raises(ValueError, match=message):
        ZerothOrder(**options)
