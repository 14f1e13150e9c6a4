"""`load(activations="int8")`: rows rounded to int8 before weights in codes multiply them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_checkpoints
import pytest
import quantized_checkpoints
import torch
from quantized_checkpoints import SAMPLES, Written
from tiny_checkpoints import NEXT_TOKEN, PROMPT

import moe_runtime
from moe_runtime.cli.main import main
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.models.pocket import pocket_path

NAMES = ("gpt_oss-mxfp4", "deepseek_v3-int4", "glm4_moe-awq")


@pytest.fixture(scope="module")
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    (sample,) = [sample for sample in SAMPLES if sample.name == request.param]
    return quantized_checkpoints.write(sample, tmp_path_factory.mktemp("quantized"))


def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    """Of a prompt and of a token after it, `[Q + 1, V]`."""
    options = {"device": "cpu", "dtype": "float32", "host_memory": "1GiB"} | options
    model = moe_runtime.load(folder, **options)
    with model.moe, torch.inference_mode():
        found = model(PROMPT, use_cache=True)
        more = model(NEXT_TOKEN, past_key_values=found.past_key_values)
        model.moe.check()
        return torch.cat((found.logits, more.logits), 1)[0]


@pytest.mark.parametrize("written", NAMES, indirect=True)
def test_near_the_exact_ones_and_the_same_at_every_budget(written):
    """A row is `sqrt(32) / 254` off at most relative to its norm, at every product it meets."""
    smallest = inspect_checkpoint(written.folder, dtype="float32").smallest_budget_bytes
    exact = logits_of(written.folder)
    found = logits_of(written.folder, activations="int8")
    assert not torch.equal(found, exact)
    assert (found - exact).norm() <= 6 * 32**0.5 / 254 * exact.norm()
    scarce = logits_of(written.folder, activations="int8", host_memory=smallest)
    assert torch.equal(scarce, found)


@pytest.mark.parametrize(
    "name", [pytest.param("qwen2moe-q8_0", marks=pytest.mark.long), "olmoe-q4_k"]
)
def test_blocks_of_a_gguf_file(name, tmp_path):
    """Near the exact ones, as above: files with blocks of 32 and of 256 codes."""
    (sample,) = [sample for sample in gguf_checkpoints.SAMPLES if sample.name == name]
    file = gguf_checkpoints.write(sample, tmp_path).folder
    smallest = inspect_checkpoint(file, dtype="float32").smallest_budget_bytes
    exact, found = logits_of(file), logits_of(file, activations="int8")
    assert not torch.equal(found, exact)
    assert (found - exact).norm() <= 6 * 32**0.5 / 254 * exact.norm()
    assert torch.equal(logits_of(file, activations="int8", host_memory=smallest), found)


@pytest.mark.parametrize("written", ["deepseek_v3-fp8"], indirect=True)
def test_models_without_quantised_weights_are_refused(written, tmp_path, capsys):
    for folder in (written.folder, pocket_path()):
        with pytest.raises(UnsupportedModelError, match="needs weights in GGUF's blocks"):
            logits_of(folder, activations="int8")
    with pytest.raises(ValueError, match="unknown activations 'int4'"):
        logits_of(written.folder, activations="int4")
    (sample,) = [found for found in gguf_checkpoints.SAMPLES if found.name == "qwen3moe-mxfp4"]
    # an embedding is no product, and is widened as it is read
    sample = replace(sample, kinds={"token_embd": gguf_checkpoints.Kind.Q8_0})
    file = gguf_checkpoints.write(sample, tmp_path).folder
    with pytest.raises(UnsupportedModelError, match="that stay so in memory; this model has none"):
        logits_of(file, activations="int8")
    capsys.readouterr()  # what wrote the file
    arguments = ["run", str(pocket_path()), "--prompt", "a", "--device", "cpu"]
    assert main([*arguments, "--activations", "int8"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "leave it out" in line
