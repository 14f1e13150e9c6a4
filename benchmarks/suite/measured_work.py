"""What results measured: numbers of two files stand side by side where that is the same.

The rest of the settings (threads, budgets, policies, how long it took) and the machine are what may
be compared.
"""

import re
from collections.abc import Mapping
from typing import Any

from moe_runtime.config import format_bytes

_LAYER = ("experts", "num_experts", "top_k", "dim_model", "dim_hidden", "dtype", "device")
_TEXT = (
    *("model", "layers", "weights", "prompt_tokens", "new_tokens"),
    *("followed_by", "device"),
)
_TRACE = ("model", "tokens", "layers", "experts", "top_k")
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "latency": _TEXT,
    "throughput": (*_TEXT, "batch"),
    "io": ("model", "expert_bytes", "experts"),
    "experts": (*_LAYER, "memory"),
    "layer": _LAYER,
    "ops": _LAYER,
    "training": (*_LAYER, "layers", "sequences", "context"),
    "ablation": (
        *("model", "steps", "sequences", "context", "device"),
        *("configuration", "seeds", "variants"),
    ),
    "policies": (*_TRACE, "scope", "side_by_side", "expert_size", "predictor", "train"),
    "predictors": (*_TRACE, "train", "test_share", "seed", "max_tokens", "side_by_side", "link"),
    "placements": (
        *(*_TRACE, "fit", "devices", "nodes", "replicas"),
        *("groups", "load_slack", "aligned", "time_limit_s"),
    ),
    "dispatch": ("ranks", "tokens", "dim", "experts", "top_k"),
    "kernels": ("dtype",),
    "device-decode": _TEXT,
    "device-training": ("model", "layers", "sequences", "context"),
    "serve": ("model", "prompt_tokens", "output_tokens", "chat", "ignore_eos"),
}
"""By case, the settings that say what was measured; other numbers of tokens are in metrics."""
_UNSAID = ("configuration", "seeds", "variants", "aligned", "load_slack", "time_limit_s")
"""Compared, and too long or too rarely given for a heading."""
_CPU = "the CPU"
_WORDS = {
    "weights": "{} weights",
    "prompt_tokens": "prompts of {} tokens",
    "new_tokens": "{} new tokens",
    "output_tokens": "{} new tokens",
    "followed_by": "the {}",
    "batch": "{} side by side",
    "side_by_side": "{} side by side",
    "expert_bytes": "experts of {} bytes",
    "experts": "E={}",
    "num_experts": "E={}",
    "memory": "{} bytes of experts",
    "top_k": "K={}",
    "dim_model": "D={}",
    "dim": "D={}",
    "dim_hidden": "F={}",
    "device": "on {}",
    "layers": "{} layers",
    "steps": "{} steps",
    "sequences": "{} sequences",
    "context": "of {} tokens",
    "tokens": "{} tokens",
    "ranks": "{} ranks",
    "devices": "{} devices",
    "expert_size": "experts of {}",
    "nodes": "{} nodes",
    "fit": "placed by {} of it",
    "train": "taught by {}",
    "predictor": "predicted by {}",
    "replicas": "{} replicas",
    "groups": "{} groups",
    "test_share": "{} of it held out",
    "seed": "seed {}",
    "max_tokens": "{} tokens of that",
    "chat": "chat",
    "ignore_eos": "to the last token",
}


def model_words(settings: Mapping[str, Any]) -> str:
    """The model that was measured: of a shape also how many of its layers."""
    words = [str(settings["model"])]
    if "layers" in settings:
        words.append(_layers(settings))
    if "weights" in settings:
        words.append(_WORDS["weights"].format(settings["weights"]))
    return ", ".join(words)


def work_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that say what a results file measured; of several lengths each one once."""
    settings = results["settings"]
    found = {name: settings.get(name) for name in _SETTINGS.get(results["case"], ())}
    if "device" in found:  # which GPU is the machine's
        found["device"] = "a GPU" if _is_on_gpu(settings) else _CPU
    return {
        name: _each_once(value) if isinstance(value, list) else value
        for name, value in found.items()
    }


def work_words(results: Mapping[str, Any]) -> str:
    """The same for people, in one line."""
    # There an expert is what is read, not one of a layer.
    known = _WORDS | ({"experts": "{} of them"} if results["case"] == "io" else {})
    words = []
    for name, value in work_of(results).items():
        if name == "layers" and value is not None:
            words.append(_layers(results["settings"]))
        elif name not in _UNSAID and value not in (None, False, [], _CPU):
            shown = " and ".join(map(str, value)) if isinstance(value, list) else str(value)
            words.append(counted(known.get(name, "{}"), shown))
    return ", ".join(words)


def heading_words(results: Mapping[str, Any]) -> str:
    """The work, and the memory that the systems were allowed: it may differ in what is compared,
    but numbers under one heading have it in common."""
    return ", ".join(filter(None, [work_words(results), *cap_words(results["settings"])]))


def cap_words(settings: Mapping[str, Any]) -> list[str]:
    """How much memory the systems were allowed; nothing where it was all there is."""
    cap = settings.get("cap_bytes")
    if cap is None:
        return []
    is_size = isinstance(cap, int) and 0 <= cap < 1 << 63  # in a file that somebody wrote, anything
    return [f"memory capped at {format_bytes(cap) if is_size else cap}"]


def device_words(results: Mapping[str, Any]) -> str:
    """Where systems computed."""
    settings, gpu = results["settings"], results["machine"].get("gpu")
    if not _is_on_gpu(settings):
        return f"on {_CPU}"
    return f"on {settings['device']}" + (f", {gpu}" if gpu else "")


def require_same_work(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuses results of different work.

    Raises:
        ValueError: something that says what was measured differs.
    """
    one, other = work_of(before), work_of(after)
    differing = [
        _difference(name, one[name], other[name]) for name in one if one[name] != other[name]
    ]
    if differing:
        raise ValueError(
            f"expected results of the same work, got {'; '.join(differing)}; measure one of them "
            "again, or lay them out with `bench report`, which keeps them apart"
        )


def counted(words: str, shown: object) -> str:
    """Words with a number in the place of ``{}``; of one thing without the plural's s."""
    one = re.sub(r"(\{\} [a-z ]+?)s\b", r"\1", words) if str(shown) == "1" else words
    return one.format(shown)


def _difference(name: str, one: Any, other: Any) -> str:
    """What differs; of tables the first key that does."""
    while isinstance(one, Mapping) and isinstance(other, Mapping):
        key = next(key for key in {**one, **other} if one.get(key) != other.get(key))
        name, one, other = f"{name}.{key}", one.get(key), other.get(key)
    return f"{name} {one!r} before, {other!r} after"


def _each_once(values: list[Any]) -> list[Any]:
    """Numbers in their order, each once; of a file that somebody wrote, whatever it has."""
    by_text = {repr(one): one for one in values}
    return [by_text[text] for text in sorted(by_text, key=lambda text: (len(text), text))]


def _is_on_gpu(settings: Mapping[str, Any]) -> bool:
    return str(settings.get("device") or "cpu").partition(":")[0] != "cpu"


def _layers(settings: Mapping[str, Any]) -> str:
    """``4 of 16 layers``, where the shape has more than were measured."""
    count, whole = settings["layers"], settings.get("layers_of_shape")
    shown = str(count) if whole in (None, count) else f"{count} of {whole}"
    return counted(_WORDS["layers"], shown)
