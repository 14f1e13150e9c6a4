"""Experts in host memory, computed on a device: bits, bytes over the link, and overlap."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerator import CROSSINGS, NAME, PLACES
from computing_devices import ForeignDevice, computing_on
from offloaded_models import (
    HIDDEN,
    WIDTH,
    Stack,
    assert_same_parameters,
    batches,
    budget_for,
    freeze,
    stack,
    train_in_memory,
    train_offloaded,
)

import moe_runtime
from moe_runtime.errors import CapacityError
from moe_runtime.training.offload import memory as offload_memory
from moe_runtime.training.offload.offloaded_training import OffloadedTraining

LAYERS, EXPERTS = 2, 4
SETTINGS = moe_runtime.AdamW(weight_decay=0.1, betas=(0.9, 0.95))
WEIGHTS = 3 * WIDTH * HIDDEN
"""Parameters of an expert."""
DEVICE_ROOM = 2**20
"""On the device for dense parameters, activations and the experts in use."""


def small() -> Stack:
    return stack(impl="torch", num_layers=LAYERS, num_experts=EXPERTS)


def on_device(
    place: torch.device, folder: Path | None, *, share: float, **options: Any
) -> tuple[OffloadedTraining, Stack]:
    """A model on a device, a share of whose experts lives in host memory."""
    settings = options.pop("settings", SETTINGS)
    model = small().to(place)
    freeze(model, options.pop("frozen", None))
    budget = budget_for(model, settings, experts_in_memory=share) + 2**18
    training = moe_runtime.offload_training(
        model, host_memory=budget, activation_memory=2**16, storage_dir=folder,
        optimizer=settings, **options,
    )  # fmt: skip
    return training, model


def windows(place: torch.device, num: int, parts: int, tokens: int = 7) -> list[list[torch.Tensor]]:
    inputs = [x.to(place) for x in batches(num * parts, tokens)]
    return [inputs[i * parts : (i + 1) * parts] for i in range(num)]


def assert_alike(training: OffloadedTraining, expected: Stack, *, tolerance: float) -> None:
    """Every parameter agrees; to the bit on the emulated device, which computes like the CPU."""
    training.model.cpu()
    if not tolerance:
        assert_same_parameters(training, expected)
    named = dict(expected.named_parameters())
    for layer in range(LAYERS):
        for name, found in training.stacked(layer).items():
            wanted = named[f"layers.{layer}.experts.{name}"]
            torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(
    ("parts", "share", "kept", "stride"),
    [(1, 0.0, False, None), (2, 0.5, True, 2), (2, 1.0, False, 1), (1, 1.0, True, None)],
    ids=["disk", "disk+memory+copies+updates", "memory+updates", "memory+copies"],
)
def test_same_bits_as_in_memory(tmp_path, name, parts, share, kept, stride):
    """For every tier of records, place of copies and place of updates."""
    with computing_on(name) as place:
        training, model = on_device(
            place, tmp_path, share=share, update_stride=stride,
            device_memory=DEVICE_ROOM if kept else "auto",
        )  # fmt: skip
        losses = train_offloaded(training, model.loss, windows(place, 2, parts))
        expected = small()
        wanted = train_in_memory(expected, windows(torch.device("cpu"), 2, parts), SETTINGS)
        # A GPU sums in another order. Where a gradient is nearly zero, its sign may be another,
        # and AdamW's step, which is about the rate, goes the other way: twice, once at 0.02 and
        # once at 0.01, by twice as much.
        tolerance = 0.0 if name == NAME else 2 * (0.02 + 0.01)
        assert losses == (wanted if not tolerance else pytest.approx(wanted, rel=1e-2))
        assert_alike(training, expected, tolerance=tolerance)
        assert (training.stats().link.kept_bytes > 0) == kept
        training.close()


@pytest.mark.parametrize("frozen", ["layers.1.experts.", "layers.0.experts.gate_up_proj"])
def test_frozen_experts_keep_their_bits_on_a_device(tmp_path, frozen):
    with computing_on(NAME) as place:
        training, model = on_device(place, tmp_path, share=0.5, frozen=frozen, update_stride=2)
        losses = train_offloaded(training, model.loss, windows(place, 2, 2))
        expected = small()
        freeze(expected, frozen)
        wanted = train_in_memory(expected, windows(torch.device("cpu"), 2, 2), SETTINGS)
        assert losses == wanted
        assert_alike(training, expected, tolerance=0.0)
        training.close()


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(
    ("kept", "parts", "there", "back"),
    [
        # ZeRO-Offload: weights in bf16 once, gradients in bf16 once, four bytes in all
        (True, 1, 2, 2),
        # no copy stays: weights in either direction; micro-batches are summed in fp32 on the device
        # before their gradient crosses, once
        (False, 2, 2 + 2, 4),
    ],
)
def test_bytes_over_the_link(name, kept, parts, there, back):
    """Bytes for each parameter and step; on the emulated device, torch counts every copy."""
    steps = 2
    with computing_on(name) as place:
        training, model = on_device(
            place, None, share=1.0, update_stride=None,
            device_memory=DEVICE_ROOM if kept else "auto",
        )  # fmt: skip
        inputs = windows(place, steps, parts, tokens=100)
        loss = partial(_in_bf16, model.loss, place.type)
        CROSSINGS.to_device_bytes = CROSSINGS.from_device_bytes = 0
        for window in inputs:
            training.backward([partial(loss, x) for x in window])
            training.step()
        parameters = steps * LAYERS * EXPERTS * WEIGHTS
        link = training.stats().link
        assert link.to_device_bytes == there * parameters
        assert link.from_device_bytes == back * parameters
        if name == NAME:
            assert CROSSINGS.to_device_bytes == there * parameters
            assert CROSSINGS.from_device_bytes == back * parameters
        training.close()


def _in_bf16(loss: Callable[[torch.Tensor], torch.Tensor], kind: str, x: torch.Tensor) -> Any:
    with torch.autocast(kind, dtype=torch.bfloat16):
        return loss(x)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_copies_run_beside_products(tmp_path, clip_norm):
    """In virtual time, on a link as fast as the products: what crosses hides behind them.

    Of a layer's experts only the first one's weights and the last one's gradients are waited for;
    in a serial order the device would wait for all of them.
    """
    tokens, rows = 60, 2 * 60
    # a forward product of an expert's rows takes what its weights take to cross
    seconds = 4 * WEIGHTS / 1e9
    flops_per_s = 2 * WEIGHTS * rows / EXPERTS / seconds
    device = ForeignDevice(bytes_per_s=1e9, flops_per_s=flops_per_s)
    with computing_on(NAME, device) as place:
        settings = moe_runtime.AdamW(clip_norm=clip_norm)
        training, model = on_device(
            place, tmp_path, share=1.0, settings=settings, update_stride=None
        )
        (window,) = windows(place, 1, 1, tokens)
        training.backward([partial(model.loss, window[0])])
        device.finish()
        link_s = sum(
            (training.stats().link.to_device_bytes, training.stats().link.from_device_bytes)
        ) / 1e9  # fmt: skip
        serial_s = device.compute_s + link_s
        # At a layer's beginning or end the device waits for one expert, in either direction; an
        # expert that has more rows or fewer than the others leaves its copy's time uncovered.
        waits_s = LAYERS * 3 * seconds
        assert device.now_s <= device.compute_s + waits_s + 0.25 * link_s
        assert device.now_s < 0.8 * serial_s
        training.step()
        training.close()


def test_a_copy_that_fails_leaves_the_step_to_be_taken_again(tmp_path):
    """Copies fail in either pass, at once or later; nothing of the step is left."""
    device = ForeignDevice()
    with computing_on(NAME, device) as place:
        training, model = on_device(place, tmp_path, share=0.0, update_stride=None)
        ((x,), *_) = inputs = windows(place, 2, 1)
        for faults in (device.faults, device.late_faults):
            faults.append(RuntimeError("the link broke"))
            with pytest.raises(RuntimeError, match="the link broke"):
                training.backward([partial(model.loss, x)])
            training.check()
        losses = train_offloaded(training, model.loss, inputs)
        expected = small()
        wanted = train_in_memory(expected, windows(torch.device("cpu"), 2, 1), SETTINGS)
        assert losses == wanted
        assert_alike(training, expected, tolerance=0)
        training.close()


def test_a_bad_step_on_a_device_changes_nothing(tmp_path):
    with computing_on(NAME) as place:
        training, model = on_device(
            place, tmp_path, share=0.5, device_memory=DEVICE_ROOM, update_stride=2
        )
        inputs = windows(place, 1, 1)
        training.backward([lambda: model.loss(inputs[0][0]) * torch.inf])
        assert training.step().bad_parameters
        train_offloaded(training, model.loss, inputs)
        expected = small()
        train_in_memory(expected, windows(torch.device("cpu"), 1, 1), SETTINGS)
        assert_alike(training, expected, tolerance=0)
        training.close()


def test_the_budget_of_the_host_is_for_experts_alone():
    """The device's budget is for dense parameters and activations; too small a one is refused."""
    with computing_on(NAME) as place:
        training, _ = on_device(place, None, share=1.0, update_stride=None)
        memory = training.memory
        assert memory.dense_bytes > 0 < memory.link_bytes
        assert memory.slot_bytes + memory.link_bytes <= memory.budget_bytes
        training.close()
        with pytest.raises(CapacityError, match="device_memory of 16 KiB is too small") as found:
            on_device(place, None, share=1.0, device_memory=2**14)
        smallest = found.value.smallest_bytes
        training, _ = on_device(place, None, share=1.0, device_memory=smallest)
        training.close()


