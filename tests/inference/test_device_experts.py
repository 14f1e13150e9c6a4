"""Models whose experts are computed from slots of an emulated device, by Triton's interpreter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_models import emulated, experts_modules_of, load_on_emulated_device, logits_of, settle
from moe_families import Family
from quantized_checkpoints import SAMPLES, write
from tiny_checkpoints import PROMPT, save, tiny_model
from triton_interpreter import repair_interpreter
from waiting_calls import Asked

import moe_runtime
from moe_runtime.errors import CapacityError
from moe_runtime.inference.device.device_experts import DeviceExperts
from moe_runtime.memory.device.device_store import DeviceStore
from moe_runtime.types import ExpertKey

pytest.importorskip("triton")
NUM_EXPERTS = 6
# One token, and more than the kernels for a few tokens take.
PROMPTS = [PROMPT[:, :1], torch.cat((PROMPT, PROMPT[:, :6]), 1), PROMPT[:, 2:3]]
# Gate and up in turn, with biases, and an activation that is a formula.
FAMILY = Family("gpt_oss", "GptOssForCausalLM", {"num_hidden_layers": 2})


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if not torch.cuda.is_available():
        repair_interpreter()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(FAMILY), tmp_path_factory.mktemp("family"), sharded=True)


@emulated
def test_experts_of_a_prompt_come_in_the_order_of_their_rows(checkpoint):
    model = load_on_emulated_device(checkpoint, slots_a_layer=2)
    with model.moe:
        layer = experts_modules_of(model)[0]
        for num_tokens in (1, 40, 77):
            # some choices are of no expert
            ids = torch.randint(-1, NUM_EXPERTS + 2, (num_tokens, 2))
            assert layer.experts_of(ids) == [*layer.rows_of(ids)]
        assert layer.experts_of(torch.full((40, 2), -1)) == []


@emulated
def test_residency_changes_no_bit(checkpoint):
    found = []
    for slots in (NUM_EXPERTS, 2):
        model = load_on_emulated_device(checkpoint, slots_a_layer=slots)
        with model.moe:
            found.append(logits_of(model, PROMPTS))
            settle(model)
            model.moe.check()
            stats = model.moe.stats()
        # nothing is guessed: each miss is a copy of one of the experts of two layers
        copied = stats.misses * stats.expert_bytes // (2 * NUM_EXPERTS)
        assert stats.copied_bytes == copied
    assert all(map(torch.equal, *found))
    with (on_host := moe_runtime.load(checkpoint, device="cpu", max_tokens=64)).moe:
        expected = logits_of(on_host, PROMPTS)
        assert on_host.moe.stats().copied_bytes == 0
    # fp32 products of at most 48 terms in two layers, in another order
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)


# Codes of 4 bits with scales of 32 columns, gate and up in turn; codes with zero points, reordered.
PACKED = [sample for sample in SAMPLES if sample.name in ("gpt_oss-mxfp4", "qwen3_moe-gptq")]


@emulated
@pytest.mark.parametrize("sample", PACKED, ids=str)
def test_quantised_experts_are_computed_in_their_slots(sample, tmp_path):
    folder, found = write(sample, tmp_path).folder, []
    for slots, has_stack in ((NUM_EXPERTS, True), (2, True), (2, False)):
        model = load_on_emulated_device(folder, slots_a_layer=slots)
        layer = experts_modules_of(model)[1]
        store = layer.store
        assert isinstance(store, DeviceStore)
        assert store.has_stack(layer.layer, model.dtype)
        if not has_stack:
            store.stacks = None
        drawn = torch.Generator().manual_seed(5)
        outputs = []
        with model.moe, torch.inference_mode():
            # many tokens are launched alike whatever the format: one of them will do
            for num_tokens in (1, 17)[: 2 if "mxfp4" in sample.name else 1]:
                hidden = torch.randn(num_tokens, model.config.hidden_size, generator=drawn)
                weights, ids = torch.rand(num_tokens, NUM_EXPERTS, generator=drawn).topk(2)
                outputs.append(layer(hidden.to(model.dtype), ids, weights.to(model.dtype)))
            model.moe.check()
        found.append(outputs)
    assert all(map(torch.equal, found[0], found[1]))
    # bf16 is rounded to 8 bits: hidden values, the rows of experts and their sums
    torch.testing.assert_close(found[1], found[2], rtol=2**-6, atol=2**-6)


def a_layer(checkpoint: Path, num_resident: int) -> tuple[Any, DeviceExperts, list[None]]:
    """A model, a layer of it of whose experts the first so many are resident, and waits to come."""
    model = load_on_emulated_device(checkpoint, slots_a_layer=num_resident)
    layer = experts_modules_of(model)[1]
    make_resident(layer, num_resident)
    waits: list[None] = []
    store = layer.store
    assert isinstance(store, DeviceStore)
    store.device.hesitate = lambda: waits.append(None)  # type: ignore[attr-defined]
    return model, layer, waits


def make_resident(layer: DeviceExperts, number: int) -> None:
    store = layer.store
    assert store is not None
    with store.lease([ExpertKey(layer.layer, expert) for expert in range(number)]) as lease:
        for _ in lease:
            pass
    while not all(entry.arrived for entry in store._entries.values()):
        pass


@emulated
@pytest.mark.parametrize("num_tokens", [1, 17])
@pytest.mark.parametrize("num_resident", [NUM_EXPERTS, NUM_EXPERTS - 1])
def test_a_step_without_misses_waits_only_for_the_choices(
    checkpoint, monkeypatch, num_tokens, num_resident
):
    from triton.runtime.jit import KernelInterface

    started: list[str] = []

    def getitem(kernel: Any, grid: Any) -> Callable[..., None]:
        started.append(kernel.fn.__name__)
        return lambda **arguments: None

    monkeypatch.setattr(KernelInterface, "__getitem__", getitem)
    model, layer, waits = a_layer(checkpoint, num_resident)
    with model.moe, torch.inference_mode(), Asked() as asked:
        ids = torch.tensor([[0, 3]]).expand(num_tokens, 2).contiguous()
        assert [*asked.calls, *waits] == []
        layer(torch.zeros(num_tokens, 32), ids, torch.ones(num_tokens, 2))
        # if a layer is not fully resident, the host must know its choices
        own = [] if num_resident == NUM_EXPERTS else ["tolist"]
        assert asked.calls == own
        assert len(waits) == len(own)
        num_products = started.count("decode_down") + started.count("grouped_gemm_fwd")
        assert num_products == (1 if num_tokens == 1 else 2)  # one launch of each for everybody
        ids.tolist()
        assert asked.calls == [*own, "tolist"]  # the probe sees calls
        assert model.moe.stats().hits == 2
        model.moe.check()


@emulated
@pytest.mark.parametrize("slots", [NUM_EXPERTS, 3])
def test_counters_equal_those_of_leases(checkpoint, slots):
    counted = []
    for has_stack in (True, False):
        model = load_on_emulated_device(checkpoint, slots_a_layer=slots)
        layer = experts_modules_of(model)[0]
        store = layer.store
        assert isinstance(store, DeviceStore)
        if not has_stack:
            store.stacks = None
        with model.moe, torch.inference_mode():
            for first in (0, 1, 2, 0, 4, 3, 0, 1):
                ids = torch.tensor([[first, first + 1]])
                layer(torch.zeros(1, 32), ids, torch.ones(1, 2))
            stats, order = model.moe.stats(), [*store._policy.layers[0]._held]  # type: ignore
        counted.append((stats.misses, stats.hits + stats.late_hits, order))
    assert counted[0] == counted[1]
    assert counted[0][0] + counted[0][1] == 16


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def typed_checkpoint(request, tmp_path_factory) -> Path:
    model = tiny_model(FAMILY).to(getattr(torch, request.param))
    return save(model, tmp_path_factory.mktemp("typed"), sharded=True)


@pytest.mark.gpu
def test_a_gpu_generates_the_same_bits_at_every_device_memory(typed_checkpoint):
    with pytest.raises(CapacityError) as refused:
        moe_runtime.load(typed_checkpoint, device="cuda", max_tokens=64, device_memory=1)
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    found = []
    for budget in ("1GiB", smallest + 20_000, smallest):
        model: Any = moe_runtime.load(
            typed_checkpoint, device="cuda", max_tokens=64, device_memory=budget
        )
        with model.moe:
            prompts = [prompt.to("cuda") for prompt in PROMPTS]
            tokens = model.generate(prompts[1], max_new_tokens=12, do_sample=False)
            found.append([*logits_of(model, prompts), tokens])
            model.moe.check()
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 17])
def test_a_gpu_is_not_waited_for_where_a_layer_is_resident(typed_checkpoint, num_tokens):
    model: Any = moe_runtime.load(typed_checkpoint, device="cuda", max_tokens=64)
    layer = experts_modules_of(model)[0]
    make_resident(layer, NUM_EXPERTS)
    ids = torch.tensor([[0, 3]], device="cuda").expand(num_tokens, 2).contiguous()
    hidden = torch.randn(num_tokens, 32, device="cuda", dtype=model.dtype)
    weights = torch.full((num_tokens, 2), 0.5, device="cuda")
    with model.moe, torch.inference_mode():
        expected = layer(hidden, ids, weights)  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = layer(hidden, ids, weights)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, expected)
        assert model.moe.stats().hits == 4


@pytest.mark.gpu
def test_a_gpu_holds_no_more_than_its_budget(typed_checkpoint):
    """Includes a static cache, recorded steps and memory of libraries."""
    with pytest.raises(CapacityError) as refused:
        moe_runtime.load(typed_checkpoint, device="cuda", max_tokens=64, device_memory=1)
    budget = refused.value.smallest_bytes
    assert budget is not None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model: Any = moe_runtime.load(
        typed_checkpoint, device="cuda", max_tokens=64, device_memory=budget
    )
    with model.moe:
        prompt = torch.arange(32, device="cuda")[None]
        model.generate(prompt, max_new_tokens=32, do_sample=False)
        assert torch.cuda.max_memory_allocated() - before <= budget
