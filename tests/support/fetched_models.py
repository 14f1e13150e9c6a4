"""Loaded models that read missing experts in host memory by themselves, and requests to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import torch
from emulated_models import experts_modules_of, load_on_emulated_device
from tiny_checkpoints import PROMPT
from transformers import StaticCache

from moe_runtime.config import PrefetchMode
from moe_runtime.inference import warming
from moe_runtime.inference.device.decode_graphs import FetchedExperts
from moe_runtime.types import ExpertKey

LAYERS, NUM_EXPERTS = 2, 6
SLOTS = 4
"""Of a layer: as many as leave a quarter for what is fetched."""
ENOUGH = LAYERS * (NUM_EXPERTS - SLOTS) + 2 + 2 * LAYERS
"""Slots of the host, so that every expert is in one memory, and those of a step in both."""
EVERY = LAYERS * NUM_EXPERTS
MOST_REFUSED = 4
"""Where `conftest.py` sets it: as the product's own, in half the steps."""
MOST_STEPS = 64
THREE = torch.cat([PROMPT.roll(shift, 1) for shift in range(3)])[:, :2]


@contextmanager
def warmed(
    checkpoint: Path, slots: int = SLOTS, host_slots: int = EVERY, **options: Any
) -> Iterator[Any]:
    """A model that has every expert in memory, and may read again who leaves it."""
    model = load_on_emulated_device(
        checkpoint, slots_a_layer=slots, host_slots=host_slots, max_tokens=256, **options
    )
    with model.moe:
        warming.warm(model, experts_modules_of(model), 256, None)
        with patch.object(model.moe, "prefetcher", Mock(mode=PrefetchMode.ENFORCE)):
            yield model


def store_of(model: Any) -> Any:
    return experts_modules_of(model)[0].store


def is_fetched(model: Any) -> bool:
    recorded = store_of(model).recorded
    return recorded is not None and isinstance(recorded._experts, FetchedExperts)


def in_both(model: Any) -> list[set[ExpertKey]]:
    """Who is on the device, and who in the host's memory."""
    store = store_of(model)
    keys = [key for module in experts_modules_of(model) for key in module._keys]
    return [{key for key in keys if each.has(key)} for each in (store, store.fetcher.lower)]


class Request:
    """Greedy decoding of one or several prompts with a static cache."""

    def __init__(self, model: Any, prompt: torch.Tensor = THREE[:1]) -> None:
        self.model, self.logits = model, list[torch.Tensor]()
        self.prompt = self._ids = prompt
        self.cache = StaticCache(model.config, max_cache_len=MOST_STEPS + 8)
        self.steps(1)

    def steps(self, number: int) -> list[torch.Tensor]:
        for _ in range(number):
            with torch.no_grad():
                found = self.model(self._ids, past_key_values=self.cache, use_cache=True).logits
            self._ids = found[:, -1:].argmax(-1)
            self.logits.append(found[:, -1])
        return self.logits

    def until_fetched(self) -> Request:
        """Experts that are on their way between the memories are waited for in parts."""
        while not is_fetched(self.model):
            assert len(self.logits) < MOST_STEPS, "one graph was never recorded"
            self.steps(1)
        return self


@cache
def resident(
    checkpoint: Path, num_sequences: int, dtype: str, num_steps: int
) -> list[torch.Tensor]:
    """What all experts in slots give, without a recording."""
    model = load_on_emulated_device(
        checkpoint, slots_a_layer=NUM_EXPERTS, max_tokens=256, dtype=dtype
    )
    with model.moe:
        model.forward = model.forward.__wrapped__
        return Request(model, THREE[:num_sequences]).steps(num_steps)


def assert_expected(checkpoint: Path, request: Request, dtype: str = "auto") -> None:
    num_steps = -(-len(request.logits) // 16) * 16  # the same for most tests
    wanted = resident(checkpoint, len(request.logits[0]), dtype, num_steps)
    assert all(map(torch.equal, request.logits, wanted))