def test_dense_weights_that_are_on_the_device_already_are_not_counted_twice(monkeypatch):
    """They reduce the free memory when training begins."""
    with computing_on(NAME) as place:
        with pytest.raises(CapacityError) as found:
            on_device(place, None, share=1.0, device_memory=2**14)
        smallest = found.value.smallest_bytes
        assert smallest is not None
        model = small()
        experts = sum(p.numel() for layer in model.layers for p in layer.experts.parameters())
        held = 4 * (sum(p.numel() for p in model.parameters()) - experts)
        for free, fits in ((smallest - held, True), (smallest - held - 1, False)):
            monkeypatch.setattr(offload_memory, "available_device_bytes", lambda _, b=free: b)
            if fits:
                on_device(place, None, share=1.0, device_memory=smallest)[0].close()
                continue
            with pytest.raises(CapacityError):
                on_device(place, None, share=1.0, device_memory=smallest)


def test_what_does_not_go_with_a_device_is_refused():
    with computing_on(NAME) as place:
        with pytest.raises(ValueError, match="copy_memory is for models on the CPU"):
            on_device(place, None, share=1.0, copy_memory=2**20)
        model = small().to(place)
        model.last.cpu()
        with pytest.raises(ValueError, match="this model is on cpu and emulated:0"):
            moe_runtime.offload_training(model, host_memory=2**24)
