"""Tokenizers that GGUF files describe, against llama.cpp's tokens of the same files."""

import importlib.util
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from gguf_vocabularies import (
    CONTROL,
    GOLDEN,
    NUM_PLAIN,
    LlamaCpp,
    byte_alphabet,
    digest,
    kinds,
    strings,
    vocabulary,
    write_vocabulary,
)

from moe_runtime.checkpoints.gguf.tokenizer import make_tokenizer, read_vocabulary
from moe_runtime.checkpoints.opening import load_tokenizer, read_generation_config
from moe_runtime.errors import CheckpointError, UnsupportedModelError

FILE = Path("model.gguf")
KINDS = kinds()


def made(metadata: dict[str, Any]) -> Any:
    return make_tokenizer(metadata, len(metadata["tokenizer.ggml.tokens"]), FILE)


def changed(described: dict[str, Any], **values: Any) -> dict[str, Any]:
    """Metadata with other values; without those that are None."""
    found = described | {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize("name", KINDS)
def test_tokens_of_2000_strings_are_llama_cpps(name):
    metadata = vocabulary(**KINDS[name])
    tokenizer = made(metadata)
    ids = tokenizer([*strings()])["input_ids"]
    assert max(map(max, filter(None, ids))) < len(metadata["tokenizer.ggml.tokens"])
    plain = tokenizer([*strings()[:NUM_PLAIN]], split_special_tokens=True)["input_ids"]
    assert [digest(ids), digest(plain)] == json.loads(GOLDEN.read_text())[name]


@pytest.mark.parametrize("name", ["llama", "llama-without-prefix", "gemma4", "llama3", "kimi-k2"])
def test_text_comes_back_from_its_tokens(name):
    tokenizer = made(vocabulary(**KINDS[name]))
    for text in (" two  spaces\n\nlines\t", "ÉCOLE 漢字 👍🏽 e\u0301", "a<|im_end|>b"):
        ids = tokenizer(text)["input_ids"]
        shown = tokenizer.decode(ids, skip_special_tokens=True)
        # text behind a token that it names begins with a space there, as in llama.cpp
        assert shown == text.replace("<|im_end|>", " " if name == "llama" else "")


def test_a_text_without_the_token_that_it_names_has_no_id_beyond_the_vocabulary():
    metadata = vocabulary("gpt2", "deepseek-v3")
    tokens = [token for token in metadata["tokenizer.ggml.tokens"] if token not in CONTROL]
    kinds_left = metadata["tokenizer.ggml.token_type"][len(CONTROL) :]
    kinds_left[0] = 2
    tokenizer = made(
        changed(
            metadata, tokens=tokens, token_type=kinds_left, bos_token_id=None, eos_token_id=102_401
        )
    )
    ids = tokenizer("a<|endoftext|>b<s>")["input_ids"]
    assert max(ids) < len(tokens)
    assert tokenizer.decode(ids) == "a<|endoftext|>b<s>"


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ({"pre": "gpt-5"}, UnsupportedModelError, r"tokenizer\.ggml\.pre is 'gpt-5', .* known: "),
        ({"pre": "whitespace"}, UnsupportedModelError, r"tokenizer\.ggml\.pre is 'whitespace'"),
        ({"pre": None}, CheckpointError, r"expected tokenizer\.ggml\.pre, .* found none"),
        ({"model": "rwkv"}, UnsupportedModelError, "llama, gpt2 or gemma4, found 'rwkv'"),
        ({"model": None}, UnsupportedModelError, "llama, gpt2 or gemma4, found None"),
        ({"tokens": 5}, CheckpointError, "the texts of tokens, found none"),
        ({"tokens": ["a", "b", "a"]}, CheckpointError, "every token once, found 'a' twice"),
        ({"token_type": [1]}, CheckpointError, r"token_type of \d+ tokens, found \[1\]"),
        ({"merges": None}, CheckpointError, r"expected tokenizer\.ggml\.merges"),
        ({"merges": ["t h", "zz h"]}, None, ""),
        ({"merges": ["t h", "1 %"]}, CheckpointError, "found '1 %', which has others"),
        ({"add_bos_token": True, "bos_token_id": None}, CheckpointError, "expected bos_token_id"),
        ({"model": "llama", "scores": None}, CheckpointError, r"expected tokenizer\.ggml\.scores"),
    ],
)
def test_metadata_that_make_no_tokenizer_are_refused_in_a_line(values, kind, message):
    metadata = changed(vocabulary("gpt2", "qwen2"), **values)
    if kind is None:
        made(metadata)
        return
    with pytest.raises(kind, match=message) as raised:
        make_tokenizer(metadata, 10**6, FILE)
    assert "\n" not in str(raised.value)


def test_tokens_of_one_score_are_refused_where_a_text_decides_between_them():
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "c", "ab", "bc", "ac"]
    types = [2, 3, 3, *[1] * 7]
    described = {"model": "llama", "tokens": tokens, "token_type": types}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in described.items()}
    for last in ([-1.0, -2.0, -3.0], [-2.0, -1.0, -2.0]):
        made(changed(metadata, scores=[0.0] * 7 + last))
    with pytest.raises(CheckpointError, match=r"different scores, found one for \['ab', 'bc'\]"):
        made(changed(metadata, scores=[0.0] * 7 + [-1.0, -1.0, -2.0]))


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """What llama.cpp makes: the neighbours of the highest score first, from the left."""
    parts = [*text]
    while len(parts) > 1:
        pairs = [left + right for left, right in itertools.pairwise(parts)]
        best = max(scores.get(pair, -math.inf) for pair in pairs)
        if best == -math.inf:
            break
        at = [scores.get(pair) for pair in pairs].index(best)
        parts[at : at + 2] = [pairs[at]]
    return parts


