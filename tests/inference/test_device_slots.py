"""Experts of real families in slots of an emulated device: alike for all of a layer."""

from pathlib import Path

import pytest
import torch
from emulated_models import map_of
from moe_families import Family
from tiny_checkpoints import save, tiny_model

from moe_runtime.inference.device.device_experts import experts_on_device
from moe_runtime.memory.device.device_layout import copy_parts, stack_slots
from moe_runtime.types import ExpertKey

# Gate, down, up apart; gate and up in turn, with biases; one behind the other; transposed.
FAMILIES = [
    Family("mixtral", "MixtralForCausalLM"),
    Family("gpt_oss", "GptOssForCausalLM"),
    Family("olmoe", "OlmoeForCausalLM"),
    Family("qwen3_moe", "Qwen3MoeForCausalLM"),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(request.param)
    return save(model, tmp_path_factory.mktemp("family"), sharded=True)


def test_every_slot_is_part_of_one_stack(checkpoint):
    experts = map_of(checkpoint)
    there = experts_on_device(experts)
    drawn = torch.Generator().manual_seed(1)
    for layer, names in enumerate(experts.matrices):
        keys = [ExpertKey(layer, e) for e in range(experts.modules[layer].num_experts)]
        assert len({there.layouts[key].form for key in keys}) == 1
        slab = torch.full((len(keys) * there.slot_bytes,), 0xFF, dtype=torch.uint8)
        stack = stack_slots(slab, there.slot_bytes, there.layouts[keys[0]], names)
        assert stack is not None
        for slot, key in enumerate(keys):
            source = torch.randint(0, 120, (experts.slot_bytes,), generator=drawn).byte()
            target = slab[slot * there.slot_bytes :][: there.slot_bytes]
            parts = copy_parts(experts.layouts[key], there.layouts[key])
            for part in parts:
                target[part.place :][: part.num_bytes] = source[part.source :][: part.num_bytes]
            expected = experts.matrices_in(key, source)
            found = there.matrices_in(key, target)
            assert found.keys() == expected.keys()
            for name, matrix in expected.items():
                assert torch.equal(found[name], matrix)
            for first, second, both in (
                ("gate", "up", stack.gate_up),
                ("gate_bias", "up_bias", stack.gate_up_bias),
            ):
                if first in expected:
                    assert both is not None
                    halves = both[slot].chunk(2) if stack.is_concatenated else (both[slot][0::2],)
                    assert torch.equal(halves[0], expected[first])
                    up = halves[1] if stack.is_concatenated else both[slot][1::2]
                    assert torch.equal(up, expected[second])
            assert torch.equal(stack.down[slot], expected["down"])
            if "down_bias" in expected:
                assert stack.down_bias is not None
                assert torch.equal(stack.down_bias[slot], expected["down_bias"])


def test_only_tensor_bytes_are_copied(checkpoint):
    experts = map_of(checkpoint)
    there = experts_on_device(experts)
    for key, layout in experts.layouts.items():
        parts = copy_parts(layout, there.layouts[key])
        assert sum(part.num_bytes for part in parts) == layout.tensor_bytes
    assert there.slot_bytes <= experts.slot_bytes
