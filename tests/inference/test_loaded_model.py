"""A loaded model as a Python object: conversions, assignments, its end."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
from moe_families import Family
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize as parametrizations
from torch.nn.utils import prune as pruning

import moe_runtime
from moe_runtime.kernels.native import native_library
from moe_runtime.models.pocket import pocket_path

PROMPT = torch.arange(8)[None]


def load(**options: Any) -> Any:
    return moe_runtime.load(pocket_path(), device="cpu", **options)


@pytest.mark.parametrize("part", ["", "model.layers.1"])
def test_a_refused_conversion_of_a_part_converts_nothing(part):
    model = load()
    with model.moe, torch.no_grad():
        expected = model(PROMPT).logits
        with pytest.raises(moe_runtime.UnsupportedUseError, match="give dtype and device"):
            model.get_submodule(part).half()
        assert len({parameter.dtype for parameter in model.parameters()}) == 1
        assert torch.equal(model(PROMPT).logits, expected)


def test_weights_in_the_place_of_experts_are_refused():
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


def test_gradients_of_all_parameters_may_be_cleared():
    """As loops do that know no `zero_grad`; the experts, which are frozen, never have one."""
    model = load()
    with model.moe:
        for parameter in model.parameters():
            parameter.grad = None
            del parameter.grad
        model.zero_grad()
        experts = model.model.layers[0].mlp.experts.gate_up_proj
        assert experts.grad is None
        with pytest.raises(moe_runtime.UnsupportedUseError, match="cannot be read, changed"):
            experts.grad = torch.zeros(experts.shape)


def test_its_class_makes_models_in_memory():
    model = load()
    with model.moe:
        for made in (type(model)(model.config), type(model)._from_config(model.config)):
            assert isinstance(model, type(made))
            assert not hasattr(made, "moe")
            assert made(PROMPT).logits.shape == (1, 8, model.config.vocab_size)


@pytest.mark.parametrize(
    ("options", "has_trace"),
    [({}, True), ({"cache_code": "planes"}, False), ({"prefetch": "enforce"}, False)],
)
def test_a_closed_model_refuses_every_call_and_has_no_experts_in_memory(
    options, has_trace, tmp_path
):
    trace = tmp_path / "trace.npz" if has_trace else None
    model = load(trace=trace, **options)
    with torch.no_grad():
        model(PROMPT)
    memory = StorageWeakRef(model.moe._store._slab.bytes.untyped_storage())
    misses = model.moe.stats().misses
    model.moe.close()
    assert memory.expired()
    experts = model.model.layers[0].mlp.experts
    hidden = torch.zeros(2, model.config.hidden_size, dtype=model.dtype)
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
    for call in (
        lambda: model(PROMPT),
        lambda: model(inputs_embeds=model.get_input_embeddings()(PROMPT)),
        lambda: model.generate(PROMPT, max_new_tokens=2),
        lambda: experts(hidden, ids, weights),
        lambda: experts(hidden, ids, weights.requires_grad_()).sum().backward(),
    ):
        with pytest.raises(moe_runtime.MoERuntimeError, match="were closed; load it again"):
            call()
    model.moe.check()
    assert model.moe.stats().misses == misses
    model.moe.close()


def test_a_dropped_model_is_freed_without_a_collector():
    model = load()
    with model.moe, torch.no_grad():
        model(PROMPT)
    gc.disable()
    try:
        alive = weakref.ref(model)
        del model
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.skipif(native_library() is None, reason="threads of Python keep the store alive")
def test_dropped_without_being_closed_it_closes_its_files():
    def open_files() -> set[str]:
        names = map(str, Path("/proc/self/fd").iterdir())
        return {name for name in names if os.path.realpath(name).endswith(".safetensors")}

    before = open_files()
    model = load()
    with torch.no_grad():
        model(PROMPT)
    opened = open_files() - before
    assert opened
    del model
    gc.collect()
    assert not opened & open_files()


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


def test_a_change_of_an_attention_layer_counts_in_prompts_and_steps():
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
    for change in (parametrize, prune):
        for ours, theirs, other in zip(logits(change), expected, unchanged, strict=True):
            assert torch.equal(ours, theirs)
            assert not torch.equal(theirs, other)


def _parametrized_norm(model: Any) -> None:
    norm = model.model.layers[1].input_layernorm
    parametrizations.register_parametrization(norm, "weight", nn.Tanh())


def _bias_of_logits(model: Any) -> None:
    size = model.config.vocab_size
    model.lm_head.bias = nn.Parameter(torch.linspace(-3, 3, size), requires_grad=False)


def _transposed_weight(model: Any) -> None:
    weight = model.model.layers[0].self_attn.o_proj.weight
    weight.data = weight.data.t()


def _steeper_gate(model: Any) -> None:
    model.model.layers[0].mlp.experts.alpha *= 3


def _hook_on_activation(model: Any) -> None:
    activation = model.model.layers[0].mlp.experts.act_fn
    activation.register_forward_hook(lambda module, inputs, out: 3 * out)


def setting(path: str, value: Any) -> Any:
    place, _, name = path.rpartition(".")
    return lambda model: setattr(model.model.layers.get_submodule(place), name, value)


QWEN = Family("qwen3_moe", "Qwen3MoeForCausalLM")
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM")
MIXTRAL = Family("mixtral", "MixtralForCausalLM")
CHANGES = {
    "smaller norm": (QWEN, setting("1.input_layernorm.variance_epsilon", 0.5)),
    "other activation": (QWEN, setting("0.mlp.experts.act_fn", nn.ReLU())),
    "parametrized norm": (QWEN, _parametrized_norm),
    "other scale": (QWEN, setting("0.self_attn.scaling", 0.01)),
    "smaller queries": (QWEN, setting("0.self_attn.q_norm.variance_epsilon", 5.0)),
    "bias of logits": (QWEN, _bias_of_logits),
    "own gate": (QWEN, setting("0.mlp.experts._apply_gate", lambda both: both.chunk(2, dim=-1)[0])),
    "hook on activation": (QWEN, _hook_on_activation),
    "transposed weight": (MIXTRAL, _transposed_weight),
    "steeper gate": (GPT_OSS, _steeper_gate),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_replaced_layers_count(tmp_path, name):
    """Layers that a faster one stands for are changed as transformers' own are, in prompts and in
    steps of one token."""
    family, change = CHANGES[name]
    reference = tiny_checkpoints.tiny_model(family)
    folder = tiny_checkpoints.save(reference, tmp_path, sharded=False)
    model: Any = moe_runtime.load(folder, device="cpu", host_memory="1GiB")

    def logits(model: Any) -> list[torch.Tensor]:
        first = model(torch.tensor([[5, 7, 11]]))
        cache, found = first.past_key_values, [first.logits]
        # the cache has room for the second one: that is where attention is one call
        for token in (13, 17):
            found.append(model(torch.tensor([[token]]), past_key_values=cache).logits)
        return found

    with model.moe, torch.no_grad():
        before = logits(reference)
        logits(model)  # the fast ways are found and used before the change
        change(reference)
        change(model)
        expected, found = logits(reference), logits(model)
    for ours, theirs, other in zip(found, expected, before, strict=True):
        assert (theirs - other).abs().max() > 1e-3
        # fp32 on both sides, sums of a few hundred products in another order
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()
