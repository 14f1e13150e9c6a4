"""Trains a LoRA adapter on attention with PEFT, then answers requests with it and without.

python examples/train_and_serve_an_adapter.py [FOLDER]     needs the extras finetune and serve

The same on the command line: `moe-runtime serve MODEL --adapter mine=FOLDER`.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer

import moe_runtime
from moe_runtime.checkpoints.adapter_files import AdapterFolder
from moe_runtime.inference.adapters import Adapters
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import Event, GenerationRequest, NewToken

TEXT = "The sea is salty because rivers carry salt to it."


def train(folder: Path) -> None:
    """Trains on one sentence and writes the adapter as PEFT does; experts stay in the files."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(pocket_path())
    model = moe_runtime.load(pocket_path(), host_memory="64MiB", dtype="float32", max_tokens=64)
    with model.moe:
        config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
        tuned = get_peft_model(model, config)
        weights = [weight for weight in tuned.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=1e-2)
        ids = tokenizer(TEXT, return_tensors="pt").input_ids
        for step in range(8):
            loss = tuned(input_ids=ids, labels=ids).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step}: loss {loss.item():.2f}")
        tuned.save_pretrained(folder)


def answer(folder: Path) -> None:
    """Answers two requests in the same engine: one without the adapter, one with it."""
    tokenizer = AutoTokenizer.from_pretrained(pocket_path())
    model = moe_runtime.load(pocket_path(), host_memory="64MiB", dtype="float32", max_tokens=128)
    prompt = tuple(tokenizer("The sea is").input_ids)
    with model.moe:
        adapters = Adapters(model, {"mine": AdapterFolder(folder)})
        said: dict[str | None, list[int]] = {None: [], "mine": []}
        with Engine(model, adapters=adapters) as engine:
            for name, ids in said.items():
                request = GenerationRequest(prompt_ids=prompt, max_new_tokens=8, adapter=name)
                engine.submit(request, partial(note, ids))
            engine.drain()
    for name, ids in said.items():
        print(f"{name or 'no adapter'}: {tokenizer.decode(ids)!r}")


def note(ids: list[int], event: Event) -> None:
    """Keeps the tokens of a request; other events say when it begins and ends."""
    if isinstance(event, NewToken):
        ids.append(event.token_id)


if __name__ == "__main__":
    if sys.argv[1:]:
        train(Path(sys.argv[1]))
        answer(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            train(Path(made))
            answer(Path(made))
