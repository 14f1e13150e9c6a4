"""Quantised experts in slots of an emulated device: by Triton's interpreter where it reads them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf_checkpoints
import pytest
import quantized_checkpoints
import torch
from emulated_models import experts_modules_of, load_on_emulated_device, logits_of
from tiny_checkpoints import PROMPT
from triton_interpreter import repair_interpreter

import moe_runtime
from moe_runtime.inference.device.device_experts import DeviceExperts
from moe_runtime.memory.device.device_store import DeviceStore

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels run on the GPU here, which sees no emulated device"
)
# One token, and more than the kernels for a few tokens take.
ONE, MANY = PROMPT[:, :1], torch.cat((PROMPT, PROMPT[:, :6]), 1)
SAMPLES = {sample.name: sample for sample in quantized_checkpoints.SAMPLES}
READ = ("gpt_oss-mxfp4", "deepseek_v3-int4")
READ_TOO = ("qwen3_moe-fp8-ragged", "mixtral-nvfp4", "olmoe-q4_k")
"""The same kernels with other codes, which the tests of kernels follow."""
SUPERBLOCKS = {"num_hidden_layers": 1, "num_experts_per_tok": 1}
"""Blocks of 256 columns make wide experts, so there is one per token, in one layer."""
FROM_VALUES = ("qwen3moe-mxfp4", "qwen2moe-mixed")


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    repair_interpreter()


def write(name: str, folder: Path, *, is_whole: bool) -> Path:
    if name in SAMPLES:
        sample = SAMPLES[name]
        # many tokens in one layer only, to save time
        layers = {"num_hidden_layers": 1 if name == "gpt_oss-mxfp4" else 2}
        family = replace(sample.family, config=sample.family.config | layers)
        return quantized_checkpoints.write(replace(sample, family=family), folder).folder
    blocks = next(sample for sample in gguf_checkpoints.SAMPLES if sample.name == name)
    if name == "olmoe-q4_k" and not is_whole:
        family = replace(blocks.family, config=blocks.family.config | SUPERBLOCKS)
        blocks = replace(blocks, family=family)
    return gguf_checkpoints.write(blocks, folder).folder


def has_stacks(model: Any) -> list[bool]:
    layers: list[DeviceExperts] = experts_modules_of(model)
    stores = [layer.store for layer in layers]
    assert all(isinstance(store, DeviceStore) for store in stores)
    return [
        store.has_stack(layer.layer, torch.float32)
        for layer, store in zip(layers, stores, strict=True)
        if isinstance(store, DeviceStore)
    ]


@pytest.mark.parametrize(
    ("name", "is_whole"),
    [
        *((name, False) for name in (*READ, FROM_VALUES[1])),
        *(
            pytest.param(name, False, marks=pytest.mark.long)
            for name in (*READ_TOO, FROM_VALUES[0])
        ),
        # layers of several types, and several experts a token
        pytest.param("olmoe-q4_k", True, marks=pytest.mark.long),
    ],
)
def test_quantised_slots_equal_the_plain_products(name, is_whole, tmp_path):
    """Of formats that no Triton product reads, experts are computed one by one from values."""
    checkpoint, found = write(name, tmp_path, is_whole=is_whole), []
    prompts = [MANY] if name == "gpt_oss-mxfp4" else [ONE]  # the interpreter takes its time
    for slots in (6, 2):
        model = load_on_emulated_device(checkpoint, slots_a_layer=slots, dtype="float32")
        assert set(has_stacks(model)) == {name not in FROM_VALUES}
        with model.moe:
            found.append(logits_of(model, prompts))
            model.moe.check()
    assert all(map(torch.equal, *found))
    with (on_host := moe_runtime.load(checkpoint, device="cpu", dtype="float32")).moe:
        expected = logits_of(on_host, prompts)
    # the same values, fp32 sums of at most 256 terms in a few layers, in another order
    torch.testing.assert_close(found[0], expected, rtol=1e-4, atol=1e-4)
