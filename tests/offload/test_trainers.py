"""The optimizer of offloaded training in the loops of others: groups, schedules, Trainer."""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from finetuning_runs import MIXTRAL, checkpoint_of, resident
from offloaded_models import assert_same_parameters, batches, here, offloaded, stack
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import Trainer, TrainingArguments

import moe_runtime
from moe_runtime.errors import CheckpointError, UnsupportedUseError
from moe_runtime.training.offload import OffloadedTraining

STEPS = 20
SETTINGS = moe_runtime.AdamW(lr=1e-2, weight_decay=0.1)


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(7 * index, 7 * index + 9 + index % 2) % 90
        return {"input_ids": ids, "labels": ids}


def grouped(model: Any) -> torch.optim.AdamW:
    """torch's optimizer with the groups that the offloaded one has."""
    groups: list[list[torch.nn.Parameter]] = [[], [], []]
    for name, parameter in model.named_parameters():
        is_expert = ".experts." in name
        groups[2 if is_expert else int(parameter.ndim < 2)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": own, "weight_decay": 0.1 if place != 1 else 0.0}
            for place, own in enumerate(groups)
        ],
        lr=SETTINGS.lr, betas=SETTINGS.betas, eps=SETTINGS.eps, fused=True,
    )  # fmt: skip


def trained(model: Any, optimizer: Any, folder: Path, clip_norm: float = 0) -> list[float]:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=1,
        gradient_accumulation_steps=2, max_grad_norm=clip_norm, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, logging_steps=1, seed=3, warmup_steps=3,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Examples(), optimizers=(optimizer, None))
    if isinstance(optimizer, OffloadedTraining):
        trainer = optimizer.attach(Trainer(model, arguments, train_dataset=Examples()))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    return losses


def test_trainer_has_the_losses_of_a_model_in_memory(tmp_path):
    """With all experts on the disk, by one argument."""
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    model = resident(folder)
    expected = trained(model, grouped(model), tmp_path / "a")
    assert min(expected) < expected[0] / 2
    wanted = model.state_dict()
    model = resident(folder)
    training = offloaded(model, SETTINGS, tmp_path, experts_in_memory=0)
    assert trained(model, training, tmp_path / "b") == expected
    assert training.num_steps == STEPS
    for name, parameter in here(model).items():
        assert torch.equal(parameter, wanted[name]), name
    for layer in range(2):
        for name, stacked in training.stacked(layer).items():
            assert torch.equal(stacked, wanted[f"model.layers.{layer}.mlp.experts.{name}"])
    training.check()
    training.close()


def test_trainer_clips_by_the_norm_of_all(tmp_path):
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    model = resident(folder)
    expected = trained(model, grouped(model), tmp_path / "a", clip_norm=0.1)
    model = resident(folder)
    training = offloaded(model, SETTINGS, None, experts_in_memory=1)
    # the norm is summed in another order
    assert trained(model, training, tmp_path / "b", clip_norm=0.1) == pytest.approx(
        expected, rel=1e-3
    )
    training.close()


def test_accelerate_takes_the_same_steps():
    expected, model = stack(), stack()
    training = offloaded(model, SETTINGS, None, experts_in_memory=1)
    adamw, accelerator = grouped(expected), training.attach(Accelerator(cpu=True))
    prepared, optimizer = accelerator.prepare(model, training)
    for x in batches(3):
        for loss, own in ((expected.loss(x), adamw), (prepared.loss(x), optimizer)):
            own.zero_grad()
            loss.backward()
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        for own in (adamw, optimizer):
            own.step()
    assert_same_parameters(training, expected)
    training.close()


def test_groups_have_rates_of_their_own():
    expected, model = stack(), stack()
    training = offloaded(model, SETTINGS, None, experts_in_memory=1)
    sizes = [sum(p.numel() for p in group["params"]) for group in training.param_groups]
    adamw = grouped(expected)
    assert sizes == [sum(p.numel() for p in group["params"]) for group in adamw.param_groups]
    factors = [lambda step: 1 / (1 + step), lambda step: 0.5, lambda step: 1 + step]
    schedules = [LambdaLR(optimizer, factors) for optimizer in (adamw, training)]
    for x in batches(4):
        for owner, optimizer in ((expected, adamw), (model, training)):
            optimizer.zero_grad()
            owner.loss(x).backward()
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    assert_same_parameters(training, expected)
    training.close()


def test_gradients_are_clipped_by_the_norm_of_all():
    """Asked for before a step, or by the settings; by the smaller of both."""
    plain, models = stack(), [stack(), stack()]
    trainings = [
        offloaded(
            model,
            moe_runtime.AdamW(lr=1e-2, weight_decay=0.1, clip_norm=clip_norm),
            None,
            experts_in_memory=1,
        )
        for model, clip_norm in zip(models, (0.0, 0.01), strict=True)
    ]
    models[0].loss(batches(1)[0]).backward()
    trainings[0].clip_grad_norm(1e-4)
    trainings[0].zero_grad()  # with the gradients that were to be clipped
    for number, x in enumerate(batches(2)):
        for model in (plain, *models):
            model.loss(x).backward()
        trainings[1].clip_grad_norm(1.0)
        found = trainings[0].clip_grad_norm(0.01)
        if number == 0:
            gradients = [p.grad for p in plain.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
            assert found == pytest.approx(norm, rel=1e-5)
            assert norm > 0.01
        outcomes = [training.step() for training in trainings]
        assert outcomes[0] == outcomes[1]
    for layer in range(3):
        one, other = (training.stacked(layer) for training in trainings)
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        experts: Any = models[0].layers[layer].experts
        assert all(torch.equal(t, experts.get_parameter(n)) for n, t in one.items())
    trainings[0].backward([lambda: models[0].loss(batches(1)[0])])
    with pytest.raises(UnsupportedUseError, match=r"give AdamW\(clip_norm"):
        trainings[0].clip_grad_norm(1.0)
    for training in trainings:
        training.close()


def backward(model: Any) -> None:
    model.loss(batches(1)[0]).backward()


def test_a_state_comes_back_or_is_refused(tmp_path):
    """What was just asked for comes back, as accelerate does; what was not written is refused."""
    for folder in (None, tmp_path):
        model = stack()
        training = offloaded(model, SETTINGS, folder, experts_in_memory=1)
        state = training.state_dict()
        copied = {**state, "experts": type(state["experts"])(state["experts"])}
        training.param_groups[0]["lr"] = 0.5
        training.load_state_dict(copied)
        assert training.param_groups[0]["lr"] == SETTINGS.lr
        with pytest.raises(UnsupportedUseError, match="`write` of the optimizer saves"):
            pickle.dumps(state)
        training.step(partial(backward, model))
        assert training.num_steps == 1
        with pytest.raises(CheckpointError, match="were not written"):
            training.load_state_dict(copied)
        training.close()


def test_what_would_not_reach_the_experts_is_refused():
    model = stack()
    training = offloaded(model, SETTINGS, None, experts_in_memory=1)
    with pytest.raises(UnsupportedUseError, match="add parameters before it"):
        training.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    OneCycleLR(training, max_lr=0.1, total_steps=9)  # cycles betas as well
    model.loss(batches(1)[0]).backward()
    with pytest.raises(UnsupportedUseError, match=r"betas of the experts .* cycle_momentum=False"):
        training.step()
    training.zero_grad()
    assert not training.optimizer.has_gradient
    training.close()
