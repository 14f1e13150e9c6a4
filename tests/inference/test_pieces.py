"""Long calls in passes of a few tokens: the logits of one pass, and memory for one pass."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import picture_checkpoints as pc
import pytest
import torch
from moe_families import ADAPTED, FAMILIES
from tiny_checkpoints import save, tiny_model
from transformers import DynamicCache, StaticCache

import moe_runtime
from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.errors import CapacityError
from moe_runtime.inference import steps
from moe_runtime.inference.generation import encode_messages
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.pictures import PictureReader, Pictures, for_model
from moe_runtime.models.pocket import pocket_path

PASS, LENGTH, LIMIT = 7, 23, 128
# as for families: sums in fp32 in another order, and a state's decay once more for each piece
MAX_RELATIVE_ERROR = 2e-5
WHOLE = {
    *("JambaForCausalLM", "MiniMaxForCausalLM", "Qwen3OmniMoeForConditionalGeneration"),
    *("Qwen3OmniMoeThinkerForConditionalGeneration", "DiffusionGemmaForBlockDiffusion"),
    *("OpenAIPrivacyFilterForTokenClassification", "UnlimitedOcrForConditionalGeneration"),
    *("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "DeepseekV4ForCausalLM"),
}
"""Families whose prompts are one pass, besides those with an indexer."""
KEYS_ALONE = {"GptOssForCausalLM", "Gemma4ForCausalLM", "DeepseekV3ForCausalLM"}
KINDS = {
    *("GptOssForCausalLM", "Gemma4ForCausalLM", "DeepseekV3ForCausalLM"),  # windows, sinks, latents
    *("Qwen3NextForCausalLM", "Lfm2MoeForCausalLM", "JambaForCausalLM"),
}
ALL = [
    pytest.param(family, id=str(family), marks=[pytest.mark.long] * (str(family) not in KINDS))
    for family in (*FAMILIES, *ADAPTED)
]


@contextlib.contextmanager
def loaded(folder: Path, monkeypatch: Any, most: int, **options: Any) -> Iterator[Any]:
    monkeypatch.setattr(steps, "PASS_TOKENS", most)
    model: Any = moe_runtime.load(folder, device="cpu", max_tokens=LIMIT, **options)
    with torch.inference_mode(), model.moe:
        yield model
        model.moe.check()


def sizes_of(model: Any, monkeypatch: Any) -> list[tuple[int, int]]:
    """Sequences and new tokens of the passes that come."""
    sizes, run = [], model._steps.run

    def noted(call: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        sizes.append((*given.shape[:2],))
        return run(call, *args, **kwargs)

    monkeypatch.setattr(model._steps, "run", noted)
    return sizes


def error(found: Any, expected: Any) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", ALL)
def test_logits_are_those_of_one_pass(family, tmp_path, monkeypatch):
    folder = save(tiny_model(family), tmp_path, sharded=False, own_names=True)
    ids = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % 61 + 3
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with (
        loaded(folder, monkeypatch, LIMIT, dtype="float32") as whole,
        loaded(folder, monkeypatch, PASS, dtype="float32") as cut,
    ):
        config = cut.config.get_text_config(decoder=True)
        is_indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
        assert (cut._pieces is None) == (str(family) in WHOLE or is_indexed)
        if cut._pieces is None:
            return
        sizes = sizes_of(cut, monkeypatch)
        one = whole(ids[:1])
        assert error(cut(ids[:1]).logits, one.logits) < MAX_RELATIVE_ERROR
        last = cut(ids[:1], logits_to_keep=9, use_cache=False)
        assert {*last} == {"logits"}
        assert error(last.logits[:, -9:], one.logits[:, -9:]) < MAX_RELATIVE_ERROR
        assert sizes == [(1, 7), (1, 7), (1, 7), (1, 2)] * 2
        sizes.clear()
        if str(family) in KEYS_ALONE:
            static = StaticCache(config=cut.config, max_cache_len=LENGTH + 2)
            logits = [cut(part, past_key_values=static).logits for part in (ids[:1], ids[:1, :1])]
            again = whole(ids[:1, :1], past_key_values=one.past_key_values).logits
            assert (
                error(torch.cat(logits, 1), torch.cat([one.logits, again], 1)) < MAX_RELATIVE_ERROR
            )
            assert sizes == [(1, 7), (1, 7), (1, 7), (1, 2), (1, 1)]
            routed = [
                model(ids, output_router_logits=True).get("router_logits") for model in (cut, whole)
            ]
            assert (routed[0] is None) == (routed[1] is None)
            assert routed[1] or str(family) != "GptOssForCausalLM"
            for pair in zip(*routed, strict=True) if routed[1] else ():
                assert error(*pair) < MAX_RELATIVE_ERROR
            sizes.clear()
        found, expected = (model(ids, attention_mask=mask).logits[:, 9:] for model in (cut, whole))
        assert error(found, expected) < MAX_RELATIVE_ERROR
        assert sizes == [(2, 3)] * 7 + [(2, 2)]
        texts = [
            model.generate(ids[:1], max_new_tokens=5, do_sample=False) for model in (cut, whole)
        ]
        assert torch.equal(*texts)


@pytest.mark.parametrize("name", [name for name in pc.TABLE if "Qwen3" in name or "Gemma4" in name])
def test_a_picture_stays_whole(name, tmp_path, monkeypatch):
    folder = pc.save_seeing_checkpoint(name, tmp_path)
    tokenizer = load_tokenizer(folder)
    reader = PictureReader.of(folder, read_config(folder), tokenizer)
    assert reader is not None
    pictures = Pictures(reader, reader.open_all([pc.data_url(pc.picture(1, 17, 31))]))
    content = [{"type": "image"}, {"type": "text", "text": "What is it, and what is it for?"}]
    inputs = encode_messages(tokenizer, [{"role": "user", "content": content}], pictures)
    kinds = inputs["mm_token_type_ids"][0]
    rest = len(kinds) - 1 - int(kinds.nonzero()[-1])
    logits, texts = [], []
    for most in (LIMIT, PASS):
        with loaded(folder, monkeypatch, most, dtype="float32") as model:
            sizes = sizes_of(model, monkeypatch)
            begun = model(**for_model(model, inputs))
            cache, text = begun.past_key_values, torch.arange(9)[None] + 5
            calls = [begun, *(model(more, past_key_values=cache) for more in (text[:, :1], text))]
            logits.append(torch.cat([call.logits for call in calls], 1))
            # transformers makes the picture's rows before, or none
            given = for_model(model, inputs), {"input_ids": text}
            texts.append(
                [model.generate(**one, max_new_tokens=2, do_sample=False) for one in given]
            )
    expected = [len(kinds) - rest, *[PASS] * (rest // PASS), rest % PASS]
    expected = [size for size in expected if size]
    assert [size for _, size in sizes] == [*expected, 1, 7, 2, *expected, 1, 7, 2, 1]
    assert len(expected) > 1
    assert error(*logits) < MAX_RELATIVE_ERROR
    assert all(torch.equal(*each) for each in zip(*texts, strict=True))


def test_int8_keys_and_drafts_go_on_from_pieces(monkeypatch):
    ids = torch.arange(3 * LENGTH)[None] % 9 + 30
    texts = []
    for most in (LIMIT, 16):  # rows that a draft may have
        with loaded(pocket_path(), monkeypatch, most, kv_cache="int8", draft="lookup") as model:
            texts.append(model.generate(ids, max_new_tokens=20, do_sample=False))
    assert torch.equal(*texts)


def test_calls_for_more_than_logits_are_one_pass(monkeypatch):
    ids = torch.arange(LENGTH)[None] + 30
    with loaded(pocket_path(), monkeypatch, PASS) as model:
        sizes = sizes_of(model, monkeypatch)
        model(ids, labels=ids)
        assert len(model(ids, output_hidden_states=True).hidden_states[0][0]) == LENGTH
        assert sizes == [(1, LENGTH)] * 2
        other = type("OtherCache", (DynamicCache,), {})()
        for name, value, said in (
            ("output_attentions", True, "output_attentions"),
            ("past_key_values", other, "a OtherCache"),
            ("logits_to_keep", torch.arange(2), "logits_to_keep as a tensor"),
        ):
            with pytest.raises(CapacityError, match=f"more than 7 new tokens with {said} would"):
                model(ids, **{name: value})
        assert sizes == [(1, LENGTH)] * 2
    with loaded(pocket_path(), monkeypatch, PASS) as model, torch.inference_mode(False):
        embeds = model.get_input_embeddings()(ids).clone().requires_grad_()
        model(inputs_embeds=embeds).logits.sum().backward()
        assert bool(embeds.grad.abs().sum(-1).bool().all())


def test_the_first_logits_can_be_left_out(monkeypatch):
    ids = torch.arange(LENGTH)[None] + 30
    with loaded(pocket_path(), monkeypatch, PASS) as model:
        logits = model(ids).logits
        for keep in (-5, -PASS, 1 - LENGTH, -LENGTH, -LENGTH - 1, LENGTH + 1):
            assert torch.equal(
                model(ids, logits_to_keep=keep).logits, logits[:, slice(-keep, None)]
            )


def test_too_much_is_refused_before_a_token_is_computed(monkeypatch):
    with loaded(pocket_path(), monkeypatch, PASS) as model:
        cache = model(torch.arange(4)[None] + 30).past_key_values
        with pytest.raises(CapacityError, match=f"room for {LIMIT + 1} tokens"):
            model(torch.arange(LIMIT - 3)[None] + 30, past_key_values=cache)
        assert cache.get_seq_length() == 4
        with pytest.raises(CapacityError, match=f"memory for {PASS} sequences, got 8"):
            model(torch.arange(8)[:, None] + 30)


def test_memory_is_set_aside_for_the_activations_of_one_pass(tmp_path):
    """32 times the tokens take 32 times the keys and values, and the activations of 2048."""
    (family,) = (one for one in FAMILIES if str(one) == "OlmoeForCausalLM")
    sizes = {**family.config, "max_position_embeddings": 2**17}
    folder = save(tiny_model(dataclasses.replace(family, config=sizes)), tmp_path, sharded=False)
    short, long = (inspect_checkpoint(folder, max_tokens=2**n) for n in (11, 16))
    grown = (long.reserve_bytes - short.reserve_bytes) / (2**16 - 2**11)
    assert long.token_bytes <= grown <= long.token_bytes * 17 / 16
    assert long.token_bytes < short.token_bytes
    with moe_runtime.load(folder, host_memory=long.smallest_budget_bytes, max_tokens=2**16).moe:
        pass
