"""JSON from untrusted files: parsed strictly, within bounds of time and memory.

Also checks the values of ``config.json`` and ``generation_config.json`` that the runtime uses.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from moe_runtime.config import type_in_words
from moe_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


FETCH_OR_CORRECT = "fetch the checkpoint again, or correct the configuration"
"""Advice where a checkpoint's tensors and its configuration disagree."""

MAX_UINT64 = 2**64 - 1

_MAX_NUMBER_CHARS = 1000
_MAX_PATH_CHARS = 4096
# The densest sound input, tensors with the shortest names, has three brackets in 49 bytes. `[],[],`
# repeated would take over twenty times its size as Python lists.
_BYTES_PER_BRACKET = 12
_FREE_BRACKETS = 1000
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_CLIPPED = reprlib.Repr()
_CLIPPED.maxstring = 200


def parse_object(raw: bytes, *, has_infinity: bool = False) -> dict[str, Any]:
    """Parses a JSON object; raises `ValueError` for other values and as `parse_value` does."""
    value = parse_value(raw, has_infinity=has_infinity)
    if not isinstance(value, dict):
        raise ValueError(clipped(value))
    return value


def parse_value(raw: bytes, *, has_infinity: bool = False) -> Any:
    """Parses JSON more strictly than the safetensors package parses a header."""
    if raw.count(b"[") + raw.count(b"{") > len(raw) // _BYTES_PER_BRACKET + _FREE_BRACKETS:
        raise ValueError(f"{len(raw)} bytes of mostly brackets")
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=unique_keys,
            parse_int=_parse_integer,
            parse_float=_parse_real,
            parse_constant=_parse_infinity if has_infinity else _parse_constant,
        )
        if _SURROGATE_ESCAPE.search(text):
            # Half a surrogate pair cannot be encoded.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise ValueError("brackets nested too deeply") from error
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair, which is not text") from error
    return value


def nests_deeper(values: Iterable[object], depth: int) -> bool:
    """Whether lists and objects nest to more than ``depth`` levels."""
    level = list(values)
    for _ in range(depth):
        children: list[object] = []
        for value in level:
            if isinstance(value, dict):
                children.extend(value.values())
            elif isinstance(value, list):
                children.extend(value)
        if not children:
            return False
        level = children
    return True


def clipped(value: object) -> str:
    """A value as Python writes it, on one line and shortened, for a message."""
    return _CLIPPED.repr(value)


def one_line(text: str) -> str:
    """Escapes text that would break a message's line or a terminal; shortens it unless it is a
    path."""
    return text if text.isprintable() and len(text) <= _MAX_PATH_CHARS else clipped(text)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `json.loads`: refuses a key that occurs twice."""
    unique = dict(pairs)
    if len(unique) == len(pairs):
        return unique
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {clipped(key)} twice in one object")
        seen.add(key)
    return unique


def _parse_integer(text: str) -> int | float:
    # JSON readers in other languages read -0 and integers beyond 64 bits as real numbers.
    if len(text) <= len(str(MAX_UINT64)) and text != "-0":
        value = int(text)
        if value <= MAX_UINT64:
            return value
    return _parse_real(text)


def _parse_real(text: str) -> float:
    if len(text) > _MAX_NUMBER_CHARS:
        raise ValueError(f"a number of {len(text)} characters")
    value = float(text)
    if abs(value) > 1e308:
        raise ValueError(f"the number {clipped(text)}, beyond double precision")
    return value


def _parse_infinity(text: str) -> float:
    return _parse_constant(text) if text == "NaN" else float(text)


def _parse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text}, which JSON does not have")


_NO_DTYPE = re.compile(r"module 'torch' has no attribute ('.*')")
_FIELD = re.compile(r"Validation error for field '(\w+)'")
_ONE_TYPE = re.compile(r"expected (\w+), got \w+ \(value: (.*)\)")
_SOME_TYPES = re.compile(r"with value (.*) doesn't match any type in \((.*?)\)\.(?: |$)")
_LIST = re.compile(r"(list|tuple)\[(\w+)((?:, \w+)*)\]")
_TYPES = {kind.__name__: kind for kind in (bool, int, float, str)}
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}


def in_our_words(error: CheckpointError, file: Path) -> CheckpointError:
    """Rewords transformers' error about the type of a value: key, expectation and value."""
    reason = " ".join(str(error.__cause__).split())
    if unknown := _NO_DTYPE.fullmatch(reason):
        expected = "a floating-point type of torch, such as 'bfloat16'"
        return CheckpointError(f"{file}: expected dtype to be {expected}, found {unknown[1]:.80}")
    field = _FIELD.match(reason)
    if some := _SOME_TYPES.search(reason):
        names, found = re.split(r", (?![^\[]*\])", some[2]), some[1]
    elif one := _ONE_TYPE.search(reason):
        names, found = [one[1]], one[2]
    else:
        return error
    names = [re.sub(r"<class '(.*)'>", r"\1", name) for name in names]
    words = [_in_words(name) for name in names if not (name == "int" and "float" in names)]
    expected = " or ".join(dict.fromkeys(filter(None, words)))
    if field is None or not expected:
        return error
    found = _JSON_WORDS.get(found, f"{found:.80}")
    return CheckpointError(f"{file}: expected {field[1]} to be {expected}, found {found}")


