"""With drafts, texts and logits have the bits that they have without."""

import threading
from typing import Any

import moe_families
import pytest
import torch
from scripted_drafts import EveryDraft, Scripted, Told
from tiny_checkpoints import PROMPT, save, tiny_model
from transformers import AutoTokenizer, LogitsProcessor, LogitsProcessorList

import moe_runtime
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.drafts import BARREN, Lookup, Lookups
from moe_runtime.inference.generation import generate_text
from moe_runtime.models.pocket import pocket_path

NEW = 12
QUICK = {
    ("DeepseekV3ForCausalLM", "float32"),  # latents
    ("GptOssForCausalLM", "bfloat16"),  # windows and sinks
    ("OlmoeForCausalLM", "bfloat16"),
    ("Qwen3NextForCausalLM", "float32"),  # states of a delta rule
    ("NemotronHForCausalLM", "bfloat16"),  # states of Mamba 2
    ("Lfm2MoeForCausalLM", "float32"),  # inputs of convolutions
    ("JambaForCausalLM", "float32"),  # states of Mamba 1
    ("DeepseekV32ForCausalLM", "float32"),  # indices
}

REFUSED = {
    *("AXK2", "DeepseekV32", "DeepseekV4", "Dots3Note", "Gemma4"),
    *("Glm5Next", "GlmMoeDsa", "HYV4", "Inkling", "Inkling2"),
    *("Jamba", "JetMoe", "Llama4", "MiniMax", "MiniMaxM3Sparse", "MiniMaxM3VL"),
    *("MistralLarge4", "Qwen4Exp", "UnlimitedOcr", "Zaya"),
}
"""Families with indices, chunks, an attention or states of their own, with all that they are part
of."""
GENERATES_FROM_IMAGES = {"Qwen3OmniMoeThinkerForConditionalGeneration"}


def _cases() -> list[Any]:
    families = [*moe_families.FAMILIES, *moe_families.ADAPTED]
    return [
        pytest.param(
            family,
            dtype,
            id=f"{family}-{dtype}",
            marks=[] if (str(family), dtype) in QUICK else pytest.mark.long,
        )
        for family in families
        if family.decodes
        and not (family.part or family.inputs)
        and str(family) not in GENERATES_FROM_IMAGES
        for dtype in ("float32", "bfloat16")
        if dtype == "float32" or family.computes_in_bf16
    ]


def told(model: Any, whole: list[int], **settings: Any) -> None:
    """Gives a model drafts that are right but for every third token."""
    model._drafts.source = Scripted(lambda: Told(whole, **settings))
    model._drafts.control = EveryDraft(model._drafts.control.most_rows)


def generated(model: Any, **settings: Any) -> Any:
    return model.generate(
        PROMPT,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        output_logits=True,
        return_dict_in_generate=True,
        **settings,
    )


@pytest.mark.parametrize(("family", "dtype"), _cases())
def test_bits_are_those_of_one_token_at_a_time(family, dtype, tmp_path):
    folder = save(tiny_model(family), tmp_path, sharded=False)
    settings = {"device": "cpu", "dtype": dtype, "host_memory": "64MiB", "max_tokens": 256}
    plain: Any = moe_runtime.load(folder, **settings)
    with plain.moe:
        expected = generated(plain, do_sample=False)
    if str(family).partition("For")[0] in REFUSED:
        with pytest.raises(UnsupportedModelError, match="leave draft out"):
            moe_runtime.load(folder, draft="lookup", **settings)
        return
    model: Any = moe_runtime.load(folder, draft="lookup", **settings)
    with model.moe:
        told(model, expected.sequences[0].tolist())
        assert model._drafts.control.most_rows >= 2
        found = generated(model, do_sample=False)
        assert found.sequences.tolist() == expected.sequences.tolist()
        assert all(map(torch.equal, found.logits, expected.logits))
        counts = model._drafts.control.counts()
        assert counts["accepted_drafts"] >= NEW // 3
        assert counts["draft_steps"] <= NEW // 2
        model.moe.check()


SETTINGS = {"device": "cpu", "host_memory": "28MiB", "max_tokens": 256}


