"""Gates of quantised experts as formulas, and the memory of their products."""

from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import torch
from torch import Tensor

import moe_runtime
from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.inference import budget
from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.native import native_library

GPT_OSS = ActivationSpec("silu", alpha=1.702, limit=7.0, up_offset=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = {sample.name: sample for sample in quantized_checkpoints.SAMPLES}
    folder = tmp_path_factory.mktemp("gpt_oss")
    return quantized_checkpoints.write(samples["gpt_oss-mxfp4"], folder).folder


@pytest.mark.skipif(native_library() is None, reason="the native library was not built")
def test_a_formula_is_not_called_in_python(folder, monkeypatch):
    model: Any = moe_runtime.load(folder, device="cpu")
    experts = [layer.mlp.experts for layer in model.model.layers]
    assert all(module._activation == GPT_OSS for module in experts)
    ids = torch.arange(3)[None]

    def refuse(self: ActivationSpec, gate: Tensor | None, up: Tensor) -> Tensor:
        raise AssertionError("computed in Python")

    monkeypatch.setattr(ActivationSpec, "__call__", refuse)
    with torch.no_grad():
        prompt = model(ids, use_cache=True)
        model(ids[:, :1], past_key_values=prompt.past_key_values)
    assert all(module._step_kernel is not None for module in experts)


def test_a_gate_with_values_of_its_own_is_called(folder):
    """A trainable value is not a constant of a formula."""
    model: Any = moe_runtime.load(folder, device="cpu")
    experts = model.model.layers[0].mlp.experts
    experts.replaced.register_parameter("slope", torch.nn.Parameter(torch.ones(())))
    experts.alpha = experts.alpha  # looked at anew
    assert not isinstance(experts._activation, ActivationSpec)


def test_the_reserve_holds_the_values_of_the_largest_matrix(folder, monkeypatch):
    """A prompt's products write them out, one matrix at a time."""
    asked: list[int] = []
    own = budget.reserve_for

    def remembered(*arguments: Any, **named: Any) -> int:
        with_values = own(*arguments, **named)
        with monkeypatch.context() as without:
            without.setattr(ExpertMap, "largest_quantised", 0)
            asked.append(with_values - own(*arguments, **named))
        return with_values

    monkeypatch.setattr("moe_runtime.inference.loading.reserve_for", remembered)
    model: Any = moe_runtime.load(folder, device="cpu", dtype="float32")
    text = model.config.get_text_config()
    assert set(asked) == {4 * text.hidden_size * text.intermediate_size}
