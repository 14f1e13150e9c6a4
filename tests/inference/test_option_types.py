"""Options of `load` have types."""

import inspect
import re

import pytest

from moe_runtime.inference.loading import load


def test_options_of_a_wrong_type():
    """By the signature: a new option has a type too."""
    names = inspect.signature(load).parameters.keys() - {"path_or_id"}
    for name in names:
        with pytest.raises(TypeError) as caught:
            load("nowhere", **{name: object()})
        assert name == "group" or str(caught.value).startswith(f"{name} must be ")
    for option, complaint in (
        ({"max_tokens": "a"}, "max_tokens must be a whole number or None, got 'a'"),
        ({"max_tokens": True}, "max_tokens must be a whole number or None, got True"),
        ({"policy": 3}, "policy must be a text, got 3"),
        ({"prefetch": True}, "prefetch must be a text, got True"),
        ({"predictor": 5}, "predictor must be a text or a path, got 5"),
        ({"progress": 5}, "progress must be a function or None, got 5"),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(complaint)}$"):
            load("nowhere", **option)
    with pytest.raises(TypeError, match=r"^path_or_id must be a text or a path, got None$"):
        load(None)  # type: ignore[arg-type]
