"""Offloaded training gives the bits of training in memory, for every tier."""

from functools import partial

import pytest
import torch
from moe_families import Family
from offloaded_models import (
    EXPERTS,
    LAYERS,
    Stack,
    assert_same_parameters,
    batches,
    here,
    offloaded,
    rate_of,
    save,
    stack,
    train_in_memory,
    train_offloaded,
)
from tiny_checkpoints import PROMPT, tiny_model

import moe_runtime
from moe_runtime.errors import CheckpointError, UnsupportedUseError
from moe_runtime.training.offload import OffloadedTraining
from moe_runtime.training.optimizer import DenseAdamW
from moe_runtime.types import ExpertKey

DECAYING = moe_runtime.AdamW(weight_decay=0.1, betas=(0.9, 0.95))


def windows(num: int, micro_batches: int) -> list[list[torch.Tensor]]:
    inputs = batches(num * micro_batches)
    return [inputs[i * micro_batches : (i + 1) * micro_batches] for i in range(num)]


def test_plain_backward_and_step(tmp_path):
    """Gradients of micro-batches that are not grouped wait in the experts' tiers and add up."""
    inputs = windows(3, 2)
    expected, model = stack(), stack()
    train_in_memory(expected, inputs, DECAYING)
    training = offloaded(model, DECAYING, tmp_path, experts_in_memory=0.4)
    for step, window in enumerate(inputs):
        for x in window:
            (model.loss(x) / 2).backward()
        training.step(rate_of(step))
        training.check()
    assert_same_parameters(training, expected)
    training.close()


def both(tmp_path, share: float) -> tuple[Stack, DenseAdamW, Stack, OffloadedTraining]:
    """The same model in memory with its optimizer, and offloaded; nothing waits for a norm."""
    expected, model = stack(), stack()
    adamw = moe_runtime.AdamW().dense(dict(expected.named_parameters()))
    return (
        expected,
        adamw,
        model,
        offloaded(model, moe_runtime.AdamW(), tmp_path, experts_in_memory=share),
    )


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("first", ["backward", "plain"])
def test_parts_of_a_step_in_several_backward_calls(tmp_path, first, share):
    """An expert of several calls takes one step, with the sum of its gradients."""
    expected, adamw, model, training = both(tmp_path, share)
    for step, (one, two) in enumerate(windows(3, 2)):
        for x in (one, two):
            expected.loss(x).backward()
        adamw.step(rate_of(step))
        adamw.forget()
        if first == "plain":
            model.loss(one).backward()
        else:
            training.backward([partial(model.loss, one)], rate=rate_of(step), is_last=False)
        training.backward([partial(model.loss, two)], rate=rate_of(step))
        training.step(rate_of(step))
        training.check()
    assert_same_parameters(training, expected)
    training.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_gradients_after_the_last_ones_are_refused(tmp_path, share):
    _, _, model, training = both(tmp_path, share)
    (x,) = batches(1)
    training.backward([partial(model.loss, x)])
    with pytest.raises(UnsupportedUseError, match="updated by the last `backward` of this step"):
        model.loss(x).backward()
    training.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("by_backward", [False, True])
