"""`experts_implementation="moe_runtime"` against transformers' own experts, for every family."""

import copy
import inspect

import pytest
import torch
from moe_families import FAMILIES, Family
from tiny_checkpoints import PROMPT, experts_modules, tiny_model
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_runtime
from moe_runtime.inference.known_classes import recognise_activation

moe_runtime.register_with_transformers()

# Same products in fp32, summed in another order: the square root of some hundred terms of 2^-24,
# through at most a dozen layers.
TOLERANCE = 1e-4


def family_named(folder: str) -> Family:
    found = next((family for family in FAMILIES if family.folder == folder), None)
    if found is None:
        pytest.skip(f"{folder} came with a later transformers")
    return found


def run_experts(
    module: torch.nn.Module, implementation: str, x: Tensor, ids: Tensor, weights: Tensor
):  # type: ignore[no-untyped-def]
    """Output and gradients of one experts module."""
    module.config._experts_implementation_internal = implementation  # type: ignore[union-attr]
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    module.zero_grad(set_to_none=True)
    out = module(x, ids, weights)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"out": out, "x": x.grad, "weights": weights.grad, **grads}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_family_equals_eager(family):
    """Every experts module of the model: output, and gradients of input, gate and parameters."""
    modules = list(experts_modules(tiny_model(family)).values())
    assert modules
    for module in modules[:2]:
        assert recognise_activation(module) is not None
        first = next(p for p in module.parameters() if p.ndim == 3)
        down = module.get_parameter("down_proj")
        dim = down.shape[2] if module.is_transposed else down.shape[1]
        num_experts = len(first)
        ids = torch.rand(13, num_experts).topk(2).indices
        x, weights = torch.randn(13, dim), torch.rand(13, 2)
        expected = run_experts(module, "eager", x, ids, weights)
        found = run_experts(module, "moe_runtime", x, ids, weights)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            if tensor is None:
                assert found[name] is None, name
                continue
            error = (found[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-6)
            assert error < TOLERANCE, f"{name}: {error:.2e}"


@pytest.fixture
def mixtral() -> PreTrainedModel:
    return tiny_model(family_named("mixtral"))


def test_an_unknown_gate_runs_as_written(mixtral):
    module = next(iter(experts_modules(mixtral).values()))
    kind = type(module)
    own = type("OwnGate", (kind,), {"_apply_gate": lambda self, z: torch.sin(z.chunk(2, -1)[0])})
    module.__class__ = own
    assert recognise_activation(module) is None
    dim = module.get_parameter("down_proj").shape[1]
    ids, weights = torch.tensor([[0, 1], [2, 0]]), torch.rand(2, 2)
    x = torch.randn(2, dim)
    found = run_experts(module, "moe_runtime", x, ids, weights)
    expected = run_experts(module, "grouped_mm", x, ids, weights)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def test_ids_outside_the_experts_add_nothing(mixtral):
    """Slots of other ranks add zero and get zero gradients, whatever their weight."""
    module = next(iter(experts_modules(mixtral).values()))
    num_experts = module.num_experts
    dim = module.get_parameter("down_proj").shape[1]
    x, weights = torch.randn(4, dim), torch.rand(4, 2)
    ids = torch.tensor([[0, num_experts], [num_experts, num_experts], [1, 0], [-1, 1]])
    found = run_experts(module, "moe_runtime", x, ids, weights)
    inside = (ids >= 0) & (ids < num_experts)
    expected = run_experts(module, "eager", x, ids.where(inside, 0), weights * inside)
    torch.testing.assert_close(found["out"], expected["out"])
    assert (found["out"][1] == 0).all()
    assert (found["x"][1] == 0).all()
    assert (found["weights"][~inside] == 0).all()
    torch.testing.assert_close(found["gate_up_proj"], expected["gate_up_proj"])


def test_load_generate_train_save_and_reload(mixtral, tmp_path):
    mixtral.save_pretrained(tmp_path / "first")
    eager = AutoModelForCausalLM.from_pretrained(tmp_path / "first", experts_implementation="eager")
    ours = AutoModelForCausalLM.from_pretrained(
        tmp_path / "first", experts_implementation="moe_runtime"
    )
    assert ours.config._experts_implementation == "moe_runtime"
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(PROMPT, **options), eager.generate(PROMPT, **options))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = ours(PROMPT, labels=PROMPT).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    ours.save_pretrained(tmp_path / "second")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    again.set_experts_implementation("moe_runtime")
    assert again.config._experts_implementation == "moe_runtime"
    with torch.no_grad():
        assert torch.equal(again(PROMPT).logits, ours(PROMPT).logits)


