"""Decode steps with a static cache by fused kernels, compared with transformers' own layers."""

import copy
import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from emulated_layers import use_device_layers
from emulated_models import emulated, experts_modules_of, load_on_emulated_device
from fetched_models import THREE, Request
from moe_families import Family
from quantized_matrices import MXFP8, random_matrix
from tiny_checkpoints import PROMPT, save, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton_interpreter import repair_interpreter

import moe_runtime
from moe_runtime.checkpoints import dense_weights
from moe_runtime.checkpoints.dense_weights import packed_parameter
from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.inference.device import fused_layers
from moe_runtime.inference.device.decoding_model import fuse_steps
from moe_runtime.inference.device.static_caches import static_cache
from moe_runtime.kernels.decode_step.prepared import PreparedQuantizedLinear
from moe_runtime.kernels.linear import quantized_linear

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = {"num_hidden_layers": 2}
QWEN3 = Family("qwen3_moe", "Qwen3MoeForCausalLM", LAYERS | {"norm_topk_prob": True})
FAMILIES = {
    family.folder: family
    for family in (
        QWEN3,
        Family("mixtral", "MixtralForCausalLM", LAYERS),
        Family("olmoe", "OlmoeForCausalLM", LAYERS),
        Family("gpt_oss", "GptOssForCausalLM", LAYERS),
        # angles for a half of each head; sigmoids with a bias
        Family(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            LAYERS | {"first_k_dense_replace": 0, "use_qk_norm": True},
        ),
    )
}
launching = importlib.import_module("moe_runtime.kernels.triton_support")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    if DEVICE == "cpu":
        repair_interpreter()


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """How often each kernel of Triton is started."""
    counts: Counter[str] = Counter()
    start = launching._launch

    def count(kernel: Any, *rest: Any) -> Any:
        counts[kernel.__name__] += 1
        with _disable_current_modes():  # the interpreter computes by torch
            return start(kernel, *rest)

    # a prepared launch starts its compiled kernel directly
    with (
        patch.object(launching, "_launch", count),
        patch.object(launching.PreparedLaunch, "__call__", _start),
    ):
        yield counts


def _start(prepared: Any, **tensors: torch.Tensor) -> None:
    launching.launch(prepared._kernel, prepared._grid, **tensors, **prepared._numbers)


@pytest.fixture(autouse=True)
def _layers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_device_layers(monkeypatch)


