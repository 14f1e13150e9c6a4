"""ZeRO-Offload's delayed update, compared with its definition in memory."""

from functools import partial

import pytest
import torch
from offloaded_models import (
    LAYERS,
    Stack,
    assert_same_parameters,
    batches,
    offloaded,
    rate_of,
    stack,
    train_offloaded,
)

import moe_runtime
from moe_runtime.training.optimizer import DenseAdamW, clip_scale

AFTER = 2
SETTINGS = moe_runtime.AdamW(weight_decay=0.1, delayed_update_after=AFTER)


def scripted(inputs: list[torch.Tensor], clip_norm: float = 0.0) -> Stack:
    """Gradients are scaled by the norm of their own step, and used in the next step."""
    model = stack()
    named = dict(model.named_parameters())
    options = {"lr": 0.1, "betas": SETTINGS.betas, "eps": SETTINGS.eps, "weight_decay": 0.1}
    experts = {name: p for name, p in named.items() if ".experts." in name}
    others = {name: p for name, p in named.items() if ".experts." not in name}
    late, at_once = (DenseAdamW(some, **options) for some in (experts, others))
    waiting: dict[str, torch.Tensor] = {}
    for step, x in enumerate(inputs):
        model.loss(x).backward()
        norm = (late.norm() ** 2 + at_once.norm() ** 2) ** 0.5
        scale = clip_scale(norm, clip_norm)
        at_once.step(rate_of(step), scale)
        now = {name: p.grad * scale for name, p in experts.items()}
        for name, parameter in experts.items():
            parameter.grad = (now if step < AFTER else waiting).get(name)
        if step != AFTER:
            late.step(rate_of(step))
        waiting = now
        late.forget()
        at_once.forget()
    return model


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_same_bits_as_the_definition(tmp_path, share):
    inputs = batches(6)
    training = offloaded(model := stack(), SETTINGS, tmp_path, experts_in_memory=share)
    train_offloaded(training, model.loss, [[x] for x in inputs])
    assert_same_parameters(training, scripted(inputs))
    training.close()


def test_clips_by_the_norm_of_the_gradients_own_step(tmp_path):
    settings = moe_runtime.AdamW(weight_decay=0.1, delayed_update_after=AFTER, clip_norm=0.05)
    inputs = batches(6)
    training = offloaded(model := stack(), settings, tmp_path, experts_in_memory=0.3)
    train_offloaded(training, model.loss, [[x] for x in inputs])
    expected = scripted(inputs, 0.05)
    for layer in range(LAYERS):
        # the norm is summed in another order than torch's: its last bits may differ
        wanted = expected.layers[layer].experts.down_proj
        found = training.stacked(layer)["down_proj"]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    training.close()


def test_a_gradient_that_waits_survives_a_bad_step_and_a_checkpoint(tmp_path):
    """The kept gradient is part of an expert's state: it is rolled back and saved with it."""
    inputs = batches(6)
    training = offloaded(model := stack(), SETTINGS, tmp_path, experts_in_memory=0.3)
    saved: dict[str, dict] = {}
    for step, x in enumerate(inputs):
        if step == 4:
            training.backward([lambda: model.loss(inputs[0]) * torch.inf], rate=rate_of(step))
            assert training.step(rate_of(step)).bad_parameters
            state = {"own": training.state_dict(), "model": model.state_dict()}
            training.write(state, lambda found: found["own"], saved.update)
            training.wait()
            training.close()
            training = offloaded(
                model := stack(), SETTINGS, tmp_path, experts_in_memory=0.6, resume=saved["own"]
            )
            model.load_state_dict(saved["model"])
        training.backward([partial(model.loss, x)], rate=rate_of(step))
        training.step(rate_of(step))
        training.check()
    assert_same_parameters(training, scripted(inputs))
    training.close()


def test_sparse_skip_uses_each_gradient_once(tmp_path):
    """Tiers agree to the bit, although they update experts at different times."""
    settings = moe_runtime.AdamW(
        weight_decay=0.1, delayed_update_after=1, untouched="sparse_skip", galore_rank=1
    )
    found = []
    for share in (0.0, 1.0):
        folder = tmp_path / str(share)
        folder.mkdir()
        training = offloaded(model := stack(), settings, folder, experts_in_memory=share)
        train_offloaded(training, model.loss, [[x] for x in batches(7)])
        counts = [e.count for e in training.optimizer.records.experts.values()]
        found.append((counts, [training.stacked(layer) for layer in range(LAYERS)]))
        training.close()
    assert found[0][0] == found[1][0]
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
