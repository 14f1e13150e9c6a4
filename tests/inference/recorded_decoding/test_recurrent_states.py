"""Recorded steps of models whose layers keep recurrent states or inputs of short convolutions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_models import bring_all, emulated, load_on_emulated_device
from fetched_models import THREE, Request, store_of
from moe_families import TABLE, Family, of_installed_version
from tiny_checkpoints import PROMPT, model_class_of, save, tiny_config, tiny_model
from transformers import DynamicCache

from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.inference.device.static_caches import static_cache
from moe_runtime.inference.known_classes import keeps_states
from moe_runtime.inference.kv_cache import cache_of

pytest.importorskip("triton")
NUM_EXPERTS, NEW_TOKENS = 6, 6
RECORDED = [
    *("Qwen3Next", "Qwen3_5Moe", "KimiLinear", "BailingHybrid"),  # linear attention
    *("GraniteMoeHybrid", "NemotronH", "Jamba"),  # Mamba
    "Lfm2Moe",  # short convolutions
]
HERE = of_installed_version(TABLE)
FAMILIES = [one for one in HERE if one.model_class in {f"{name}ForCausalLM" for name in RECORDED}]
QUICK = "Qwen3NextForCausalLM", "NemotronHForCausalLM", "Lfm2MoeForCausalLM"


def loaded(family: Family, folder: Path, slots: int) -> Any:
    checkpoint = save(tiny_model(family), folder, sharded=True)
    model = load_on_emulated_device(checkpoint, slots_a_layer=slots, max_tokens=256)
    model.generation_config.eos_token_id = None
    return model


@emulated
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=() if one.model_class in QUICK else pytest.mark.long)
        for one in FAMILIES
    ],
    ids=str,
)
def test_recorded_steps_have_the_bits_of_unrecorded_ones(family, tmp_path):
    model = loaded(family, tmp_path, 3)
    with model.moe:
        found = [Request(model, prompt) for prompt in (THREE[:1], THREE)]
        for request in found:
            request.steps(4)
            assert store_of(model).recorded is not None
        found[0].steps(2)  # each has states of its own
        model.forward = model.forward.__wrapped__
        for request in found:
            expected = Request(model, request.prompt).steps(len(request.logits) - 1)
            assert all(map(torch.equal, request.logits, expected))
        model.moe.check()


@emulated
@pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one.model_class == QUICK[0]], ids=str
)
def test_texts_end_and_go_on_as_with_a_growing_cache(family, tmp_path):
    """With a step ahead of the host, unless somebody sees the states that it changes."""
    model = loaded(family, tmp_path, NUM_EXPERTS)
    prompts, mask = PROMPT.repeat(2, 1), torch.ones_like(PROMPT.repeat(2, 1))
    mask[1, :2] = 0
    settings: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    with model.moe:
        bring_all(model)
        for ids, given in ((PROMPT, {}), (prompts, {"attention_mask": mask})):
            grown = model.generate(ids, cache_implementation="dynamic", **settings, **given)
            for _ in range(2):  # with the same cache and recording
                assert torch.equal(model.generate(ids, **settings, **given), grown)
            assert store_of(model).recorded.is_one_graph
        text = model.generate(PROMPT, **settings)
        end = int(text[0, PROMPT.shape[1] + 2])
        for asks in (False, True):
            found = model.generate(
                PROMPT, eos_token_id=end, return_dict_in_generate=asks, **settings
            )
            sequences = found.sequences if asks else found
            assert torch.equal(sequences, text[:, : PROMPT.shape[1] + 3])
        cache = cache_of(found)
        assert type(cache) is DynamicCache
        states = [layer.recurrent_states[0].clone() for layer in cache.layers[:2]]
        model.generate(PROMPT.flip(1), **settings)
        kept = [layer.recurrent_states[0] for layer in cache.layers[:2]]
        assert all(map(torch.equal, states, kept))
        further = model.generate(text, **{cache_name(model.forward): cache}, **settings)
        assert torch.equal(further, model.generate(text, **settings))


def test_all_other_caches_with_states_are_refused():
    for family in HERE:
        kind = model_class_of(family)
        config = tiny_config(kind.config_class, family.config)
        if keeps_states(config) and family not in FAMILIES:
            is_known = kind.__name__.removesuffix("ForConditionalGeneration") in RECORDED
            assert is_known or not kind._can_compile_fullgraph or not static_cache(config, 8)