def pair(family: Family, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model of transformers, and the same one with fused kernels."""
    own = tiny_model(family).to(DEVICE, dtype).eval().requires_grad_(False)
    fused = copy.deepcopy(own)
    fuse_steps(fused)
    return own, fused


def decode(model: Any, prompt: torch.Tensor, mask: torch.Tensor, num_steps: int = 3) -> Any:
    """The logits of a prompt and of the steps behind it, and the cache."""
    cache = static_cache(model.config, prompt.shape[1] + num_steps + 2)
    ids, logits = prompt.to(DEVICE), []
    for _ in range(num_steps + 1):
        given = {"attention_mask": mask.to(DEVICE), "past_key_values": cache, "use_cache": True}
        logits.append(model(ids, **given).logits[:, -1].float())
        ids = logits[-1].argmax(-1, keepdim=True)
        mask = torch.cat([mask, mask[:, -1:]], 1)
    return torch.stack(logits), cache


@pytest.mark.parametrize(
    ("name", "num_sequences"), [*((name, 3) for name in FAMILIES), (QWEN3.folder, 1)]
)
def test_a_family_decodes_as_by_its_own_layers(name, num_sequences):
    own, fused = pair(FAMILIES[name])
    prompt = torch.cat([PROMPT.roll(shift, 1) for shift in range(num_sequences)])[:, :5]
    mask = torch.ones_like(prompt)
    mask[1:, 0] = 0
    with torch.no_grad(), launches() as counts:
        found = decode(fused, prompt, mask)
    with torch.no_grad():
        expected = decode(own, prompt, mask)
    assert counts["split_attention_fwd"] == 3 * 2
    assert counts["choose_experts_fwd"] == 4 * 2  # the prompt is of few tokens too
    # fp32 sums in other orders, in three layers of some hundred terms
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(found[0].argmax(-1), expected[0].argmax(-1))
    for ours, theirs in zip(found[1].layers, expected[1].layers, strict=True):
        assert ours.cumulative_length == theirs.cumulative_length == 5 + 3
        for part in ("keys", "values"):
            pairs = getattr(ours, part), getattr(theirs, part)
            torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_sequences", [1, 3])
def test_linear_layers_that_stay_packed(num_sequences):
    """Queries, keys, values and outputs of attention, whose codes are multiplied as they lie."""
    own = tiny_model(QWEN3).to(DEVICE).eval().requires_grad_(False)
    fused = copy.deepcopy(own)
    generator = torch.Generator().manual_seed(5)
    for layers in zip(own.model.layers, fused.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            parts = [getattr(layer.self_attn, name) for layer in layers]
            matrix = random_matrix(MXFP8, *parts[0].weight.shape, generator)
            parts[0].weight = torch.nn.Parameter(matrix.dequantize().to(DEVICE))
            packed = torch.nn.Linear(*matrix.shape[::-1], bias=False, device="meta")
            packed.weight = packed_parameter(matrix.to(torch.device(DEVICE)), torch.float32)
            setattr(layers[1].self_attn, name, packed)
    fuse_steps(fused)
    prompt = torch.cat([PROMPT.roll(shift, 1) for shift in range(num_sequences)])[:, :4]
    with torch.no_grad(), launches() as counts, multiplied_on_a_gpu() as rows:
        found, _ = decode(fused, prompt, torch.ones_like(prompt))
    with torch.no_grad():
        expected, _ = decode(own, prompt, torch.ones_like(prompt))
    assert counts["split_attention_fwd"] == 3 * 2
    assert counts["packed_linear_row_fwd"] == (3 * 2 * 4 if num_sequences == 1 else 0)
    assert len(rows) == 4 * 2 * 4
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@contextmanager
def multiplied_on_a_gpu() -> Iterator[list[int]]:
    """Has weights that are packed multiplied by the Triton kernels; the rows of each product."""
    rows: list[int] = []

    def multiply(x: torch.Tensor, matrix: Any, bias: Any, **_: Any) -> torch.Tensor:
        rows.append(len(x))
        return quantized_linear(x, matrix, bias, impl="triton")

    with (
        patch.object(dense_weights, "quantized_linear", multiply),
        patch.object(PreparedQuantizedLinear, "__call__", lambda *_: None),
    ):
        yield rows


def test_half_precision_is_rounded_where_transformers_rounds():
    """In a layer on the same input: all but a few bits of its result are the same."""
    own, fused = pair(QWEN3, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 1, own.config.hidden_size, generator=generator)
    hidden = hidden.to(DEVICE, torch.bfloat16)
    found = []
    for model in (own, fused):
        cache = static_cache(model.config, 7)
        layer = model.model.layers[0]
        with torch.no_grad():
            angles = model.model.rotary_emb(hidden, torch.tensor([[3]], device=DEVICE))
            name = cache_name(type(layer.self_attn).forward)
            for place in range(3):
                mask = (torch.arange(7, device=DEVICE) <= place).expand(3, 1, 1, -1)
                given = {"attention_mask": mask, name: cache}
                mixed, _ = layer.self_attn(
                    hidden_states=hidden, position_embeddings=angles, **given
                )
        with torch.no_grad():
            chosen = layer.mlp.gate(hidden.view(3, -1))
        found.append([mixed, cache.layers[0].keys, cache.layers[0].values, *chosen])
    for ours, theirs in zip(*found, strict=True):
        if ours.dtype == torch.int64:
            assert torch.equal(ours, theirs)
            continue
        eps = torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(ours, theirs, rtol=2 * eps, atol=eps)
        if ours is not found[0][0]:  # sums of attention have orders of their own
            assert (ours == theirs).float().mean() > 0.95


def twice(function: Any) -> Any:
    return lambda *args, **kwargs: tuple(2 * part for part in function(*args, **kwargs))


def test_observed_or_changed_layers_use_their_own_forward():
    own, fused = pair(QWEN3)
    prompt, attention = PROMPT[:, :3], [each.model.layers[0].self_attn for each in (own, fused)]
    gates = [each.model.layers[0].mlp.gate for each in (own, fused)]
    mask = torch.ones_like(prompt)

    def compare(num_attention: int, num_chosen: int) -> None:
        with torch.no_grad(), launches() as counts:
            found, _ = decode(fused, prompt, mask, 1)
        with torch.no_grad():
            torch.testing.assert_close(found, decode(own, prompt, mask, 1)[0], rtol=1e-4, atol=1e-5)
        assert counts["split_attention_fwd"] == num_attention
        assert counts["choose_experts_fwd"] == num_chosen

    compare(2, 4)
    for gate in gates:
        gate.top_k = 1
    compare(2, 2)
    seen: list[Any] = []
    hook = attention[1].k_norm.register_forward_hook(lambda *_: seen.append(1))
    compare(1, 2)
    assert len(seen) == 2
    hook.remove()
    for layer in attention:
        layer.q_norm.eps = layer.q_norm.variance_epsilon = 0.5
    compare(2, 2)
    for layer in attention:
        layer.scaling = 0.7
    compare(2, 2)
    module = importlib.import_module(type(own).__module__)
    with patch.object(module, "apply_rotary_pos_emb", twice(module.apply_rotary_pos_emb)):
        compare(0, 2)
    for layer in attention:
        layer.q_norm = torch.nn.Identity()
    compare(1, 2)
    with launches() as counts:  # a gradient may be wanted
        decode(fused, prompt, mask, 1)
        with torch.no_grad():
            fused(prompt.to(DEVICE), use_cache=True)  # a cache that grows
            fused(prompt.to(DEVICE)[:, :1], output_attentions=True)
    assert counts["split_attention_fwd"] == 0
    assert counts["choose_experts_fwd"] == 2


class Operations(TorchDispatchMode):
    """Counts operations that make or change values, which are kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(each and not each.is_write for each in aliases)
        if not is_view and not name.startswith(("new_empty", "empty", "_unsafe_view")):
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(QWEN3), tmp_path_factory.mktemp("fused"), sharded=True)


