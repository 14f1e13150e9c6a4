"""Updates on a device, for which the CPU stands in: the same bits for every stride."""

import pytest
import torch
from accelerator import PLACES, place_of
from offloaded_models import (
    EXPERTS,
    LAYERS,
    assert_trains_as_in_memory,
    batches,
    offloaded,
    stack,
    train_offloaded,
)

import moe_runtime
from moe_runtime.training.offload.adamw import UpdateStep, take_steps
from moe_runtime.training.offload.device_updates import (
    DeviceUpdates,
    best_stride,
    measure_speeds,
    planned_updates,
)
from moe_runtime.training.offload.records import ExpertTensor, RecordLayout, Sections, StateFormat
from moe_runtime.types import ExpertKey

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("stride", "share", "clip_norm"), [(1, 0.0, 0.0), (2, 0.4, 1e6), (3, 1.0, 0.0)]
)
def test_the_stride_changes_no_bit(tmp_path, stride, share, clip_norm):
    """Updates in the backward pass, or after it with a global norm; every record comes back."""
    settings = moe_runtime.AdamW(weight_decay=0.1, clip_norm=clip_norm)
    inputs = [[x] for x in batches(3, 60)]
    assert_trains_as_in_memory(
        tmp_path, settings, inputs, experts_in_memory=share, update_stride=stride
    )


def test_bytes_to_the_device_and_back(tmp_path):
    """State and gradient to the device, state back, for every second expert."""
    training = offloaded(
        model := stack(), moe_runtime.AdamW(), tmp_path, experts_in_memory=0, update_stride=2
    )
    train_offloaded(training, model.loss, [[x] for x in batches(2, 400)])
    elsewhere = training.optimizer.device_updates
    assert isinstance(elsewhere, DeviceUpdates)
    assert elsewhere.num_updates == 2 * LAYERS * EXPERTS // 2
    section = training.optimizer.records.experts[ExpertKey(0, 0)].layout.bytes_of(Sections.MEAN)
    assert elsewhere.moved_bytes == elsewhere.num_updates * 7 * section
    training.close()


def test_measured_speeds_make_a_plan():
    speeds = measure_speeds(CPU)
    assert min(speeds.cpu_params_per_s, speeds.to_device_bytes_per_s) > 0
    planned = planned_updates(CPU).stride
    assert planned is None or 1 <= planned <= 64
    assert best_stride(speeds) is None or best_stride(speeds, largest=1) in (None, 1)


def test_unusable_stride(tmp_path):
    with pytest.raises(ValueError, match="update_stride"):
        offloaded(stack(), moe_runtime.AdamW(), tmp_path, experts_in_memory=0, update_stride=0)


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize(
    "state",
    [StateFormat(), StateFormat(moments="bf16"), StateFormat(moments="fp8"), StateFormat(rank=3)],
    ids=str,
)
def test_steps_of_a_record_that_is_on_a_device(state, name):
    """Step numbers, random numbers and bases are on the device too."""
    place = place_of(name)
    layout = RecordLayout(
        [ExpertTensor("matrix", (24, 40), True), ExpertTensor("bias", (24,), False)],
        torch.float32,
        state,
    )
    generator = torch.Generator().manual_seed(5)
    here = torch.zeros(layout.record_bytes, dtype=torch.uint8)
    for section in (Sections.PARAMETERS, Sections.GRADIENT):
        for view in layout.views(here, section).values():
            view.normal_(generator=generator)
    there = here.to(place)
    for record in (here, there):
        for number in (1, 2):
            gradient = layout.flat(record, Sections.GRADIENT)
            step = [UpdateStep(number, 1e-2)]
            take_steps(layout, record, moe_runtime.AdamW(), step, gradient, refreshes=number == 1)
    found = layout.flat(there.cpu(), Sections.PARAMETERS)
    expected = layout.flat(here, Sections.PARAMETERS)
    # The emulated device computes as the CPU does. A GPU rounds divisions and roots of a step of
    # 1e-2 otherwise: two steps, a few ulp of each; in narrow formats a moment may then be the next
    # number, 2**-3 of it in fp8 (COAT's codes), and a step moves by as much of itself. A parameter
    # is rounded where it decays and where it moves, by either processor, in either step.
    narrow = state.moments != "full" or state.rank
    is_exact = name == "emulated"
    tolerance = 0.0 if is_exact else 2 * 1e-2 * (2**-3 if narrow else 2**-18)
    relative = 0.0 if is_exact else 2 * 2 * 2 * 2**-24
    torch.testing.assert_close(found, expected, rtol=relative, atol=tolerance)
