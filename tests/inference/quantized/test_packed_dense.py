"""Dense layers of quantised checkpoints, which stay in memory as codes and scales."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf_checkpoints
import peft
import pytest
import quantized_checkpoints
import torch
from emulated_models import map_of
from moe_families import Family
from quantized_checkpoints import EVEN, Quantized
from quantized_matrices import BLOCK_FORMATS, PUBLISHED, random_matrix
from safetensors.torch import load_file
from tiny_checkpoints import PROMPT
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import DynamicCache

import moe_runtime
from moe_runtime.checkpoints.dense_weights import PackedTensor, packed_parameter
from moe_runtime.checkpoints.opening import open_checkpoint
from moe_runtime.checkpoints.safetensors_index import TensorEntry
from moe_runtime.errors import UnsupportedUseError
from moe_runtime.inference.budget import reserve_for
from moe_runtime.inference.cpu import step_layers
from moe_runtime.inference.device.device_experts import keep_readable
from moe_runtime.inference.loading import signature_of
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.quantized import WeightFormat

SAMPLES = {sample.name: sample for sample in quantized_checkpoints.SAMPLES}
KEPT = ("deepseek_v3-fp8", "qwen3_moe-int4-zeros", "olmoe-fp8-tensor")
KEPT_TOO = ("qwen3_moe-fp8-ragged", "qwen3_moe-gptq", "glm4_moe-awq", "olmoe-mxfp8")
MXFP8 = SAMPLES["olmoe-mxfp8"]
BIASED = Quantized(
    "qwen2_moe-mxfp8",
    Family("qwen2_moe", "Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 64, **EVEN}),
    MXFP8.config,
    MXFP8.packers,
)
KINDS = {**PUBLISHED, "q4_k": BLOCK_FORMATS["q4_k"]}


def write(sample: Quantized, folder: Path) -> Path:
    return quantized_checkpoints.write(sample, folder).folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = write(SAMPLES["qwen3_moe-fp8-ragged"], tmp_path_factory.mktemp("dense"))
    model = moe_runtime.load(folder, device="cpu", host_memory="1GiB")
    with model.moe:
        yield model


@pytest.fixture
def layer(model: Any) -> nn.Linear:
    """A linear layer of attention, `[160, 160]` in blocks of 128 x 128."""
    return model.model.layers[0].self_attn.q_proj


def packed_in(model: nn.Module) -> dict[str, PackedTensor]:
    named = model.named_parameters()
    return {name: p for name, p in named if isinstance(p, PackedTensor)}


def test_columns_that_a_gguf_file_moves_in_whole_blocks_stay_packed(tmp_path):
    """llama.cpp has value heads in another order: their columns are blocks of 32 codes here."""
    sample = next(row for row in gguf_checkpoints.SAMPLES if row.architecture == "qwen35moe")
    written = gguf_checkpoints.write(sample, tmp_path)
    plain = load_file(written.plain / "model.safetensors")
    model: Any = moe_runtime.load(written.folder, device="cpu", host_memory="1GiB")
    with model.moe:
        weights = {n: p for n, p in packed_in(model).items() if n.endswith("out_proj.weight")}
        assert len(weights) == 3
        for name, weight in weights.items():
            assert torch.equal(weight.values(), plain[name].to(weight.dtype))


@pytest.mark.parametrize(
    "name", [*KEPT, *(pytest.param(name, marks=pytest.mark.long) for name in KEPT_TOO)]
)
def test_dense_bytes_are_those_that_lie_in_memory(tmp_path, name):
    folder = write(SAMPLES[name], tmp_path)
    model = moe_runtime.load(folder, device="cpu", host_memory="1GiB")
    with model.moe:
        packed = packed_in(model)
        in_codes = sum(parameter.matrix.nbytes for parameter in packed.values())
        others = [
            p for n, p in model.named_parameters() if n not in packed and ".experts." not in n
        ]
        assert len(packed) >= 9
        assert in_codes < 0.6 * sum(parameter.nbytes for parameter in packed.values())
        in_bf16 = sum(2 * parameter.numel() for parameter in others)
        # buffers are not weights, except the gate's correction bias
        biases = [2 * b.numel() for n, b in model.named_buffers() if "correction_bias" in n]
        assert model.moe.stats().dense_bytes == in_codes + in_bf16 + sum(biases)


def test_on_a_gpu_only_what_its_kernels_read_stays_packed(tmp_path):
    folder = write(SAMPLES["qwen3_moe-fp8-ragged"], tmp_path)
    experts = map_of(folder)
    names = dict(experts.packed_dense)
    keep_readable(experts.packed_dense, experts.dense_entries)
    assert experts.packed_dense == names
    assert len(names) >= 9
    # values are set aside for experts alone, which are written out where they are fewer
    layers = [name for name in names if ".experts." not in name]
    largest = max(math.prod(experts.dense_entries[name].shape) for name in layers)
    assert experts.largest_quantised == max(largest, experts.largest_in_experts)
    experts.dense_entries["large"] = SimpleNamespace(shape=(999, 999))  # type: ignore[assignment]
    experts.packed_dense["large"] = "large"
    checkpoint = open_checkpoint(folder, "auto")
    sizes: Any = {"max_tokens": 8, "dense_bytes": 0}
    on_cpu, on_gpu = (
        reserve_for(checkpoint, experts, signature_of(checkpoint, experts), **sizes, **place)
        for place in ({}, {"writes_dense": False})
    )
    itemsize = checkpoint.dtype.itemsize
    assert on_cpu - on_gpu == (999 * 999 - experts.largest_in_experts) * itemsize
    del experts.dense_entries["large"], experts.packed_dense["large"]
    unread, coded, *_ = names
    entry: Any = experts.dense_entries[unread]
    odd = WeightFormat("e4m3", "f32", group_rows=8, group_cols=8)
    part = next(iter(entry.parts.values()))
    tensor = TensorEntry(coded, part.file, "BF16", entry.shape, part.offset, part.num_bytes)
    entries = {**experts.dense_entries, coded: tensor}
    entries[unread] = SimpleNamespace(format=odd)  # type: ignore[assignment]
    keep_readable(experts.packed_dense, entries)
    assert experts.packed_dense.keys() == names.keys() - {unread, coded}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_products_are_those_with_the_values(name, num_rows):
    """In fp32 no weight is rounded: bf16 would leave errors of 2**-9, a hundred times as large."""
    generator = torch.Generator().manual_seed(0)
    matrix = random_matrix(KINDS[name], 96, 256, generator)
    weight = packed_parameter(matrix, torch.float32)
    bias = torch.randn(96, generator=generator)
    x = torch.randn(2, num_rows, 256, generator=generator)
    expected = linear(x.double(), matrix.dequantize(torch.float64), bias.double())
    size = linear(x.abs().double(), matrix.dequantize(torch.float64).abs(), bias.abs().double())
    with torch.no_grad():
        found = linear(x, weight, bias)
    # 257 roundings of fp32 or fewer in a sum of such terms, scales and the last ones among them
    assert found.dtype == torch.float32
    assert ((found - expected).abs() <= 260 * 2**-24 * size).all()
    traced = linear(x.clone().requires_grad_(), weight, bias)
    assert torch.equal(traced, found)


@pytest.mark.skipif(native_library() is None, reason="torch multiplies by rounded values")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_of_half_precision_are_rounded_once(layer, dtype):
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight: Any = layer.weight
    exact = x.double() @ weight.matrix.dequantize(torch.float64).T
    with torch.no_grad():
        found = layer(x)
    assert torch.equal(found, layer(x))
    assert found.dtype == dtype
    half = torch.finfo(dtype).eps / 2
    # and sums of 160 products in fp32; a weight that was rounded first would leave 2**-9
    assert ((found - exact).abs() <= half * exact.abs() + 1e-5 * exact.abs().max()).all()


def test_gradients_are_those_of_the_values():
    generator = torch.Generator().manual_seed(1)
    matrix = random_matrix(PUBLISHED["fp8-block"], 160, 136, generator)
    layer = nn.Linear(136, 160)
    plain = copy.deepcopy(layer)
    layer.weight = packed_parameter(matrix, torch.float32)
    plain.weight.data = matrix.dequantize()
    x = torch.randn(4, 136, generator=generator)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    for part, leaf in zip((layer, plain), leaves, strict=True):
        part(leaf).square().sum().backward()
    expected = [leaves[1].grad, plain.bias.grad]
    for found, wanted in zip([leaves[0].grad, layer.bias.grad], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)  # fp32 in another order


READING: dict[str, Callable[[Any], Any]] = {
    "view": lambda w: w.view(4, -1, 160)[1],
    "transposed": lambda w: torch.randn(2, 160).to(w) @ w.t(),
    "concatenated": lambda w: torch.cat([w, w]),
    "float": lambda w: w.float().numpy(),
    "cloned": lambda w: w.clone().add_(1),
    "indexed": lambda w: w[3, 4:6],
    "pickled": lambda w: pickle.loads(pickle.dumps(w)),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("name", READING)
def test_reading_a_packed_weight_gives_its_values(layer, name, is_inference):
    weight: Any = layer.weight
    plain = weight.matrix.dequantize(torch.bfloat16)
    torch.manual_seed(0)
    with torch.inference_mode(is_inference):
        found = READING[name](weight)
    torch.manual_seed(0)
    assert torch.equal(torch.as_tensor(found), torch.as_tensor(READING[name](plain)))
    assert (weight.shape, weight.dtype, weight.nbytes) == (plain.shape, plain.dtype, plain.nbytes)


CHANGING: dict[str, Callable[[Any], Any]] = {
    "added to": lambda w: w.add_(1),
    "data": lambda w: w.data.mul_(2),
    "put": lambda w: setattr(w, "data", torch.zeros(w.shape)),
    "element": lambda w: w.__setitem__((0, 0), 1.0),
    "view": lambda w: w.view(4, -1, 160)[1].zero_(),
    "row": lambda w: w[3].__setitem__(0, 1.0),
    "part": lambda w: torch.chunk(w.t(), 2)[1].mul_(2),
    "drawn": nn.init.normal_,
    "out": lambda w: torch.add(torch.zeros(w.shape), 1, out=w),
    "trained": lambda w: w.requires_grad_(),
    "trained as an attribute": lambda w: setattr(w, "requires_grad", True),
    "address": lambda w: w.data_ptr(),
    "shared": lambda w: w.share_memory_(),
}


@pytest.mark.parametrize("is_inference", [False, True])
@pytest.mark.parametrize("name", CHANGING)
def test_changing_a_packed_weight_is_refused_in_one_line(layer, name, is_inference):
    refused = pytest.raises(UnsupportedUseError, match="and stays so")
    with torch.inference_mode(is_inference), refused as caught:
        CHANGING[name](layer.weight)
    assert "\n" not in str(caught.value)
    assert isinstance(layer.weight, PackedTensor)


def test_a_state_can_be_put_back_and_no_other(model):
    before = model(PROMPT).logits
    state = model.state_dict()
    model.load_state_dict(state)
    name = next(iter(packed_in(model)))
    with pytest.raises(UnsupportedUseError, match=f"{name}: experts and quantised weights"):
        model.load_state_dict({**state, name: torch.zeros(state[name].shape)})
    assert torch.equal(model(PROMPT).logits, before)


def test_a_packed_layer_refuses_other_types(model):
    attention = model.model.layers[0].self_attn
    assert attention.to("cpu", torch.bfloat16) is attention
    with pytest.raises(UnsupportedUseError, match="and stays so"):
        attention.half()
    assert isinstance(attention.q_proj.weight, PackedTensor)


def test_adapters_stand_beside_codes_and_are_not_merged(model):
    places = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj"]
    before = model(PROMPT).logits
    settings = peft.LoraConfig(r=2, target_modules=places, init_lora_weights=False)
    peft.inject_adapter_in_model(settings, model)
    adapters = [p for n, p in model.named_parameters() if "lora_" in n]
    model(PROMPT).logits.float().sum().backward()
    assert all(adapter.grad is not None for adapter in adapters)
    wrapped = model.get_submodule(places[0])
    for is_safe in (False, True):
        with pytest.raises(UnsupportedUseError, match="without merging them"):
            wrapped.merge(safe_merge=is_safe)
    for place in places:
        model.set_submodule(place, model.get_submodule(place).get_base_layer())
    assert torch.equal(model(PROMPT).logits, before)


def test_compiled_layers_have_the_same_bits(layer):
    x = torch.randn(2, 160).bfloat16()
    with torch.no_grad():
        assert torch.equal(torch.compile(layer, backend="eager")(x), layer(x))


@pytest.mark.skipif(native_library() is None, reason="torch computes the steps")
@pytest.mark.parametrize(
    "sample", [SAMPLES["olmoe-mxfp8"], SAMPLES["qwen3_moe-int4-zeros"], BIASED], ids=str
)
def test_packed_attention_steps_are_fused_with_the_same_bits(tmp_path, monkeypatch, sample):
    """Whose queries, keys and values have one format."""
    step, calls = step_layers.attention_step, []

    def counted(*operands: Any) -> Tensor:
        calls.append(operands)
        return step(*operands)

    monkeypatch.setattr(step_layers, "attention_step", counted)
    model = moe_runtime.load(write(sample, tmp_path), device="cpu", host_memory="1GiB")
    with model.moe, torch.no_grad():
        assert (model.model.layers[0].self_attn.q_proj.bias is not None) == (sample is BIASED)
        cache, found = DynamicCache(), []
        model(PROMPT, past_key_values=cache)
        calls.clear()
        for token in (3, 5, 7):
            found.append(model(torch.tensor([[token]]), past_key_values=cache).logits)
        fused = [layer.self_attn for layer in model.model.layers]
        assert len(calls) == 2 * len(fused)  # the first token finds no room behind the prompt
        for attention in fused:
            del attention.forward
        cache = DynamicCache()
        model(PROMPT, past_key_values=cache)
        for token, logits in zip((3, 5, 7), found, strict=True):
            own = model(torch.tensor([[token]]), past_key_values=cache).logits
            assert torch.equal(own, logits)


def test_tied_weights_are_dequantised(tmp_path):
    """The head of a model is tied to its embedding, which looks rows up."""
    packers = {**MXFP8.packers, "embed_tokens": next(iter(MXFP8.packers.values()))}
    tied = Quantized("tied", MXFP8.family, MXFP8.config, packers)
    folder = write(tied, tmp_path)
    model = moe_runtime.load(folder, device="cpu", host_memory="1GiB")
    with model.moe:
        names = packed_in(model)
        assert not any("embed" in name or "lm_head" in name for name in names)
        assert names
        assert isinstance(model(PROMPT).logits, Tensor)
