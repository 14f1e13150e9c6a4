"""The language model's parts against independent references, its export against transformers."""

import warnings
from typing import Any

import pytest
import torch
from language_models import EXPORTED, VOCAB, build, experts, shape
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.models.lm.attention import Attention, RotaryTable
from moe_runtime.models.lm.export import export_hugging_face, hugging_face_family
from moe_runtime.models.lm.layers import linear_cross_entropies, rms_norm
from moe_runtime.models.lm.model import LanguageModel


def test_rms_norm_and_its_gradients():
    x = torch.randn(3, 5, 4, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    reference = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    assert torch.allclose(rms_norm(x, weight, 1e-3), reference, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (x, weight))
    assert torch.allclose(
        rms_norm(x, weight[0], 1e-3), F.rms_norm(x, (7,), weight[0], 1e-3), atol=1e-13
    )


def test_rms_norm_sums_in_float32():
    x = (torch.randn(9, 256) * 30).bfloat16()
    weight = torch.ones(256, dtype=torch.bfloat16)
    exact = F.rms_norm(x.double(), (256,), None, 1e-6)
    # One rounding to bfloat16 of numbers up to 4: 2^-7.
    assert (rms_norm(x, weight, 1e-6).double() - exact).abs().max() <= 2**-7


def rotated_by_definition(x: Tensor, theta: float) -> Tensor:
    """RoFormer's rotation as complex numbers; component i pairs with i + W/2."""
    half = x.shape[-1] // 2
    positions = torch.arange(x.shape[1], dtype=torch.float64)
    frequencies = theta ** (-torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(()).double(), positions[:, None] * frequencies)
    numbers = torch.complex(x[..., :half].double(), x[..., half:].double()) * turns[:, None]
    return torch.cat([numbers.real, numbers.imag], dim=-1)


def test_rotation_and_its_gradient():
    table = RotaryTable(10, 40, 500.0)
    x = torch.randn(2, 23, 3, 10)
    # Angles are float32: at position 22 they are known to about 1e-6.
    assert torch.allclose(table(x).double(), rotated_by_definition(x, 500.0), atol=1e-5)
    wide = torch.randn(1, 5, 2, 10, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(table, (wide,))


def test_attention_looks_back_only():
    config = shape(intermediate_size=8)
    attention, table = Attention(config), RotaryTable(10, 40, 500.0)
    x = torch.randn(2, 11, 48)
    later = x.clone()
    later[:, 7:] += 1
    difference = (attention(x, table) - attention(later, table)).abs().amax(dim=(0, 2))
    assert difference[:7].max() == 0
    assert difference[7:].min() > 1e-4


class _Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk_bytes", [32 << 20, 8 * VOCAB * 4])
def test_cross_entropy_and_its_gradients(chunk_bytes, monkeypatch):
    from moe_runtime.models.lm import layers as module

    # The small chunks: four tokens each in float64, an odd rest at the end.
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    hidden = torch.randn(21, 12, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, 12, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (21,))
    ours = linear_cross_entropies(hidden, weight, targets)[0] * 3
    reference = F.cross_entropy(hidden @ weight.T, targets) * 3
    assert torch.allclose(ours, reference, atol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad(ours, (hidden, weight)),
        torch.autograd.grad(reference, (hidden, weight)),
        strict=True,
    ):
        assert torch.allclose(mine, theirs, atol=1e-12)
    with torch.no_grad(), _Products() as products:
        assert torch.allclose(linear_cross_entropies(hidden, weight, targets)[0] * 3, ours)
    chunks = -(-21 // max(1, chunk_bytes // (VOCAB * 8)))
    assert products.count == chunks  # none for gradients


def test_cross_entropy_refuses_shapes_that_do_not_fit():
    hidden, weight = torch.randn(5, 4), torch.randn(7, 4)
    with pytest.raises(ValueError, match=r"targets \[T\]"):
        linear_cross_entropies(hidden, weight, torch.zeros(6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"weight \[V, 4\]"):
        linear_cross_entropies(hidden, weight[:, :3], torch.zeros(5, dtype=torch.int64))


@pytest.mark.parametrize("name", EXPORTED)
def test_an_exported_model_computes_the_same(name, tmp_path):
    from transformers import AutoModelForCausalLM

    import moe_runtime

    family, changes = EXPORTED[name]
    config = shape(**changes)
    assert hugging_face_family(config) == family
    model = build(config)
    export_hugging_face(model, tmp_path, special_tokens={"eos_token_id": 3})
    ids = torch.randint(VOCAB, (3, 33))
    with warnings.catch_warnings(), torch.no_grad():
        # torch remarks on shared experts of width 0.
        warnings.simplefilter("ignore", UserWarning)
        theirs, report = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report.values())
        assert theirs.config.model_type == family
        assert theirs.generation_config.eos_token_id == 3
        logits = model(ids)
        assert (theirs.eval()(ids).logits - logits).abs().max() < 1e-5
        if config.moe is not None:
            loaded = moe_runtime.load(str(tmp_path), device="cpu", dtype="float32", max_tokens=128)
            assert (loaded(ids).logits - logits).abs().max() < 1e-5
            loaded.moe.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capacity_factor": 1.0}, "capacity_factor must be omitted"),
        ({"activation": "relu2"}, "swiglu"),
        ({"bias": True}, "no biases"),
        ({"shared_experts": 1}, r"no shared experts \(use sigmoid_topk\)"),
        ({"gate_options": {"scale": 2.0}}, "no scale"),
        ({"gate_options": {"bias_update_rate": 1e-3}}, "no selection bias"),
        ({"gate": "group_limited_topk", "gate_options": {"score": "softmax"}}, "not softmax"),
        ({"shortcut": "middle", "shared_experts": 1}, r"\(shortcut\)"),
    ],
)
def test_what_no_architecture_expresses_is_refused(changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        hugging_face_family(shape(moe=experts(**changes), num_layers=2, intermediate_size=8))


def test_recomputation_changes_nothing():
    ids = torch.randint(VOCAB, (2, 21))
    gradients: list[list[Tensor]] = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = LanguageModel(shape(moe=experts()), recompute=recompute)
        losses = model.losses(ids[:, :-1], ids[:, 1:])
        (losses.cross_entropy + losses.auxiliary).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_losses_are_what_the_layers_say():
    model = build(shape(moe=experts(loss_weights={"load_balance": 0.5, "z": 0.25})))
    ids = torch.randint(VOCAB, (2, 20))
    losses = model.losses(ids[:, :-1], ids[:, 1:])
    logits = model(ids[:, :-1])
    reference = F.cross_entropy(logits.flatten(0, 1).double(), ids[:, 1:].reshape(-1))
    assert losses.cross_entropy.item() == pytest.approx(reference.item(), rel=1e-6)
    each = [0.5 * aux.losses["load_balance"] + 0.25 * aux.losses["z"] for aux in model.layer_aux()]
    assert losses.auxiliary.item() == pytest.approx(sum(each).item() / 3, rel=1e-6)
    loads = [float(aux.counts_E.max() / aux.counts_E.double().mean()) for aux in model.layer_aux()]
    assert losses.max_load is not None
    assert float(losses.max_load) == pytest.approx(sum(loads) / 3, rel=1e-6)


def test_bad_calls_are_explained():
    with pytest.raises(ValueError, match="vocab_size must be known"):
        LanguageModel(shape(vocab_size=None, intermediate_size=8))
    with pytest.raises(ValueError, match="at most 40 tokens a sequence, got 41"):
        LanguageModel(shape(intermediate_size=8))(torch.zeros(1, 41, dtype=torch.int64))
    with pytest.raises(ValueError, match="did you mean 'softmax_topk'"):
        LanguageModel(shape(moe=experts(gate="softmax_topkk")))
    with pytest.raises(ValueError, match="top_k"):
        LanguageModel(shape(moe=experts(top_k=9)))