@pytest.mark.parametrize(
    "folder",
    [pytest.param(name, marks=pytest.mark.long) for name in ("mixtral", "muse_spark")]
    + ["gpt_oss"],
)
def test_compiles_without_a_break(folder):
    """Experts of a plain, a special and a normed family, in inference and in training."""
    module = next(iter(experts_modules(tiny_model(family_named(folder))).values()))
    module.config._experts_implementation_internal = "moe_runtime"
    down = module.get_parameter("down_proj")
    x = torch.randn(6, down.shape[2] if module.is_transposed else down.shape[1])
    ids, weights = torch.tensor([[0, 1]] * 6), torch.rand(6, 2)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, ids, weights), module(x, ids, weights))
    module(x, ids, weights).sum().backward()
    expected = copy.deepcopy(down.grad)
    module.zero_grad()
    compiled(x, ids, weights).sum().backward()
    torch.testing.assert_close(down.grad, expected)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_cold_model_is_exported(mixtral, strict):
    """Gates are recognised while torch traces: no values of tensors are known in that thread."""
    expected = mixtral(PROMPT, use_cache=False).logits
    mixtral.set_experts_implementation("moe_runtime")
    program = torch.export.export(mixtral, (PROMPT,), {"use_cache": False}, strict=strict)
    found = program.module()(PROMPT, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_lora_on_the_experts(mixtral):
    """PEFT adds its product to the stacked parameter: its gradient comes through ours."""
    peft = pytest.importorskip("peft")
    results = []
    for implementation in ("eager", "moe_runtime"):
        base = copy.deepcopy(mixtral)
        base.set_experts_implementation(implementation)
        torch.manual_seed(1)
        model = peft.get_peft_model(
            base,
            peft.LoraConfig(
                target_modules=[],
                target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
                init_lora_weights=False,
            ),
        )
        model(PROMPT, labels=PROMPT).loss.backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    eager, ours = results
    assert eager
    assert eager.keys() == ours.keys()
    for name, grad in eager.items():
        torch.testing.assert_close(ours[name], grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("block_size", [(16, 16), (128, 128), None], ids=str)
def test_fp8_experts(mixtral, block_size):
    """8-bit experts against the same numbers widened by hand, through transformers' registry."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    config = copy.deepcopy(mixtral.config)
    config._experts_implementation_internal = "moe_runtime"

    class Experts(FP8Experts):
        pass

    kind = use_experts_implementation(Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)
    module = kind(config, block_size=block_size)
    wide = {}
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = module.get_parameter(name), module.get_parameter(f"{name}_scale_inv")
        weight.data = (torch.randn(weight.shape) * 0.2).to(torch.float8_e4m3fn)
        scale.data = torch.rand(scale.shape) + 0.5
        # where a block is larger than all rows, gate and up have a scale each
        rows = torch.arange(weight.shape[1]) // (weight.shape[1] // scale.shape[1])
        columns = torch.arange(weight.shape[2]) // (weight.shape[2] // scale.shape[2])
        wide[name] = weight.detach().float() * scale.detach()[:, rows][:, :, columns]
    plain = next(iter(experts_modules(mixtral).values()))
    plain.config._experts_implementation_internal = "eager"
    for name, tensor in wide.items():
        plain.get_parameter(name).data = tensor
    x = torch.randn(5, config.hidden_size, requires_grad=True)
    ids, weights = torch.tensor([[0, 2]] * 5), torch.rand(5, 2)
    found = module(x, ids, weights)
    torch.testing.assert_close(found, plain(x, ids, weights), rtol=1e-5, atol=1e-5)
    found.sum().backward()
    assert x.grad is not None
    assert module.get_parameter("down_proj").grad is None


@pytest.mark.parametrize(
    ("block_size", "options"),
    [
        ((128, 128), {}),
        ((16, 32), {"scale_fmt": "ue8m0"}),
        (None, {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}),
    ],
    ids=["ragged fp8 blocks", "powers of two", "fp4"],
)
def test_packed_experts_are_computed_from_their_codes(mixtral, block_size, options, monkeypatch):
    """Blocks that cross from gate to up, and DeepSeek-V4's FP4, compared with their values."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    from moe_runtime.kernels.expert_mlp import QuantizedExperts

    known = inspect.signature(FP8Experts.__init__).parameters
    if not options.keys() <= known.keys():
        pytest.skip("this came with a later transformers")
    config = copy.deepcopy(mixtral.config)
    config.hidden_size, config.intermediate_size = 160, 160
    config._experts_implementation_internal = "moe_runtime"
    kind = use_experts_implementation(
        type("Experts", (FP8Experts,), {}), experts_interface=ALL_FP8_EXPERTS_FUNCTIONS
    )
    module = kind(config, block_size=block_size, **options)
    own_config = copy.deepcopy(config)
    own_config._experts_implementation_internal = "eager"
    plain = type(next(iter(experts_modules(mixtral).values())))(own_config)
    for name in ("gate_up_proj", "down_proj"):
        weight, scale = module.get_parameter(name), module.get_parameter(f"{name}_scale_inv")
        powers = torch.randint(-5, -2, scale.shape)
        scale.data = (2.0**powers * (1 if options else 0.7)).to(scale.dtype)
        if weight.dtype == torch.int8:
            weight.data = torch.randint(-128, 128, weight.shape).to(torch.int8)
            blocks = weight.view(torch.uint8).unflatten(2, (-1, 16))
            wide = convert_moe_packed_tensors(
                blocks, scale.view(torch.uint8), dtype=torch.float32
            ).mT
        else:
            weight.data = torch.randn(weight.shape).to(torch.float8_e4m3fn)
            assert block_size is not None
            spread = scale.detach().float()
            for dim, block in enumerate(block_size, start=1):
                spread = spread.repeat_interleave(block, dim)
            wide = weight.detach().float() * spread[:, : weight.shape[1], : weight.shape[2]]
        plain.get_parameter(name).data = wide
    x = torch.randn(7, 160, requires_grad=True)
    own_x = x.detach().clone().requires_grad_()
    ids, weights = torch.tensor([[0, 2]] * 4 + [[1, 0]] * 3), torch.rand(7, 2)
    with monkeypatch.context() as patch:
        patch.setattr(QuantizedExperts, "widened", None)
        found = module(x, ids, weights)
    if options == {"scale_fmt": "ue8m0"}:
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, ids, weights), found.detach())
    expected = plain(own_x, ids, weights)
    scale_of = expected.abs().max().item()
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE * scale_of)
    found.sum().backward()
    expected.sum().backward()
    assert x.grad is not None
    assert own_x.grad is not None
    bound = TOLERANCE * own_x.grad.abs().max().item()
    torch.testing.assert_close(x.grad, own_x.grad, rtol=0, atol=bound)