def test_passes_with_drafts_prefetch(plain):
    """Every pass but the prompt's, since the predictor looks at gates; no bit changes."""
    expected = generated(plain, do_sample=False)
    model: Any = moe_runtime.load(
        pocket_path(), draft="lookup", prefetch="enforce", predictor="next-gate", **SETTINGS
    )
    with model.moe:
        told(model, expected.sequences[0].tolist())
        found = generated(model, do_sample=False)
        assert all(map(torch.equal, found.logits, expected.logits))
        passes = model._drafts.control.counts()["draft_steps"]
        assert passes <= NEW // 2
        assert model.moe.prefetcher.stats().active_steps == passes
        model.moe.check()


@pytest.fixture(scope="module")
def plain() -> Any:
    with (model := moe_runtime.load(pocket_path(), **SETTINGS)).moe:
        yield model


@pytest.fixture(scope="module")
def drafted() -> Any:
    with (model := moe_runtime.load(pocket_path(), draft="lookup", **SETTINGS)).moe:
        yield model


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.1, "no_repeat_ngram_size": 3},
    ],
)
def test_a_seed_gives_the_same_text_with_drafts(plain, drafted, options):
    texts = []
    for model in (plain, drafted):
        if texts:
            told(drafted, texts[0].sequences[0].tolist())
        torch.manual_seed(7)
        texts.append(generated(model, do_sample=True, **options))
    assert texts[0].sequences.tolist() == texts[1].sequences.tolist()
    assert all(map(torch.equal, texts[0].logits, texts[1].logits))
    assert drafted._drafts.control.counts()["accepted_drafts"] > NEW // 4


@torch.no_grad()
def test_a_cache_may_be_cut_and_continued_between_calls(plain, drafted):
    """Kept rows belong to the cache as it was: another token, or fewer of them, void these."""
    whole = generated(plain, do_sample=False).sequences[0].tolist()
    length = PROMPT.shape[1]
    for cut, follows in ((0, None), (0, 5), (1, None), (4, None)):
        logits = []
        for model in (plain, drafted):
            told(drafted, whole)
            cache = model(PROMPT, use_cache=True).past_key_values
            for token in whole[length : length + 5]:
                out = model(torch.tensor([[token]]), past_key_values=cache)
            if cut:
                cache.crop(-cut)
            rest = whole[length + 5 - cut : length + 10]
            rest = rest if follows is None else [follows, *rest]
            for token in rest:
                out = model(torch.tensor([[token]]), past_key_values=cache)
            logits.append(out.logits)
            assert cache.get_seq_length() == length + 5 - cut + len(rest)
        assert torch.equal(*logits)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_cache_that_the_model_makes_has_drafts_too(plain, drafted, mode):
    whole = generated(plain, do_sample=False).sequences[0].tolist()
    told(drafted, whole)
    logits: list[list[torch.Tensor]] = [[], []]
    with mode():
        for model, found in zip((plain, drafted), logits, strict=True):
            cache = model(PROMPT, logits_to_keep=1).past_key_values
            for token in whole[PROMPT.shape[1] :]:
                step = model(torch.tensor([[token]]), past_key_values=cache, logits_to_keep=1)
                found.append(step.logits)
    assert all(map(torch.equal, *logits))
    assert drafted._drafts.control.counts()["accepted_drafts"] > NEW // 3


@torch.no_grad()
def test_calls_without_drafts_are_computed_as_usual(plain, drafted):
    whole = generated(plain, do_sample=False).sequences[0].tolist()
    told(drafted, whole)
    for options in (
        {"num_return_sequences": 2, "do_sample": True},
        {"num_beams": 2, "do_sample": False},
        {"output_hidden_states": True, "do_sample": False},
        {"do_sample": False, "attention_mask": torch.tensor([[0, *[1] * (PROMPT.shape[1] - 1)]])},
    ):
        texts = []
        for model in (plain, drafted):
            torch.manual_seed(3)
            texts.append(generated(model, **options).sequences.tolist())
        assert texts[0] == texts[1]
    assert drafted._drafts.control.counts()["drafted_tokens"] == 0


