"""Models whose experts several GPUs of one machine divide, by emulated devices."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_models import emulated, experts_modules_of, load_on_emulated_device
from fetched_models import THREE, Request
from moe_families import Family
from tiny_checkpoints import PROMPT, save, tiny_model

from moe_runtime.errors import CapacityError
from moe_runtime.inference import warming
from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.inference.device.cards import divide_cards, divide_layers, require_one_process
from moe_runtime.inference.device.device_experts import DeviceExperts
from moe_runtime.inference.device.recorded_layers import CrossedLayer
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.kernels.operands import find_devices

pytest.importorskip("triton")
NUM_LAYERS, NUM_EXPERTS = 4, 6
EVERY = NUM_LAYERS * NUM_EXPERTS
SPLITS = [(18, 6), (8, 8), (4, 4, 4), (20, 10), (3, 11)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": NUM_LAYERS})
    return save(tiny_model(family), tmp_path_factory.mktemp("four_layers"), sharded=True)


def loaded(checkpoint: Path, card_slots: tuple[int, ...] = (), **options: Any) -> Any:
    return load_on_emulated_device(
        checkpoint, slots_a_layer=NUM_EXPERTS, card_slots=card_slots, max_tokens=256, **options
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[torch.Tensor]]:
    """Logits of one device with all experts, without recordings."""
    with (model := loaded(checkpoint)).moe:
        model.forward = model.forward.__wrapped__
        return [Request(model, prompt).steps(5) for prompt in (THREE[:1], THREE)]


@emulated
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("is_warm", [False, pytest.param(True, marks=pytest.mark.long)])
def test_the_same_bits_for_every_division(checkpoint, expected, split, is_warm):
    with (model := loaded(checkpoint, split, host_slots=EVERY)).moe:
        modules = experts_modules_of(model)
        if is_warm:
            warming.read_experts(modules, None)
        stores = [*dict.fromkeys(module.store for module in modules)]
        assert len(stores) == len(split)
        for prompt, wanted in zip((THREE[:1], THREE), expected, strict=True):
            assert all(map(torch.equal, Request(model, prompt).steps(5), wanted))
        recorded = modules[0].store.recorded
        assert sum(type(one) is CrossedLayer for one in recorded._experts._layers) == sum(
            module.card is not None for module in modules
        )
        stats = model.moe.stats()
        assert stats.cut_steps
        assert stats.expert_slots == sum(store.num_slots for store in stores) <= sum(split)
        assert stats.misses == sum(store.stats().misses for store in stores) > 0
        assert all(store.recorded_bytes for store in stores)
        model.moe.check()


@emulated
def test_texts_end_as_those_of_one_card(checkpoint):
    """With a step ahead of the host, as no layer waits."""
    found, settings = [], {"max_new_tokens": 6, "do_sample": False}
    for split in ((), (12, 12)):
        with (model := loaded(checkpoint, split, host_slots=EVERY)).moe:
            warming.read_experts(experts_modules_of(model), None)
            model.generation_config.eos_token_id = None
            texts = [model.generate(PROMPT, **settings)]
            assert experts_modules_of(model)[0].store.recorded.is_one_graph
            end = int(texts[0][0, PROMPT.shape[1] + 2])
            texts.append(model.generate(PROMPT, eos_token_id=end, **settings))
            found.append([*texts, model.generate(THREE, **settings)])
            model.moe.check()
    assert all(map(torch.equal, *found))


@emulated
def test_the_cpu_computes_misses_of_every_card(checkpoint):
    found = []
    for split in ((), (8, 8)):
        options = {"misses": "all-on-cpu", "host_slots": EVERY}
        with (model := loaded(checkpoint, split, **options)).moe:
            if not split:
                model.forward = model.forward.__wrapped__
            request = Request(model)
            assert (model.moe.stats().computed_misses > 0) or not split
            found.append(request.steps(4))
    # fp32 sums of few terms in another order
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@emulated
def test_a_card_that_fails_leaves_the_next_request_right(checkpoint, expected):
    with (model := loaded(checkpoint, (8, 8), host_slots=EVERY)).moe:
        request = Request(model, THREE)
        request.steps(3)
        last: Any = experts_modules_of(model)[-1].store
        last.device.faults.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            Request(model, PROMPT).steps(20)
        model.moe.check()
        assert all(map(torch.equal, Request(model, THREE).steps(5), expected[1]))
    for module in experts_modules_of(model):
        assert module.store is not None
        assert module.store.is_closed


@pytest.mark.parametrize(
    ("slots", "sizes", "layers"),
    [
        ((6, 6), (6, 6), [[0], [1]]),
        ((12, 6), (6, 6, 6), [[0, 1], [2]]),
        ((4, 4), (6, 6), [[0], [1]]),
        ((1, 2, 1), (8, 8, 8, 8), [[0], [1, 2], [3]]),
        ((30, 6), (6, 6), [[0, 1], []]),
        ((5, 5, 5), (6, 6, 3), [[0], [1], [2]]),
        ((3, 30), (6, 6, 6), [[0], [1, 2]]),
    ],
)
def test_layers_are_divided_by_slots(slots, sizes, layers):
    assert [[*own] for own in divide_layers(slots, sizes)] == layers


def test_impossible_divisions_are_refused(checkpoint):
    from emulated_models import map_of

    experts, place = map_of(checkpoint), torch.device("cuda:1")

    def plan(num_slots: int) -> MemoryPlan:
        return MemoryPlan(
            budget_bytes=1, dense_bytes=0, reserve_bytes=0, slot_bytes=1, num_slots=num_slots
        )

    with pytest.raises(ValueError, match="device cuda:1 would have no experts: leave it out"):
        divide_cards([place] * 2, [plan(EVERY), plan(EVERY)], plan(EVERY), experts)
    with pytest.raises(CapacityError, match="room for 3 experts: each of 2 GPUs needs 2"):
        divide_cards([place] * 2, [plan(4), plan(4)], plan(3), experts)
    for given in (("auto", "even", True), ("off", "adaptive", True), ("off", "auto", False)):
        with pytest.raises(ValueError, match="is for one GPU, got the device cuda:0,cuda:1"):
            require_one_process("cuda:0,cuda:1", given[0], given[1], is_alone=given[2])


def test_several_devices_are_different_gpus_of_one_model():
    names = {0: "A", 1: "A", 2: "B"}
    with (
        patch("torch.cuda.device_count", lambda: 3),
        patch("torch.cuda.get_device_name", lambda place: names[place.index]),
    ):
        assert [place.index for place in find_devices("cuda:0,cuda:1")] == [0, 1]
        assert find_devices("cpu") == [torch.device("cpu")]
        for device, text in (
            ("cuda:0,cuda:0", "name different GPUs, such as cuda:0,cuda:1"),
            ("cuda:0,cpu", "name different GPUs, such as cuda:0,cuda:1"),
            ("cuda:1,cuda:2", "name GPUs of one model, got A and B"),
            ("cuda:1,cuda:3", "torch sees GPUs up to cuda:2 here"),
            ("cuda:1,", "must be auto, cpu, cuda or cuda:N"),
        ):
            with pytest.raises(ValueError, match=text):
                find_devices(device)


def test_rows_go_to_the_card_and_their_sums_come_back():
    experts: Any = DeviceExperts.__new__(DeviceExperts)
    torch.nn.Module.__init__(experts)
    routed = torch.ones(2, 3), torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1)
    seen: list[set[str]] = []

    def compute(_: Any, *given: torch.Tensor) -> torch.Tensor:
        seen.append({tensor.device.type for tensor in given})
        return torch.ones(2, 3)

    with patch.object(OffloadedExperts, "_forward_general", compute):
        for card in (None, torch.device("meta")):
            experts.card = card
            assert experts._forward_general(*routed).device.type == "cpu"
    assert seen == [{"cpu"}, {"meta"}]