def test_packed_experts_of_an_unknown_type_are_refused(mixtral):
    from moe_runtime.errors import UnsupportedModelError
    from moe_runtime.inference.hugging_face.backend import fp8_experts_forward

    module = next(iter(experts_modules(mixtral).values()))
    for name in ("gate_up_proj", "down_proj"):
        weight = module.get_parameter(name)
        weight.data = weight.data.to(torch.float8_e5m2)
        module.register_parameter(
            f"{name}_scale_inv", torch.nn.Parameter(torch.ones(len(weight), 1, 1))
        )
    x, ids = torch.zeros(1, mixtral.config.hidden_size), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedModelError, match=r"gate_up_proj is torch\.float8_e5m2"):
        fp8_experts_forward(module, x, ids, torch.ones(1, 1))


def test_scales_that_may_be_of_other_rows_are_refused(mixtral):
    """Gate and up of 96 rows: two scales are of 96 rows each, or of 128 and 64 of both together."""
    from transformers.integrations.finegrained_fp8 import FP8Experts

    from moe_runtime.errors import UnsupportedModelError
    from moe_runtime.inference.hugging_face.backend import fp8_experts_forward

    config = copy.deepcopy(mixtral.config)
    config.intermediate_size = 96
    module = FP8Experts(config, block_size=(128, 128))
    assert module.gate_up_proj_scale_inv.shape[1] == 2
    x, ids = torch.zeros(1, config.hidden_size), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedModelError, match="192 rows or columns of gate_up_proj share"):
        fp8_experts_forward(module, x, ids, torch.ones(1, 1))
