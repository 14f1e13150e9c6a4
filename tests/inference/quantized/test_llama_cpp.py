"""GGUF files in llama.cpp: logits that it computed from the same bytes.

`data/llama_cpp_logits.npz` has them, with digests of the files. `llama-cpp-python` (extra `peers`)
writes it anew: `PYTHONPATH=tests/support:tests/support/checkpoints:tests/support/kernels
python tests/inference/quantized/test_llama_cpp.py`.
"""

import functools
import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path

import gguf_checkpoints
import numpy as np
import pytest
import tiny_checkpoints
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import PreTrainedModel

import moe_runtime
from moe_runtime.checkpoints.gguf import architectures

LOGITS = Path(__file__).parent / "data" / "llama_cpp_logits.npz"
# Weights in fp32: both compute in fp32 and differ in the order of sums, as in test_gguf_models.
MAX_RELATIVE_ERROR = 1e-5
# Three layers of linear attention: in each, sums over states follow those of the products.
MAX_ERROR_OF_STATES = 4 * MAX_RELATIVE_ERROR
# Quantised weights: llama.cpp rounds what they multiply to eight bits, at most `sqrt(32) / 254` of
# the norm at each product; six of them lie behind one another, as in test_int8_activations.
MAX_ROUNDING_ERROR = 6 * 32**0.5 / 254
# Files of DeepSeek are left out: the tiny ones lack what llama.cpp asks of them, its sizes of heads
# and its models without compressed queries being known by their numbers of layers.
QUANTISED = {
    sample.name: sample
    for sample in gguf_checkpoints.SAMPLES
    if sample.architecture != "deepseek2" and sample.kinds
}
PLAIN = {
    f"{sample.architecture}-f32": replace(
        sample, name=f"{sample.architecture}-f32", kinds={"": Kind.F32}
    )
    for sample in QUANTISED.values()
}
SAMPLES = QUANTISED | PLAIN


SEEDS = {"qwen35moe-q8_0": 3, "qwen3next-ssm_in": 28, "qwen3next-q5_1": 28}
"""Of these, else of 1, llama.cpp's rounding sends no token to another expert."""


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """As `tiny_checkpoints` does, by numbers that are the same on every processor."""
    generator = np.random.default_rng(seed)
    for _, tensor in sorted(model.state_dict(keep_vars=True).items()):
        numbers = torch.from_numpy(generator.standard_normal(tensor.shape, dtype=np.float32))
        if tensor.ndim >= 2 and isinstance(tensor, torch.nn.Parameter):
            tensor.copy_(numbers * tensor.shape[-1] ** -0.5)
        elif tensor.is_floating_point():
            tensor.copy_(tensor.round() + 0.1 * numbers)


def write(sample: gguf_checkpoints.Sample, folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        seed = SEEDS.get(sample.name, 1)
        patch.setattr(tiny_checkpoints, "randomise", functools.partial(randomise, seed=seed))
        return gguf_checkpoints.write(sample, folder).folder


def digest(file: Path) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(file.read_bytes()).digest(), np.uint8)


REPRESENTED = ("gpt-oss-mxfp4", "qwen2moe-q8_0", "olmoe-q4_k")
with np.load(LOGITS) as archive:
    KEPT = sorted(SAMPLES.keys() & set(archive.files))


@pytest.mark.parametrize(
    "name",
    # values of codes are compared with gguf's in test_gguf_models
    [
        name if name in (*PLAIN, *REPRESENTED) else pytest.param(name, marks=pytest.mark.long)
        for name in KEPT
    ],
)
def test_logits_are_those_of_llama_cpp(name, tmp_path, monkeypatch):
    sample = SAMPLES[name]
    if sample.architecture == "gpt-oss":
        # llama.cpp begins and ends YaRN's ramp at whole dimensions, OpenAI's model between them
        row = architectures.ARCHITECTURES["gpt-oss"]
        other = {"gpt-oss": replace(row, rope={**row.rope, "truncate": True})}
        monkeypatch.setattr(architectures, "ARCHITECTURES", architectures.ARCHITECTURES | other)
    file = write(sample, tmp_path)
    with np.load(LOGITS) as kept:
        expected, bytes_then = torch.from_numpy(kept[name]), kept[f"{name} file"]
    if not np.array_equal(digest(file), bytes_then):
        pytest.skip("another version of numpy or transformers makes another random file")
    model = moe_runtime.load(file, device="cpu", dtype="float32", host_memory="1GiB")
    with model.moe, torch.no_grad():
        found = model(tiny_checkpoints.PROMPT).logits[0]
    if name in PLAIN:
        has_states = sample.architecture in ("qwen3next", "qwen35moe")
        most = MAX_ERROR_OF_STATES if has_states else MAX_RELATIVE_ERROR
        assert (found - expected).abs().max() < most * expected.abs().max()
    else:
        assert (found - expected).norm() <= MAX_ROUNDING_ERROR * expected.norm()


def logits_of_llama_cpp(file: Path, ids: Tensor) -> np.ndarray:
    import llama_cpp

    model = llama_cpp.Llama(
        str(file), n_ctx=128, logits_all=True, verbose=False, n_threads=1, flash_attn=False,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    model.eval(ids.tolist())
    found = np.array(model.scores[: len(ids)], dtype=np.float32)
    model.close()
    return found


if __name__ == "__main__":
    arrays = {}
    for name, sample in SAMPLES.items():
        with tempfile.TemporaryDirectory() as folder:
            file = write(sample, Path(folder))
            arrays |= {name: logits_of_llama_cpp(file, tiny_checkpoints.PROMPT[0])}
            arrays |= {f"{name} file": digest(file)}
    LOGITS.parent.mkdir(exist_ok=True)
    np.savez_compressed(LOGITS, **arrays)
