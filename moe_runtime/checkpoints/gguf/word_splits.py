"""How GGUF files name the ways to split a text into words, within which pairs are merged.

Names and words are those of llama.cpp; the expressions are written for Oniguruma. Each expression
of a list splits what the ones before it left, and text between matches is a word too.

llama.cpp is followed where it differs from the model's first tokenizer: letters beyond ASCII count
as upper and as lower case, and marks (category M) are letters only where an expression says so. The
one exception are code points that are new in Unicode 16: they have their categories here, as in
`tokenizers`, and none in llama.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WordSplit:
    """How a kind of vocabulary splits text."""

    expressions: tuple[str, ...]  # applied one after another
    keeps_tokens: bool = False  # a word that is a token stays whole, whatever its merges
    adds_bos: bool = False  # where the file does not say
    # words are merged from characters, with a mark for the space, and not from bytes
    is_raw: bool = False


_ENDINGS = r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"  # english contractions
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
"""Text before the first digits goes with them, as in llama.cpp."""
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ud7ff\ue000-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\u1100-\u11ff]+"
)
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅ"
    "Ὀ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
    "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
"""Letters that have a case, in the Unicode of the first DeepSeek models."""


def _words(
    digits: str,
    *,
    endings: str = _ENDINGS + "|",
    letters: str = r"\p{L}+",
    marks: str = r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    lines: str = _LINES,
    spaces: str = _SPACES,
) -> str:
    """An expression in the manner of Llama 3: an ending, a word, digits, marks, lines, spaces."""
    return f"{endings}{_LEAD}{letters}|{digits}|{marks}|{lines}{spaces}"


def _cased_words(digits: str, letters: str, endings: str, *, has_case: bool = True) -> str:
    """One in the manner of GPT-4o: a word ends where capitals follow small letters."""
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
"""By the name that a file gives as `tokenizer.ggml.pre`."""
