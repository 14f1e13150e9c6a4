"""`load(adapter=...)`: logits are those of PEFT on transformers, experts' adapters included."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import moe_families
import peft
import pytest
import torch
from engine_events import ask_all, drained, greedy, request_of
from finetuning_runs import config_of, train
from frozen_bases import bases
from safetensors.torch import load_file, save_file
from tiny_checkpoints import NEXT_TOKEN, PROMPT, save, stacked_experts, tiny_model
from transformers import AutoModelForCausalLM

import moe_runtime
from moe_runtime.checkpoints.adapter_files import AdapterFolder
from moe_runtime.errors import CapacityError, MoERuntimeError, UnsupportedUseError
from moe_runtime.inference.adapters import Adapters
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine
from moe_runtime.training.finetune.finetune_run import finish, prepare, start

FAMILIES = {str(family): family for family in (*moe_families.FAMILIES, *moe_families.ADAPTED)}
KINDS = {
    "Qwen3MoeForCausalLM": "gate and up behind each other",
    "GptOssForCausalLM": "gate and up by turns, transposed, biases, a formula",
    "MixtralForCausalLM": "other names in files",
    "DeepseekV3ForCausalLM": "shared experts",
    "NemotronHForCausalLM": "no gate",
    "Llama4ForCausalLM": "PEFT takes outputs for inputs",
    "PhimoeForCausalLM": "another router",
    "Qwen2MoeForCausalLM": "biases and magnitudes",
}
LOADING: dict[str, Any] = {"device": "cpu", "host_memory": "64MiB", "max_tokens": 64}


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
    options = (
        {"use_rslora": True, "alpha_pattern": {"experts.down_proj": 4}} if "Qwen3" in name else {}
    )
    if "Qwen2" in name:
        options = {"use_dora": True, "target_parameters": None}
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


@pytest.mark.parametrize(
    "kind", ["gpt_oss-mxfp4", "qwen3_moe-fp8-ragged", "deepseek_v3-int4", "olmoe-q4_k.gguf"]
)
def test_packed_bases_that_stream(tmp_path: Path, kind: str) -> None:
    """The base stays in its codes, in a budget for few experts; PEFT has its values."""
    folder, plain = bases(kind, tmp_path)
    values: Any = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    adapter = write_adapter(values, tmp_path / "adapter", experts_only=True)
    exact = logits_of(peft.PeftModel.from_pretrained(copy.deepcopy(values), adapter))
    loading = {**LOADING, "dtype": "float32", "adapter": adapter}
    found = []
    for memory in ("64MiB", smallest_memory(folder, loading)):
        model: Any = moe_runtime.load(folder, **(loading | {"host_memory": memory}))
        with model.moe:
            found.append(logits_of(model))
            model.moe.check()
    assert all(map(torch.equal, *found)), "a budget changes no bit"
    # sums of a hundred fp32 terms, logits of a few units, two layers and their norms
    assert error(found[0], exact) < 1e-3 < error(logits_of(values), exact)


def smallest_memory(folder: Path, loading: dict[str, Any]) -> int:
    with pytest.raises(CapacityError) as refused:
        moe_runtime.load(folder, **(loading | {"host_memory": 1}))
    assert refused.value.smallest_bytes is not None
    return refused.value.smallest_bytes


def test_half_precision_is_as_near_as_merged_weights(tmp_path: Path) -> None:
    """bf16: unmerged products are at most as far from fp32 as PEFT's rounded sums, doubled."""
    tiny = tiny_model(FAMILIES["Qwen3MoeForCausalLM"])
    folder = save(tiny.bfloat16(), tmp_path / "base", sharded=False)
    adapter = write_adapter(tiny, tmp_path / "adapter", r=2)
    half = logits_of(peft.PeftModel.from_pretrained(copy.deepcopy(tiny), adapter))
    exact = logits_of(peft.PeftModel.from_pretrained(copy.deepcopy(tiny).float(), adapter))
    model: Any = moe_runtime.load(folder, **LOADING, adapter=adapter)
    with model.moe:
        assert error(logits_of(model), exact) <= 2 * error(half, exact)


def test_inputs_have_gradients_through_adapters(tmp_path: Path) -> None:
    tiny = tiny_model(FAMILIES["Qwen3MoeForCausalLM"])
    folder = save(tiny, tmp_path / "base", sharded=False)
    adapter = write_adapter(tiny, tmp_path / "adapter")

    def gradient(model: Any) -> torch.Tensor:
        embedded = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits
        return torch.autograd.grad(logits.log_softmax(-1)[0, -1, 3], embedded)[0]

    exact = gradient(peft.PeftModel.from_pretrained(copy.deepcopy(tiny), adapter))
    model: Any = moe_runtime.load(folder, **LOADING, adapter=adapter)
    with model.moe:
        found = gradient(model)
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-4 * float(exact.abs().max()))


