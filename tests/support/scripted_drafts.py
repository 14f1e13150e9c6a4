"""Drafts for tests: told beforehand, verified whatever they cost."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import moe_families
import torch
from tiny_checkpoints import randomise, save, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM

from moe_runtime.inference.drafts import DraftControl, Lookups, Offer


class EveryDraft(DraftControl):
    """Has as many drafted tokens verified as there may be."""

    def choose(self, offers: Sequence[Offer]) -> list[int]:
        left = self.most_rows - len(offers)
        chosen = []
        for offer in offers:
            chosen.append(min(left, offer.most))
            left -= chosen[-1]
        return chosen

    def may_catch_up(self, num_base: int) -> bool:
        return True


class Told:
    """Drafts what is told to follow, but for every third token."""

    def __init__(self, whole: Sequence[int], most: int = 15) -> None:
        self.whole, self.most, self.place = list(whole), most, 0

    def extend(self, tokens: Sequence[int]) -> None:
        self.place += len(tokens)

    def offer(self, most: int) -> Offer:
        return Offer(max(min(most, self.most, len(self.whole) - self.place), 0), 1)

    def draft(self, count: int) -> list[int]:
        places = range(self.place, self.place + count)
        right = [self.whole[place] for place in places]
        return [
            token if place % 3 else (token + 1) % 64
            for place, token in zip(places, right, strict=True)
        ]


class Scripted(Lookups):
    """Makes drafters of tests."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.new = make

    def draft(self, drafters: Sequence[Any], counts: Sequence[int]) -> list[list[int]]:
        return [one.draft(count) for one, count in zip(drafters, counts, strict=True)]


def models_of_few_tokens(folder: Path, size: int) -> Any:
    """Writes a mixture that knows so many tokens to ``model``, and a dense model for its drafts to
    ``draft``; gives the mixture."""
    small: dict[str, Any] = {"vocab_size": size, "num_hidden_layers": 1}
    (family,) = [each for each in moe_families.FAMILIES if str(each) == "OlmoeForCausalLM"]
    model = tiny_model(dataclasses.replace(family, config={**family.config, **small}))
    save(model, folder / "model", sharded=False)
    torch.manual_seed(3)
    config = LlamaConfig(
        **small,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
    )
    randomise(drafter := LlamaForCausalLM(config))
    drafter.save_pretrained(folder / "draft")
    return model
