"""A draft model: its drafts, the resulting texts, and refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_drafts import EveryDraft, models_of_few_tokens
from tiny_checkpoints import PROMPT, randomise
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import moe_runtime
from moe_runtime.checkpoints.opening import open_checkpoint
from moe_runtime.errors import (
    CapacityError,
    MoERuntimeError,
    MoERuntimeWarning,
    UnsupportedModelError,
)
from moe_runtime.inference.budget import room_for
from moe_runtime.inference.draft_models import DraftPlan, ModelDrafts
from moe_runtime.inference.drafts import MOST_DRAFTED
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.models.pocket import pocket_path

NEW = 16
SIZES = {
    **{"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96},
}
SETTINGS = {"device": "cpu", "host_memory": "80MiB", "max_tokens": 256}


def dense(kind: Any, config: Any, folder: Path) -> Any:
    """A random dense model with the pocket model's tokenizer."""
    torch.manual_seed(1)
    model = kind(config).float().eval()
    randomise(model)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pocket_path() / name, folder)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("dense")
    dense(LlamaForCausalLM, LlamaConfig(**SIZES), path)
    return path


def plan_of(path: Path) -> DraftPlan:
    return DraftPlan(path, open_checkpoint(pocket_path(), "auto"))


def caught_up(source: ModelDrafts, texts: list[Any]) -> None:
    for _ in range(10):
        if not source.catch_up(texts):
            return
    raise AssertionError("each piece brings a text further")


@torch.no_grad()
def expected(model: Any, tokens: list[int], count: int) -> list[int]:
    whole = list(tokens)
    for _ in range(count):
        whole.append(int(model(torch.tensor([whole])).logits[0, -1].argmax()))
    return whole[len(tokens) :]


@pytest.mark.parametrize("window", [None, 5])
def test_drafts_equal_greedy_text_of_the_draft_model(window, tmp_path):
    """Texts of several lengths, drafted for together, go on as drafted, in part, or otherwise."""
    kind, config = LlamaForCausalLM, LlamaConfig(**SIZES)
    if window:
        kind, config = MistralForCausalLM, MistralConfig(**SIZES, sliding_window=window)
    model = dense(kind, config, tmp_path)
    source = plan_of(tmp_path).load(None, 256)
    draw = torch.Generator().manual_seed(2)
    texts = [source.new() for _ in range(3)]
    for size, text in zip((1, 7, 30), texts, strict=True):
        text.extend(torch.randint(4096, (size,), generator=draw).tolist())
    caught_up(source, texts)
    texts[0].extend([3])
    for counts in ((3, 0, 5), (1, 8, 2), (0, 4, 4), (2, 2, 2)):
        found = source.draft(texts, counts)
        for text, draft, count in zip(texts, found, counts, strict=True):
            assert draft == expected(model, text.tokens, count)
            num_right = int(torch.randint(count + 1, (1,), generator=draw))
            text.extend([*draft[:num_right], 17])


def test_a_text_too_long_for_the_model_begins_with_its_latest_tokens(folder):
    source = plan_of(folder).load(None, 256)
    model = LlamaForCausalLM.from_pretrained(folder)
    text = source.new()
    text.extend([(7 * index) % 4096 for index in range(90)])
    caught_up(source, [text])
    context = SIZES["max_position_embeddings"] // 2
    assert source.draft([text], [4]) == [expected(model, text.tokens[-context:], 4)]
    for size, first in ((30, 90 - context), (20, 140 - context)):
        text.extend(range(size))
        assert source.draft([text], [4]) == [[]]  # not before it caught up
        caught_up(source, [text])
        assert source.draft([text], [2]) == [expected(model, text.tokens[first:], 2)]


