"""Frozen parameters stay unchanged with every way of training; compared with plain torch."""

import math
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from moe_families import FAMILIES
from offloaded_models import (
    Stack,
    assert_same_parameters,
    batches,
    offloaded,
    rate_of,
    save,
    stack,
    train_in_memory,
    train_offloaded,
)
from tiny_checkpoints import PROMPT, tiny_model
from torch import nn

import moe_runtime
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.research.zeroth_order import offload_zeroth_order
from moe_runtime.training.offload import activations as activation_swap
from moe_runtime.training.offload.activations import ActivationSwap

MIXTRAL = next(family for family in FAMILIES if family.folder == "mixtral")
SETTINGS = moe_runtime.AdamW(weight_decay=0.1)
FROZEN: dict[str, Callable[[str], bool]] = {
    "all_experts": lambda name: ".experts." in name,
    "one_layer": lambda name: name.startswith("layers.1.experts."),
    "one_stack": lambda name: name.startswith("layers.1.experts.down_proj"),
    "first_stacks": lambda name: name.endswith(("gate_up_proj", "gate_up_proj_bias")),
    "all_but_experts": lambda name: ".experts." not in name,
}
DOORS: dict[str, dict[str, Any]] = {
    "in_memory": {"experts_in_memory": 1},
    "disk": {"experts_in_memory": 0},
    "recompute": {"experts_in_memory": 0.4, "activations": "recompute"},
    "swap": {"experts_in_memory": 0.4, "activations": "swap"},
}
OPTIONS: dict[str, moe_runtime.AdamW] = {
    "clipped": moe_runtime.AdamW(clip_norm=0.1),
    "delayed": moe_runtime.AdamW(weight_decay=0.1, delayed_update_after=1),
    "galore_fp8": moe_runtime.AdamW(galore_rank=4, moments="fp8"),
    "sparse": moe_runtime.AdamW(untouched="sparse_skip"),
}


def frozen_stack(what: str) -> Stack:
    model = stack(bias=True, num_layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[what](name))
    return model


def windows() -> list[list[torch.Tensor]]:
    inputs = batches(4)
    return [inputs[:2], inputs[2:]]


def frozen_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}


def assert_kept(training: Any, first: dict[str, torch.Tensor]) -> None:
    """Frozen parameters have the bits that they had."""
    named = dict(training.model.named_parameters())
    for layer in range(len(training.model.layers)):
        stacked = training.stacked(layer).items()
        named |= {f"layers.{layer}.experts.{name}": tensor for name, tensor in stacked}
    assert all(torch.equal(named[name], before) for name, before in first.items())


@pytest.mark.parametrize(
    ("what", "door"),
    [
        *(("all_experts", "disk"), ("all_experts", "swap"), ("one_layer", "recompute")),
        *(("one_stack", "disk"), ("one_stack", "in_memory"), ("first_stacks", "swap")),
        ("all_but_experts", "recompute"),
    ],
)
def test_the_rest_is_trained_as_in_memory(tmp_path, monkeypatch, door, what):
    # small slots, so that these tensors are swapped
    monkeypatch.setattr(activation_swap, "SLOT_BYTES", 4096)
    monkeypatch.setattr(ActivationSwap.__init__, "__kwdefaults__", {
        "io_threads": 2, "direct": True, "buffer_bytes": 8192, "smallest_bytes": 64,
    })  # fmt: skip
    expected, model = frozen_stack(what), frozen_stack(what)
    first = frozen_values(expected)
    training = offloaded(model, SETTINGS, tmp_path, **DOORS[door])
    written = training.stats().traffic.written_bytes
    losses = train_in_memory(expected, windows(), SETTINGS)
    assert train_offloaded(training, model.loss, windows()) == losses
    assert_same_parameters(training, expected)
    assert_kept(training, first)
    if what == "all_experts":
        assert training.stats().traffic.written_bytes == written
    training.close()


@pytest.mark.parametrize(
    ("option", "what"), [*zip(OPTIONS, ["one_layer", "first_stacks"] * 2, strict=True)]
)
def test_no_option_moves_what_is_frozen(tmp_path, option, what):
    model = frozen_stack(what)
    first = frozen_values(model)
    training = offloaded(model, OPTIONS[option], tmp_path, experts_in_memory=0.4)
    before = training.stacked(0)
    train_offloaded(training, model.loss, windows())
    assert_kept(training, first)
    assert not torch.equal(training.stacked(0)["down_proj"], before["down_proj"])
    training.close()


def test_frozen_parameters_have_no_part_in_the_norm():
    expected, model = frozen_stack("first_stacks"), frozen_stack("first_stacks")
    training = offloaded(model, OPTIONS["clipped"], None, experts_in_memory=1)
    for one in (expected, model):
        one.loss(batches(1)[0]).backward()
    norm = nn.utils.get_total_norm([p.grad for p in expected.parameters() if p.grad is not None])
    assert training.step().gradient_norm == pytest.approx(float(norm), rel=1e-5)
    training.close()


