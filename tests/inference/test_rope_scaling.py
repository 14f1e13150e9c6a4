"""Positions beyond the trained ones, for each RoPE scaling of transformers."""

import dataclasses
from typing import Any

import moe_families
import pytest
import torch
from tiny_checkpoints import save, tiny_model

import moe_runtime

ORIGINAL, LENGTH = 16, 60
SCALED: dict[str, dict[str, Any]] = {
    "linear": {},
    "dynamic": {},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]},
}
# of sums in another order, of a few hundred products of order one
MAX_ERROR = 1e-5


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("Qwen3MoeForCausalLM", kind) for kind in SCALED), ("GptOssForCausalLM", "yarn")],
)
def test_logits_are_those_of_transformers(name, kind, tmp_path):
    """A prompt that ends beyond the original length, and then token by token."""
    (family,) = (one for one in moe_families.FAMILIES if str(one) == name)
    rope = {
        "rope_theta": 10000.0,
        "rope_type": kind,
        "factor": 8.0,
        "original_max_position_embeddings": ORIGINAL,
        **SCALED[kind],
    }
    sizes = {**family.config, "rope_parameters": rope, "max_position_embeddings": 8 * ORIGINAL}
    reference = tiny_model(dataclasses.replace(family, config=sizes)).float().eval()
    folder = save(reference, tmp_path, sharded=False)
    model: Any = moe_runtime.load(folder, device="cpu", dtype="float32", max_tokens=LENGTH)
    ids = torch.randint(3, 96, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    with model.moe, torch.inference_mode():
        assert model.config.rope_parameters["rope_type"] == kind
        cache = expected_cache = None
        for first, end in [(0, 40), *((place, place + 1) for place in range(40, LENGTH))]:
            found = model(ids[:, first:end], past_key_values=cache, use_cache=True)
            expected = reference(ids[:, first:end], past_key_values=expected_cache, use_cache=True)
            cache, expected_cache = found.past_key_values, expected.past_key_values
            largest = expected.logits.abs().max()
            assert (found.logits - expected.logits).abs().max() <= MAX_ERROR * largest, first
