"""generate_text gives the text of transformers and reports it correctly."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerator import accelerator
from sentencepiece_tokenizer import sentencepiece_tokenizer
from text_checkpoint import MAX_POSITIONS, tiny_text_model, tiny_tokenizer

from moe_runtime.inference.generation import (
    GenerationInterrupted,
    encode_prompt,
    end_token_ids,
    generate_text,
)

PROMPT = "The store reads"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return tiny_text_model(len(tokenizer))


def by_hand(model: Any, tokenizer: Any, num_tokens: int) -> list[int]:
    """Greedy decoding without cache, streamer or generate."""
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    num_prompt_tokens = ids.shape[1]
    for _ in range(num_tokens):
        with torch.no_grad():
            best = model(input_ids=ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, best], dim=1)
    return ids[0, num_prompt_tokens:].tolist()


def test_greedy_text_is_that_of_plain_decoding(model, tokenizer):
    pieces: list[str] = []
    result = generate_text(model, tokenizer, PROMPT, max_new_tokens=30, on_text=pieces.append)
    expected = by_hand(model, tokenizer, 30)
    assert list(result.token_ids) == expected
    assert result.text == tokenizer.decode(expected)
    assert "".join(pieces) == result.text
    assert result.new_tokens == 30
    assert result.prompt_tokens == len(tokenizer(PROMPT)["input_ids"])
    assert result.finish_reason == "length"


EACH = "{% for m in messages %}"
TEMPLATES = {
    "chatml": (
        EACH + "<|im_start|>{{m.role}}\n{{m.content}}<|im_end|>\n{% endfor %}",
        "<|im_end|>",
    ),
    "mistral": (
        EACH + "{% if m.role == 'user' %}[INST] {{m.content}} [/INST]"
        "{% else %}{{m.content}} </s>{% endif %}{% endfor %}",
        "</s>",
    ),
    "glm, where the next turn ends one": (
        EACH + "<|{{m.role}}|>\n{{m.content}}{% endfor %}",
        "<|user|>",
    ),
    "gpt-oss, whose last part ends otherwise": (
        EACH + "<|start|>{{m.role}}<|message|>{{m.content}}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}",
        "<|return|>",
    ),
    "parts that end alike": (EACH + "<|start|>{{m.content}}<|end|>{% endfor %}", None),
    "BOS before each turn": (EACH + "<s>{{m.content}}{% endfor %}", None),
    "marks that are text": (EACH + "### {{m.role}}: {{m.content}}\n{% endfor %}", None),
    "one that refuses": ("{{ raise_exception('no') }}", None),
    "one that is broken": ("{{ messages[ }}", None),
    "none": (None, None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_ends_at_each_end_of_settings_tokenizer_and_template(name):
    tokenizer = sentencepiece_tokenizer()
    marks = ("im_start", "im_end", "user", "assistant", "start", "message", "return", "end")
    tokenizer.add_special_tokens({"extra_special_tokens": [f"<|{mark}|>" for mark in marks]})
    tokenizer.chat_template, expected = TEMPLATES[name]
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[7, 8]))
    ends = {7, 8, tokenizer.eos_token_id}
    ends |= {tokenizer.convert_tokens_to_ids(expected)} if expected else set()
    assert {*end_token_ids(model, tokenizer)} == ends
    assert end_token_ids(model) == [7, 8]


@pytest.mark.parametrize("whose", ["settings", "tokenizer"])
def test_generation_ends_at_an_end_token(model, tokenizer, whose, monkeypatch):
    text = generate_text(model, tokenizer, PROMPT, max_new_tokens=30).token_ids
    ending = SimpleNamespace(eos_token_id=text[4])

    class Ending:
        def __getattr__(self, name: str) -> Any:
            return getattr(ending if name == "eos_token_id" else tokenizer, name)

        def __call__(self, *args: Any, **settings: Any) -> Any:
            return tokenizer(*args, **settings)

    if whose == "settings":
        monkeypatch.setattr(model.generation_config, "eos_token_id", [text[4]])
    own = tokenizer if whose == "settings" else Ending()
    result = generate_text(model, own, PROMPT, max_new_tokens=30)
    assert result.token_ids == text[: text.index(text[4]) + 1]
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("chat", [False, True])
def test_text_goes_on_with_its_prompt_but_the_answer_of_a_chat_stands_alone(chat):
    """With a tokenizer whose decoding drops the first space, after line breaks too."""
    llama = sentencepiece_tokenizer()
    llama.chat_template = "{{ messages[0].content }}"
    answer = llama("Once a\n a time\n\n a", add_special_tokens=False)["input_ids"]

    def generate(streamer: Any, input_ids: torch.Tensor, **_: Any) -> None:
        for ids in (input_ids[0], *torch.tensor([*answer, llama.eos_token_id])[:, None]):
            streamer.put(ids)
        streamer.end()

    model = SimpleNamespace(
        generate=generate,
        forward=lambda input_ids, attention_mask: None,
        config=SimpleNamespace(
            model_type="", get_text_config=lambda: SimpleNamespace(vocab_size=len(llama))
        ),
        device="cpu",
        generation_config=SimpleNamespace(eos_token_id=None, stop_strings=None),
        register_forward_pre_hook=lambda _: SimpleNamespace(remove=lambda: None),
    )
    pieces: list[str] = []
    result = generate_text(
        model, llama, "Once upon", max_new_tokens=50, chat=chat, on_text=pieces.append
    )
    before = [] if chat else llama("Once upon")["input_ids"]
    expected = llama.decode([*before, *answer], skip_special_tokens=True)
    assert result.text == "".join(pieces) == expected.removeprefix("" if chat else "Once upon")
    assert result.text.startswith("Once" if chat else " Once")


def test_sampling_repeats_with_its_seed_and_leaves_the_global_state(model, tokenizer):
    def sample(seed: int) -> tuple[int, ...]:
        return generate_text(
            model, tokenizer, PROMPT, max_new_tokens=20, temperature=2.0, top_p=0.9, seed=seed
        ).token_ids

    # torch keeps the state of an accelerator's numbers as well, if there is one
    if not torch.cuda.is_available():
        accelerator()
    state = torch.random.get_rng_state()
    first = sample(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sample(1) == first
    assert any(sample(seed) != first for seed in (2, 3, 4))


def test_no_hidden_filter_narrows_sampling(model, tokenizer, monkeypatch):
    """By default transformers would keep only the 50 most likely tokens."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr(model, "generate", lambda **options: seen.update(options))
    generate_text(model, tokenizer, PROMPT, max_new_tokens=1, temperature=0.5, top_p=0.9)
    assert (seen["temperature"], seen["top_p"], seen["top_k"]) == (0.5, 0.9, 0)


