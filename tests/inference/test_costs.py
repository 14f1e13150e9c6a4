"""Policies that use costs get the bytes of a miss of each expert."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import moe_runtime
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.budget import MemoryPlan
from moe_runtime.inference.loading import policy_maker
from moe_runtime.memory.source import TensorRange, lay_out
from moe_runtime.models.pocket import pocket_path
from moe_runtime.policies.eviction.base import PolicyChoice
from moe_runtime.types import ExpertKey, ModelSignature

SIGNATURE = ModelSignature(model_type="some", num_layers=1, num_experts=6, top_k=1, vocab_size=10)
PLAN = MemoryPlan(budget_bytes=0, dense_bytes=0, reserve_bytes=0, slot_bytes=4096, num_slots=2)


def test_adaptive_shares_move_to_the_layer_whose_misses_read_more():
    """Both layers miss alike, as text and picture experts of different widths may."""
    layouts = {
        ExpertKey(layer, expert): lay_out(
            [TensorRange(Path("f"), 0, 4 * width, torch.float32, (width,), (1,))]
        )
        for layer, width in enumerate([100, 1000])
        for expert in range(6)
    }
    signature = replace(SIGNATURE, num_layers=2)
    plan = replace(PLAN, num_slots=8)
    choice = PolicyChoice(policy="lru", adaptive=True, reason="")
    moving = policy_maker(choice, signature, layouts)(plan)
    even = policy_maker(choice, signature, dict.fromkeys(layouts, layouts[ExpertKey(0, 0)]))(plan)
    for number in range(4000):
        for policy in (moving, even):
            policy.access([ExpertKey(number % 2, number // 2 % 6)], plan.num_slots)
            policy.check()
    assert even.slots_by_layer == [4, 4]
    assert moving.slots_by_layer[0] < moving.slots_by_layer[1]
    assert sum(moving.slots_by_layer) == 8


def test_experts_of_one_layer_in_several_types_are_refused(tmp_path):
    folder = tmp_path / "mixed"
    shutil.copytree(pocket_path(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    tensors[name] = tensors[name].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    expected = f"expected one type for all.* of expert 5, {name}, in float32, those .* bfloat16"
    with pytest.raises(UnsupportedModelError, match=expected):
        moe_runtime.load(folder, device="cpu", max_tokens=64)
