"""What a loaded model refuses or does as a Python object: conversions, assignments, its end."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from moe_families import Family
from torch import nn
from torch.nn.utils import parametrize as parametrizations
from torch.nn.utils import prune as pruning

import moe_runtime
from moe_runtime.models.pocket import pocket_path

PROMPT = torch.arange(8)[None]


def load() -> Any:
    return moe_runtime.load(pocket_path(), device="cpu")


@pytest.mark.parametrize("part", ["", "model", "model.layers", "model.layers.1"])
def test_a_refused_conversion_of_a_part_converts_nothing(part: str) -> None:
    model = load()
    with model.moe, torch.no_grad():
        expected = model(PROMPT).logits
        with pytest.raises(moe_runtime.UnsupportedUseError, match="give dtype and device"):
            model.get_submodule(part).half()
        assert len({parameter.dtype for parameter in model.parameters()}) == 1
        assert torch.equal(model(PROMPT).logits, expected)


def test_weights_in_the_place_of_experts_are_refused() -> None:
    model = load()
    with model.moe, torch.no_grad():
        expected = model(PROMPT).logits
        experts = model.model.layers[0].mlp.experts
        zeros = torch.zeros(experts.gate_up_proj.shape)
        with pytest.raises(moe_runtime.UnsupportedUseError, match="cannot be read, changed"):
            experts.gate_up_proj = nn.Parameter(zeros)
        other = {"model.layers.0.mlp.experts.gate_up_proj": zeros}
        with pytest.raises(moe_runtime.UnsupportedUseError, match="cannot be read, changed"):
            torch.func.functional_call(model, other, PROMPT)
        # its own description is no other weight
        same = torch.func.functional_call(model, model.state_dict(), PROMPT, tie_weights=False)
        assert torch.equal(same.logits, expected)
        assert torch.equal(model(PROMPT).logits, expected)


def test_its_class_makes_models_in_memory() -> None:
    model = load()
    with model.moe:
        for made in (type(model)(model.config), type(model)._from_config(model.config)):
            assert isinstance(model, type(made))
            assert not hasattr(made, "moe")
            assert made(PROMPT).logits.shape == (1, 8, model.config.vocab_size)


def test_it_is_freed_when_it_is_let_go() -> None:
    model = load()
    with model.moe, torch.no_grad():
        model(PROMPT)
    gc.collect()
    gc.disable()
    try:
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


class Zero(nn.Module):
    """A parametrization: whatever the weight is, zeros are computed with."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 0


def parametrize(attention: Any) -> None:
    parametrizations.register_parametrization(attention.q_proj, "weight", Zero())


def prune(attention: Any) -> None:
    pruning.l1_unstructured(attention.q_proj, "weight", attention.q_proj.weight.numel())


def zero_queries(attention: Any) -> None:
    attention.q_proj.weight.zero_()


@pytest.mark.parametrize("change", [parametrize, prune])
def test_a_change_of_an_attention_layer_counts_in_prompts_and_steps(change: Any) -> None:
    """The bits are those of weights of zeros: products with them are exact in every order."""

    def logits(change: Any) -> list[torch.Tensor]:
        model: Any = moe_runtime.load(pocket_path(), device="cpu", dtype="float32")
        with model.moe, torch.no_grad():
            # the fast ways are found and used before the change
            cache = model(PROMPT).past_key_values
            model(PROMPT[:, :1], past_key_values=cache)
            change(model.model.layers[0].self_attn)
            out = model(PROMPT)
            step = model(PROMPT[:, :1], past_key_values=out.past_key_values)
            return [out.logits, step.logits]

    expected, unchanged = logits(zero_queries), logits(lambda _: None)
    for ours, theirs, other in zip(logits(change), expected, unchanged, strict=True):
        assert torch.equal(ours, theirs)
        assert not torch.equal(theirs, other)


def _smaller_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.variance_epsilon = 0.5


def _other_activation(model: Any) -> None:
    model.model.layers[0].mlp.experts.act_fn = nn.ReLU()


def _parametrized_norm(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    parametrizations.register_parametrization(norm, "weight", nn.Tanh())


@pytest.mark.parametrize("change", [_smaller_norm, _other_activation, _parametrized_norm])
def test_a_change_of_a_replaced_layer_counts(tmp_path: Path, change: Any) -> None:
    """Layers that a faster one stands for are changed as transformers' own are."""
    family = Family("qwen3_moe", "Qwen3MoeForCausalLM")
    reference = tiny_checkpoints.tiny_model(family)
    folder = tiny_checkpoints.save(reference, tmp_path, sharded=False)
    model = moe_runtime.load(folder, device="cpu", host_memory="1GiB")
    prompt = torch.tensor([[5, 7, 11]])
    with model.moe, torch.no_grad():
        before = reference(prompt).logits
        model(prompt)
        change(reference)
        change(model)
        expected, found = reference(prompt).logits, model(prompt).logits
    assert (expected - before).abs().max() > 1e-3
    # fp32 on both sides, sums of a few hundred products in another order
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_handle_of_a_model_is_not_copied(copied: Any) -> None:
    model = load()
    with model.moe, pytest.raises(moe_runtime.UnsupportedUseError, match="cannot be copied"):
        copied(model.moe)
