"""Prompts with pictures, compared with the processor and model of transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import picture_checkpoints as pc
import pytest
import torch
from PIL import Image

import moe_runtime
from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.checkpoints.transformers_private import picture_processor
from moe_runtime.inference.generation import generate_text
from moe_runtime.inference.pictures import PictureReader, Pictures

NUM_NEW = 8


@pytest.fixture(scope="module", params=pc.TABLE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pc.save_seeing_checkpoint(request.param, tmp_path_factory.mktemp("seeing"))


def reference_text(folder: Path, images: Sequence[Image.Image], text: str) -> list[int]:
    """Greedy tokens of transformers: its processor on the whole prompt, its model in memory."""
    tokenizer = load_tokenizer(folder)
    config = read_config(folder)
    processor = picture_processor(folder, config, tokenizer)
    content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    given = processor(
        text=[prompt], images=list(images), return_tensors="pt", add_special_tokens=False
    )
    model = pc.model_of(folder)
    inputs = pc.known_inputs(model, given)
    out = model.generate(
        **inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=tokenizer.eos_token_id
    )
    return out[0, given["input_ids"].shape[1] :].tolist()


def test_a_text_is_that_of_transformers(folder):
    images = [pc.picture(seed, *size) for seed, size in enumerate([(17, 31), (40, 9)])]
    expected = reference_text(folder, images, "What is it?")
    tokenizer = load_tokenizer(folder)
    reader = PictureReader.of(folder, read_config(folder), tokenizer)
    assert reader is not None
    pictures = Pictures(reader, [reader.read(pc.png(image)) for image in images])
    assert tokenizer.backend_tokenizer.padding is None  # others use it meanwhile
    loaded: Any = moe_runtime.load(folder, device="cpu", dtype="float32", host_memory="1GiB")
    with torch.no_grad(), loaded.moe:
        found = generate_text(
            loaded, tokenizer, "What is it?", max_new_tokens=NUM_NEW, chat=True, pictures=pictures
        )
    assert list(found.token_ids) == expected
