from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from moe_runtime.benchmarks.synthetic import model_shapes


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def test_transformers_loads_every_tensor(shape, checkpoint):
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(weight.numel() for weight in model.parameters()) * 2 == shape.total_bytes


def test_routing_depends_on_the_token(shape, checkpoint):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 5, 77, 9, 5]])
    with torch.no_grad():
        output = model(ids, output_router_logits=True)
    for logits in output.router_logits:
        chosen = [frozenset(row) for row in logits.topk(shape.top_k).indices.tolist()]
        assert chosen[0] == chosen[2] == chosen[5]
        assert chosen[1] == chosen[4]
    last = [frozenset(row) for row in output.router_logits[-1].topk(shape.top_k).indices.tolist()]
    assert len(set(last)) > 1


def test_weights_depend_on_seed_and_name_only(shape, tmp_path):
    model_shapes.write_checkpoint(replace(shape, shard_bytes=10**9), tmp_path / "one", seed=3)
    model_shapes.write_checkpoint(shape, tmp_path / "many", seed=3)
    model_shapes.write_checkpoint(shape, tmp_path / "other", seed=4)
    one, many, other = (load_all(tmp_path / name) for name in ("one", "many", "other"))
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])
    down = [f"model.layers.{layer}.mlp.experts.0.down_proj.weight" for layer in (0, 1)]
    assert not torch.equal(one[down[0]], one[down[1]])


def test_scales_are_those_announced(shape):
    wanted = {"embed_tokens": 1.0, "q_proj": 0.02, "o_proj": 2e-5, "0.down_proj": 2e-5}
    for part, std in wanted.items():
        plan = next(plan for plan in shape.tensors() if part in plan.name)
        bits = model_shapes.make_parts(plan, seed=0)[0]
        values = torch.from_numpy(bits).view(torch.bfloat16).double()
        # The standard error of a sample's deviation is std / sqrt(2 n); five of them.
        assert values.std() == pytest.approx(std, rel=5 / (2 * values.numel()) ** 0.5 + 2**-8)


def test_shapes_have_the_sizes_that_were_published():
    # Qwen3-30B-A3B-FP8: three matrices of 2048 x 768 bytes and 96 bf16 scales
    experts = {"olmoe-1b-7b": 12_582_912, "gpt-oss-20b": 13_236_480}
    experts["qwen3-30b-a3b-fp8"] = 3 * (2048 * 768 + 96 * 2)
    assert {name: model_shapes.SHAPES[name].expert_bytes for name in experts} == experts
    billions = {"olmoe-1b-7b": 6.92, "qwen3-30b-a3b": 30.53, "mixtral-8x7b": 46.70}
    for name, parameters in billions.items():
        assert model_shapes.SHAPES[name].total_bytes == pytest.approx(2e9 * parameters, rel=1e-3)
    for shape in model_shapes.SHAPES.values():
        assert shape.total_bytes == sum(plan.num_bytes for plan in shape.tensors())


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_transformers_knows_every_weight_of_a_family(name, tmp_path):
    from transformers import AutoModelForCausalLM

    sizes = {"num_layers": 2, "num_experts": 4, "top_k": 2, "model_width": 64, "expert_width": 32}
    sizes |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "vocab_size": 320}
    shape = replace(model_shapes.SHAPES[name], **sizes)
    model_shapes.write_checkpoint(shape, tmp_path)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(weight.numel() for weight in model.parameters()) * 2 == shape.total_bytes


@pytest.mark.parametrize("name", ["qwen3-tiny-fp8", "gpt-oss-tiny"])
def test_a_quantised_checkpoint_is_whole_and_routes_by_the_token(name, tmp_path):
    import moe_runtime

    shape = replace(model_shapes.SHAPES[name], num_layers=2, vocab_size=512)
    model_shapes.write_checkpoint(shape, tmp_path, seed=3)
    assert (
        sum(one.read_bits().nbytes for one in model_shapes.locate_tensors(tmp_path).values())
        == shape.total_bytes
    )
    model = moe_runtime.load(tmp_path, device="cpu", host_memory="200MiB", max_tokens=16)
    chosen: list[list[frozenset[int]]] = []

    def note(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        chosen.append([frozenset(row) for row in inputs[1].tolist()])

    for module in model.modules():
        if hasattr(module, "expert_outputs"):
            module.register_forward_pre_hook(note)
    with model.moe, torch.no_grad():
        logits = model(torch.tensor([[5, 9, 5, 77, 9, 5]])).logits
        assert (
            model.moe.stats().expert_bytes
            == shape.num_layers * shape.num_experts * shape.expert_bytes
        )
    assert torch.isfinite(logits).all()
    assert len(chosen) == shape.num_layers
    for layer in chosen:
        assert layer[0] == layer[2] == layer[5]
        assert layer[1] == layer[4]
    assert len(set(chosen[-1])) > 1


@pytest.mark.parametrize("stored", ["fp8", "mxfp4"])
def test_quantised_weights_are_gaussian(stored):
    """Their codes use the range that a format has: neither few of them, nor all alike."""
    shape = model_shapes.SHAPES["qwen3-tiny-fp8" if stored == "fp8" else "gpt-oss-tiny"]
    plan = next(plan for plan in shape.tensors() if plan.stored == stored)
    codes = torch.from_numpy(model_shapes.make_parts(plan, seed=0)[0]).flatten()
    if stored == "fp8":
        values = codes.view(torch.float8_e4m3fn).float()
        assert values.abs().max() == 448
        # the largest of 128 x 128 Gaussian numbers is about four times their deviation
        assert 448 / 5 < values.std() < 448 / 3
    else:
        counts = torch.bincount(torch.cat((codes & 15, codes >> 4)).int(), minlength=16)
        assert (counts > 0).all()
        signs = counts[1:8] / counts[9:16]
        assert ((signs > 0.8) & (signs < 1.25)).all()


def test_mxfp4_codes_are_the_nearest_numbers():
    """Of the eight magnitudes and the group's power of two, beside the same numbers in bf16."""
    plan = model_shapes.TensorPlan("weight", (3, 130, 64), 0.02, "mxfp4")
    blocks, scales = (torch.from_numpy(part) for part in model_shapes.make_parts(plan, seed=0))
    exact = torch.from_numpy(model_shapes.make_parts(replace(plan, stored="bf16"), seed=0)[0])
    numbers = exact.view(torch.bfloat16).double().view(3, 130, 2, 32)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).view(3, 130, 2, 32).int()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    steps = torch.exp2(scales.view(3, 130, 2, 1).double() - 127)
    stored = torch.where(codes < 8, 1, -1) * magnitudes[codes % 8] * steps
    nearest = (numbers.abs()[..., None] - magnitudes * steps[..., None]).abs().amin(-1)
    # bf16 is off by at most 2**-9 of a number
    assert ((stored - numbers).abs() <= nearest + numbers.abs() * 2**-8).all()
    peaks = numbers.abs().amax(-1) / steps[..., 0]
    assert ((peaks > 3.5 * (1 - 2**-8)) & (peaks < 7 * (1 + 2**-8))).all()
