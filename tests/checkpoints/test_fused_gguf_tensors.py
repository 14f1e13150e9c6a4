"""Tensors of GGUF files that are several of a model's, and those that are a part of one."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import gguf_checkpoints
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_checkpoints import SAMPLES, Written
from gguf_rewriting import rewritten, tensors_of
from safetensors.torch import load_file

import moe_runtime
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.gguf.header import read_header
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.types import ExpertKey

NAMED = {sample.name: sample for sample in SAMPLES}
GATE_UP = "blk.1.ffn_gate_up_exps.weight"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Experts of six, each gate and up of 96 rows."""
    return gguf_checkpoints.write(NAMED["qwen3next-q5_1"], tmp_path_factory.mktemp("gguf"))


def mapped(file: Path) -> ExpertMap:
    checkpoint = open_checkpoint(file, "auto")
    return map_experts(build_on_meta(checkpoint), checkpoint)


def test_gates_and_ups_are_ranges_of_their_tensor(written, tmp_path):
    """An up behind its gate, each of the sizes that it has in a file where they are apart."""
    apart = replace(written.sample, is_fused=False)
    other = mapped(gguf_checkpoints.write(apart, tmp_path).folder)
    experts = mapped(written.folder)
    assert (experts.matrices, experts.packings) == (other.matrices, other.packings)
    whole = {tensor.name: tensor for tensor in read_header(written.folder).tensors}[GATE_UP]
    keys = [ExpertKey(1, number) for number in range(6)]
    places = [part.offset for key in keys for part in experts.layouts[key].tensors[:2]]
    each = whole.num_bytes // 12
    assert places == [whole.offset + each * number for number in range(12)]
    for key in keys:
        here, there = experts.layouts[key].tensors, other.layouts[key].tensors
        assert [(t.shape, t.stride) for t in here] == [(t.shape, t.stride) for t in there]


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (np.s_[:, :95], "as many rows for gates as for ups, found 95"),
        (np.s_[:5], r"experts\.5\.gate_proj\.weight: expected experts 0 to 5, as"),
        (np.s_[:, :64], r"gate_up_proj: expected \(6, 192, 64\), .* \(6, 64, 64\)|fit together"),
    ],
)
def test_gates_and_ups_of_other_sizes_are_refused(written, tmp_path, size, words):
    stack, kind = tensors_of(written.folder)[GATE_UP]
    stored = {GATE_UP: (np.ascontiguousarray(stack[size]), kind)}
    file = rewritten(written.folder, tmp_path / "a.gguf", instead=stored)
    with pytest.raises(CheckpointError, match=words):
        mapped(file)


def test_what_is_there_twice_is_refused(written, tmp_path):
    """Gates on their own beside those with ups; a projection whole and in parts."""
    stack, kind = tensors_of(written.folder)[GATE_UP]
    gates = {"blk.1.ffn_gate_exps.weight": (np.ascontiguousarray(stack[:, :96]), kind)}
    file = rewritten(written.folder, tmp_path / "a.gguf", instead=gates)
    with pytest.raises(CheckpointError, match=r"\.0\.gate_proj\.weight once, found it twice"):
        mapped(file)
    whole = {"blk.1.ssm_in.weight": (np.zeros((768, 64), np.float32), Kind.F32)}
    file = rewritten(written.folder, tmp_path / "b.gguf", instead=whole)
    with pytest.raises(UnsupportedModelError, match=r"no place for, such as blk\.0\.attn_qkv"):
        mapped(file)


def test_a_projection_in_parts_stays_packed_and_gives_the_order_of_transformers(written):
    """Rows of the unit matrix give the weights themselves, to the bit."""
    expected = load_file(written.plain / "model.safetensors")
    model = moe_runtime.load(written.folder, device="cpu", dtype="float32", max_tokens=32)
    with model.moe, torch.inference_mode():
        for layer in range(3):
            projection = model.model.layers[layer].linear_attn.in_proj_qkvz
            parts = (projection.qkv.weight, projection.z.weight)
            kinds = [cast(Any, part).matrix.format.codes for part in parts]
            assert kinds == ["q8_0", "q5_1"]
            name = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
            assert torch.equal(projection(torch.eye(64)).T, expected[name])


@pytest.mark.parametrize("part", ["attn_qkv", "attn_gate"])
def test_a_part_of_a_projection_that_is_missing_is_named(written, tmp_path, part):
    name = f"blk.1.{part}.weight"
    file = rewritten(written.folder, tmp_path / "a.gguf", without=[name])
    with pytest.raises(CheckpointError, match=r"lacks 1 .*layers\.1\.linear_attn\.in_proj_qkvz"):
        moe_runtime.load(file, device="cpu", max_tokens=32)


@pytest.mark.parametrize(("part", "rows"), [("attn_qkv", 319), ("attn_gate", 191)])
def test_parts_of_a_projection_of_no_whole_heads_are_refused(written, tmp_path, part, rows):
    stored = {f"blk.1.{part}.weight": (np.zeros((rows, 64), np.float32), Kind.F32)}
    file = rewritten(written.folder, tmp_path / "a.gguf", instead=stored)
    with pytest.raises(CheckpointError, match=r"layers\.1\.linear_attn\.in_proj_qkvz"):
        moe_runtime.load(file, device="cpu", max_tokens=32)


@pytest.mark.parametrize(
    ("most", "other", "dtype"),
    [(Kind.F16, Kind.F32, torch.float16), (Kind.F32, Kind.F16, torch.float32)],
)
def test_experts_of_several_plain_types_are_computed_in_that_of_most_weights(
    most, other, dtype, tmp_path
):
    sample = replace(NAMED["qwen3moe-f16"], kinds={"down_exps": other, "": most})
    assert open_checkpoint(gguf_checkpoints.write(sample, tmp_path).folder, "auto").dtype is dtype
