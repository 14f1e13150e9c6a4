"""Latent attention: on the latents where that is fewer products, else of expanded keys."""

import copy
import gc
import weakref
from typing import Any

import moe_families
import pytest
import torch
from tiny_checkpoints import tiny_model
from transformers import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from moe_runtime.inference.cpu import attention as latent_attention
from moe_runtime.inference.cpu.attention import attend, use_single_query_attention
from moe_runtime.inference.cpu.step_layers import use_small_batch_layers
from moe_runtime.kernels.native import native_library

NAMES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")
needs_native = pytest.mark.skipif(
    native_library() is None, reason="the native CPU library was not built (needs gcc)"
)


@pytest.fixture(scope="module", params=NAMES)
def models(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """transformers' own, and one whose attention is ours."""
    (family,) = [f for f in moe_families.FAMILIES if str(f) == request.param]
    own = tiny_model(family)
    ours = copy.deepcopy(own)
    use_small_batch_layers(ours)
    use_single_query_attention(ours)
    return own, ours


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many queries were computed on latents, call by call."""
    calls: list[int] = []
    real = latent_attention.native_latent_attention

    def counting(query: torch.Tensor, *rest: Any) -> torch.Tensor | None:
        mixed = real(query, *rest)
        if mixed is not None:
            calls.append(len(query))
        return mixed

    monkeypatch.setattr(latent_attention, "native_latent_attention", counting)
    return calls


def logits(model: Any, ids: torch.Tensor, sizes: tuple[int, ...], **options: Any) -> torch.Tensor:
    """Of a text that goes through a model in pieces of these sizes."""
    cache, found, done = DynamicCache(config=model.config), [], 0
    with torch.inference_mode():
        for size in sizes:
            piece = ids[:, done : done + size]
            done += size
            given = {name: option[:, :done] for name, option in options.items()}
            found.append(model(input_ids=piece, past_key_values=cache, **given).logits)
    return torch.cat(found, dim=1)


def layer_of(model: Any) -> Any:
    return model.model.layers[1].self_attn


@needs_native
@pytest.mark.parametrize("is_padded", [False, True])
def test_a_text_in_pieces_has_the_logits_of_transformers(models, absorbed, is_padded):
    own, ours = models
    ids = torch.randint(3, 96, (3, 32), generator=torch.Generator().manual_seed(1))
    options = {}
    if is_padded:
        options["attention_mask"] = (torch.arange(32) >= torch.tensor([[0], [4], [9]])).long()
    sizes = (14, 1, 1, 2, 1, 1, 12)
    expected = logits(own, ids, sizes, **options)
    found = logits(ours, ids, sizes, **options)
    if is_padded:  # tokens without keys have no defined result
        seen = options["attention_mask"].bool()
        expected, found = expected[seen], found[seen]
    # fp32 on both sides, see test_families
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    # three layers; pieces of 14 and 12 tokens take fewer products if keys are expanded
    assert absorbed == [3] * 6 + [6] * 3 + [3] * 6


@needs_native
@pytest.mark.parametrize("num_new", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_in_half_precision_sums_are_fp32(models, absorbed, dtype, num_new):
    layer = copy.deepcopy(layer_of(models[1])).to(dtype)
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    query, latents, turned = random(2, 4, num_new, 16), random(2, 1, 37, 16), random(2, 1, 37, 8)
    mask = torch.rand(2, 1, num_new, 37, generator=generator) < 0.7
    mask[..., -num_new:] = True
    wide = copy.deepcopy(layer_of(models[0])).to(dtype).double()
    with torch.inference_mode():
        keys, values = layer.expand_kv(latents, turned)
        found, _ = attend(layer, query, keys, values, mask, scaling=0.3)
        exact_keys, exact_values = wide.expand_kv(latents.double(), turned.double())
        exact, _ = sdpa_attention_forward(
            wide, query.double(), exact_keys, exact_values, mask, scaling=0.3
        )
        assert found.dtype == dtype
        # an average of values, computed in fp32 and rounded once to the type
        bound = (torch.finfo(dtype).eps + 1e-5) * exact_values.abs().max()
        assert (found - exact).abs().max() < bound
        assert absorbed == [2 * num_new]
        assert keys.shape == exact_keys.shape  # a reader gets them
        halved, _ = attend(layer, query, keys, values.mul(0.5), mask, scaling=0.3)
        assert torch.allclose(2 * halved, found, atol=30 * bound)
        assert absorbed == [2 * num_new]


@needs_native
def test_observed_or_changed_layers_are_expanded(models, absorbed):
    """Adapters are hooks; gradients flow through expanded keys."""
    ids = torch.randint(3, 96, (1, 9), generator=torch.Generator().manual_seed(3))

    def hook(_: object, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
        return out + 0.3 * args[0].mean(-1, keepdim=True)

    found = []
    for model in models:
        plain = logits(model, ids, (7, 1, 1))
        handles = [b.self_attn.kv_b_proj.register_forward_hook(hook) for b in model.model.layers]
        absorbed.clear()
        found.append(logits(model, ids, (7, 1, 1)))
        for handle in handles:
            handle.remove()
        assert absorbed == []
        assert not torch.allclose(found[-1], plain, atol=1e-2)
    assert torch.allclose(*found, atol=1e-5 * float(found[0].abs().max()))
    layer = layer_of(models[1])
    latents = torch.randn(1, 1, 5, 16, requires_grad=True)
    query, turned = torch.randn(1, 4, 1, 16), torch.randn(1, 1, 5, 8)
    attend(layer, query, *layer.expand_kv(latents, turned), None, scaling=1.0)[0].sum().backward()
    assert latents.grad is not None
    assert absorbed == []


def test_expanded_keys_are_freed_after_the_pass(models, monkeypatch):
    """Without Python looking for cycles: keys of a long prompt are many times its latents."""
    made = []
    real = latent_attention.ExpandLatents.expanded

    def expanded(*arguments: Any) -> Any:
        pair = real(*arguments)
        made.extend(map(weakref.ref, pair))
        return pair

    monkeypatch.setattr(latent_attention.ExpandLatents, "expanded", expanded)
    gc.disable()
    try:
        logits(models[1], torch.randint(3, 96, (1, 20)), (20,))
        assert len(made) == 2 * len(models[1].model.layers)
        assert not any(part() is not None for part in made)
    finally:
        gc.enable()


def test_an_unknown_expansion_is_kept(models, absorbed):
    own, ours = (copy.deepcopy(model) for model in models)

    class Other(type(layer_of(own))):
        def expand_kv(self, *cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = super().expand_kv(*cached)
            return torch.nn.functional.normalize(keys, dim=-1), values

    for model in (own, ours):
        for block in model.model.layers:
            block.self_attn.__class__ = Other
    latent_attention.use_latents(ours)
    ids = torch.randint(3, 96, (1, 9), generator=torch.Generator().manual_seed(4))
    expected = logits(own, ids, (7, 1, 1))
    assert (logits(ours, ids, (7, 1, 1)) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert absorbed == []


def test_another_attention_gets_keys_and_values(models):
    ours = copy.deepcopy(models[1])
    layer = layer_of(ours)
    assert layer.expand_kv._layer is layer
    ours.set_attn_implementation("sdpa")
    keys, values = layer.expand_kv(torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 8))
    assert isinstance(keys, torch.Tensor)
    assert isinstance(values, torch.Tensor)