def _in_words(name: str) -> str:
    """The JSON name of a type that transformers names; empty if there is none."""
    if found := _LIST.fullmatch(name):
        count = f"{found[3].count(',') + 1} " if found[3] or found[1] == "tuple" else ""
        kind = type_in_words(_TYPES[found[2]]).removeprefix("a ") if found[2] in _TYPES else "value"
        return f"a list of {count}{kind}s"
    if name == "dict" or name.startswith("transformers."):
        return "an object"
    if name == "NoneType":
        return "null"
    return type_in_words(_TYPES[name]) if name in _TYPES else ""


_MOST_LAYERS, _MOST_EXPERTS = 10_000, 50_000
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
TOP_KS = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "top_k_experts",
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SMALLEST = {
    **dict.fromkeys((*_LAYERS, *TOP_KS), 1),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "vocab_size"), 1),
    # Dense members of a family have none of these.
    **dict.fromkeys((*_EXPERTS, "intermediate_size", "moe_intermediate_size"), 0),
    "num_key_value_heads": 1,
    # 0 is sound: latent attention without rotated dimensions, and attention to all tokens.
    **dict.fromkeys(("head_dim", "sliding_window"), 0),
}
"""Sizes of a model and their smallest values; some are lists with one size for each layer."""

QUANTIZATION_NAMES = ("compression_config", "quantization_config")
_TEXTS = ("hidden_act", "rope_type")
_NUMBERS = (
    *("rope_theta", "rms_norm_eps", "layer_norm_eps"),
    *("factor", "attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings"),
)
_LISTS = ("mrope_section", "short_factor", "long_factor")

