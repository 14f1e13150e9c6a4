"""The same GGUF files in llama.cpp, where it is installed (`llama-cpp-python`, extra `peers`).

Weights are in fp32 here: llama.cpp rounds activations to eight bits before it multiplies them by
quantised weights, and these products have tests of their own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf_checkpoints
import numpy as np
import pytest
import tiny_checkpoints
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

import moe_runtime
from moe_runtime.checkpoints.gguf import architectures

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

# Both compute in fp32 and differ in the order of sums, as in test_gguf_models.
MAX_RELATIVE_ERROR = 1e-5
# Files of DeepSeek are left out: the tiny ones lack what llama.cpp asks of them, its sizes of heads
# and its models without compressed queries being known by their numbers of layers.
SAMPLES = {
    sample.architecture: replace(sample, kinds={"": Kind.F32})
    for sample in gguf_checkpoints.SAMPLES
    if sample.architecture != "deepseek2"
}


def logits_of_llama_cpp(file: Path, ids: Tensor) -> Tensor:
    model = llama_cpp.Llama(
        str(file), n_ctx=128, logits_all=True, verbose=False, n_threads=1, flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    model.eval(ids.tolist())
    found = torch.from_numpy(np.array(model.scores[: len(ids)], dtype=np.float32))
    model.close()
    return found


@pytest.mark.parametrize("architecture", SAMPLES)
def test_logits_equal_those_of_llama_cpp(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture == "gpt-oss":
        # llama.cpp begins and ends YaRN's ramp at whole dimensions, OpenAI's model between them
        row = architectures.ARCHITECTURES[architecture]
        other = {architecture: replace(row, rope={**row.rope, "truncate": True})}
        monkeypatch.setattr(architectures, "ARCHITECTURES", architectures.ARCHITECTURES | other)
    written = gguf_checkpoints.write(SAMPLES[architecture], tmp_path)
    ids = tiny_checkpoints.PROMPT
    expected = logits_of_llama_cpp(written.folder, ids[0])
    model = moe_runtime.load(written.folder, device="cpu", dtype="float32", host_memory="1GiB")
    with model.moe, torch.no_grad():
        found = model(ids).logits[0]
    assert (found - expected).abs().max() < MAX_RELATIVE_ERROR * expected.abs().max()
