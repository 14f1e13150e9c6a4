"""The tokenizer of a GGUF file, made from its metadata; it gives the tokens of llama.cpp."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.gguf.header import refuse
from moe_runtime.checkpoints.strict_json import clipped, one_line
from moe_runtime.config import nearest
from moe_runtime.errors import UnsupportedModelError, blamed_on


@dataclass(frozen=True, slots=True)
class WordSplit:
    """The way a kind of vocabulary splits text."""

    expressions: tuple[str, ...]  # applied in order
    keeps_tokens: bool = False  # a word that is a token is not split
    adds_bos: bool = False  # default of files without the key
    is_raw: bool = False  # words consist of characters instead of bytes, with a mark for the space


_ENDINGS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"  # English contractions
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+|"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_MARKS_AND_LETTERS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+"
)
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2EBEF}"
    r"\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
_THREES_FROM_THE_END = r"\G\P{N}*(?:\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3})"
"""Text before the first digits belongs to them, as in llama.cpp."""
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ud7ff\ue000-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\u1100-\u11ff]+"
)
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
    "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters with case, in the Unicode version of the first DeepSeek models."""


def _words(
    digits: str,
    *,
    endings: str = _ENDINGS + "|",
    letters: str = r"\p{L}+",
    marks: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    lines: str = _LINES,
    spaces: str = _SPACES,
) -> str:
    """An expression like Llama 3's: an ending, a word, digits, marks, lines, spaces."""
    return f"{endings}{_LEAD}{letters}|{digits}|{marks}|{lines}{spaces}"


def _cased_words(digits: str, letters: str, endings: str, *, has_case: bool = True) -> str:
    """An expression like GPT-4o's: a word ends where capitals follow small letters."""
    upper, lower = (
        f"[{letters}&&[^{of}]]" if has_case else f"[{letters}]" for of in ("a-z", "A-Z")
    )
    words = f"{_LEAD}{upper}*{lower}+{endings}|{_LEAD}{upper}+{lower}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}{_SPACES}"


_ONE, _THREE = r"\p{N}", r"\p{N}{1,3}"
_QWEN2, _LLAMA3 = _words(_ONE), _words(_THREE)
_PERHAPS = f"(?:{_ENDINGS})?"
_LINE_OR_LINES = r"[^\n]+|\n+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_RUNS_OF_SPACES = "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
_RUNS_OF_SPACES += r"\s{1,2}(?!\S)|\s"


def _split(*expressions: str, **kind: bool) -> WordSplit:
    return WordSplit(expressions, **kind)


