"""Vocabularies as GGUF files describe them, strings of many kinds, and llama.cpp's tokens.

`python -P tests/support/checkpoints/gguf_vocabularies.py` writes digests of what
llama-cpp-python makes of them into `tests/checkpoints/data/gguf_tokens.json`.
"""

from __future__ import annotations

import hashlib
import json
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.gguf.tokenizer import WORD_SPLITS

GOLDEN = Path(__file__).parents[2] / "checkpoints" / "data" / "gguf_tokens.json"
_SPACE = "\u2581"
_WORDS = """
the quick brown fox jumps over lazy dogs don't I'm WE'RE they'll he'd it's I'VE y’all isn't
HelloWorld getElementById snake_case_name HTTPServer ABCdef McDonald iPhone ÉCOLE Éa éA straße
Ünïcödé naïve Привет МОСКВА москва Ελλάδα ΑΘΗΝΑ ǅungla ʰʷ 𝒜𝓑𝒸 ﬁne Ⅷ ½ ² ³ 10² ªº
中文字符 漢字かな交じり カタカナ ひらがな 〇々 한국어 ㄱㄴㄷ ㄅㄆㄇ ไทยภาษา ภาษาไทย
हिन्दी नमस्ते বাংলা தமிழ் العربية مُحَمَّد שָׁלוֹם café ẹ́ Z͑ͫ
ភាសាខ្មែរ မြန်မာ ꦧꦱ ꩡ ｶﾅ ⼀⼁ 豈更 ｱ
""".split()  # noqa: SIM905
_MARKS = """
1 12 123 1234 12345 1234567 3.14159 1,234,567.89 2024-05-06 0x1F
٣٤٥ १२३४ １２３４ ๑๒๓ 1a2b3c x86_64 ①②③
😀 👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ ☃ ∑∫√ €£¥₹ →⇒ ™®© \ue000 \U000e0041 \u200b \u200d \ufeff \x7f ▁ । ۔ ، ･
. , ! ? ; : ... … — – “q” ‘q’ «q» ！？。，、 （） 「」
' " ` `` # $ % & * + - / \\ < = > @ ^ _ | ~ { } [ ] ( )
++ => != </ /* */ // 's 'T 'll 're'VE <sentinel:12> IMGIMGABCZ https://a.b/c?d=e#f SELECT*FROM
""".split()  # noqa: SIM905
_SPACES = (
    "@ @  @   @     @\t@\t\t @ \t@\n@\n\n@\n\n\n@\r\n@ \n @\n  \n"
    "@\x0b@\x1c@\xa0@\u3000@\u2003@\x85@\u2028"
)
_CODE = (
    *("def f(x):\n    return x+1\n", "if (a&&b) { c[i]++; }", '{"key": [1, 2.5, null]}'),
    "#include <x>\n",
)
_OTHERS = (*_MARKS, *_SPACES.split("@")[1:], *_CODE)
NUM_PLAIN = 500  # Strings that are also read without regard to control tokens
CONTROL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "[gMASK]")
ADDED = ("<think>", "</think>", "<|tool|>", "    #")
UNUSED = ("[PAD1]", "[PAD22]")
_RANGES = (
    *((0x20, 0x17F), (0x100, 0x52F), (0x900, 0xE7F), (0x1E00, 0x2426), (0x3000, 0x31E3)),
    *((0x4E00, 0x9FFF), (0xA000, 0xA48F), (0xAC00, 0xD7FF), (0xF900, 0xFFFF), (0x1D400, 0x1D7FF)),
    (0x1F300, 0x1F64F),
)
"""Code points whose categories Unicode 16 did not change."""


@cache
def strings(count: int = 2000) -> tuple[str, ...]:
    """Strings of many kinds; the same ones each time."""
    chance = random.Random(1)

    def piece() -> str:
        kind = chance.random()
        if kind < 0.4:
            return chance.choice(_WORDS)
        if kind < 0.5:
            return " " + chance.choice(_WORDS)
        if kind < 0.9:
            return chance.choice(_OTHERS)
        if kind < 0.97:
            return chr(chance.randint(*chance.choice(_RANGES)))
        return chance.choice((*CONTROL, *ADDED, *UNUSED, "<0x41>", "<|im_end", "<|unknown|>"))

    made = ["".join(piece() for _ in range(chance.randint(1, 9))) for _ in range(count - 2)]
    return ("", " ", *made)


