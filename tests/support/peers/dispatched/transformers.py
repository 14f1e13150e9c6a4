"""Stands in for transformers with accelerate: a causal model whose cache is a sum."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from recorded_calls import note

utils = SimpleNamespace(logging=SimpleNamespace(disable_progress_bar=lambda: note("no_bar")))


class Output(dict[str, Any]):
    """By names, and by attributes, as that of a model."""

    __getattr__ = dict.__getitem__


class AutoModelForCausalLM:
    @classmethod
    def from_pretrained(cls, path: str, **options: Any) -> "AutoModelForCausalLM":
        note("from_pretrained", path, **options)
        return cls()

    def __call__(self, tokens: Any, *, cache: Any = None, use_cache: bool) -> Any:
        assert use_cache
        count, width = tokens.shape
        sums = tokens.sum(1) + (0 if cache is None else cache)
        logits = np.zeros((count, width, 97))
        logits[np.arange(count), -1, sums % 97] = 1
        return Output(logits=logits, cache=sums)