def test_drafts_change_no_text_of_an_adapter(tmp_path: Path) -> None:
    tiny = tiny_model(FAMILIES["Qwen3MoeForCausalLM"])
    folder = save(tiny, tmp_path / "base", sharded=False)
    adapter = write_adapter(tiny, tmp_path / "adapter")
    prompt, texts = PROMPT.repeat(1, 3), []
    for draft in ("none", "lookup"):
        model: Any = moe_runtime.load(folder, **LOADING, adapter=adapter, draft=draft)
        with model.moe:
            texts.append(model.generate(prompt, max_new_tokens=20, do_sample=False))
    assert torch.equal(*texts)


def test_adapters_of_experts_share_a_batch_and_change_no_other_text(tmp_path: Path) -> None:
    """Two of other ranks, one of them on linear layers too, and requests without one."""
    tiny = tiny_model(FAMILIES["GptOssForCausalLM"])
    base = save(tiny, tmp_path / "base", sharded=False)
    folders = {
        "wide": write_adapter(tiny, tmp_path / "wide", r=5),
        "experts": write_adapter(tiny, tmp_path / "experts", experts_only=True),
    }
    prompts = [tuple(range(3 + row, 3 + 3 * row + 6)) for row in range(3)]
    names = [None, "wide", "experts"]
    options: dict[str, Any] = {**LOADING, "dtype": "float32", "max_tokens": 256}
    alone = {}
    for name in dict.fromkeys(names):
        model: Any = moe_runtime.load(base, **options, adapter=folders.get(name or ""))
        with model.moe:
            alone |= {(name, prompt): greedy(model, prompt, 8) for prompt in prompts}
    assert len({tuple(alone[name, prompts[0]]) for name in names}) == 3
    model = moe_runtime.load(base, **options)
    adapters = Adapters(model, {name: AdapterFolder(folder) for name, folder in folders.items()})
    with model.moe, Engine(model, adapters=adapters) as engine:
        asked = [*zip(names, prompts, strict=True), *zip(names[1:], prompts[:-1], strict=True)]
        requests = [request_of(prompt, 8, adapter=name) for name, prompt in asked]
        answers = ask_all(engine, requests)
        drained(engine)
        steps = engine.statistics().steps
    assert [answer.ids for answer in answers] == [alone[one] for one in asked]
    assert steps < 8 * len(requests) / 2, "they decoded together"


def test_adapters_that_do_not_fit_are_refused_before_weights_are_read(tmp_path: Path) -> None:
    tiny = tiny_model(FAMILIES["Qwen3MoeForCausalLM"])
    folder = save(tiny, tmp_path / "base", sharded=False)
    adapter = write_adapter(tiny, tmp_path / "adapter")
    file = adapter / "adapter_model.safetensors"
    stored, read = load_file(file), []

    def refusal(tensors: dict[str, torch.Tensor]) -> str:
        save_file(tensors, file)
        with pytest.raises(MoERuntimeError) as error:
            moe_runtime.load(
                folder, **LOADING, adapter=adapter, progress=lambda *_: read.append(True)
            )
        assert "\n" not in str(error.value)
        return str(error.value)

    inner = {n: t for n, t in stored.items() if "layers.0.mlp.experts.base_layer" not in n}
    assert "mlp.experts.gate_up_proj of the model, for which it has no matrices" in refusal(inner)
    swapped = {n.replace(".base_layer", ".x").replace("experts.lora", "experts.base_layer.lora")
               .replace("experts.x", "experts"): t for n, t in stored.items()}  # fmt: skip
    assert "give the model that the adapter was trained for" in refusal(swapped)
    ranks = {n: (t[1:] if "lora_A" in n else t[:, 1:]).contiguous() for n, t in stored.items()}
    ranks |= {n: t for n, t in stored.items() if "experts" not in n}
    assert "ranks, but the model's" in refusal(ranks)
    assert not read


def test_what_finetune_writes_is_its_merged_model(tmp_path: Path) -> None:
    """Three steps on the pocket model: adapters of experts, and fp32 weights with them."""
    lora = {"rank": 4, "places": ["experts"]}
    run = {"steps": 3, "precision": "float32"}
    config = config_of(
        pocket_path(), tmp_path, lora=lora, merge=True, export_dtype="float32", run=run
    )
    preparation = prepare(config)
    trainer = start(preparation, resume=False)
    train(trainer)
    finish(preparation, trainer, export=True)
    adapter, merged = tmp_path / "run" / "adapters", tmp_path / "run" / "model"
    trainer.close()
    found = {}
    for name, folder, options in (
        ("base", pocket_path(), {}),
        ("merged", merged, {}),
        ("beside", pocket_path(), {"adapter": adapter}),
    ):
        model: Any = moe_runtime.load(folder, **LOADING, dtype="float32", **options)
        with model.moe:
            text = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
            found[name] = logits_of(model), text[0].tolist()
    assert found["beside"][1] == found["merged"][1]
    assert 100 * error(found["beside"][0], found["merged"][0]) < error(
        found["base"][0], found["merged"][0]
    )
