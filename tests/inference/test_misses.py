"""Experts that an emulated device lacks, computed by the CPU out of the host's slots."""

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_models import emulated, experts_modules_of, load_on_emulated_device, logits_of
from moe_families import Family
from quantized_checkpoints import SAMPLES, write
from tiny_checkpoints import PROMPT, save, tiny_model
from triton_interpreter import repair_interpreter

import moe_runtime
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.device import misses as misses_module
from moe_runtime.inference.device.device_experts import DeviceExperts
from moe_runtime.inference.device.misses import Misses, MissPlan
from moe_runtime.inference.loading import check_place
from moe_runtime.inference.lossy import LossyRules
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.types import ExpertKey

pytest.importorskip("triton")
pytestmark = emulated
NUM_EXPERTS = 6
# Gate and up in turn, with biases, and an activation that is a formula.
FAMILY = Family("gpt_oss", "GptOssForCausalLM", {"num_hidden_layers": 2})
# Few tokens, and more than the kernels for a few tokens take.
FEW = [PROMPT[:, :1], PROMPT[:, :3]]
LONG = torch.cat((PROMPT, PROMPT[:, :6]), 1)


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    repair_interpreter()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(FAMILY), tmp_path_factory.mktemp("family"), sharded=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[torch.Tensor]:
    with (model := load_on_emulated_device(checkpoint, slots_a_layer=NUM_EXPERTS)).moe:
        return logits_of(model, [*FEW, LONG])


@pytest.mark.parametrize("mode", [pytest.param("all-on-cpu", marks=pytest.mark.long), "auto"])
def test_values_do_not_depend_on_the_side_of_a_miss(checkpoint, expected, mode):
    model = load_on_emulated_device(checkpoint, slots_a_layer=2, misses=mode)
    with model.moe:
        for place in (0, 1, 2, 0):
            prompt, logits = [*FEW, LONG][place], expected[place]
            (found,) = logits_of(model, [prompt])
            model.moe.check()
            # fp32 products of at most 48 terms in two layers, in another order
            torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)
        stats = model.moe.stats()
    asked = stats.hits + stats.late_hits + stats.misses
    assert 0 < stats.computed_misses <= stats.misses <= asked
    if mode == "all-on-cpu":
        assert stats.planned_s == 0.0
    else:
        assert stats.computed_misses < stats.misses


# Codes of 4 bits with scales of 32 columns, gate and up in turn; codes with zero points, reordered.
PACKED = [sample for sample in SAMPLES if sample.name in ("gpt_oss-mxfp4", "qwen3_moe-gptq")]


