"""`activations="int8"`: what quantised experts multiply is rounded, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import tiny_checkpoints
import torch
from moe_families import Family
from quantized_checkpoints import Written

import moe_runtime
from moe_runtime.errors import UnsupportedModelError, UnsupportedUseError
from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.kernels.quantized.reference import round_to_int8

MAX_RELATIVE_ERROR = 1e-5
"""Of sums in fp32 in another order, as in test_quantized_models."""
SAMPLES = {sample.name: sample for sample in quantized_checkpoints.SAMPLES}


def load(written: Written, host_memory: int | str = "1GiB", **options: Any) -> Any:
    options = {"device": "cpu", "dtype": "float32", "activations": "int8"} | options
    return moe_runtime.load(written.folder, host_memory=host_memory, **options)


def logits_of(model: Any, written: Written) -> torch.Tensor:
    return torch.cat(tiny_checkpoints.prompt_and_step_logits(model, written.sample.family), dim=1)


def with_rounded_inputs(experts: torch.nn.Module, patch: pytest.MonkeyPatch, *args: Any) -> Any:
    """What the experts of transformers compute where every product rounds its left side."""
    linear, matmul = torch.nn.functional.linear, torch.Tensor.__matmul__
    with torch.no_grad(), patch.context() as patched:
        patched.setattr(
            torch.nn.functional, "linear", lambda x, *rest: linear(round_to_int8(x), *rest)
        )
        patched.setattr(torch.Tensor, "__matmul__", lambda x, y: matmul(round_to_int8(x), y))
        return experts(*args)


@pytest.mark.parametrize("name", ["gpt_oss-mxfp4", "deepseek_v3-int4", "qwen3_moe-gptq"])
def test_experts_compute_those_of_transformers_with_rounded_inputs_of_products(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = quantized_checkpoints.write(SAMPLES[name], tmp_path)
    model_class = tiny_checkpoints.model_class_of(written.sample.family)
    reference = model_class.from_pretrained(
        written.plain, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    smallest = inspect_checkpoint(written.folder, dtype="float32").smallest_budget_bytes
    with (model := load(written, smallest)).moe:
        starved = logits_of(model, written)
        model.moe.check()
    calls: list[tuple[str, Any, torch.Tensor]] = []
    with (model := load(written)).moe:
        assert torch.equal(logits_of(model, written), starved)
        for path, module in model.named_modules():
            if isinstance(module, OffloadedExperts):
                note = lambda _, args, out, path=path: calls.append((path, args, out))  # noqa: E731
                module.register_forward_hook(note)
        logits_of(model, written)
    errors = []
    for path, args, found in calls:
        experts = reference.get_submodule(path)
        expected = with_rounded_inputs(experts, monkeypatch, *args)
        exact = experts(*args).detach()
        largest = exact.abs().amax(-1)
        assert ((expected - exact).abs().amax(-1) > 1e-4 * largest).any()
        errors += ((found - expected).abs().amax(-1) / largest).tolist()
    assert len(errors) > 4
    # where sums in another order move a hidden value over the middle of a step, it is a step off
    assert max(errors) < 4 / 127
    assert sum(error > MAX_RELATIVE_ERROR for error in errors) < len(errors) / 4


def test_a_backward_pass_is_refused_and_the_next_call_has_the_same_bits(tmp_path: Path) -> None:
    written = quantized_checkpoints.write(SAMPLES["qwen3_moe-gptq"], tmp_path)
    with (model := load(written)).moe:
        before = logits_of(model, written)
        embedded = model.get_input_embeddings()(torch.tensor([[3, 5, 7]])).requires_grad_()
        with pytest.raises(UnsupportedUseError, match="load with activations exact"):
            model(inputs_embeds=embedded).logits.sum().backward()
        model.moe.check()
        assert torch.equal(logits_of(model, written), before)


def test_experts_that_are_no_integers_are_refused(tmp_path: Path) -> None:
    plain = tiny_checkpoints.tiny_model(Family("mixtral", "MixtralForCausalLM"))
    path = tiny_checkpoints.save(plain, tmp_path / "plain", sharded=False)
    fp8 = quantized_checkpoints.write(SAMPLES["deepseek_v3-fp8"], tmp_path / "fp8").folder
    for folder in (path, fp8):
        with pytest.raises(UnsupportedModelError, match="int4, int8 or fp4, and these are"):
            moe_runtime.load(folder, device="cpu", host_memory="1GiB", activations="int8")
    with pytest.raises(ValueError, match="unknown activations 'int4'"):
        moe_runtime.load(path, device="cpu", activations="int4")