@pytest.mark.parametrize(
    ("what", "experts_in_memory"), [("one_layer", 0), ("first_stacks", 1), ("all_experts", 0)]
)
def test_a_skipped_step_moves_nothing(tmp_path, what, experts_in_memory):
    """A skipped step between two others does not affect them."""
    expected, model = frozen_stack(what), frozen_stack(what)
    training = offloaded(model, SETTINGS, tmp_path, experts_in_memory=experts_in_memory)
    losses = train_in_memory(expected, windows(), SETTINGS)
    assert train_offloaded(training, model.loss, windows()[:1]) == losses[:1]
    before = training.num_steps
    training.backward([lambda: model.loss(windows()[0][0]) * math.inf], rate=0.1)
    assert training.step(0.1).bad_parameters
    assert (training.num_steps, training.skipped_steps) == (before, 1)
    training.backward([lambda x=x: model.loss(x) / 2 for x in windows()[1]], rate=rate_of(1))
    training.step(rate_of(1))
    assert_same_parameters(training, expected)
    training.close()


def test_what_adapters_froze_is_not_trained():
    """LoRA on the queries of a model of transformers; the base has its bits afterwards."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        models.append(peft.get_peft_model(tiny_model(MIXTRAL), lora))
    expected, model = models
    experts = {n: p.clone() for n, p in model.named_parameters() if ".experts." in n}
    training = moe_runtime.offload_training(model, host_memory="64MiB", optimizer=SETTINGS)
    adamw = torch.optim.AdamW(
        [p for p in expected.parameters() if p.requires_grad], weight_decay=0.1
    )
    for _ in range(3):
        for one in models:
            one(PROMPT, labels=PROMPT).loss.backward()
        adamw.step()
        adamw.zero_grad()
        training.step(1e-3)
    named = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        if ".experts." not in name:
            torch.testing.assert_close(named[name], parameter, rtol=1e-4, atol=1e-6)
    for layer in range(len(model.get_base_model().model.layers)):
        for name, stacked in training.stacked(layer).items():
            base = f"base_model.model.model.layers.{layer}.mlp.experts.{name}"
            assert torch.equal(stacked, experts[base])
    training.close()


def test_adapters_on_experts_are_refused_before_anything_is_moved():
    lora = peft.LoraConfig(r=2, target_parameters=["mlp.experts.down_proj"])
    model = peft.get_peft_model(tiny_model(MIXTRAL), lora)
    with pytest.raises(UnsupportedModelError, match=r"target_parameters.*finetune --lora"):
        moe_runtime.offload_training(model, host_memory="64MiB")
    model(PROMPT)


def test_a_model_of_transformers_may_be_a_part_of_another():
    class Rewarding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy = tiny_model(MIXTRAL)
            torch.manual_seed(1)
            self.head = nn.Linear(self.policy.config.vocab_size, 1)

        def loss(self) -> torch.Tensor:
            return self.head(self.policy(PROMPT).logits).square().mean()

    expected, model = Rewarding(), Rewarding()
    training = moe_runtime.offload_training(model, host_memory="64MiB", optimizer=SETTINGS)
    with pytest.raises(moe_runtime.UnsupportedUseError, match=r"model\.layers\.0"):
        model.policy.save_pretrained("nowhere")
    adamw = torch.optim.AdamW(expected.parameters(), weight_decay=0.1)
    for _ in range(2):
        wanted = expected.loss()
        wanted.backward()
        adamw.step()
        adamw.zero_grad()
        (found,) = training.backward([model.loss], rate=1e-3)
        training.step(1e-3)
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=0)
    training.close()
    for dense in (nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))):
        with pytest.raises(UnsupportedModelError, match="nothing to offload"):
            moe_runtime.offload_training(dense, host_memory="64MiB")


@pytest.mark.parametrize("offload", [moe_runtime.offload_training, offload_zeroth_order])
def test_a_model_without_anything_to_train_is_refused(offload):
    model = stack().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        offload(model, host_memory="64MiB")
    assert "layers.0.experts.down_proj" in model.state_dict()


def test_a_checkpoint_goes_on_with_the_same_parameters_frozen(tmp_path):
    model = frozen_stack("first_stacks")
    first = frozen_values(model)
    training = offloaded(model, SETTINGS, tmp_path, experts_in_memory=0.4)
    losses = train_offloaded(training, model.loss, windows())
    save(training, tmp_path / "saved", losses)
    training.wait()
    state = torch.load(tmp_path / "saved")
    wanted = train_offloaded(training, model.loss, windows())
    training.close()
    with pytest.raises(CheckpointError, match="frozen"):
        offloaded(
            frozen_stack("one_layer"),
            SETTINGS,
            tmp_path,
            experts_in_memory=1,
            resume=state["optimizer"],
        )
    model = frozen_stack("first_stacks")
    model.load_state_dict(state["model"], strict=False)
    training = offloaded(model, SETTINGS, tmp_path, experts_in_memory=0, resume=state["optimizer"])
    model.load_state_dict(state["model"])
    assert train_offloaded(training, model.loss, windows()) == wanted
    assert_kept(training, first)
    training.close()
