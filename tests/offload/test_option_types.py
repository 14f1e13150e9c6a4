"""Options of `offload_training` and of optimizers have types."""

import dataclasses
import inspect
import math

import pytest
import torch

import moe_runtime
from moe_runtime.research.zeroth_order import ZerothOrder
from moe_runtime.training.offload.entry import offload_training


def test_options_of_training_of_a_wrong_type():
    """An optimizer of torch is refused as settings."""
    model = torch.nn.Linear(2, 2)
    sizes = {"host_memory", "device_memory", "copy_memory", "activation_memory"}
    names = inspect.signature(offload_training).parameters.keys() - {"model", "groups"} - sizes
    for name in names:
        with pytest.raises(TypeError, match=f"^{name} must be "):
            offload_training(model, **{name: object()})  # type: ignore[arg-type]
    theirs = torch.optim.AdamW(model.parameters())
    with pytest.raises(TypeError) as caught:
        offload_training(model, optimizer=theirs)  # type: ignore[arg-type]
    message = str(caught.value)
    assert message.startswith("optimizer must be moe_runtime.AdamW or None, got AdamW (")
    assert "\n" not in message
    with pytest.raises(TypeError, match=r"^model must be torch\.Module, got 'a'$"):
        offload_training("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [moe_runtime.AdamW, ZerothOrder])
@pytest.mark.parametrize("value", [None, "1", True, (0.9, "0.99")])
def test_a_setting_of_a_wrong_type_is_named(kind, value):
    choices = {"clip", "untouched", "moments", "loss_scale"}
    for field in dataclasses.fields(kind):
        if field.name in choices or (field.name, value) == ("delayed_update_after", None):
            continue
        with pytest.raises(TypeError, match=rf"^{field.name}.* must be .*, got ") as caught:
            kind(**{field.name: value})
        assert "whole number or a number" not in str(caught.value)


@pytest.mark.parametrize("kind", [moe_runtime.AdamW, ZerothOrder])
def test_rates_and_norms_are_finite(kind):
    names = {"lr", "weight_decay", "clip_norm"} & {one.name for one in dataclasses.fields(kind)}
    for name in names:
        for value in (math.inf, math.nan, -1.0):
            with pytest.raises(ValueError, match=f"^{name} must be finite and at least 0, got "):
                kind(**{name: value})
