"""Attention with sinks equals transformers' own, and keeps no code for the lengths it meets."""

import copy
import dataclasses
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from moe_families import FAMILIES as INSTALLED
from tiny_checkpoints import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, DynamicCache, StaticCache

from moe_runtime.checkpoints import transformers_private
from moe_runtime.inference.budget import resident_bytes
from moe_runtime.inference.cpu import attention as eager_attention
from moe_runtime.inference.cpu.attention import LayerConfig, use_single_query_attention
from moe_runtime.inference.cpu.step_layers import use_small_batch_layers
from moe_runtime.kernels.linear import native_row_limit
from moe_runtime.kernels.native import native_library

OF_PROMPTS = "_fused_with_sinks" if native_library() is None else "_of_prompt"
WITH_SINKS = {"gpt_oss", "flint", "granitemoe_swa", "mimo_v2_flash", "deepseek_v4"}
WITH_SINKS |= {"openai_privacy_filter", "hy_v4"}
FAMILIES = {row.folder: row for row in INSTALLED if row.folder in WITH_SINKS | {"inkling2"}}


def pair(
    folder: str, dtype: torch.dtype = torch.float32, config: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """A tiny model with the attention that it came with, and one with ours."""
    family = FAMILIES[folder]
    family = dataclasses.replace(family, config=family.config | (config or {}))
    theirs: Any = tiny_model(family).to(dtype).requires_grad_(False)
    wide = transformers_private.dtype_plan(theirs, dtype)  # of the loaded model, which has some
    for name, parameter in theirs.named_parameters():
        if any(re.search(pattern.replace("*", ".*"), name) for pattern in wide):
            parameter.data = parameter.data.float()
    ours = copy.deepcopy(theirs)
    use_single_query_attention(ours)
    return theirs, ours


def attention_layers(model: Any) -> list[Any]:
    return [
        layer
        for layer in model.modules()
        if not hasattr(layer, "layers") and isinstance(vars(layer).get("config"), LayerConfig)
    ]


@pytest.fixture
def is_called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which attention computed, call by call: the native one, torch's fused one, or their own."""
    calls: list[str] = []
    for name in ("single_query_attention", "_of_prompt", "_fused_with_sinks", "_own_attention"):
        function = getattr(eager_attention, name)

        def count(*arguments, _function=function, _name=name, **options):
            found = _function(*arguments, **options)
            if found is not None:
                calls.append(_name)
            return found

        monkeypatch.setattr(eager_attention, name, count)
    return calls


@pytest.fixture
def keeps_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor with instructions for half precision, for which torch makes code."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(eager_attention, "keeps_code", lambda x: x.dtype != torch.float32)


def masks(dtype: torch.dtype, queries: int, length: int) -> torch.Tensor:
    """Two sequences, one padded on the left so far that its first queries see nothing."""
    allowed = torch.ones(2, 1, queries, length, dtype=torch.bool).tril(length - queries)
    allowed[0, ..., :4] = False
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)