@pytest.mark.parametrize(
    ("others", "longest", "is_made"),
    [
        ({"ba": -1.0, "ab": -2.0, "bb": -3.0}, 8, True),
        ({"ba": -1.0, "aab": -9.5, "bb": -9.7}, 4, True),
        ({"ba": -1.0}, 6, False),
        ({"ab": -1.0, "aab": -2.0}, 8, False),
        ({"ab": -1.0, "baa": -9.0}, 8, False),
        ({"ab": -9.0}, 8, False),
    ],
)
def test_repeated_characters_of_one_score_are_merged_from_the_left(others, longest, is_made):
    scores = {**dict.fromkeys("ab", 0.0), **others}
    scores |= {"a" * length: -9.0 for length in range(longest, 1, -1)}
    tokens = ["<unk>", "<s>", "</s>", *scores]
    described = {"model": "llama", "tokens": tokens, "add_bos_token": False}
    described |= {"token_type": [2, 3, 3] + [1] * len(scores), "add_space_prefix": False}
    metadata = changed({}, **described, scores=[0.0] * 3 + [*scores.values()])
    if not is_made:
        with pytest.raises(CheckpointError, match="expected tokens of different scores"):
            made(metadata)
        return
    texts = [
        "".join(text) for size in range(1, 12) for text in itertools.product("ab", repeat=size)
    ]
    texts += ["a" * size for size in range(12, 40)]
    ids = made(metadata)(texts)["input_ids"]
    found = [[tokens[number] for number in text] for text in ids]
    assert found == [merged_by_score(text, scores) for text in texts]


def ending(texts: str, **named: str) -> dict[str, Any]:
    """Metadata of bytes and these tokens, some of which are named."""
    tokens = [*byte_alphabet(), "th", *texts.split()]
    types = [1] * 257 + [3] * (len(tokens) - 257)
    ids = {f"{role}_token_id": tokens.index(text) for role, text in named.items()}
    described = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types}
    return changed({}, **described, merges=["t h"], **ids)


ENDS = [
    ("<|im_end|> <|endoftext|> <y>", {"eos": "<|im_end|>"}, "<|im_end|> <|endoftext|>"),
    ("<|eot_id|> <|eom_id|> <y>", {"eos": "<y>"}, "<|eot_id|> <|eom_id|> <y>"),
    ("<|user|> <y> <z>", {"eos": "<z>", "eot": "<|user|>", "eom": "<y>"}, "<|user|> <y> <z>"),
    ("<|return|> <|call|> <|end|> <|start|>", {"eos": "<|return|>"}, "<|return|> <|call|>"),
    ("<|flush|> <|calls|> <|end|>", {"eos": "<|flush|>"}, "<|flush|> <|calls|>"),
    ("<|end|> <|assistant|>", {"eos": "<|end|>"}, "<|end|>"),
    ("<eos> <turn|> <|tool_response> </s>", {"eos": "<eos>"}, "<eos> <turn|> <|tool_response>"),
    ("</s> [EOT] [PAD] [e~[", {"eos": "</s>"}, "</s> [EOT] [PAD] [e~["),
    ("<|fim_pad|> <|repo_name|> <|file_sep|>", {}, "<|fim_pad|> <|repo_name|> <|file_sep|>"),
    ("<|fim_pad|> <|repo_name|> <y>", {"fim_pad": "<y>"}, "<|repo_name|> <y>"),
    ("<｜end▁of▁sentence｜> <|fim_middle|>", {}, "<｜end▁of▁sentence｜>"),
]


@pytest.mark.parametrize(("texts", "named", "expected"), ENDS)
def test_all_tokens_that_end_a_text_are_known(texts, named, expected):
    metadata = ending(texts, **named)
    tokens = metadata["tokenizer.ggml.tokens"]
    found = read_vocabulary(metadata, len(tokens), FILE).ends
    assert {tokens[end] for end in found} == {*expected.split()}


if importlib.util.find_spec("llama_cpp"):

    @pytest.mark.parametrize("name", ["llama3", "gpt-4o", "deepseek-v3", "gemma4", "llama"])
    def test_the_llama_cpp_that_is_installed_gives_the_same_tokens(name):
        metadata = vocabulary(**KINDS[name])
        model, texts = LlamaCpp(metadata), [*strings()[:NUM_PLAIN]]
        assert made(metadata)(texts)["input_ids"] == [model.ids(text) for text in texts]

    def test_the_llama_cpp_that_is_installed_ends_texts_there():
        for texts, named, expected in ENDS:
            metadata = ending(texts, **named)
            tokens = metadata["tokenizer.ggml.tokens"]
            # 11 is where it looks without a name
            ends = LlamaCpp(metadata).ends() - ({11} if "eos" not in named else set())
            assert {tokens[end] for end in ends} == {*expected.split()}


def test_a_files_tokenizer_and_its_ends_come_from_its_header(tmp_path):
    metadata = ending("<|im_end|> <|endoftext|>", eos="<|endoftext|>")
    metadata["tokenizer.chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata |= {"general.sampling.temp": 0.75, "general.sampling.top_k": 40}
    tokens = metadata["tokenizer.ggml.tokens"]
    file = write_vocabulary(metadata, tmp_path / "model.gguf", num_rows=len(tokens))
    tokenizer, settings = load_tokenizer(file), read_generation_config(file)
    assert tokenizer.eos_token == "<|endoftext|>"
    assert settings is not None
    assert settings.eos_token_id == [len(tokens) - 1, len(tokens) - 2]
    assert (settings.do_sample, settings.temperature, settings.top_k) == (True, 0.75, 40)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    write_vocabulary(metadata, file, num_rows=9)
    with pytest.raises(CheckpointError, match="at most 9 tokens, as many as token_embd has"):
        load_tokenizer(file)