_BY_NAMES: dict[str, WordSplit] = {
    "default": _split(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert mpt "
    "olmo jais exaone4 trillion granite-docling jina-v1-en jina-v2-code roberta-bpe": _split(_GPT2),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _split(_ONE, _GPT2),
    "falcon": _split(r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]"),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _split(
        _LLAMA3, keeps_tokens=True, adds_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe": _split(_LLAMA3),
    "glm4 glm5": _split(_LLAMA3, keeps_tokens=True),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _split(
        _QWEN2
    ),
    "qwen35": _split(
        _words(_ONE, letters=r"[\p{L}\p{M}]+", marks=r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")
    ),
    "laguna": _split(_LINE_OR_LINES, _QWEN2),
    "ufakzeka": _split(_words(_ONE, endings="")),
    "minicpm5": _split(_THREE, _words(r"\p{N}+"), keeps_tokens=True),
    "bailingmoe bailingmoe2 llada-moe": _split(_words(_ONE, lines=r"\s*[\r\n]|")),
    "seed-coder": _split(_words(_ONE, marks=r" ?[^\s\p{L}\p{N}]+")),
    "exaone-moe": _split(
        _words(
            _ONE,
            letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
            marks=r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
            lines=r"\s*[\r\n]|",
        )
    ),
    "jais-2": _split(_words(_THREE, spaces=_RUNS_OF_SPACES)),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _split(_cased_words(_THREE, r"\p{L}", _PERHAPS)),
    "granite-embed-multi-97m": _split(
        _cased_words(_THREE, r"\p{L}\p{M}", _PERHAPS), keeps_tokens=True
    ),
    "tekken": _split(_cased_words(_ONE, r"\p{L}", ""), keeps_tokens=True, adds_bos=True),
    "tiny_aya cohere2moe": _split(
        _THREES_FROM_THE_END, _cased_words(_THREE, r"\p{L}\p{M}", _PERHAPS, has_case=False)
    ),
    "youtu": _split(
        "[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|"
        f"[\u3105-\u312f]+|{_KANA_AND_HAN}",
        _cased_words(_ONE, r"\p{L}\p{M}", _PERHAPS, has_case=False),
        keeps_tokens=True,
    ),
    "kimi-k2": _split(
        f"[{_HAN}]+|" + _words(_THREE, endings="", letters=rf"[\p{{L}}&&[^{_HAN}]]+{_PERHAPS}")
    ),
    "deepseek-llm": _split(
        r"[\r\n]",
        rf"\s?[{_CASED}]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3001\u3002]+",
        r"\s+\z",
        r"[\u0800-\u9fa5\uac00-\ud7ff&&\S]+",
        r"\p{N}+",
    ),
    "deepseek-coder": _split(
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u0800-\u9fa5\uac00-\ud7ff&&\S]+", _ONE
    ),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _split(
        _THREE, _KANA_AND_HAN, rf"{_MARKS_AND_LETTERS}[\r\n]*|{_LINES}{_SPACES}"
    ),
    "spark2_5": _split(_THREE, _KANA_AND_HAN, rf"{_MARKS_AND_LETTERS}|[\r\n]|{_SPACES}", _ONE),
    "afmoe": _split(
        _THREES_FROM_THE_END, _ASIAN, rf"{_MARKS_AND_LETTERS}[\r\n]*|{_LINES}{_SPACES}"
    ),
    "poro-chat bloom gpt3-finnish": _split(_BLOOM),
    "viking": _split(_BLOOM, _ONE),
    "superbpe": _split(r"\p{N}+", r"(?=(?:[0-9]{3})+(?![0-9]))"),
    "chameleon": _split(
        *("<sentinel:[0-9]+>", "IMGIMG[A-I]{1,4}Z", r"[\t\n]|    |  ", _ONE),
        *(r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        adds_bos=True,
    ),
    "gemma4 granite-embed-multi-311m sarvam-moe": _split(_LINE_OR_LINES, is_raw=True),
}
WORD_SPLITS = {name: split for names, split in _BY_NAMES.items() for name in names.split()}
"""By `tokenizer.ggml.pre`."""


_NORMAL, _UNKNOWN, _CONTROL, _ADDED = 1, 2, 3, 4
_NAMED = (_UNKNOWN, _CONTROL, _ADDED)
"""Values of `tokenizer.ggml.token_type`; unused tokens and bytes have others."""
_SPACE = "\u2581"
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Token roles in transformers and in files."""
_ALWAYS_BOS = frozenset({"gemma4", "granite-embed-multi-311m"})
"""Splits of models that always need BOS."""
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}
"""Defaults for sentencepiece vocabularies."""
_NAMED_ENDS = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Tokens that end a text, if the metadata name none: the first one that exists."""
_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>"),
        *("<|calls|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>"),
        *("[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>"),
        *("<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    }
)
"""Texts of tokens that end a text in any vocabulary; llama.cpp's list."""


@dataclass(frozen=True, slots=True)
class TextVocabulary:
    """The tokens of a file."""

    tokens: list[str]  # their texts by id
    ids: dict[str, int]  # of the tokens, by text
    kinds: list[int]  # types of tokens; tokens that end a text are control tokens
    named: dict[str, int]  # ids by role: bos, eos, unknown, padding and others
    ends: frozenset[int]  # tokens that end a text


def read_vocabulary(metadata: Mapping[str, Any], num_rows: int, file: Path) -> TextVocabulary:
    found = metadata.get("tokenizer.ggml.tokens")
    if not found or not isinstance(found, list) or not isinstance(found[0], str):
        refuse(file, "tokenizer.ggml.tokens, the texts of tokens", "none")
    tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(found)]
    if len(tokens) > num_rows:
        refuse(file, f"at most {num_rows} tokens, as many as token_embd has", str(len(tokens)))
    ids = {text: number for number, text in enumerate(tokens)}
    if len(ids) < len(tokens):
        twice = Counter(tokens).most_common(1)[0][0]
        refuse(file, "every token once", f"{clipped(twice)} twice")
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not _are_numbers(kinds, len(tokens), int):
        refuse(file, f"tokenizer.ggml.token_type of {len(tokens)} tokens", clipped(kinds))
    named = dict(_SENTENCEPIECE_IDS) if metadata.get("tokenizer.ggml.model") == "llama" else {}
    for key, number in metadata.items():
        is_token = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if is_token and type(number) is int and 0 <= number < len(tokens):
            named[key.removeprefix("tokenizer.ggml.").removesuffix("_token_id")] = number
    return _with_end_tokens(tokens, ids, [*kinds[: len(tokens)]], named)


def _with_end_tokens(
    tokens: list[str], ids: dict[str, int], kinds: list[int], named: dict[str, int]
) -> TextVocabulary:
    """Finds the tokens that end a text, and makes them control tokens."""
    ends = {ids[text] for text in _ENDS if text in ids}
    for role, texts in _NAMED_ENDS.items():
        if role not in named and (present := [ids[text] for text in texts if text in ids]):
            named[role] = present[0]
            ends.add(present[0])
    for number in ends:
        kinds[number] = _CONTROL
    ends |= {named[role] for role in ("eos", "eot", "eom", *_NAMED_ENDS) if role in named}
    texts = {tokens[number] for number in ends}
    calls = "<|call|>" in texts or "<|calls|>" in texts
    if calls and ("<|return|>" in texts or "<|flush|>" in texts):
        # gpt-oss and Solar end every part of an answer with it
        ends.discard(ids.get("<|end|>", -1))
    if "</s>" in texts and not texts.isdisjoint(("<|tool_response>", "<|plamo:eos|>")):
        # these models use it as an HTML tag
        ends.discard(ids["</s>"])
        kinds[ids["</s>"]] = _NORMAL
    return TextVocabulary(tokens, ids, kinds, named, frozenset(ends))


def make_tokenizer(metadata: Mapping[str, Any], num_rows: int, file: Path) -> Any:
    """The `PreTrainedTokenizerFast` of a file; all its ids are tokens of the file."""
    vocabulary = read_vocabulary(metadata, num_rows, file)
    model, name = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model not in ("llama", "gpt2", "gemma4"):
        raise UnsupportedModelError(
            f"{one_line(str(file))}: expected tokenizer.ggml.model llama, gpt2 or gemma4, found "
            f"{clipped(model)}; no tokenizer is made of it here"
        )
    if model == "llama":
        made, adds_bos = _sentencepiece(metadata, vocabulary, file), True
    else:
        name = "gemma4" if model == "gemma4" else name
        if not isinstance(name, str):
            refuse(file, "tokenizer.ggml.pre, which says how text is split", "none")
        if name not in WORD_SPLITS:
            raise UnsupportedModelError(
                f"{one_line(str(file))}: tokenizer.ggml.pre is {clipped(name)}, a way to split "
                f"text that is not known here; {nearest(name, WORD_SPLITS)}"
            )
        split = WORD_SPLITS[name]
        made, adds_bos = _byte_pairs(metadata, vocabulary, split, file), split.adds_bos
    adds = {
        end: metadata.get(f"tokenizer.ggml.add_{end}_token", usual)
        for end, usual in (("bos", adds_bos), ("eos", False))
    }
    if model != "llama" and name in _ALWAYS_BOS:
        adds["bos"] = True
    for end, is_added in adds.items():
        if is_added and end not in vocabulary.named:
            refuse(file, f"{end}_token_id, as {end.upper()} is added to texts", "none")
    return _to_transformers(made, metadata, vocabulary, adds, file)


def _to_transformers(
    made: Any,
    metadata: Mapping[str, Any],
    vocabulary: TextVocabulary,
    adds: Mapping[str, bool],
    file: Path,
) -> Any:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    title = str(metadata.get("general.name", "")).lower()
    takes_spaces = "phi-3" in title or "phi3" in title
    named = [
        AddedToken(
            text,
            special=kind != _ADDED,
            normalized=False,
            rstrip=takes_spaces and text not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in _NAMED
    ]
    template = metadata.get("tokenizer.chat_template")
    roles = {
        f"{role}_token": vocabulary.tokens[vocabulary.named[key]]
        for role, key in _ROLES.items()
        if key in vocabulary.named
    }
    with blamed_on(f"{one_line(str(file))}: its tokenizer cannot be made"):
        made.add_tokens(named)
        return PreTrainedTokenizerFast(
            tokenizer_object=made,
            **roles,
            extra_special_tokens=[each.content for each in named if each.special],
            add_bos_token=bool(adds["bos"]),
            add_eos_token=bool(adds["eos"]),
            clean_up_tokenization_spaces=False,
            chat_template=template if isinstance(template, str) else None,
        )


def _byte_pairs(
    metadata: Mapping[str, Any], vocabulary: TextVocabulary, split: WordSplit, file: Path
) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    made = Tokenizer(
        models.BPE(
            vocabulary.ids,
            _merges(metadata, vocabulary.ids, file),
            ignore_merges=split.keeps_tokens,
            byte_fallback=split.is_raw,
        )
    )
    words: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
    if split.is_raw:
        made.normalizer = normalizers.Replace(" ", _SPACE)
        made.decoder = decoders.Sequence(
            [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        words.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        made.decoder = decoders.ByteLevel()
    made.pre_tokenizer = pre_tokenizers.Sequence(words)
    return made


def _merges(
    metadata: Mapping[str, Any], ids: Mapping[str, int], file: Path
) -> list[tuple[str, str]]:
    """The pairs of a file, without those of tokens that no text contains."""
    lines = metadata.get("tokenizer.ggml.merges")
    if not lines or not isinstance(lines, list) or not isinstance(lines[0], str):
        refuse(file, "tokenizer.ggml.merges, pairs of tokens", "none")
    merges: dict[tuple[str, str], None] = {}
    for line in lines:
        if (cut := line.find(" ", 1)) < 0:
            continue
        left, right = line[:cut], line[cut + 1 :]
        if left in ids and right in ids and left + right in ids:
            merges[left, right] = None
        elif left + right in ids or (left in ids and right in ids):
            refuse(file, "merges of tokens into tokens", f"{clipped(line)}, which has others")
    return [*merges]


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: TextVocabulary, file: Path) -> Any:
    """Merges any neighbours that form a token, the highest score first."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, ids = vocabulary.tokens, vocabulary.ids
    scores = metadata.get("tokenizer.ggml.scores", [])
    if not _are_numbers(scores, len(tokens), int, float):
        refuse(file, f"tokenizer.ggml.scores of {len(tokens)} tokens", clipped(scores))
    ways = {
        text: [
            (text[:cut], text[cut:])
            for cut in range(len(text) - 1, 0, -1)
            if text[:cut] in ids and text[cut:] in ids
        ]
        for text in tokens
    }
    runs = _tied_runs(vocabulary, scores, ways)
    merges: list[tuple[str, str]] = []
    ends: dict[tuple[float, str], str] = {}
    for number in sorted(range(len(tokens)), key=lambda at: (-scores[at], runs.get(tokens[at], 0))):
        text = tokens[number]
        merges += ways[text]
        if vocabulary.kinds[number] not in _NAMED:  # text is split at named tokens first
            ends |= {(scores[number], right): text for _, right in ways[text]}
    for left, right in merges:
        text = left + right
        other = ends.get((scores[ids[text]], left), text)
        is_tied = other != text and not runs.keys() >= {text, other}
        if is_tied and vocabulary.kinds[ids[text]] not in _NAMED:
            found = f"one for {clipped([other, text])}, so that a text decides which is made"
            refuse(file, "tokens of different scores", found)
    unknown = vocabulary.named.get("unknown")
    made = Tokenizer(
        models.BPE(
            ids,
            merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    to_spaces = normalizers.Replace(" ", _SPACE)
    decoding = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        made.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), to_spaces])
        decoding.append(decoders.Strip(" ", 1, 0))
    else:
        made.normalizer = to_spaces
    made.decoder = decoders.Sequence(decoding)
    return made


def _tied_runs(
    vocabulary: TextVocabulary, scores: list[float], ways: Mapping[str, list[tuple[str, str]]]
) -> dict[str, int]:
    """Tokens of 2, 3, ... 2^n equal characters with one score, by the order of their merges."""
    ids, runs = vocabulary.ids, dict[str, int]()
    for pair in (text for text in ids if len(text) == 2 and text[0] == text[1]):
        score, run = scores[ids[pair]], [pair]
        while (longer := run[-1] + pair[0]) in ids:
            run.append(longer)
        most, is_tied = len(run) + 1, all(scores[ids[text]] == score for text in run)
        is_plain = all(vocabulary.kinds[ids[text]] not in _NAMED for text in run)
        if is_tied and is_plain and most & (most - 1) == 0:
            runs |= {
                text: len(text) + (0 if len(text) & (len(text) - 1) == 0 else most) for text in run
            }
    for text, parts in ways.items():
        for part in itertools.chain.from_iterable(parts):
            if part in runs and text not in runs and scores[ids[text]] >= scores[ids[part]]:
                runs = {run: place for run, place in runs.items() if run[0] != part[0]}
    return runs


def _are_numbers(values: Any, least: int, *kinds: type) -> bool:
    return isinstance(values, list) and len(values) >= least and type(values[0]) in kinds