class Dictated(LogitsProcessor):
    """Makes a model write a given text."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self.text[input_ids.shape[1]]] = 0.0
        return forced


def test_drafting_resumes_when_a_text_repeats_itself(plain, drafted, monkeypatch):
    """Up to there, most steps do not look for drafts."""
    prompt = PROMPT[0].tolist()
    new = [token for token in range(100, 160) if token not in prompt]
    text = [*prompt, *new, *new]
    looks, look = list[int](), Lookup.offer
    monkeypatch.setattr(Lookup, "offer", lambda *of: (looks.append(1), look(*of))[1])
    answers = [
        model.generate(
            PROMPT,
            max_new_tokens=2 * len(new),
            min_new_tokens=2 * len(new),
            do_sample=False,
            logits_processor=LogitsProcessorList([Dictated(text)]),
            output_logits=True,
            return_dict_in_generate=True,
        )
        for model in (plain, with_lookups(drafted))
    ]
    assert answers[0].sequences.tolist() == answers[1].sequences.tolist() == [text]
    assert all(map(torch.equal, answers[0].logits, answers[1].logits))
    counts = drafted._drafts.control.counts()
    assert counts["accepted_drafts"] >= len(new) // 4
    # the first token comes with the prompt
    assert counts["draft_steps"] + counts["accepted_drafts"] == 2 * len(new) - 1
    num_rests = counts["draft_steps"] - len(looks)
    assert num_rests >= len(new) - BARREN - len(new) // BARREN - 1


def with_lookups(model: Any) -> Any:
    drafts = model._drafts
    drafts.source, drafts.control = Lookups(), EveryDraft(drafts.control.most_rows)
    return model


def test_drafts_keep_within_the_tokens_that_memory_is_set_aside_for(plain):
    whole = generated(plain, do_sample=False).sequences[0].tolist()
    settings = {**SETTINGS, "max_tokens": PROMPT.shape[1] + NEW}
    with (model := moe_runtime.load(pocket_path(), draft="lookup", **settings)).moe:
        told(model, [*whole, *whole])
        assert generated(model, do_sample=False).sequences[0].tolist() == whole


def test_a_failed_read_within_a_verification_fails_the_call_alone(plain, drafted, monkeypatch):
    whole = generated(plain, do_sample=False).sequences[0].tolist()
    told(drafted, whole)
    layer = drafted.get_submodule("model.layers.1.mlp")
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    hook = layer.register_forward_pre_hook(fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            generated(drafted, do_sample=False)
    finally:
        hook.remove()
    drafted.moe.check()
    told(drafted, whole)
    assert generated(drafted, do_sample=False).sequences[0].tolist() == whole


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"temperature": 0.9, "top_p": 0.8, "seed": 4}, marks=pytest.mark.long),
    ],
)
def test_the_text_of_a_prompt_is_that_without_drafts(plain, drafted, settings):
    """As in `run`, which passes further arguments to the model."""
    tokenizer = AutoTokenizer.from_pretrained(pocket_path())
    drafted._drafts.source, drafted._drafts.control = Lookups(), EveryDraft(16)
    prompt = "def first(x):\n    return x\n\ndef second(x):\n"
    texts = [
        generate_text(model, tokenizer, prompt, max_new_tokens=60, **settings)
        for model in (plain, drafted)
    ]
    assert texts[0].token_ids == texts[1].token_ids
    counts = drafted._drafts.control.counts()
    assert counts["drafted_tokens"] > counts["accepted_drafts"] > 5
    assert counts["draft_steps"] + counts["accepted_drafts"] == 59  # the first is the prompt's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "bogus"}, "unknown draft 'bogus'"),
        ({"draft": "lookup", "trace": "trace.npz"}, "a trace must not have"),
        ({"draft": "lookup", "placement": "map.json"}, "is for one process"),
    ],
)
def test_drafts_that_cannot_be_verified_are_refused(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        moe_runtime.load(pocket_path(), **options)
    assert not [*tmp_path.iterdir()]


def test_a_trial_and_a_waiting_thread_do_not_deadlock(drafted):
    """The trials of an engine hold the passes of a model, and call it."""
    entered, found = threading.Event(), []
    single = drafted._drafts._single_token

    def call() -> None:
        found.append(drafted(PROMPT).logits)

    def told_of(given: Any) -> Any:
        entered.set()
        return single(given)

    drafted._drafts._single_token = told_of
    other = threading.Thread(target=call, daemon=True)

    def trial() -> None:
        with drafted._steps.muted():
            other.start()
            entered.wait(0.2)  # where locks have two orders, the other thread has one of them now
            call()

    mine = threading.Thread(target=trial, daemon=True)
    mine.start()
    for thread in (mine, other):
        thread.join(60)
        assert not thread.is_alive()
    del drafted._drafts._single_token
    assert torch.equal(*found)