def test_gradients_of_other_tensors_alone_train_nothing(tmp_path, share, by_backward):
    """As in adversarial training: the gradient of an input moves that input."""
    expected, adamw, model, training = both(tmp_path, share)

    def loss_of(net: Stack, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        if by_backward:
            net.loss(x).backward(inputs=[x])
            assert x.grad is not None
            found = x.grad
        else:
            (found,) = torch.autograd.grad(net.loss(x), [x])
        return net.loss(x.detach() + found.sign())

    for step, x in enumerate(batches(3)):
        loss_of(expected, x).backward()
        adamw.step(rate_of(step))
        adamw.forget()
        training.backward([partial(loss_of, model, x)], rate=rate_of(step))
        training.step(rate_of(step))
        training.check()
    assert_same_parameters(training, expected)
    training.close()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_a_layer_without_part_in_a_step_is_left_alone(tmp_path, share):
    """As with stochastic depth. AdamW skips parameters without gradients, and their step counts."""

    def loss_of(net: Stack, x: torch.Tensor, left_out: int) -> torch.Tensor:
        x = net.first(x)
        for number, layer in enumerate(net.layers):
            x = x if number == left_out else x + layer(x)
        return net.last(x).square().mean()

    expected, model, settings = stack(), stack(), moe_runtime.AdamW(weight_decay=0.1)
    adamw = settings.dense(dict(expected.named_parameters()))
    training = offloaded(model, settings, tmp_path, experts_in_memory=share)
    for step, x in enumerate(batches(6)):
        left_out = step * step % 4
        loss_of(expected, x, left_out).backward()
        adamw.step(rate_of(step))
        adamw.forget()
        loss_of(model, x, left_out).backward()
        training.step(rate_of(step))
        if step == 3:
            save(training, tmp_path / "checkpoint", [])
            training.wait()
            training.close()
            state = torch.load(tmp_path / "checkpoint")
            model = stack()
            training = offloaded(
                model, settings, tmp_path, experts_in_memory=0.2, resume=state["optimizer"]
            )
            model.load_state_dict(state["model"])
    assert_same_parameters(training, expected)
    training.close()


def test_a_folder_has_one_training(tmp_path):
    training = offloaded(stack(), DECAYING, tmp_path, experts_in_memory=0.4)
    with pytest.raises(CheckpointError, match="another training has its experts there"):
        offloaded(stack(), DECAYING, tmp_path, experts_in_memory=0.4)
    training.close()
    offloaded(stack(), DECAYING, tmp_path, experts_in_memory=0.4).close()


def test_recomputed_activations(tmp_path):
    """With torch's activation checkpoints, the backward pass fetches experts twice."""
    from torch.utils.checkpoint import checkpoint

    inputs = windows(4, 1)
    expected, model = stack(), stack(recompute=True)
    train_in_memory(expected, inputs, DECAYING)
    training = offloaded(model, DECAYING, tmp_path, experts_in_memory=0.3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        hidden, auxiliary = model.first(x), []
        for layer in model.layers:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=False)
            auxiliary.append(layer.aux.loss)
        return model.last(hidden).square().mean() + 0.01 * sum(auxiliary)

    train_offloaded(training, loss, inputs)
    assert_same_parameters(training, expected)
    training.close()


@pytest.mark.parametrize("lift", [0.0, 100.0])
def test_experts_without_weights_are_never_asked_for(tmp_path, lift):
    """MoE++: a pass accesses each visited expert with weights once, and no other expert."""
    inputs = windows(4, 1)
    expected, model = stack(gate="moepp"), stack(gate="moepp")
    with torch.no_grad():
        for layer in (*expected.layers, *model.layers):
            layer.gate.weight[EXPERTS:] += lift
        for first in (expected.first, model.first):
            first.bias.fill_(3.0)  # sums of tokens are positive, so that the lift decides
    training = offloaded(model, DECAYING, tmp_path, experts_in_memory=0)
    accesses = []
    with torch.no_grad():
        x = model.first(inputs[0][0])
        for layer in model.layers:
            before = training.stats().traffic.needed_bytes
            x = x + layer(x)
            moved = training.stats().traffic.needed_bytes - before
            accesses.append((moved, int((layer.aux.counts_E > 0).sum())))
    record = max(moved for moved, _ in accesses) // max(1, max(n for _, n in accesses))
    assert all(moved == visited * record for moved, visited in accesses)
    assert (record == 0) == bool(lift)
    losses = train_in_memory(expected, inputs, DECAYING)
    assert train_offloaded(training, model.loss, inputs) == losses
    assert (training.stats().traffic.needed_bytes == 0) == bool(lift)
    assert_same_parameters(training, expected)
    training.close()


def test_evaluation_sees_missed_steps(tmp_path):
    inputs = windows(6, 1)
    expected, model = stack(), stack()
    train_in_memory(expected, inputs, DECAYING)
    training = offloaded(model, DECAYING, tmp_path, experts_in_memory=0.3)
    train_offloaded(training, model.loss, inputs)
    x = torch.randn(200, 8)
    with torch.no_grad():
        found = model(x)
    # with gradients, a resident layer takes the path of training for few rows as well
    assert torch.equal(found, expected(x).detach())
    training.check()
    training.close()


def test_sparse_skip_leaves_experts_without_tokens_alone(tmp_path):
    """The definition: one AdamW over every expert's own parameters, whose gradient may be None."""
    settings = moe_runtime.AdamW(weight_decay=0.1, untouched="sparse_skip")
    inputs = windows(8, 1)
    expected, model = stack(), stack()
    named = {name: p for name, p in expected.named_parameters() if ".experts." not in name}
    slices = {
        (layer, name, expert): torch.nn.Parameter(stacked[expert].detach().clone())
        for layer in range(LAYERS)
        for name, stacked in expected.layers[layer].experts.named_parameters()
        for expert in range(EXPERTS)
    }
    adamw = DenseAdamW(
        {**named, **{".".join(map(str, key)): value for key, value in slices.items()}},
        lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.1,
    )  # fmt: skip
    skipped = 0
    for step, (x,) in enumerate(inputs):
        expected.loss(x).backward()
        for (layer, name, expert), parameter in slices.items():
            counts = expected.layers[layer].aux.routing.counts_E
            stacked = expected.layers[layer].experts.get_parameter(name)
            if counts[expert]:
                parameter.grad = stacked.grad[expert].clone()
            skipped += not counts[expert]
        adamw.step(rate_of(step))
        adamw.forget()
        with torch.no_grad():
            for (layer, name, expert), parameter in slices.items():
                stacked = expected.layers[layer].experts.get_parameter(name)
                stacked[expert] = parameter
                stacked.grad = None
    assert skipped > 20
    training = offloaded(model, settings, tmp_path, experts_in_memory=0.4)
    train_offloaded(training, model.loss, inputs)
    assert_same_parameters(training, expected)
    training.close()


@pytest.mark.parametrize("clip", ["two_phase", "delayed"])
def test_clipping_does_not_depend_on_tiers(tmp_path, clip):
    settings = moe_runtime.AdamW(clip_norm=0.05, clip=clip, weight_decay=0.1)
    inputs = windows(3, 2)
    results = []
    for share in (0.0, 0.5, 1.0):
        model, folder = stack(), tmp_path / str(share)
        folder.mkdir()
        training = offloaded(model, settings, folder, experts_in_memory=share)
        train_offloaded(training, model.loss, inputs)
        results.append([training.stacked(layer)["down_proj"] for layer in range(LAYERS)])
        training.close()
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    if clip == "two_phase":
        expected = stack()
        train_in_memory(expected, inputs, settings)
        for layer, found in enumerate(results[0]):
            wanted = expected.layers[layer].experts.down_proj
            # the norm is summed in another order than torch's: its last bits may differ
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_delayed_clipping_takes_the_norm_of_the_step_before(tmp_path):
    settings = moe_runtime.AdamW(clip_norm=0.05, clip="delayed")
    inputs = windows(4, 1)
    expected, model = stack(), stack()
    adamw = DenseAdamW(
        dict(expected.named_parameters()),
        lr=0.1, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay,
    )  # fmt: skip
    norm = 0.0
    for step, (x,) in enumerate(inputs):
        expected.loss(x).backward()
        scale = 0.05 / norm if norm > 0.05 else 1.0
        norm = adamw.norm()
        adamw.step(rate_of(step), scale)
        adamw.forget()
    training = offloaded(model, settings, tmp_path, experts_in_memory=0)
    train_offloaded(training, model.loss, inputs)
    for layer in range(LAYERS):
        found, wanted = training.stacked(layer), expected.layers[layer].experts
        torch.testing.assert_close(found["down_proj"], wanted.down_proj, rtol=1e-5, atol=1e-7)
    training.close()


@pytest.mark.parametrize(
    "family", [Family("gpt_oss", "GptOssForCausalLM"), Family("olmoe", "OlmoeForCausalLM")], ids=str
)
def test_models_of_transformers(tmp_path, family):
    """Micro-batches side by side through a model that we did not write."""
    moe_runtime.register_with_transformers()
    expected, model = tiny_model(family), tiny_model(family)
    expected.set_experts_implementation("moe_runtime")
    prompts = [PROMPT, PROMPT.flip(1)]
    named = {name: p for name, p in expected.named_parameters() if p.requires_grad}
    adamw = DenseAdamW(named, lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    training = offloaded(model, moe_runtime.AdamW(), tmp_path, experts_in_memory=0.3)
    for step in range(2):
        wanted = [expected(ids, labels=ids).loss / 2 for ids in prompts]
        for loss in wanted:
            loss.backward()
        adamw.step(rate_of(step))
        adamw.forget()
        parts = [lambda ids=ids: model(ids, labels=ids).loss / 2 for ids in prompts]
        found = training.backward(parts, rate=rate_of(step))
        training.step(rate_of(step))
        torch.testing.assert_close(found, [loss.detach() for loss in wanted], rtol=1e-6, atol=0)
    parameters = dict(expected.named_parameters())
    for name, parameter in here(model).items():
        torch.testing.assert_close(parameter, parameters[name], rtol=1e-5, atol=1e-6)
    some = training.expert(ExpertKey(0, 1))["down_proj"]
    name = next(name for name in parameters if name.endswith("experts.down_proj"))
    torch.testing.assert_close(some, parameters[name][1], rtol=1e-5, atol=1e-6)
    training.close()


@pytest.mark.parametrize("again", ["x", "weights"])
def test_second_derivatives_are_refused(again):
    """This includes named inputs, for which torch skips its own check."""
    model = stack()
    training = offloaded(model, DECAYING, None, experts_in_memory=1)
    ids = torch.arange(18).view(9, 2) % EXPERTS
    inputs = {"x": torch.randn(9, 16), "weights": torch.rand(9, 2)}
    x, weights = (tensor.requires_grad_() for tensor in inputs.values())
    out = model.layers[0].experts(x, ids, weights)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="offloaded experts have no second derivatives: train"):
        torch.autograd.grad(first.sum(), inputs[again])
    training.close()
