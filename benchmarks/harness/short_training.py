"""Short training runs of small language models on text that every Python installation carries."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_runtime.models.lm.model import LanguageModel, Losses
from moe_runtime.models.pocket.corpus import gather

VOCAB = 256


def training_text() -> Tensor:
    """The documents that are not held out, as bytes."""
    documents = [document.text for document in gather() if not document.held_out]
    return torch.frombuffer(bytearray("\n\n".join(documents).encode()), dtype=torch.uint8).long()


def steps_of_training(
    model: LanguageModel, text: Tensor, *, steps: int, batch: int, context: int, seed: int
) -> Iterator[Losses]:
    """Trains a model; yields the losses of each step after it was taken.

    Args:
        model: trained in place.
        text: token ids, of which windows are drawn at random.
        steps: how many.
        batch, context: windows of a step, and tokens that each predicts.
        seed: of the windows.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        first = torch.randint(len(text) - context - 1, (batch, 1), generator=generator)
        window = text[first + torch.arange(context + 1)]
        losses = model.losses(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        (losses.cross_entropy + losses.auxiliary).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.after_step()
        yield losses