def route(model: Any, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(5)
    hidden = torch.randn(num_tokens, model.config.hidden_size, generator=drawn)
    weights, ids = torch.rand(num_tokens, NUM_EXPERTS, generator=drawn).topk(2)
    return hidden.to(model.dtype), ids, weights.to(model.dtype)


@pytest.mark.parametrize("sample", PACKED, ids=str)
def test_quantised_experts_too(sample, tmp_path):
    folder, found = write(sample, tmp_path).folder, []
    for slots, mode in ((NUM_EXPERTS, "device"), (2, "all-on-cpu")):
        model = load_on_emulated_device(folder, slots_a_layer=slots, misses=mode)
        with model.moe, torch.inference_mode():
            found.append(experts_modules_of(model)[1](*route(model, 2)))
            model.moe.check()
            assert (model.moe.stats().computed_misses > 0) == (mode == "all-on-cpu")
    # bf16 is rounded to 8 bits: hidden values, the rows of experts and their sums
    torch.testing.assert_close(found[0], found[1], rtol=2**-6, atol=2**-6)


def a_layer(checkpoint: Path, mode: str, resident: int) -> tuple[Any, DeviceExperts]:
    """A model, and a layer of it of whose experts the first so many are resident."""
    model = load_on_emulated_device(checkpoint, slots_a_layer=NUM_EXPERTS, misses=mode)
    layer = experts_modules_of(model)[1]
    store = layer.store
    assert isinstance(store, DeviceStore)
    if resident:
        with store.lease([ExpertKey(layer.layer, e) for e in range(resident)]) as lease:
            for _ in lease:
                pass
        while store._link.under_way:
            pass
        store.reset_stats()
    return model, layer


def call(layer: DeviceExperts, ids: list[list[int]], **hidden: Any) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(len(ids), 32, generator=drawn).requires_grad_(bool(hidden))
    weights = torch.rand(len(ids), len(ids[0]), generator=drawn)
    return layer(x, torch.tensor(ids), weights)


@pytest.mark.parametrize("computed", [(), (3,), (2, 3, 4)])
def test_every_plan_gives_the_values_and_what_is_counted(checkpoint, monkeypatch, computed):
    ids = [[0, 2], [3, 2], [0, 4]]
    model, layer = a_layer(checkpoint, "device", NUM_EXPERTS)
    with model.moe, torch.inference_mode():
        expected = call(layer, ids)
    model, layer = a_layer(checkpoint, "auto", 2)
    store = layer.store
    assert store is not None
    copied = tuple(expert for expert in (2, 3, 4) if expert not in computed)
    plan = MissPlan(copied, computed, 0.25, computed[:1])
    monkeypatch.setattr(Misses, "plan", lambda *_: plan)
    with model.moe, torch.inference_mode():
        torch.testing.assert_close(call(layer, ids), expected, rtol=1e-5, atol=1e-5)
        model.moe.check()
        while store._link.under_way:
            pass
        stats = model.moe.stats()
        assert {key.expert for key in store._entries} == {
            0,
            1,
            *copied,
            *plan.kept,
        }  # a copied expert stays
    assert (stats.hits, stats.misses, stats.computed_misses) == (1, 3, len(computed))
    assert stats.planned_s == 0.25
    assert stats.spent_s > 0


def test_the_way_back_is_measured_until_the_next_layer_is_queued(checkpoint):
    model, second = a_layer(checkpoint, "all-on-cpu", 2)
    first, misses = experts_modules_of(model)[0], second.misses
    assert misses is not None
    seconds = iter(range(100))
    misses.clock = lambda: float(next(seconds))
    with model.moe, torch.inference_mode():
        call(second, [[0, 2]])
        call(first, [[0, 2]])  # of the next step: whatever was between is no way back
        assert misses.speeds.back.seconds == 0.0
        call(second, [[0, 3]])
    # the CPU's part of the first layer ends, and plans begin and end, before the second is queued
    assert 1.0 <= misses.speeds.back.seconds <= 4.0


def test_a_layer_without_a_plan_gives_the_bits_of_the_device(checkpoint, monkeypatch):
    model, layer = a_layer(checkpoint, "device", NUM_EXPERTS)
    with model.moe, torch.inference_mode():
        expected = call(layer, [[0, 2], [3, 5]])
    model, layer = a_layer(checkpoint, "auto", 2)
    misses = layer.misses
    assert misses is not None
    monkeypatch.setattr(misses.speeds, "rests", lambda: True)
    with model.moe, torch.inference_mode():
        assert torch.equal(call(layer, [[0, 2], [3, 5]]), expected)
        assert model.moe.stats().computed_misses == 0
        model.moe.check()


def test_gradients_and_prompts_stay_on_the_device(checkpoint):
    model, layer = a_layer(checkpoint, "all-on-cpu", 0)
    with model.moe:
        call(layer, [[0, 2]], requires_grad=True).sum().backward()
        with torch.inference_mode():
            call(layer, [[0, 2]] * 17)
        assert model.moe.stats().computed_misses == 0
        model.moe.check()


class Struck(KeyboardInterrupt):
    pass


@pytest.mark.parametrize(("error", "resident"), [(Struck, 0), (MemoryError, 2)])
def test_an_error_on_the_cpu_leaves_nothing_behind(checkpoint, monkeypatch, error, resident):
    model, layer = a_layer(checkpoint, "all-on-cpu", resident)
    ids = [[0, 2], [3, 5]]
    with model.moe, torch.inference_mode():
        expected, ffn = call(layer, ids), misses_module.expert_ffn

        def strike(*args: Any, **kwargs: Any) -> None:
            ffn(*args, **kwargs)
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(misses_module, "expert_ffn", strike)
            with pytest.raises(error):
                call(layer, ids)
        model.moe.check()
        assert torch.equal(call(layer, ids), expected)
        model.moe.check()


def test_a_failing_disk_raises(checkpoint, monkeypatch):
    model, layer = a_layer(checkpoint, "all-on-cpu", 0)
    misses = layer.misses
    assert misses is not None
    with model.moe, torch.inference_mode():

        def fail(*_: Any) -> None:
            raise CheckpointError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(misses.lower._fetcher, "fetch", fail)
            with pytest.raises(CheckpointError, match="broken"):
                call(layer, [[0, 2]])
        model.moe.check()
        call(layer, [[0, 2]])
        model.moe.check()


def test_misses_auto_needs_a_gpu(checkpoint):
    with pytest.raises(ValueError, match="misses auto is for models on a GPU, got the device cpu"):
        moe_runtime.load(checkpoint, device="cpu", misses="auto")
    with pytest.raises(ValueError, match="unknown misses 'cpu': known: auto, device"):
        moe_runtime.load(checkpoint, device="cpu", misses="cpu")
    model: Any = moe_runtime.load(checkpoint, device="cpu", misses="device", max_tokens=64)
    model.moe.close()


def test_processes_that_divide_experts_leave_misses_to_the_device():
    place, rules = torch.device("cuda"), LossyRules()
    check_place(place, rules, "none", "device", None, "exact", is_alone=False)
    check_place(place, rules, "none", "auto", None, "exact", is_alone=True)
    with pytest.raises(ValueError, match="misses auto is for one process"):
        check_place(place, rules, "none", "auto", None, "exact", is_alone=False)
