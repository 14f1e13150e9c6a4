"""`load(adapter=...)`: logits are those of PEFT on transformers, experts' adapters included."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import moe_families
import peft
import pytest
import torch
from frozen_bases import bases
from safetensors.torch import load_file, save_file
from tiny_checkpoints import NEXT_TOKEN, PROMPT, save, stacked_experts, tiny_model
from transformers import AutoModelForCausalLM

import moe_runtime
from moe_runtime.errors import CheckpointError, MoERuntimeError, UnsupportedUseError

FAMILIES = {str(family): family for family in (*moe_families.FAMILIES, *moe_families.ADAPTED)}
KINDS = {
    "Qwen3MoeForCausalLM": "gate and up behind each other",
    "GptOssForCausalLM": "gate and up by turns, transposed, biases, a formula",
    "MixtralForCausalLM": "other names in files",
    "DeepseekV3ForCausalLM": "shared experts",
    "NemotronHForCausalLM": "no gate",
    "Llama4ForCausalLM": "PEFT takes outputs for inputs",
    "PhimoeForCausalLM": "another router",
}
LOADING = {"device": "cpu", "host_memory": "64MiB", "max_tokens": 64}


def write_adapter(model: Any, folder: Path, *, experts_only: bool = False, **options: Any) -> Path:
    """An adapter on experts (and on linear layers) of a model, large enough to change logits."""
    stacked = stacked_experts(model)
    names = [
        f"{name.rpartition('.')[2]}.{parameter}"
        for name, module in model.named_modules()
        if module in stacked
        for parameter, value in module.named_parameters(recurse=False)
        if value.dim() == 3
    ]
    linear = [] if experts_only else ["q_proj", "o_proj"]
    settings = {
        "r": 3, "lora_alpha": 5, "target_modules": linear,
        "target_parameters": sorted(set(names)), "init_lora_weights": False,
    }  # fmt: skip
    torch.manual_seed(len(folder.name))
    adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings | options))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.3)
    adapted.save_pretrained(folder)
    return folder


def logits_of(model: Any) -> list[torch.Tensor]:
    """Of a prompt, and of a step after it."""
    with torch.no_grad():
        first = model(input_ids=PROMPT, use_cache=True)
        name = "past_key_values" if "past_key_values" in first else "cache_params"
        second = model(input_ids=NEXT_TOKEN, use_cache=True, **{name: first[name]})
    return [first.logits.double(), second.logits.double()]


def error(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    pairs = zip(found, exact, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


@pytest.mark.parametrize("name", KINDS, ids=KINDS.get)
def test_logits_are_those_of_peft(tmp_path: Path, name: str) -> None:
    """fp64 is the judge: unmerged products round in other places than merged weights, not more."""
    tiny = tiny_model(FAMILIES[name])
    folder = save(tiny, tmp_path / "base", sharded=False)
    options = {"use_rslora": True, "alpha_pattern": {"experts.down_proj": 4}} if "Qwen" in name else {}
    adapter = write_adapter(tiny, tmp_path / "adapter", **options)
    plain = logits_of(tiny)
    peft32 = peft.PeftModel.from_pretrained(copy.deepcopy(tiny), adapter)
    tiny.config._experts_implementation = "eager"  # which computes in fp64, too
    peft64 = peft.PeftModel.from_pretrained(copy.deepcopy(tiny), adapter).double()
    single, exact = logits_of(peft32), logits_of(peft64)
    assert error(plain, exact) > 0.05, "the adapter must change the logits"
    model: Any = moe_runtime.load(folder, **LOADING, adapter=adapter)
    with model.moe:
        found = logits_of(model)
        model.moe.check()
        assert error(found, exact) <= 8 * error(single, exact)
        with pytest.raises(UnsupportedUseError, match="beside this model's weights"):
            model.save_pretrained(tmp_path / "saved")