_WHOLE = frozenset(
    {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_beams", "top_k"}
    | {"no_repeat_ngram_size", "num_return_sequences", "num_beam_groups", "prefill_chunk_size"}
)
_REAL = frozenset(
    {"temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "max_time"}
    | {"repetition_penalty", "length_penalty", "diversity_penalty", "penalty_alpha"}
    | {"guidance_scale", "encoder_repetition_penalty"}
)
# Ranges of what a request may ask for; the first three apply only to sampling.
_RANGES = {
    "temperature": (1e-20, math.inf, "0, or at least 1e-20"),
    "top_p": (math.ulp(0.0), 1.0, "above 0 and at most 1"),
    "min_p": (0.0, 1.0, "from 0 to 1"),
    "repetition_penalty": (1e-20, 1e20, "from 1e-20 to 1e20"),
}
_FLAGS = frozenset(
    {"do_sample", "use_cache", "renormalize_logits", "remove_invalid_values", "token_healing"}
    | {"output_scores", "output_logits", "output_attentions", "output_hidden_states"}
    | {"return_dict_in_generate", "low_memory", "disable_compile"}
)
_TOKENS = frozenset(
    {"eos_token_id", "pad_token_id", "bos_token_id", "forced_bos_token_id", "forced_eos_token_id"}
    | {"decoder_start_token_id", "suppress_tokens", "begin_suppress_tokens"}
)


def check_config(values: dict[str, Any], file: Path) -> None:
    """Refuses a configuration with impossible sizes, at any depth."""
    if not isinstance(kind := values.get("model_type"), str):
        _refuse(file, "model_type", "the name of an architecture, such as 'olmoe'", kind)
    for part in _parts(values):
        for name in _TEXTS:
            if not isinstance(part.get(name), str | None):
                _refuse(file, name, "a name", part[name])
        for name in QUANTIZATION_NAMES:
            if not isinstance(part.get(name), dict | None):
                _refuse(file, name, "an object, or left out of plain weights", part[name])
        for name in _NUMBERS:
            if not all(one is None or _is_real(one) for one in _each(part.get(name))):
                _refuse(file, name, "a number", part[name])
        for name in _LISTS:  # some are first used in the forward pass
            value = part.get(name)
            if value is not None and not (isinstance(value, list) and all(map(_is_real, value))):
                _refuse(file, name, "a list of numbers", value)
        if part.get("return_dict") is False:
            _refuse(file, "return_dict", "true, which transformers' models rely on", False)
        for name, smallest in _SMALLEST.items():
            value = part.get(name)
            for size in _each(value):
                if size is not None and (type(size) is not int or size < smallest):
                    _refuse(file, name, f"a whole number of at least {smallest}", value)
            most = _MOST_LAYERS if name in _LAYERS else _MOST_EXPERTS
            if name in (*_LAYERS, *_EXPERTS) and max(_counts(part, (name,)), default=0) > most:
                _refuse(file, name, f"at most {most}", value)
        classes = part.get("architectures") or []
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            _refuse(file, "architectures", "a list of class names", classes)
        num_experts = max(_counts(part, _EXPERTS), default=None)
        for name in TOP_KS:
            top_k = max(_counts(part, (name,)), default=0)
            if num_experts is not None and top_k > num_experts:
                _refuse(file, name, f"at most the {num_experts} experts", part[name])


def check_layers(config: PreTrainedConfig, names: Iterable[str], file: Path) -> None:
    """Refuses more layers than the numbers in the tensors' names allow."""
    numbers = (re.findall(r"(?:^|\.)(\d{1,9})(?=\.|$)", name) for name in names)
    highest = max((int(number) for found in numbers for number in found), default=0)
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if isinstance(num_layers, int) and num_layers > highest + 1:
        expected = f"at most {highest + 1}, the highest number in a tensor's name and one"
        _refuse(file, "num_hidden_layers", expected, num_layers)


@contextlib.contextmanager
def named_lookup(config: PreTrainedConfig) -> Iterator[None]:
    """Names the setting whose value transformers does not know, or a number that is null."""
    try:
        yield
    except KeyError as error:
        for part in _parts(config.to_dict()):
            for key, value in part.items():
                if isinstance(value, str) and (value,) == error.args:
                    reason = f"transformers knows no {key} {clipped(value)}"
                    raise ValueError(reason) from error
        raise
    except TypeError as error:
        for part in _parts(config.to_dict()):
            for name in _EXPERTS:
                if part.get(name, 0) is None:
                    raise ValueError(f"expected {name} to be a whole number, found null") from error
        raise


def check_generation_settings(values: dict[str, Any], file: Path) -> None:
    """Refuses generation settings with wrong types or out of range."""
    greedy = values.get("do_sample") is not True or values.get("temperature") == 0
    for name, value in values.items():
        if value is None:
            continue
        if name in _WHOLE and not (type(value) is int and 0 <= value < 2**31):
            _refuse(file, name, "a whole number", value)
        if name in _REAL and not _is_real(value):
            _refuse(file, name, "a number", value)
        if name in _RANGES and not (greedy and name != "repetition_penalty"):
            low, high, words = _RANGES[name]
            if not low <= value <= high:
                _refuse(file, name, words, value)
        if name in _FLAGS and not isinstance(value, bool):
            _refuse(file, name, "true or false", value)
        if name in _TOKENS:
            ids = value if isinstance(value, list) and value else [value]
            if not all(type(item) is int and -(2**31) <= item < 2**31 for item in ids):
                _refuse(file, name, "the number of a token, or a list of them", value)


def _parts(value: Any) -> Iterator[dict[str, Any]]:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)


def _counts(part: dict[str, Any], names: Iterable[str]) -> Iterator[int]:
    for name in names:
        yield from (value for value in _each(part.get(name)) if type(value) is int)


def _each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_real(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= 1e308 and math.isfinite(value)


def _refuse(file: Path, name: str, expected: str, found: Any) -> None:
    raise CheckpointError(f"{file}: expected {name} to be {expected}, found {clipped(found)}")
