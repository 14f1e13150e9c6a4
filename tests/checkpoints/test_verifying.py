"""Weights that are not numbers: named by `inspect --verify`, and by a run that they spoil."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf_checkpoints
import pytest
import torch
from changed_checkpoints import EXPERT, Originals, changed
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_runtime.checkpoints.packing import pack_checkpoint
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.models.pocket import pocket_path

MIXTRAL = "model.layers.1.block_sparse_moe.experts.3.w3"
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return Originals(tmp_path_factory.mktemp("verified"))


def poisoned(name: str, number: float) -> Callable[[dict[str, Tensor]], None]:
    """Makes the last element of a tensor a number, or gives it a byte."""

    def poison(tensors: dict[str, Tensor]) -> None:
        stored = tensors[name]
        is_byte = isinstance(number, int)
        values = stored.view(torch.uint8).clone() if is_byte else stored.float()
        values.view(-1)[-1] = number
        tensors[name] = values.view(stored.dtype) if is_byte else values.to(stored.dtype)

    return poison


@pytest.mark.parametrize(
    ("sample", "name", "number", "matrix"),
    [
        ("deepseek_v3-int4", f"{EXPERT}.weight_scale", NAN, "up of expert 3"),
        ("deepseek_v3-fp8", f"{EXPERT}.weight", 127, "up of expert 3"),
        ("olmoe-mxfp8", f"{EXPERT}.weight_scale_inv", 255, "up of expert 3"),
        ("mixtral-nvfp4", f"{MIXTRAL}.weight_global_scale", NAN, "up of expert 3"),
        ("gpt_oss-mxfp4", "model.layers.1.mlp.experts.down_proj_scales", 255, "down of expert 5"),
        ("gpt_oss-mxfp4", "model.layers.1.mlp.experts.down_proj_scales", 254, "down of expert 5"),
        ("gpt_oss-mxfp4", "model.layers.1.mlp.experts.down_proj_bias", NAN, "down_bias of expert"),
        ("deepseek_v3-fp8", "model.norm.weight", -INF, ""),
    ],
)
def test_what_is_no_number_is_named(originals, tmp_path, sample, name, number, matrix):
    folder = changed(originals(sample), tmp_path, poisoned(name, number))
    inspect_checkpoint(folder)
    with pytest.raises(CheckpointError) as caught:
        inspect_checkpoint(folder, verify=True)
    named, _, said = str(caught.value).partition(": expected finite numbers, found ")
    assert name in named
    assert f" ({matrix}" in named or not matrix
    assert said.endswith(" NaN or infinite; fetch the checkpoint again")


def test_scales_of_a_dense_weight_are_seen_in_its_values(originals, tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    folder = changed(originals("deepseek_v3-fp8"), tmp_path, poisoned(f"{name}_scale_inv", NAN))
    with pytest.raises(
        CheckpointError, match=f"{name} with {name}_scale_inv: expected finite numbers, found"
    ):
        inspect_checkpoint(folder, verify=True)


def test_sound_checkpoints_pass_whatever_holds_them(originals, tmp_path):
    """Every byte is counted once, of experts first and then of all else."""
    done: list[tuple[str, int, int]] = []
    packed = pack_checkpoint(pocket_path(), tmp_path / "packed").folder
    sample = next(sample for sample in gguf_checkpoints.SAMPLES if sample.name == "qwen2moe-q8_0")
    file = gguf_checkpoints.write(sample, tmp_path / "gguf").folder
    for place in (packed, file, originals("glm4_moe-awq"), originals("qwen3_moe-int4-zeros")):
        done.clear()
        inspect_checkpoint(place, verify=True, progress=lambda *now: done.append(now))
        stages = [stage for stage, *_ in done]
        assert set(stages) == {"verifying experts", "loading dense weights"}
        for stage in set(stages):
            last = max(number for number, found in enumerate(stages) if found == stage)
            assert done[last][1] == done[last][2] > 0


def test_a_run_whose_logits_are_no_numbers_says_what_finds_the_cause(tmp_path, capsys):
    folder = tmp_path / "pocket"
    shutil.copytree(pocket_path(), folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    tensors = load_file(folder / "model.safetensors")
    poisoned("model.norm.weight", NAN)(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert main(["run", str(folder), "--prompt", "The", "-n", "4"]) == 2
    assert "inspect MODEL --verify` names weights" in capsys.readouterr().err
    assert main(["inspect", str(folder), "--verify"]) == 2
    assert "model.norm.weight: expected finite numbers, found 1 of" in capsys.readouterr().err
    assert main(["inspect", str(pocket_path()), "--verify"]) == 0
    assert "every weight that the model uses was read" in capsys.readouterr().out


def test_a_buffer_may_be_infinite_but_is_a_number(originals, tmp_path):
    """Towers clip by buffers that are infinite until they are calibrated."""
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for number in (INF, NAN):
        folder = changed(
            originals("deepseek_v3-fp8"), tmp_path / str(number), poisoned(name, number)
        )
        if number == INF:
            inspect_checkpoint(folder, verify=True)
            continue
        with pytest.raises(CheckpointError, match=f"{name}: expected finite numbers, found 1 of"):
            inspect_checkpoint(folder, verify=True)