def test_growing_texts_stay_within_the_draft_memory(folder):
    source = plan_of(folder).load(None, 128)
    texts = [source.new() for _ in range(4)]
    for text in texts[:2]:
        text.extend(range(20))
    texts[2].extend(range(3))
    num_drafts = 0
    for step in range(12):
        for text in texts:
            text.extend(range(7))
        caught_up(source, texts)
        num_drafts += sum(map(bool, source.draft(texts, [3] * 4)))
        layers = [one.cache.layers[0] for one in texts if one.cache is not None]
        rooms = [layer.keys.untyped_storage().nbytes() // (4 * 2 * 8) for layer in layers]
        assert 0 < sum(rooms) <= room_for(128), step
    assert num_drafts > 12
    texts[0].extend(range(20))  # nothing is kept of the others if it needs their place
    caught_up(source, texts[:1])
    assert len(source.draft(texts[:1], [3])[0]) == 3


@pytest.mark.parametrize("size", [5000, 4000])
def test_a_draft_with_other_embeddings_uses_common_tokens(size, tmp_path):
    model = dense(LlamaForCausalLM, LlamaConfig(**{**SIZES, "vocab_size": size}), tmp_path)
    model.lm_head.weight.data[4096:] *= 9
    model.save_pretrained(tmp_path)
    source = plan_of(tmp_path).load(None, 256)
    text, other = source.new(), source.new()
    text.extend(list(range(30)))
    caught_up(source, [text])
    for draft in (source.draft([text], [8])[0], source.draft([text], [1])[0]):
        model.lm_head.weight.data[4096:] = 0.0
        assert draft == expected(model, text.tokens, len(draft))
        text.extend([9])
    other.extend([5, 4050])
    assert other.offer(4).most == (4 if size > 4096 else 0)


def test_the_draft_reserve_grows_with_the_cache_only(folder):
    """Passes of drafts have few tokens, however long the texts are."""
    plan = plan_of(folder)
    per_token = 2 * 2 * 8 * 4  # keys and values of a layer: two heads of eight fp32 values
    grown = (room_for(9216) - room_for(8192)) * per_token * (2 + 1)  # and a copy of one layer
    assert plan.bytes_for(9216) - plan.bytes_for(8192) == grown == plan.context_step_bytes
    mixture = plan_of(pocket_path())
    assert mixture.bytes_for(9216) - mixture.bytes_for(8192) == mixture.context_step_bytes


@pytest.fixture(scope="module")
def plain() -> Any:
    with (model := moe_runtime.load(pocket_path(), **SETTINGS)).moe:
        options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        torch.manual_seed(5)
        yield [
            model.generate(PROMPT, do_sample=False, **options)[0].tolist(),
            model.generate(PROMPT, do_sample=True, **options)[0].tolist(),
        ]


@pytest.mark.parametrize("drafter", ["dense", "itself"])
def test_texts_are_those_without_drafts(drafter, folder, plain):
    draft = folder if drafter == "dense" else pocket_path()
    with (model := moe_runtime.load(pocket_path(), draft=draft, **SETTINGS)).moe:
        model._drafts.control = EveryDraft(model._drafts.control.most_rows)
        options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        torch.manual_seed(5)
        assert model.generate(PROMPT, do_sample=False, **options)[0].tolist() == plain[0]
        greedy = model._drafts.control.counts()
        if drafter == "itself":  # draft and target are the same model
            wrong = greedy["drafted_tokens"] - greedy["accepted_drafts"]
            assert wrong < MOST_DRAFTED  # of the last draft, beyond the end
            most_rows = model._drafts.control.most_rows  # a pass yields at most one token a row
            assert greedy["draft_steps"] <= 3 + NEW // most_rows
            assert greedy["accepted_drafts"] >= NEW - 1 - greedy["draft_steps"]
        assert greedy["drafted_tokens"] >= NEW // 2
        assert model.generate(PROMPT, do_sample=True, **options)[0].tolist() == plain[1]
        stats = model.moe.stats()
        assert stats.draft_bytes == plan_of(draft).bytes_for(256)
        smaller = {**SETTINGS, "host_memory": stats.draft_bytes + 2**20}
    with pytest.raises(CapacityError, match="smallest that works"):
        moe_runtime.load(pocket_path(), draft=draft, **smaller)


@torch.no_grad()
def test_samples_have_the_probabilities_of_the_model_alone(tmp_path):
    """Chi-square of tokens that are sampled with drafts: a draft without a chance of its own is
    taken with the model's, by the rule of Leviathan et al., or another token is."""
    size, num_texts, prompt = 5, 150, [1, 4, 2]
    whole = models_of_few_tokens(tmp_path, size)
    exact, chances = [], torch.ones(1, dtype=torch.float64)
    texts = torch.tensor([prompt])
    for _ in range(3):  # of every text that may come
        of_next = whole(texts).logits[:, -1].double().softmax(-1)
        chances = (chances[:, None] * of_next).flatten()
        exact.append(chances.view(-1, size).sum(0))
        texts = torch.cat(
            [texts.repeat_interleave(size, 0), torch.arange(size).repeat(len(texts))[:, None]], 1
        )
    settings = {**SETTINGS, "draft": tmp_path / "draft"}
    counts = torch.zeros(3, size, dtype=torch.float64)
    torch.manual_seed(8)
    with (model := moe_runtime.load(tmp_path / "model", **settings)).moe:
        control = model._drafts.control = EveryDraft(4)
        for _ in range(num_texts):
            ids, cache = torch.tensor([prompt]), None
            for place in range(3):
                out = model(ids, past_key_values=cache, use_cache=True)
                ids, cache = out.logits[:, -1].softmax(-1).multinomial(1), out.past_key_values
                counts[place, int(ids)] += 1
        found = control.counts()
    with pytest.raises(MoERuntimeError, match="closed"):
        model(ids, past_key_values=cache, use_cache=True)
    assert num_texts // 5 < found["accepted_drafts"] < found["drafted_tokens"] - num_texts
    expected_counts = num_texts * torch.stack(exact)
    statistic = ((counts - expected_counts) ** 2 / expected_counts).sum(1)
    assert float(expected_counts.min()) > 4
    assert float(statistic.max()) < 18.5  # one in a thousand, with four degrees of freedom


def test_a_closed_draft_gives_its_memory_to_experts(folder, plain):
    smallest = inspect_checkpoint(pocket_path(), max_tokens=256, draft=folder)
    settings = {**SETTINGS, "host_memory": smallest.smallest_budget_bytes + 2**23}
    again = torch.cat([PROMPT, PROMPT, PROMPT[:, :8]], 1)  # a lookup finds the continuation
    with (model := moe_runtime.load(pocket_path(), **settings)).moe:
        repeated = model.generate(again, do_sample=False, max_new_tokens=NEW)[0].tolist()
    with (model := moe_runtime.load(pocket_path(), draft=folder, **settings)).moe:
        control = EveryDraft(model._drafts.control.most_rows)
        model.moe.drafts = model._drafts.control = control
        options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        before = model.moe.stats()
        assert model.generate(PROMPT, do_sample=False, **options)[0].tolist() == plain[0]
        waited_s, misses, spared = model.moe.waits()
        assert waited_s > 0
        assert 0 < spared < misses
        model._drafts.control.is_too_dear = True
        with pytest.warns(MoERuntimeWarning, match=r"the draft is given up: .* MiB; lookup"):
            found = model.generate(PROMPT, do_sample=False, **options)[0].tolist()
        assert found == plain[0]
        after = model.moe.stats()
        num_more = before.draft_bytes // before.slot_bytes
        assert after.expert_slots == min(before.expert_slots + num_more, smallest.total_experts)
        assert (after.draft_bytes, after.drafts_given_up) == (0, 1)
        assert after.budget_bytes <= before.budget_bytes
        assert model.generate(again, do_sample=False, max_new_tokens=NEW)[0].tolist() == repeated
        assert model.moe.stats().drafted_tokens > after.drafted_tokens
        model.moe.check()


def _other_tokenizer(path: Path) -> None:
    file = path / "tokenizer.json"
    parsed = json.loads(file.read_text())
    vocabulary = parsed["model"]["vocab"]
    first, second = [word for word, number in vocabulary.items() if number in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(parsed))


def _no_tokenizer(path: Path) -> None:
    for file in path.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [(_other_tokenizer, "is token 30"), (_no_tokenizer, "has no tokenizer")],
)
def test_a_draft_with_another_tokenizer_is_refused(change, message, folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    change(other)
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        moe_runtime.load(pocket_path(), draft=other, **SETTINGS)
    assert "\n" not in str(caught.value)
