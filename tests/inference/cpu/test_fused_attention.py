"""Attention layers fused for single tokens give the bits of their own way, or are left alone."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_layers import Model
from moe_families import TABLE
from tiny_checkpoints import tiny_model
from torch import Tensor
from transformers import DynamicCache
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention

import moe_runtime.inference.cpu.step_layers as fused
from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.inference.cpu.attention import (
    ATTENTION,
    EAGER_ATTENTION,
    use_single_query_attention,
)
from moe_runtime.inference.cpu.step_layers import use_small_batch_layers
from moe_runtime.inference.kv_cache import give_room, grow_cache_in_place
from moe_runtime.kernels.linear import native_row_limit
from moe_runtime.kernels.native import native_library

pytestmark = pytest.mark.skipif(
    native_library() is None, reason="the native CPU library was not built (needs gcc)"
)


def make(kind: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    torch.manual_seed(0)
    model = Model(kind)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * parameter.shape[-1] ** -0.5
    model.to(dtype).eval().requires_grad_(False)
    use_small_batch_layers(model)
    use_single_query_attention(model)
    assert model.layer.config._attn_implementation in {ATTENTION, EAGER_ATTENTION}
    fused.fuse_attention_layers(model)
    return model


def run(model: Model, forward, *, steps: int = 6, batch: int = 2, masked: bool = False, **options):
    """A prompt of 5 tokens and some single ones; returns the outputs, and the cache."""
    generator = torch.Generator().manual_seed(1)
    layer, cache, outputs = model.layer, DynamicCache(), []
    give_room(cache)
    dtype, dim = layer.o_proj.weight.dtype, model.num_angles
    for step in range(steps):
        length = 1 if step else 5
        x = torch.randn(batch, length, 48, generator=generator).to(dtype)
        angles = [torch.randn(batch, length, dim, generator=generator).to(dtype) for _ in "cs"]
        mask = None
        if masked:
            mask = torch.ones(batch, 1, length, 5 + step, dtype=torch.bool).tril(step)
            mask[0, ..., :2] = False
            mask[..., -1:] = True
            if model.config._attn_implementation == "eager":
                lowest = torch.finfo(dtype).min
                mask = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, lowest)
        with torch.inference_mode():
            out, _ = forward(
                hidden_states=x,
                position_embeddings=tuple(angles),
                attention_mask=mask,
                **{cache_name(type(layer).forward): cache},
                **options,
            )
        outputs.append(out)
    return [*outputs, cache.layers[0].keys, cache.layers[0].values]


def own_way(model: Model):
    return lambda **kwargs: type(model.layer).forward(model.layer, **kwargs)


def are_fused(num_sequences: int, model: Any) -> bool:
    """Whether the kernel is meant to take so many rows: without vectors, torch is faster."""
    library = native_library()
    assert library is not None
    return num_sequences <= native_row_limit(library, next(model.parameters()).dtype)


@pytest.fixture
def fused_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch sizes of the fused calls made."""
    seen: list[int] = []
    kernel = fused.attention_step

    def count(x, *arguments):
        seen.append(len(x))
        return kernel(x, *arguments)

    monkeypatch.setattr(fused, "attention_step", count)
    return seen


