"""Keys and values in int8: the logits of a rounding cache of transformers, in half the memory."""

import dataclasses
from pathlib import Path
from typing import Any

import moe_families
import numpy as np
import pytest
import torch
from engine_events import ask_all, drained, greedy, request_of
from tiny_checkpoints import PROMPT, model_class_of, save, tiny_model
from transformers import DynamicCache, StaticCache

import moe_runtime
from moe_runtime.errors import UnsupportedModelError, UnsupportedUseError
from moe_runtime.inference.budget import kv_bytes_per_token
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.kv_cache import can_give_back
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.prefixes import PrefixDisk
from moe_runtime.serving.requests import EngineOptions

NEXT = (43, 3, 77, 12, 5, 9, 61)


def checkpoint(name: str, folder: Path, **sizes: Any) -> tuple[Any, Path]:
    """A tiny checkpoint whose heads are whole groups of values."""
    (family,) = (family for family in moe_families.FAMILIES if str(family) == name)
    sizes = sizes or {"head_dim": 32}
    family = dataclasses.replace(family, config={**family.config, **sizes})
    return family, save(tiny_model(family), folder, sharded=False)


class RoundedByNumpy(DynamicCache):
    """Attention to values that NumPy rounds to int8 one by one."""

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        return super().update(nearest(keys), nearest(values), *args, **kwargs)


def nearest(x: torch.Tensor) -> torch.Tensor:
    groups = x.numpy().astype(np.float32).reshape(*x.shape[:-1], -1, 32)
    scales = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
    wide = scales.astype(np.float32)
    codes = np.clip(np.rint(groups / np.where(wide == 0, 1, wide)), -127, 127)
    return torch.from_numpy((codes * wide).reshape(x.shape)).to(x.dtype)


def logits_of(model: Any, cache: Any) -> torch.Tensor:
    """Of a prompt in two parts, and of single tokens after it."""
    parts = [PROMPT[:, :7], PROMPT[:, 7:], *(torch.tensor([[token]]) for token in NEXT)]
    with torch.inference_mode():
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], dim=1)


def test_a_cache_of_the_other_form_is_refused(tmp_path: Path):
    _, folder = checkpoint("Qwen3MoeForCausalLM", tmp_path)
    options: Any = {"device": "cpu", "dtype": "float32", "max_tokens": 64}
    models = [moe_runtime.load(folder, kv_cache=form, **options) for form in ("exact", "int8")]
    for model, other in (models, models[::-1]):
        cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            model(PROMPT, past_key_values=cache)
            with pytest.raises(UnsupportedUseError, match="another kv_cache"):
                other(PROMPT, past_key_values=cache)
    for model in models:
        model.moe.close()


@pytest.mark.parametrize(
    "name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "Qwen3NextForCausalLM"]
)
def test_logits_are_those_of_transformers_with_a_cache_that_rounds(
    name: str, tmp_path: Path
) -> None:
    """Fused steps; windows and sinks; gated attention with running states."""
    family, folder = checkpoint(name, tmp_path)
    theirs = model_class_of(family).from_pretrained(folder, dtype=torch.float32).eval()
    expected = logits_of(theirs, RoundedByNumpy(config=theirs.config))
    exact = logits_of(theirs, DynamicCache(config=theirs.config))
    model: Any = moe_runtime.load(
        folder, device="cpu", dtype="float32", max_tokens=64, kv_cache="int8"
    )
    with model.moe:
        cache = DynamicCache(config=model.config)
        found = logits_of(model, cache)
        assert model.moe.stats().kv_cache == "int8"
    rounded = [layer for layer in cache.layers if hasattr(layer, "keys")]
    assert all(layer.keys.dtype is layer.values.dtype is torch.uint8 for layer in rounded)
    # a code whose value lies between two may be the other one: far less than all that is rounded
    error = (exact - expected).norm()
    assert 0 < error < 0.1 * exact.norm()
    assert (found - expected).norm() < 0.2 * error


