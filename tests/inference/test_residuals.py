"""Residuals that are added by the norm behind them: which layers, in which bits, and when not."""

import copy
from typing import Any

import pytest
import torch
from emulated_layers import use_device_layers
from moe_families import Family
from tiny_checkpoints import PROMPT, tiny_model
from torch import Tensor, nn
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer
from triton_interpreter import repair_interpreter

from moe_runtime.inference.cpu.step_layers import (
    SmallBatchLinear,
    SmallBatchRMSNorm,
    replace_dense_layers,
)
from moe_runtime.inference.device import fused_layers as residuals
from moe_runtime.inference.device.fused_layers import ResidualLayer, fuse_residuals

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = {"num_hidden_layers": 2}
FAMILIES = [
    Family("qwen3_moe", "Qwen3MoeForCausalLM", LAYERS),
    Family("gpt_oss", "GptOssForCausalLM", LAYERS),  # whose feed-forward returns scores too
    Family("glm4_moe", "Glm4MoeForCausalLM", LAYERS | {"first_k_dense_replace": 1}),
]

FORWARD = {kind: kind.forward for kind in (SmallBatchRMSNorm, SmallBatchLinear)}


@pytest.fixture(autouse=True)
def _layers(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        repair_interpreter()
    use_device_layers(monkeypatch)


def pair(family: Family = FAMILIES[0]) -> tuple[Any, Any]:
    """A model with the norms of a GPU, and one whose residuals are added by them too."""
    own = tiny_model(family).to(DEVICE).bfloat16().eval().requires_grad_(False)
    replace_dense_layers(own)
    fused = copy.deepcopy(own)
    fuse_residuals(fused)
    return own, fused


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(PROMPT[:, :5].to(DEVICE), **options).logits
    return found


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of fused sums, and of norms that were taken from them."""
    counts = [0, 0]
    add, take = residuals.add_rms_norm, residuals._Handed.take

    def counted(*args: Any, **options: Any) -> Any:
        counts[0] += 1
        return add(*args, **options)

    def taken(*args: Any) -> Tensor | None:
        found: Tensor | None = take(*args)
        counts[1] += found is not None
        return found

    monkeypatch.setattr(residuals, "add_rms_norm", counted)
    monkeypatch.setattr(residuals._Handed, "take", taken)
    return counts


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.folder)
def test_a_family_has_its_bits(family, sums):
    own, fused = pair(family)
    assert torch.equal(logits(fused), logits(own))
    assert sums == [4, 4]
    with torch.inference_mode():
        assert torch.equal(logits(fused), logits(own))
    assert sums == [8, 8]


def run_layer(model: Any, number: int, hidden: Tensor) -> Tensor:
    angles = model.model.rotary_emb(hidden, torch.arange(hidden.shape[1], device=DEVICE)[None])
    found: Tensor = model.model.layers[number](hidden, position_embeddings=angles)
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda norm: norm.weight.div_(2),
        lambda norm: setattr(norm, "eps", 0.5),
        lambda norm: setattr(norm, "weight", nn.Parameter(norm.weight / 2)),
    ],
)
def test_a_norm_changed_between_two_layers_counts(change):
    """As of calibration, which runs a layer, scales the next norm and goes on."""
    found, generator = [], torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 4, 32, generator=generator).to(DEVICE, torch.bfloat16)
    for model in pair():
        with torch.no_grad():
            between = run_layer(model, 0, hidden)
            change(model.model.layers[1].input_layernorm)
            found.append(run_layer(model, 1, between))
    assert torch.equal(*found)


def add_in_place(module: nn.Module, args: Any, out: Tensor) -> None:
    out.add_(1)


def add_to_data(x: Tensor) -> None:
    x.data.add_(1)


CHANGES = [
    lambda model: model.model.layers[0].register_forward_hook(add_in_place),
    lambda model: model.model.layers[0].register_forward_hook(lambda *call: call[-1] + 1),
    lambda model: model.model.layers[1].input_layernorm.register_forward_hook(add_in_place),
    lambda model: model.model.layers[0].mlp.register_forward_hook(add_in_place),
    # which torch does not count
    lambda model: model.model.layers[0].register_forward_hook(lambda *c: add_to_data(c[-1])),
    lambda model: model.model.layers[1].register_forward_pre_hook(lambda *c: add_to_data(c[1][0])),
    lambda model: model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(
        lambda *c: add_to_data(c[1][0])
    ),
    lambda model: setattr(model.model.layers[0], "post_attention_layernorm", nn.Identity()),
    lambda model: setattr(model.model, "norm", nn.Identity()),
    lambda model: setattr(model.model.layers[1].input_layernorm, "eps", 0.5),
    lambda model: model.model.layers.pop(0),
    lambda model: model.float(),
    lambda model: model.train(),
]


@pytest.mark.parametrize(
    ("change", "is_inference"),
    [*((change, False) for change in CHANGES), (CHANGES[1], True), (CHANGES[4], True)],
)
def test_changes_of_the_model_count(change, is_inference):
    own, fused = pair()
    logits(fused)
    for model in (own, fused):
        change(model)
    with torch.inference_mode(is_inference):
        assert torch.equal(logits(fused), logits(own))


def test_a_changed_class_is_called(monkeypatch):
    own, fused = pair()
    kind = type(own.model.layers[0])
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda *args, **kwargs: 2 * forward(*args, **kwargs))
    assert torch.equal(logits(fused), logits(own))


def test_gradients_use_the_own_forward(sums, monkeypatch):
    for kind, forward in FORWARD.items():  # which have gradients
        monkeypatch.setattr(kind, "forward", forward)
    own, fused = pair()
    found = []
    for model in (own, fused):
        embedded = model.model.embed_tokens(PROMPT[:, :5].to(DEVICE)).requires_grad_()
        model(inputs_embeds=embedded).logits.float().sum().backward()
        found.append(embedded.grad)
    assert sums == [0, 0]
    assert torch.equal(*found)


def test_a_step_that_fails_leaves_the_next_one_right(monkeypatch):
    own, fused = pair()
    mlp = fused.model.layers[0].mlp
    with monkeypatch.context() as patches:
        patches.setattr(mlp, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(fused)
    assert torch.equal(logits(fused), logits(own))


class Scaled(Qwen3MoeDecoderLayer):
    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        return 2 * super().forward(hidden_states, *args, **options)


def test_a_subclass_uses_its_own_forward():
    own, fused = pair()
    for model in (own, fused):
        model.model.layers[0].__class__ = Scaled
        vars(model.model.layers[0]).pop("forward", None)
    fuse_residuals(fused)
    assert "forward" not in vars(fused.model.layers[0])
    assert isinstance(vars(fused.model.layers[1])["forward"], ResidualLayer)
    assert torch.equal(logits(fused), logits(own))