@emulated
@pytest.mark.parametrize(
    ("num_sequences", "slots", "misses"), [(1, 6, "device"), (3, 2, "device"), (1, 2, "all-on-cpu")]
)
def test_recorded_steps_have_the_bits_of_steps_that_are_not(
    checkpoint, num_sequences, slots, misses
):
    """Where all experts are there, and in parts where some are missing."""
    prompt, found = THREE[:num_sequences], []
    ways = ((True, True), (False, True), (False, False))
    for is_recorded, is_fused in ways if slots == 6 else ways[:2]:
        model = load_on_emulated_device(
            checkpoint, slots_a_layer=slots, misses=misses, max_tokens=256
        )
        with model.moe, launches() as counts:
            if is_fused:
                fuse_steps(model)
            if not is_recorded:
                model.forward = model.forward.__wrapped__
            logits = Request(model, prompt).steps(4)
            store: Any = experts_modules_of(model)[0].store
            assert (store.recorded is not None) == is_recorded
            assert (counts["split_attention_fwd"] > 0) == is_fused
            model.moe.check()
            found.append(torch.stack(logits))
    assert torch.equal(found[0], found[1])
    torch.testing.assert_close(found[1], found[-1], rtol=1e-4, atol=1e-5)


def test_attention_counters_follow_the_cache_layer():
    """It may have another batch later."""
    layer, found = SimpleNamespace(), list[Any]()
    for batch in (1, 1, 3):
        layer.keys = torch.empty(batch, 2, 5, 8)
        found.append(fused_layers._counters_of(layer))
    assert found[0] is found[1]
    assert [len(each) for each in found] == [3, 3, 7]


@emulated
def test_a_layer_is_few_kernels():
    """The difference between two layers and one, without experts, which are different on a GPU."""
    counted = []
    for num_layers in (1, 2):
        config = QWEN3.config | {"num_hidden_layers": num_layers}
        _, model = pair(Family(QWEN3.folder, QWEN3.model_class, config))
        for layer in model.model.layers:
            layer.mlp.experts.forward = lambda hidden, *_: hidden
        cache, ids = static_cache(model.config, 9), PROMPT[:, :1].to(DEVICE)
        with torch.no_grad():
            for _ in range(2):
                model(ids, past_key_values=cache)
            with launches() as counts, Operations() as operations:
                model(ids, past_key_values=cache)
        counted.append(operations.names + counts)
    fused = {"linear_row_fwd": 3, "rms_norm_fwd": 2}
    fused |= {"split_attention_fwd": 1, "choose_experts_fwd": 1}
    assert counted[1] - counted[0] == Counter(fused)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_replays_fused_steps(tmp_path, name):
    """Recorded with compiled kernels, and compared with transformers' model on the same GPU."""
    checkpoint = save(tiny_model(FAMILIES[name]), tmp_path, sharded=True)
    prompt = torch.cat([PROMPT.roll(shift, 1) for shift in range(3)])[:, :4].to("cuda")
    own = tiny_model(FAMILIES[name]).to("cuda").eval()
    model: Any = moe_runtime.load(checkpoint, device="cuda", max_tokens=64)
    given = {"max_new_tokens": 6, "do_sample": False, "output_logits": True}
    given |= {"return_dict_in_generate": True, "pad_token_id": 0}
    with model.moe, launches() as counts:
        found = model.generate(prompt, **given)
        assert counts["split_attention_fwd"] > 0
        assert counts["choose_experts_fwd"] > 0
        assert experts_modules_of(model)[0].store.recorded is not None
    expected = own.generate(prompt, **given)
    assert torch.equal(found.sequences, expected.sequences)
    ours, theirs = torch.stack(found.logits), torch.stack(expected.logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_a_changed_setting_counts():
    own, other = pair(FAMILIES["glm4_moe"])
    with torch.no_grad():
        decode(other, PROMPT[:, :3], torch.ones(1, 3, dtype=torch.long), 1)
    for model in (own, other):
        for layer in model.model.layers:
            layer.self_attn.use_qk_norm = False  # its forward reads it
    with torch.no_grad():
        found = [
            decode(model, PROMPT[:, :3], torch.ones(1, 3, dtype=torch.long), 1)[0]
            for model in (own, other)
        ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_an_uncounted_change_of_a_mask_counts():
    found = []
    for model in pair(QWEN3):
        cache, prompt_2T = static_cache(model.config, 9), PROMPT.repeat(2, 1).to(DEVICE)
        mask = torch.zeros(2, 1, 1, 9, dtype=torch.bool, device=DEVICE)
        with torch.no_grad():
            model(prompt_2T[:, :3], past_key_values=cache)
            for step in range(3):
                mask.data[..., : 4 + step] = True
                mask.data[0, ..., step] = False
                ids = prompt_2T[:, 3 + step : 4 + step]
                found.append(model(ids, past_key_values=cache, attention_mask=mask).logits)
    torch.testing.assert_close(torch.stack(found[:3]), torch.stack(found[3:]), rtol=1e-4, atol=1e-5)
