"""Masks that take no memory equal those of transformers, and become such when they are used."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, GptOssConfig, StaticCache
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
    create_causal_mask,
    create_chunked_causal_mask,
    create_sliding_window_causal_mask,
    eager_mask,
    sdpa_mask,
)

from moe_runtime.inference.kv_cache import SeenKeys, as_seen_keys
from moe_runtime.kernels.native import native_library

pytestmark = pytest.mark.skipif(
    native_library() is None, reason="the native CPU library was not built (needs gcc)"
)
MAKERS = {
    "full": create_causal_mask,
    "window": create_sliding_window_causal_mask,
    "chunks": create_chunked_causal_mask,
}


def both(maker: str, adds: bool, mask: torch.Tensor | None, cache: Any, num_new: int, **more: Any):
    """The mask of transformers, and ours."""
    config = GptOssConfig(sliding_window=5, attention_chunk_size=4)
    of_theirs, theirs = ("eager", eager_mask) if adds else ("sdpa", sdpa_mask)
    AttentionMaskInterface.register("test_seen_keys", as_seen_keys(theirs, adds=adds))
    found = []
    with torch.inference_mode():
        for name in (of_theirs, "test_seen_keys"):
            config._attn_implementation = name
            rows = torch.zeros(2, num_new, 4, dtype=torch.bfloat16)
            found.append(MAKERS[maker](config, rows, mask, cache, **more))
    del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["test_seen_keys"]
    return found


def filled(kind: str, num_cached: int) -> Any:
    if kind == "none":
        return None
    config = GptOssConfig(num_hidden_layers=2, sliding_window=5)
    cache: Any = (
        StaticCache(config=config, max_cache_len=20)
        if kind == "static"
        else DynamicCache(config=config)
    )
    for layer in range(2) if num_cached else ():
        cache.update(*torch.zeros(2, 2, 8, num_cached, 64).unbind(), layer)
    return cache


@pytest.mark.parametrize("padded", ["no mask", "none", "left", "right"])
@pytest.mark.parametrize(
    ("kind", "num_cached"), [("none", 0), ("dynamic", 0), ("dynamic", 9), ("static", 3)]
)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("maker", ["full", "window"])
def test_masks_are_those_of_transformers(maker, adds, kind, num_cached, padded):
    length = num_cached + 7
    mask = None if padded == "no mask" else torch.ones(2, length, dtype=torch.long)
    if mask is not None and padded != "none":
        mask[1, 0 if padded == "left" else -1] = 0
    theirs, ours = both(maker, adds, mask, filled(kind, num_cached), 7)
    if theirs is None:
        assert ours is None
        return
    if kind != "static":
        assert isinstance(ours, SeenKeys) == (padded in ("no mask", "none"))
    assert ours.shape == theirs.shape
    assert torch.equal(ours + 0 if adds else ours | False, theirs)


@pytest.mark.parametrize("more", [{}, {"or_mask_function": lambda b, h, q, k: k < 3}])
def test_other_masks_are_made_by_transformers(more):
    maker = "full" if more else "chunks"
    theirs, ours = both(maker, False, None, filled("dynamic", 0) if more else None, 7, **more)
    assert not isinstance(ours, SeenKeys)
    assert torch.equal(ours, theirs)


def test_a_changed_mask_is_materialised():
    theirs, ours = both("window", True, None, None, 9)
    assert repr(ours).startswith("SeenKeys([2, 1, 9, 9]")
    with torch.inference_mode():
        for mask in (theirs, ours):
            mask[:, :, 3:, :4] = 1
            mask.view(2, 81)[0].mul_(0.5)
    assert ours.sight is None
    assert torch.equal(ours.made(), theirs)


def test_gradients_and_single_tokens_get_masks_of_transformers():
    make = as_seen_keys(sdpa_mask, adds=False)
    asked: dict[str, Any] = {"batch_size": 1, "kv_length": 6, "q_offset": 2}
    asked["mask_function"] = causal_mask_function
    assert not isinstance(make(q_length=4, **asked), SeenKeys)
    with torch.inference_mode():
        assert not isinstance(make(q_length=1, **asked), SeenKeys)
        assert isinstance(make(q_length=4, **asked), SeenKeys)