@pytest.mark.parametrize(
    ("queries", "dtype"),
    [(1, torch.bfloat16), (7, torch.float16), (1, torch.float32), (7, torch.bfloat16)],
)
@pytest.mark.parametrize("folder", sorted(WITH_SINKS & FAMILIES.keys()))
def test_a_layer_equals_its_own_attention_in_fp64(folder, queries, dtype, keeps_code, is_called):
    _, model = pair(folder)
    layer = next(layer for layer in attention_layers(model) if layer.sinks is not None)
    is_called.clear()
    own = vars(eager_attention.sys.modules[type(layer).__module__])["eager_attention_forward"]
    heads, groups = len(layer.sinks), layer.num_key_value_groups
    query = torch.randn(2, heads, queries, 8, dtype=dtype) * 2
    key, value = (torch.randn(2, heads // groups, 11, width, dtype=dtype) for width in (8, 6))
    with torch.inference_mode():
        found, weights = eager_attention.attend_eagerly(
            layer, query, key, value, masks(dtype, queries, 11), scaling=0.3, s_aux=layer.sinks
        )
        wide = [part.double() for part in (query, key, value, masks(dtype, queries, 11))]
        exact, _ = own(copy.deepcopy(layer).double(), *wide, scaling=0.3)
    native = queries == 1 and native_library() is not None
    assert is_called == ["single_query_attention" if native else "_fused_with_sinks"]
    assert weights is None
    assert found.dtype == dtype
    # averages of values by weights that are exponentials of scores up to 20, in fp32; flint's own
    # computes these in fp32 too; rounded once to the dtype
    bound = torch.finfo(dtype).eps + 100 * torch.finfo(torch.float32).eps
    assert (found - exact).abs().max() < bound * value.abs().max()


def steps(model: Any, cache: Any, mask: torch.Tensor, ids: torch.Tensor) -> Iterator[torch.Tensor]:
    """Logits of a prompt of five tokens, of two at once, and of single ones behind them."""
    places = [0, 5, *range(7, ids.shape[1] + 1)]
    for first, last in itertools.pairwise(places):
        yield model(
            ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache, use_cache=True
        ).logits[mask[:, first:last] > 0]


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("folder", ["gpt_oss", "mimo_v2_flash", "granitemoe_swa"])
def test_logits_of_padded_batches_beyond_a_sliding_window_equal_those_of_transformers(
    folder, kind, is_called
):
    theirs, ours = pair(folder)
    assert {"sliding_attention", "full_attention"} <= set(ours.config.layer_types)
    ids = torch.randint(3, 96, (2, 14), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    caches = [
        DynamicCache(config=theirs.config)
        if kind == "dynamic"
        else StaticCache(config=theirs.config, max_cache_len=16)
        for _ in range(2)
    ]
    is_called.clear()
    with torch.inference_mode():
        wanted = list(steps(theirs, caches[0], mask, ids))
        found = list(steps(ours, caches[1], mask, ids))
    assert "_own_attention" not in is_called
    assert ours.config.sliding_window < ids.shape[1]
    for one, other in zip(found, wanted, strict=True):
        # logits up to 4 through three layers of sums of at most 48 products in fp32
        assert (one - other).abs().max() < 3 * 48 * torch.finfo(torch.float32).eps * 4


@pytest.mark.parametrize("folder", sorted({"hy_v4", "inkling2"} & FAMILIES.keys()))
def test_logits_of_layers_that_mask_or_add_a_bias_themselves_equal_those_of_transformers(folder):
    """Some compare the attention's name before they mask; others add a bias."""
    theirs, ours = pair(folder, config={"index_topk": 4} if folder == "hy_v4" else None)
    assert len(attention_layers(ours)) == ours.config.get_text_config().num_hidden_layers
    ids = torch.randint(3, 96, (2, 14), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.inference_mode():
        wanted = list(steps(theirs, DynamicCache(config=theirs.config), mask, ids))
        found = list(steps(ours, DynamicCache(config=ours.config), mask, ids))
    for one, other in zip(found, wanted, strict=True):
        # as in the test before
        assert (one - other).abs().max() < 3 * 48 * torch.finfo(torch.float32).eps * 4


def test_beams_and_their_reordered_cache_are_those_of_transformers():
    theirs, ours = pair("gpt_oss")
    ids = torch.tensor([[5, 7, 11, 13], [0, 0, 17, 19]])
    options: dict[str, Any] = {
        "attention_mask": (ids > 0).long(),
        "num_beams": 3,
        "max_new_tokens": 12,
        "do_sample": False,
        "eos_token_id": -1,
    }
    assert torch.equal(ours.generate(ids, **options), theirs.generate(ids, **options))


class Products(TorchDispatchMode):
    """Takes down the shapes of products of matrices, and of attention, in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[Any, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "attention" in name or name in ("matmul", "bmm", "baddbmm", "mm", "linear", "addmm"):
            operands = [arg for arg in args if isinstance(arg, torch.Tensor)]
            if operands[0].dtype in (torch.bfloat16, torch.float16):
                self.shapes.add((name, *(tuple(operand.shape) for operand in operands)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("folder", "watched"),
    [
        (folder, watched)
        for folder, watched in (("gpt_oss", True), ("hy_v4", False), ("inkling2", False))
        if folder in FAMILIES
    ],
)
def test_no_step_has_products_of_its_own_shapes_in_half_precision(
    folder, watched, keeps_code, monkeypatch
):
    """Each new shape would leave code behind; requested attention weights make no difference."""
    library = native_library()
    if library is None or native_row_limit(library, torch.bfloat16) < 8:
        pytest.skip("linear layers are torch's, whose rows are padded where it keeps code")
    monkeypatch.setattr(eager_attention, "SHORT_CONTEXT", 5)
    options = {"output_attentions": True} if watched else {}
    seen = []
    for model in pair(folder, torch.bfloat16):
        use_small_batch_layers(model)
        with torch.inference_mode():
            cache = DynamicCache(config=model.config)
            model(torch.tensor([[5, 7, 11, 13]]), past_key_values=cache)
            for token in range(3):
                with Products() as products:
                    model(torch.tensor([[17 + token]]), past_key_values=cache, **options)
                seen.append(products.shapes)
    assert seen[3] == seen[4] == seen[5]
    assert seen[0] != seen[1] != seen[2]  # transformers' own has them


@pytest.mark.parametrize("watched", [False, True])
def test_prompts_have_attention_in_half_precision_of_few_lengths(watched, keeps_code):
    """Requested weights are computed in fp32; the prompt kernel uses no products of torch."""
    _, model = pair("gpt_oss", torch.bfloat16)
    attentions = []
    for length in (5, 9, 33):
        with torch.inference_mode(), Products() as products:
            model(torch.arange(length)[None], output_attentions=watched)
        attentions.append({shape for shape in products.shapes if shape[0] != "linear"})
    assert attentions[0] == attentions[1] == attentions[2]
    assert bool(attentions[0]) is (not watched and native_library() is None)


def test_attention_weights_are_returned_on_request(is_called):
    theirs, ours = pair("gpt_oss")
    ids = torch.tensor([[5, 7, 11, 13]])
    is_called.clear()
    with torch.inference_mode():
        wanted = theirs(ids, output_attentions=True)
        found = ours(ids, output_attentions=True)
        assert set(is_called) == {"_own_attention"}
        assert len(found.attentions) == len(wanted.attentions) == 3
        for one, other in zip(found.attentions, wanted.attentions, strict=True):
            assert torch.equal(one, other)
        is_called.clear()
        ours(ids, output_router_logits=True)  # the recorders of outputs stay hooked
        assert set(is_called) == {OF_PROMPTS}
        ours.config.output_attentions = True
        assert len(ours(ids).attentions) == 3
        ours.config.output_attentions = False
        seen = []
        layer = attention_layers(ours)[0]
        layer.register_forward_hook(lambda *call: seen.append(call[-1][1]))
        ours(ids)
    assert torch.equal(seen[0], wanted.attentions[0])


def nothing(_, query, *__, **___):
    return torch.zeros_like(query).transpose(1, 2), None


def test_set_attn_implementation_counts_for_one_model_only(is_called):
    AttentionInterface.register("nothing", nothing)
    theirs, ours = pair("gpt_oss")
    ids = torch.tensor([[5, 7, 11, 13]])
    assert ours.config._attn_implementation == "eager"
    twin = copy.deepcopy(ours)
    is_called.clear()
    for model in (theirs, ours):
        model.set_attn_implementation("nothing")
    with torch.inference_mode():
        wanted, found = (model(ids).logits for model in (theirs, ours))
        assert is_called == []
        twin(ids)
        assert set(is_called) == {OF_PROMPTS}
    assert torch.equal(found, wanted)
    layer = attention_layers(twin)[0]
    assert layer.config.behind is twin.config
    layer.config.rms_norm_eps = 0.5
    assert twin.config.rms_norm_eps == 0.5
    assert ours.config.rms_norm_eps != 0.5


def test_gradients_use_the_models_own_attention():
    theirs, ours = pair("gpt_oss")
    gradients = []
    for model in (theirs, ours):
        embedded = model.get_input_embeddings()(torch.tensor([[5, 7, 11, 13]])).requires_grad_()
        model(inputs_embeds=embedded).logits.sum().backward()
        gradients.append(embedded.grad)
    assert torch.equal(*gradients)


def test_memory_does_not_grow_with_the_lengths_of_the_cache():
    """Where torch's products in half precision are oneDNN's; heads so wide that it takes them."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "head_dim": 32}
    _, model = pair("gpt_oss", torch.bfloat16, {**sizes, "max_position_embeddings": 512})
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(torch.full((1, 24), 5), past_key_values=cache)
        model(torch.tensor([[7]]), past_key_values=cache)  # what the first of such steps sets up
        before = resident_bytes()
        for _ in range(100):
            model(torch.tensor([[7]]), past_key_values=cache)
    # eager attention leaves 130 MiB behind; keys and values are 150 KiB
    assert resident_bytes() - before < 40 * 2**20


def test_a_replaced_attention_function_is_called(monkeypatch):
    _, model = pair("gpt_oss")
    module = "transformers.models.gpt_oss.modeling_gpt_oss"
    called = []

    def own(layer, query, *_, **__):
        called.append(layer)
        return torch.zeros_like(query).transpose(1, 2), None

    monkeypatch.setattr(f"{module}.eager_attention_forward", own)
    model(torch.tensor([[5, 7]]))
    assert called == attention_layers(model)