def test_times_are_those_of_the_first_and_the_later_tokens(model, tokenizer, monkeypatch):
    """By a clock that goes on in forward passes alone: 4 s in the first, then 0.5 s."""
    calls = itertools.count()
    now = 7.0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("moe_runtime.inference.generation.time", clock)

    def go_on(*_: Any) -> None:
        nonlocal now
        now += 4.0 if next(calls) == 0 else 0.5

    hook = model.register_forward_hook(go_on)
    try:
        result = generate_text(model, tokenizer, PROMPT, max_new_tokens=5)
    finally:
        hook.remove()
    assert result.ttft_s == 4.0
    assert result.decode_tokens_per_s == 2.0
    single = generate_text(model, tokenizer, PROMPT, max_new_tokens=1)
    assert (single.new_tokens, single.decode_tokens_per_s) == (1, None)


def test_ctrl_c_hands_back_what_was_generated(model, tokenizer):
    calls = itertools.count()

    def interrupt(*_: Any) -> None:
        if next(calls) == 6:
            raise KeyboardInterrupt

    pieces: list[str] = []
    hook = model.register_forward_hook(interrupt)
    try:
        with pytest.raises(GenerationInterrupted) as caught:
            generate_text(model, tokenizer, PROMPT, max_new_tokens=50, on_text=pieces.append)
    finally:
        hook.remove()
    result = caught.value.result
    assert isinstance(caught.value, KeyboardInterrupt)
    assert result.finish_reason == "interrupted"
    assert 0 < result.new_tokens <= 6
    assert list(result.token_ids) == by_hand(model, tokenizer, result.new_tokens)
    assert "".join(pieces) == result.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"chat": True}, "no chat template"),
        ({"max_new_tokens": MAX_POSITIONS}, f"knows {MAX_POSITIONS} positions"),
        ({"prompt": ""}, "prompt is empty"),
    ],
)
def test_options_out_of_range_are_refused(model, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        generate_text(model, tokenizer, **{"prompt": PROMPT, "max_new_tokens": 4} | options)


def test_chat_goes_through_the_template():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    ids = encode_prompt(tokenizer, "hello", chat=True)["input_ids"]
    assert tokenizer.decode(ids[0]) == "[user]hello[assistant]"


def test_a_stop_string_of_the_checkpoint_ends_the_text(model, tokenizer, monkeypatch):
    ids = by_hand(model, tokenizer, 30)
    words = (tokenizer.decode([token]).strip() for token in ids)
    stop = next(word for word in words if len(word) > 3 and word.isascii() and word.isalpha())
    ends = (n for n in range(1, 31) if stop in tokenizer.decode(ids[:n]))
    monkeypatch.setattr(model.generation_config, "stop_strings", [stop])
    result = generate_text(model, tokenizer, PROMPT, max_new_tokens=30)
    assert list(result.token_ids) == ids[: next(ends)]
    assert result.finish_reason == "stop"