def test_a_cache_of_a_model_that_rounds_can_be_cropped_reordered_and_given_back(
    tmp_path: Path,
) -> None:
    _, folder = checkpoint("Qwen3MoeForCausalLM", tmp_path)
    model: Any = moe_runtime.load(
        folder, device="cpu", dtype="bfloat16", max_tokens=256, kv_cache="int8"
    )
    with model.moe, torch.inference_mode():
        whole = model(PROMPT, use_cache=True)
        cache = whole.past_key_values
        assert can_give_back(cache)
        cache.crop(7 - PROMPT.shape[1])
        again = model(PROMPT[:, 7:], past_key_values=cache).logits
        assert torch.equal(again, whole.logits[:, 7:])
        beams = model.generate(PROMPT, max_new_tokens=5, num_beams=3, do_sample=False)
        assert beams.shape == (1, PROMPT.shape[1] + 5)
        with pytest.raises(UnsupportedUseError, match="got a StaticCache"):
            model(PROMPT, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    model: Any = moe_runtime.load(folder, device="cpu", dtype="float32", kv_cache="int8")
    with model.moe:
        inputs = model.get_input_embeddings()(PROMPT).requires_grad_()
        model(inputs_embeds=inputs, use_cache=False).logits.sum().backward()
        assert inputs.grad is not None
        cache = DynamicCache(config=model.config)
        with pytest.raises(UnsupportedUseError, match="no gradients"):
            model(inputs_embeds=inputs, past_key_values=cache)
        with pytest.raises(UnsupportedUseError, match="continuous batching"):
            model.init_continuous_batching()


def test_freed_memory_holds_experts_and_inspect_says_how_many(tmp_path: Path) -> None:
    _, folder = checkpoint("Qwen3MoeForCausalLM", tmp_path)
    forms = {}
    for form in ("exact", "int8"):
        given: Any = {"dtype": "bfloat16", "max_tokens": 2048, "kv_cache": form}
        summary = inspect_checkpoint(folder, **given)
        model: Any = moe_runtime.load(folder, device="cpu", host_memory=1 << 26, **given)
        with model.moe:
            plan = model.moe.facts.host_plan
            config = model.config
        assert plan.reserve_bytes == summary.reserve_bytes
        forms[form] = summary
    layer = 2 * config.num_key_value_heads * 32
    kept = {"exact": 2 * layer, "int8": layer * 34 // 32}
    for form, each in kept.items():
        expected = each * config.num_hidden_layers + 2 * layer
        assert kv_bytes_per_token(config, torch.bfloat16, form) == expected
    exact, int8 = forms["exact"], forms["int8"]
    freed = exact.reserve_bytes - int8.reserve_bytes
    assert freed >= 2048 * config.num_hidden_layers * (kept["exact"] - kept["int8"])
    tight = exact.smallest_budget_bytes
    more = min(freed // int8.slot_bytes, int8.total_experts - 2)
    assert int8.slots_for(tight) == exact.slots_for(tight) + more > exact.slots_for(tight)


def test_batched_requests_equal_single_ones_after_preemption_and_drafts(
    tmp_path: Path,
) -> None:
    _, folder = checkpoint("Qwen3MoeForCausalLM", tmp_path)
    prompts = [[3 + (7 * row + place) % 90 for place in range(20 + row)] for row in range(4)]
    requests = [request_of(prompt, 24) for prompt in prompts]
    said = []
    for draft in ("none", "lookup"):
        model: Any = moe_runtime.load(
            folder, device="cpu", dtype="float32", max_tokens=1024, kv_cache="int8", draft=draft
        )
        with model.moe:
            with Engine(model, EngineOptions(reuses_prefixes=False)) as engine:
                said.append([ask_all(engine, [one])[0].ids for one in requests])
            with Engine(model, max_tokens=128) as engine:
                said.append([answer.ids for answer in ask_all(engine, requests)])
                # drafts that were right may end an answer before another needs its memory
                assert engine.statistics().preemptions or draft == "lookup"
                assert engine.statistics().experts.kv_cache == "int8"
                engine.check()
    assert said[0] == said[1] == said[2] == said[3]


@pytest.mark.parametrize(
    ("name", "sizes", "kept"),
    [
        ("DeepseekV3ForCausalLM", {"v_head_dim": 32}, "latents"),
        ("Qwen3MoeForCausalLM", {"head_dim": 16}, "heads of 16 values"),
        ("ZayaForCausalLM", {"head_dim": 32}, "keys, values and states in one layer"),
    ],
)
def test_unsupported_caches_are_refused(
    name: str, sizes: dict[str, int], kept: str, tmp_path: Path
) -> None:
    _, folder = checkpoint(name, tmp_path, **sizes)
    for refused in (moe_runtime.load, inspect_checkpoint):
        with pytest.raises(UnsupportedModelError, match=f"keeps {kept}.*expected kv_cache exact"):
            refused(folder, kv_cache="int8")


def test_windows_in_int8_come_back_from_memory_and_from_the_disk(tmp_path: Path) -> None:
    """Conversations that fork, in one engine and after it: each text is that of a fresh run."""
    _, folder = checkpoint("GptOssForCausalLM", tmp_path / "model")
    first = [3 + 7 * place % 90 for place in range(41)]
    disk = PrefixDisk(tmp_path / "kept", 1 << 24, b"windows in int8")
    model: Any = moe_runtime.load(
        folder, device="cpu", dtype="float32", max_tokens=512, kv_cache="int8"
    )
    with model.moe:
        said = greedy(model, tuple(first), 8)
        turns = [first, *([*first, *said, *(rest + 5 for rest in first[:end])] for end in (9, 30))]
        expected = [greedy(model, tuple(turn), 8) for turn in turns]
        known = []
        for few in (512, 96, 512):  # with room for all, for one, and after both
            with Engine(model, max_tokens=few, prefix_disk=disk) as engine:
                answers = [ask_all(engine, [request_of(tuple(turn), 8)])[0] for turn in turns]
                drained(engine)
                found = engine.statistics()
            assert [answer.ids for answer in answers] == expected
            assert found.prefix_disk_failures == 0
            known.append([answer.read.cached_tokens for answer in answers])
        assert known[0][0] == 0
        assert min(known[0][1:] + known[1] + known[2]) > 0
        assert found.prefix_disk_hit_tokens > 0