@cache
def _pieces(is_raw: bool, count: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Characters, and parts of the strings that are frequent, each longer than a part by one."""
    alphabet = byte_alphabet()
    found: Counter[str] = Counter()
    characters = {chr(code) for code in range(0x21, 0x7F)} if is_raw else set(alphabet)
    for text in strings():
        shown = text.replace(" ", _SPACE) if is_raw else "".join(alphabet[b] for b in text.encode())
        characters.update(shown if is_raw else ())
        for size in range(2, 7):
            found.update(shown[at : at + size] for at in range(len(shown) - size + 1))
    if is_raw:  # some have no token and become bytes
        characters = {one for one in characters if ord(one) % 5 or one in f"{_SPACE}\n"}
    parts = sorted(found, key=lambda part: (-found[part], len(part), part))
    known, kept = set(characters), []
    for part in parts:
        if part[:-1] in known and part[-1] in known and len(kept) < count:
            known.add(part)
            kept.append(part)
    return tuple(sorted(characters)), tuple(kept)


def byte_alphabet() -> list[str]:
    """The characters that stand for bytes."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(rest)) for byte in range(256)]


def vocabulary(model: str, split: str | None = None, **others: Any) -> dict[str, Any]:
    """Metadata of a vocabulary with tokens of every type."""
    is_raw = model != "gpt2" or WORD_SPLITS[str(split)].is_raw
    characters, parts = _pieces(is_raw, 1200)
    number_of_bytes = 256 if is_raw else 0
    tokens = ["<unk>", *CONTROL, *ADDED, *UNUSED]
    kinds = [2, *[3] * len(CONTROL), *[4] * len(ADDED), *[5] * len(UNUSED)]
    tokens += [f"<0x{byte:02X}>" for byte in range(number_of_bytes)]
    kinds += [6] * number_of_bytes
    tokens += [each for each in (*characters, *parts) if each not in tokens]
    kinds += [1] * (len(tokens) - len(kinds))
    made: dict[str, Any] = {"model": model, "tokens": tokens, "token_type": kinds}
    made |= {"bos_token_id": 1, "eos_token_id": 2}
    if split is not None:
        made["pre"] = split
    if model == "llama":
        begin = len(tokens) - len(parts)
        made["scores"] = [float(min(begin - at, 0)) for at in range(len(tokens))]
    else:
        known = {*characters, *parts}
        ways = [(part[:cut], part[cut:]) for part in parts for cut in range(1, len(part))]
        made["merges"] = [f"{one} {two}" for one, two in ways if one in known and two in known]
    return {f"tokenizer.ggml.{key}": value for key, value in (made | others).items()}


def kinds() -> dict[str, dict[str, Any]]:
    """What is given to `vocabulary`: every way to split text, once, and what else files say."""
    first = {split: name for name, split in reversed(WORD_SPLITS.items())}
    found: dict[str, dict[str, Any]] = {
        name: {"model": "gpt2", "split": name} for name in reversed(first.values())
    }
    found["gemma4-model"] = {"model": "gemma4"}
    found["llama"] = {"model": "llama"}
    found["llama-without-prefix"] = {
        "model": "llama",
        "add_space_prefix": False,
        "add_eos_token": True,
    }
    found["qwen2-with-bos"] = {"model": "gpt2", "split": "qwen2", "add_bos_token": True}
    return found


def digest(ids: Sequence[Sequence[int]]) -> str:
    """Of the tokens of all strings."""
    return hashlib.sha256(json.dumps([[*row] for row in ids]).encode()).hexdigest()[:16]


def write_vocabulary(metadata: Mapping[str, Any], file: Path, *, num_rows: int = 0) -> Path:
    """A GGUF file of a vocabulary, with embeddings of so many tokens, as llama.cpp reads it."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(file, "llama")
    for name, value in (("context_length", 8), ("embedding_length", 8), ("block_count", 1)):
        writer.add_uint32(f"llama.{name}", value)
    writer.add_uint32("llama.feed_forward_length", 8)
    writer.add_uint32("llama.attention.head_count", 1)
    writer.add_layer_norm_rms_eps(1e-6)
    for key, value in metadata.items():
        kind = gguf.GGUFValueType.get_type(value)
        if type(value) is int:
            kind = gguf.GGUFValueType.UINT32
        writer.add_key_value(key, value, kind, None)
    if num_rows:
        writer.add_tensor("token_embd.weight", np.zeros((num_rows, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class LlamaCpp:
    """llama.cpp's tokenizer of a vocabulary."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        import llama_cpp

        self._library = llama_cpp
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        with tempfile.TemporaryDirectory() as folder:
            file = write_vocabulary(metadata, Path(folder) / "vocabulary.gguf")
            self._model = llama_cpp.llama_model_load_from_file(str(file).encode(), settings)
        self._vocabulary = llama_cpp.llama_model_get_vocab(self._model)

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """Tokens of a text; `special` has control tokens in it read as such."""
        raw = text.encode()
        room = len(raw) + 8
        ids = (self._library.llama_token * room)()
        count = self._library.llama_tokenize(
            self._vocabulary, raw, len(raw), ids, room, True, special
        )
        return ids[:count]

    def ends(self) -> set[int]:
        """Tokens that end a text."""
        count = self._library.llama_vocab_n_tokens(self._vocabulary)
        is_end = self._library.llama_vocab_is_eog
        return {token for token in range(count) if is_end(self._vocabulary, token)}


def _write() -> None:
    found = {}
    for name, described in kinds().items():
        model = LlamaCpp(vocabulary(**described))
        plain = [model.ids(text, special=False) for text in strings()[:NUM_PLAIN]]
        found[name] = [digest([model.ids(text) for text in strings()]), digest(plain)]
    GOLDEN.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    _write()
