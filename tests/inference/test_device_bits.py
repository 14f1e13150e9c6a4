"""The same bits from slots of an emulated device, for families, formats, budgets and prefetches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import quantized_checkpoints
import torch
from emulated_models import emulated, experts_modules_of, load_on_emulated_device, logits_of, settle
from moe_families import Family
from tiny_checkpoints import PROMPT, save, tiny_model
from triton_interpreter import repair_interpreter

from moe_runtime.inference.steps import LayerRouting, Listener
from moe_runtime.memory.prefetcher import Guesses
from moe_runtime.policies.prefetch import Admission, PrefetchRules
from moe_runtime.types import ExpertKey

pytest.importorskip("triton")
pytestmark = emulated
NUM_EXPERTS, LAYERS = 6, {"num_hidden_layers": 2}
FAMILIES = [
    Family("qwen3_moe", "Qwen3MoeForCausalLM", LAYERS),
    # gate and up in turn, with biases
    Family("gpt_oss", "GptOssForCausalLM", LAYERS),
    # sigmoids with a bias, an expert that all tokens share
    Family("glm4_moe", "Glm4MoeForCausalLM", LAYERS | {"first_k_dense_replace": 0}),
]
QUANTISED = ("gpt_oss-mxfp4", "deepseek_v3-int4")
WAYS = {
    "one": [(3, "guesses")],
    "others": [(2, "nothing"), (2, "guesses"), (2, "reads"), (4, "reads"), (5, "guesses")],
}
"""Slots of a layer, fewer than experts, and the reads that begin while a layer is computed."""
PROMPTS = [PROMPT[:, :1], PROMPT[:, :4], PROMPT[:, 5:6]]


@pytest.fixture(scope="module", autouse=True)
def _interpreter() -> None:
    repair_interpreter()


def write(what: Family | str, folder: Path) -> Path:
    """A checkpoint in bf16, or with quantised experts."""
    if isinstance(what, Family):
        return save(tiny_model(what).bfloat16(), folder, sharded=True)
    sample = next(sample for sample in quantized_checkpoints.SAMPLES if sample.name == what)
    # the first layer of DeepSeek is dense
    layers = {"num_hidden_layers": 3 if what.startswith("deepseek") else 2}
    family = replace(sample.family, config=sample.family.config | layers)
    return quantized_checkpoints.write(replace(sample, family=family), folder).folder


class Generous(Admission):
    """Lets everything be read ahead, which with a link on a clock would depend on that."""

    room = 8.0

    def gives_way(self, key: Any, probability: Any, chance: Any) -> Any:
        return lambda held: True


class Ahead(Listener):
    """Begins to read experts of the next layer after a layer's own reads."""

    wants_demands = True

    def __init__(self, layers: Sequence[Any], how: str) -> None:
        self._store, self._how, self._num_layers = layers[0].store, how, len(layers)
        self._admission = Generous(PrefetchRules(), self._num_layers)

    def demanded(self, routing: LayerRouting) -> None:
        after = (routing.layer + 1) % self._num_layers
        keys = [ExpertKey(after, expert) for expert in range(NUM_EXPERTS)]
        if self._how == "reads":
            self._store.read_ahead(keys)
        else:
            Guesses(self._store).start([(key, 0.5) for key in keys], {}, self._admission)
            self._store.check()


def logits_and_stats(folder: Path, slots: int, ahead: str) -> tuple[list[torch.Tensor], Any]:
    model = load_on_emulated_device(folder, slots_a_layer=slots)
    with model.moe:
        if ahead != "nothing":
            model._steps.listeners.add(Ahead(experts_modules_of(model), ahead))
        found = logits_of(model, PROMPTS)
        settle(model)
        model.moe.check()
        return found, model.moe.stats()


@pytest.mark.parametrize("ways", ["one", pytest.param("others", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "what",
    # quantised ones in test_quantised_device_slots, without guesses
    [*FAMILIES, *(pytest.param(name, marks=pytest.mark.long) for name in QUANTISED)],
    ids=str,
)
def test_the_bits_are_those_of_the_resident_model(what, ways, tmp_path):
    folder = write(what, tmp_path)
    expected, _ = logits_and_stats(folder, NUM_EXPERTS, "nothing")
    assert all(logits.isfinite().all() for logits in expected)
    for slots, ahead in WAYS[ways]:
        found, stats = logits_and_stats(folder, slots, ahead)
        assert all(map(torch.equal, found, expected)), (slots, ahead)
        assert stats.misses + stats.late_hits > 0
        assert (stats.guesses > 0) == (ahead == "guesses")