@pytest.fixture
def fused_prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Sequences and tokens of the prompts whose heads the kernel made."""
    seen: list[tuple[int, int]] = []
    kernel = fused.attention_heads

    def count(query, *arguments):
        seen.append((query.shape[0], query.shape[1]))
        return kernel(query, *arguments)

    monkeypatch.setattr(fused, "attention_heads", count)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["olmoe", "qwen2", "qwen3", "gpt_oss"])
def test_the_usual_layers_are_fused_and_keep_their_bits(kind, dtype, fused_steps, fused_prompts):
    model = make(kind, dtype)
    # how torch adds squares of several rows in fp32, and takes their roots, differs by processor
    may_differ = dtype is torch.float32 and kind in {"olmoe", "qwen3"}
    for masked in (False, True):
        fused_steps.clear()
        fused_prompts.clear()
        found = run(model, model.layer, masked=masked)
        takes_prompts = are_fused(1, model) and not may_differ
        assert fused_prompts.count((2, 5)) == int(takes_prompts)
        # the first token finds no room behind the prompt
        assert fused_steps.count(2) == (4 if are_fused(2, model) else 0)
        expected = run(model, own_way(model), masked=masked)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["clipped", "own", "without angles"])
def test_other_layers_are_not_fused(kind, fused_steps, fused_prompts):
    model = make(kind)
    for masked in (False, True):
        found, expected = (run(model, way, masked=masked) for way in (model.layer, own_way(model)))
        assert fused_steps.count(2) == 0
        assert fused_prompts.count((2, 5)) == 0
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def patch_part(model: Model) -> None:
    model.layer.o_proj.forward = lambda x: torch.nn.functional.linear(x, model.layer.o_proj.weight)


CHANGES = {
    "hook": lambda m: m.layer.k_proj.register_forward_hook(lambda *_: None),
    "part": lambda m: setattr(m.layer, "v_proj", torch.nn.Linear(48, 20, dtype=torch.bfloat16)),
    "patched part": patch_part,
    "attention": lambda m: setattr(m.config, "_attn_implementation", "sdpa"),
    "weight": lambda m: setattr(m.layer.q_proj.weight, "data", 2 * m.layer.q_proj.weight.data),
    # sees the second result of a layer with sinks: its weights
    "watch": lambda m: m.layer.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_layer_uses_its_own_forward(change, fused_steps, fused_prompts):
    model = make("gpt_oss" if change == "watch" else "qwen3")
    run(model, model.layer)
    CHANGES[change](model)
    fused_steps.clear()
    fused_prompts.clear()
    found = run(model, model.layer)
    assert fused_steps.count(2) == 0
    assert fused_prompts.count((2, 5)) == 0
    for one, other in zip(found, run(model, own_way(model)), strict=True):
        assert torch.equal(one, other)


def fewer_heads(model: Model) -> None:
    """The first key head and its queries alone; every weight still begins where it did."""
    dim = model.layer.head_dim
    for name, rows in (("q_proj", 2 * dim), ("k_proj", dim), ("v_proj", dim)):
        part = getattr(model.layer, name)
        part.weight.data, part.out_features = part.weight.data[:rows], rows
    part = model.layer.o_proj
    part.weight.data, part.in_features = part.weight.data[:, : 2 * dim], 2 * dim


def data(of: Callable[[Model], Tensor], change: Callable[[Tensor], Tensor]) -> Any:
    return lambda model: setattr(of(model), "data", change(of(model).data))


SETTINGS = {
    "scale": ("qwen3", lambda m: setattr(m.layer, "scaling", 0.01)),
    "epsilon": ("qwen3", lambda m: setattr(m.layer.k_norm, "eps", 3.0)),
    "clipping": ("olmoe", lambda m: setattr(m.config, "clip_qkv", 0.1)),
    "turned weight": ("olmoe", data(lambda m: m.layer.o_proj.weight, Tensor.t)),
    "heads": ("qwen3", fewer_heads),
    "sinks": ("gpt_oss", data(lambda m: m.layer.sinks, lambda sinks: sinks + 1)),
    "scale with sinks": ("gpt_oss", lambda m: setattr(m.layer, "scaling", 0.01)),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_current_settings_of_a_layer_count(setting):
    """Nothing that the fused step was made of is remembered longer than it holds."""
    kind, change = SETTINGS[setting]
    model = make(kind)
    before = run(model, model.layer)
    change(model)
    found = run(model, model.layer)
    for one, other in zip(found, run(model, own_way(model)), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[5], before[5])


def patched_class(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Qwen3MoeAttention.forward
    monkeypatch.setattr(Qwen3MoeAttention, "forward", lambda *a, **k: (2 * own(*a, **k)[0], None))


class Doubled:
    """Called like a function, and has nothing else of one."""

    def __init__(self, own) -> None:
        self.own = own

    def __call__(self, *args, **kwargs):
        return 2 * self.own(*args, **kwargs)[0], None


def patched_by_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3MoeAttention, "forward", Doubled(Qwen3MoeAttention.forward))


def patched_function(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "transformers.models.qwen3_moe.modeling_qwen3_moe"
    monkeypatch.setattr(f"{module}.apply_rotary_pos_emb", lambda q, k, *_: (2 * q, k))


@pytest.mark.parametrize("patch", [patched_class, patched_by_an_object, patched_function])
def test_replaced_code_of_a_family_is_called(patch, monkeypatch, fused_steps):
    model = make("qwen3")
    before = run(model, model.layer)
    with monkeypatch.context() as patches:
        patch(patches)
        fused_steps.clear()
        found = run(model, model.layer)
        assert fused_steps.count(2) == 0
        for one, other in zip(found, run(model, own_way(model)), strict=True):
            assert torch.equal(one, other)
        assert not torch.equal(found[5], before[5])
    for one, other in zip(run(model, model.layer), before, strict=True):
        assert torch.equal(one, other)


def test_training_gradients_and_options_use_the_own_forward(fused_steps):
    model = make("qwen3", torch.float32)
    run(model, model.layer, output_attentions=True)
    assert fused_steps.count(2) == 0
    x = torch.randn(1, 1, 48, requires_grad=True)
    angles = (torch.randn(1, 1, 10), torch.randn(1, 1, 10))
    out, _ = model.layer(x, angles, None)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert torch.isfinite(gradient).all()
    model.layer.train()
    run(model, model.layer)
    assert fused_steps.count(2) == 0


def test_weights_written_in_place_count_and_copies_stand_alone(fused_steps):
    model = make("olmoe")
    run(model, model.layer)
    state = {name: torch.randn_like(value) * 0.1 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    fused_steps.clear()
    found = run(model, model.layer)
    assert fused_steps.count(2) == (4 if are_fused(2, model) else 0)
    for one, other in zip(found, run(model, own_way(model)), strict=True):
        assert torch.equal(one, other)
    twin = copy.deepcopy(model)
    twin.layer.q_proj.weight.data.zero_()
    for one, other in zip(run(model, model.layer), found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(run(twin, twin.layer)[1], found[1])
    assert set(model.state_dict()) == set(Model("olmoe").state_dict())


def test_too_many_sequences_use_the_own_forward(fused_steps, monkeypatch):
    library = native_library()
    assert library is not None
    most = min(16, native_row_limit(library, torch.bfloat16))  # 16 where the processor has AMX
    monkeypatch.setattr(fused, "native_row_limit", lambda *_: most)
    model = make("qwen3")
    for batch in (most, most + 1):
        found = run(model, model.layer, batch=batch, steps=3)
        for one, other in zip(found, run(model, own_way(model), batch=batch, steps=3), strict=True):
            assert torch.equal(one, other)
    assert most in fused_steps
    assert most + 1 not in fused_steps


def test_every_layer_of_a_model_with_sinks_and_sliding_windows_is_fused(fused_steps):
    """Windows of 8 tokens move through their room; the bits are those of the layers' own way."""
    models: list[Any] = []
    for fuses in (True, False):
        family = next(family for family in TABLE if family.folder == "gpt_oss")
        models.append(tiny_model(family).to(torch.bfloat16).requires_grad_(False))
        use_small_batch_layers(models[-1])
        use_single_query_attention(models[-1])
        if fuses:
            fused.fuse_attention_layers(models[-1])
            grow_cache_in_place(models[-1])
    ids = torch.randint(3, 96, (2, 90), generator=torch.Generator().manual_seed(0))
    caches = [DynamicCache(config=model.config) for model in models]
    for first in range(86):
        tokens = ids[:, :5] if first == 0 else ids[:, first + 4 : first + 5]
        with torch.inference_mode():
            ours, theirs = (
                model(tokens, past_key_values=cache).logits
                for model, cache in zip(models, caches, strict=True)
            )
        assert torch.equal(ours, theirs)
    assert models[0].config.sliding_window == 8
    assert set(models[0].config.layer_types) == {"sliding_attention", "full_attention"}
    # room is made behind the prompt and for the 33rd token after that; 66 and 67 tokens later again
    assert fused_steps.count(2) == (3 * (85 - 3) if are_fused(2, models[0]) else 0)
