"""Attention of one query equals transformers' SDPA attention in fp64."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from moe_families import TABLE, is_oldest_version
from tiny_checkpoints import tiny_model
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moe_runtime.checkpoints import transformers_private
from moe_runtime.inference.cpu.attention import ATTENTION, attend, use_single_query_attention
from moe_runtime.inference.kv_cache import SeenKeys
from moe_runtime.kernels.decode_step.prompt_attention import Sight
from moe_runtime.kernels.native import native_library


class Layer(torch.nn.Module):
    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups
        self.is_causal = True


def inputs(dtype, *, heads=6, key_heads=2, queries=1, length=37, batch=2):
    query = torch.randn(batch, heads, queries, 16, dtype=dtype)
    key = torch.randn(batch, key_heads, length, 16, dtype=dtype)
    value = torch.randn(batch, key_heads, length, 24, dtype=dtype)
    return query, key, value


def masks(kind: str):
    allowed = torch.rand(2, 1, 1, 37) < 0.7
    allowed[..., -1] = True
    if kind == "none":
        return None, None
    if kind == "bool":
        return allowed, allowed
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    return added, added.double()


@pytest.mark.parametrize("mask", ["none", "bool", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_one_query_equals_fp64(mask, dtype, key_heads):
    layer = Layer(6 // key_heads)
    query, key, value = inputs(dtype, key_heads=key_heads)
    ours, theirs = masks(mask)
    with torch.inference_mode():
        found, _ = attend(layer, query, key, value, ours, scaling=0.3, dropout=0.0)
        wide = (query.double(), key.double(), value.double())
        exact, _ = sdpa_attention_forward(layer, *wide, theirs, scaling=0.3)
    assert found.shape == exact.shape
    assert found.dtype == dtype
    # values are averages of at most |value|, computed in fp32 and rounded once to the dtype
    bound = (2 * torch.finfo(dtype).eps + 1e-5) * value.abs().max()
    assert (found - exact).abs().max() < bound


@pytest.mark.parametrize("change", [{"mask": "bool"}, {"dtype": torch.float64}])
def test_other_calls_use_transformers_attention(change):
    layer = Layer(3)
    query, key, value = inputs(change.get("dtype", torch.float32), queries=3)
    mask, _ = masks(change.get("mask", "none"))
    with torch.inference_mode():
        found, _ = attend(layer, query, key, value, mask, scaling=0.3)
        expected, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["causal", "all", "window"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts_equal_fp64(dtype, kind):
    """A mask that is none, and one that a layer of another kind has none of."""
    layer = Layer(3)
    layer.is_causal = kind != "all"
    query, key, value = inputs(dtype, queries=37)
    mask = SeenKeys((2, 1, 37, 37), torch.bool, Sight(0, 5)) if kind == "window" else None
    with torch.inference_mode():
        found, _ = attend(layer, query, key, value, mask, scaling=0.3)
        assert mask is None or native_library() is None or mask.sight is not None
        wide = (query.double(), key.double(), value.double())
        made = None if mask is None else mask.made()
        exact, _ = sdpa_attention_forward(layer, *wide, made, scaling=0.3)
    assert found.shape == exact.shape
    assert found.dtype == dtype
    # averages of at most |value| by weights in the dtype, in fp32, rounded once to the dtype
    assert (found - exact).abs().max() < (torch.finfo(dtype).eps + 1e-5) * value.abs().max()


@pytest.mark.parametrize("mask", ["bool", "added"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_values_are_padded_to_the_width_of_keys(mask, dtype, monkeypatch):
    widths = set[tuple[int, int]]()

    def sdpa(module: object, query: Any, key: Any, value: Any, *rest: Any, **options: Any):
        widths.add((key.shape[3], value.shape[3]))
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    monkeypatch.setattr(transformers_private, "sdpa_attention_forward", sdpa)
    query, key, value = inputs(dtype, queries=5)
    value = value[..., :11]
    ours, theirs = masks(mask)
    ours = ours.to(dtype) if mask == "added" else ours
    with torch.inference_mode():
        found, _ = attend(Layer(3), query, key, value, ours, scaling=0.3)
        wide = (query.double(), key.double(), value.double())
        exact, _ = sdpa_attention_forward(Layer(3), *wide, theirs, scaling=0.3)
    assert widths == {(16, 16)}
    assert found.shape == exact.shape
    # averages of at most |value| by weights in the dtype, in fp32, rounded once to the dtype
    assert (found - exact).abs().max() < (torch.finfo(dtype).eps + 1e-5) * value.abs().max()


def test_other_options_reach_transformers(monkeypatch):
    passed: list[dict[str, object]] = []

    def sdpa(_: object, query: torch.Tensor, *__: object, **options: object):
        passed.append(options)
        return query, None

    monkeypatch.setattr(transformers_private, "sdpa_attention_forward", sdpa)
    query, key, value = inputs(torch.float32)
    with torch.inference_mode():
        attend(Layer(3), query, key, value, None, scaling=0.3, softcap=20.0)
        attend(Layer(3), query, key, value, None, scaling=0.3, softcap=None)
    plain = [] if native_library() is not None else [{"scaling": 0.3, "softcap": None}]
    assert passed == [{"scaling": 0.3, "softcap": 20.0}, *plain]


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Those of queries and keys that torch's attention is called with, as on a processor with
    matrix units."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    seen = set[tuple[int, int]]()

    def sdpa(module: object, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any):
        seen.add((query.shape[2], key.shape[2]))
        return sdpa_attention_forward(module, query, key, *rest, **options)

    monkeypatch.setattr(transformers_private, "sdpa_attention_forward", sdpa)
    return seen


@pytest.mark.parametrize("bias", ["none", "each", "for all keys"])
@pytest.mark.parametrize("kind", ["causal", "none", "bool", "added"])
@pytest.mark.parametrize(
    ("queries", "dtype"), [(2, torch.bfloat16), (36, torch.float16), (37, torch.bfloat16)]
)
def test_prompts_in_half_precision_have_few_lengths(dtype, queries, kind, bias, lengths):
    query, key, value = inputs(dtype, queries=queries)
    options: dict[str, Any] = {"scaling": 0.3, "is_causal": kind == "causal"}
    mask, wide_mask = masks("none" if kind == "causal" else kind)
    mask = mask.to(dtype) if kind == "added" else mask
    added = torch.randn(2, 6, queries, 37 if bias == "each" else 1, dtype=dtype)
    added, wide_added = (None, None) if bias == "none" else (added, added.double())
    wide = [t.double() for t in (query, key, value)]
    with torch.inference_mode():
        found, _ = attend(Layer(3), query, key, value, mask, position_bias=added, **options)
        exact, _ = sdpa_attention_forward(
            Layer(3), *wide, wide_mask, position_bias=wide_added, **options
        )
    assert lengths == {(64, 64)}
    assert found.shape == exact.shape
    assert found.dtype == dtype
    # averages of at most |value| by weights in the dtype, in fp32, rounded once to the dtype
    assert (found - exact).abs().max() < (torch.finfo(dtype).eps + 1e-5) * value.abs().max()


def test_a_fully_masked_query_averages_all_real_keys(lengths):
    query, key, value = inputs(torch.bfloat16, queries=3)
    mask = torch.full((1, 1, 3, 37), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
    with torch.inference_mode():
        found, _ = attend(Layer(3), query, key, value, mask, scaling=0.3)
    mean = value.double().mean(2).repeat_interleave(3, 1)[:, None].expand(-1, 3, -1, -1)
    assert (found - mean).abs().max() < torch.finfo(torch.bfloat16).eps * value.abs().max()


@pytest.mark.parametrize(("queries", "keys"), [(2, 1025), (38, 37), (1024, 1025)])
def test_long_contexts_keep_their_lengths(queries, keys, lengths):
    query, _, _ = inputs(torch.bfloat16, queries=queries, batch=1)
    _, key, value = inputs(torch.bfloat16, length=keys, batch=1)
    with torch.inference_mode():
        attend(Layer(3), query, key, value, None, scaling=0.3)
    assert lengths == {(queries, keys)}


def test_families_that_compare_the_attention_name_are_listed():
    """Every comparison of that name in transformers with more than eager attention."""
    compares = re.compile(r'_attn_implementation\s*(==|!=|in\b|not in\b)(?!\s*"eager")')
    models = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if compares.search(path.read_text("utf-8"))
    }
    known = transformers_private.DECIDE_BY_ATTENTION_NAME
    assert found <= known
    assert found == {name for name in known if (models / name).is_dir()} or is_oldest_version()


@pytest.mark.parametrize(("model_class", "is_ours"), [("Mixtral", True), ("DeepseekV32", False)])
def test_a_family_that_compares_the_attention_name_keeps_its_attention(model_class, is_ours):
    family = next(f for f in TABLE if f.model_class == f"{model_class}ForCausalLM")
    model: Any = tiny_model(family)
    before = model.config._attn_implementation
    use_single_query_attention(model)
    assert model.config._attn_implementation == (ATTENTION if is_ours else before)
