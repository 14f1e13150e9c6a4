"""What is frozen stays as it is, whichever way the rest is trained; the reference is plain torch."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_families import FAMILIES
from offloaded_models import (
    Stack,
    assert_same_parameters,
    batches,
    offloaded,
    rate_of,
    stack,
    train_in_memory,
    train_offloaded,
)
from tiny_checkpoints import PROMPT, tiny_model

import moe_runtime
from moe_runtime.errors import CheckpointError
from moe_runtime.training.offload.optimizers.adamw import bytes_of_step
from moe_runtime.training.offload.states.records import Sections

MIXTRAL = next(family for family in FAMILIES if family.folder == "mixtral")
SETTINGS = moe_runtime.AdamW(weight_decay=0.1)
DELAYED = moe_runtime.AdamW(weight_decay=0.1, delayed_update_after=1)
FROZEN: dict[str, Callable[[str], bool]] = {
    "all_experts": lambda name: ".experts." in name,
    "one_layer": lambda name: name.startswith("layers.1.experts."),
    "one_stack": lambda name: name.startswith("layers.1.experts.down_proj"),
    "the_first_stacks": lambda name: name.endswith(("gate_up_proj", "gate_up_proj_bias")),
    "all_but_experts": lambda name: ".experts." not in name,
}
DOORS: dict[str, dict[str, Any]] = {
    "in_memory": {"experts_in_memory": 1},
    "disk": {"experts_in_memory": 0},
    "recompute": {"experts_in_memory": 0.4, "activations": "recompute"},
    "swap": {"experts_in_memory": 0.4, "activations": "swap"},
}


def frozen_stack(what: str) -> Stack:
    model = stack(bias=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not FROZEN[what](name))
    return model


def windows() -> list[list[torch.Tensor]]:
    inputs = batches(6)
    return [[inputs[2 * step], inputs[2 * step + 1]] for step in range(3)]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("what", FROZEN)
def test_what_is_frozen_keeps_its_bits(tmp_path: Path, door: str, what: str) -> None:
    expected, model = frozen_stack(what), frozen_stack(what)
    first = {name: p.clone() for name, p in expected.named_parameters() if not p.requires_grad}
    training = offloaded(model, SETTINGS, tmp_path, **DOORS[door])
    written = training.stats().traffic.written_bytes
    losses = train_in_memory(expected, windows(), SETTINGS)
    assert train_offloaded(training, model.loss, windows()) == losses
    assert_same_parameters(training, expected)
    named = dict(expected.named_parameters())
    assert all(torch.equal(named[name], before) for name, before in first.items())
    if what == "all_experts":
        assert training.stats().traffic.written_bytes == written
    training.close()


@pytest.mark.parametrize("what", FROZEN)
def test_a_frozen_parameter_has_no_gradient_and_no_moments(tmp_path: Path, what: str) -> None:
    model = frozen_stack(what)
    named = {name: p for name, p in model.named_parameters() if ".experts." in name}
    trained = sum(p.numel() for p in named.values() if p.requires_grad)
    whole = sum(p.numel() for p in named.values())
    training = offloaded(model, SETTINGS, tmp_path, experts_in_memory=0.4)
    elements = {Sections.MEAN: 0, Sections.VARIANCE: 0, Sections.GRADIENT: 0}
    parameters = 0
    for expert in training.states.experts.values():
        layout = expert.layout
        parameters += layout.num_elements
        for section in elements:
            views = layout.spans if section != Sections.GRADIENT else layout.trained
            elements[section] += sum(math.prod(view.shape) for view in views)
        if not layout.trained:
            assert layout.record_bytes == layout.bytes_of(Sections.PARAMETERS)
            assert bytes_of_step(layout, SETTINGS) == (2 * layout.record_bytes, 0)
            elements = {section: number for section, number in elements.items()}
    assert parameters == whole
    in_layers_with_states = trained
    assert set(elements.values()) == {in_layers_with_states}
    model.loss(batches(1)[0]).backward()
    waiting = [key for key, e in training.states.experts.items() if e.has_gradient]
    assert all(training.states.experts[key].layout.trained for key in waiting)
    training.discard()
    training.close()
