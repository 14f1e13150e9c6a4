"""The optimizer of offloaded training in loops of others: groups, schedules, Trainer."""

import math
import pickle
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from finetuning_runs import MIXTRAL, checkpoint_of, resident
from offloaded_models import assert_same_parameters, batches, here, offloaded, stack
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from transformers import Trainer, TrainingArguments

import moe_runtime
from moe_runtime.errors import CapacityError, CheckpointError, UnsupportedUseError
from moe_runtime.training.offload import OffloadedTraining

STEPS = 3
SETTINGS = moe_runtime.AdamW(lr=1e-2, weight_decay=0.1)


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(7 * index, 7 * index + 9 + index % 2) % 90
        return {"input_ids": ids, "labels": ids}


class OddExamples(Examples):
    """Padded on the left; one without targets, one that is padding alone."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(7 * index, 7 * index + 9) % 90
        mask = (torch.arange(9) >= (9 if index == 2 else index % 5)).long()
        labels = ids.where((mask > 0) & torch.tensor(index != 1), -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def grouped(model: Any) -> torch.optim.AdamW:
    """torch's optimizer with the groups of the offloaded one."""
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


def trainer_of(model: Any, optimizer: Any, folder: Path, **options: Any) -> Trainer:
    settings: dict[str, Any] = {"max_steps": STEPS, "max_grad_norm": 0, "warmup_steps": 3}
    settings["save_strategy"] = "no"
    settings |= {"gradient_accumulation_steps": 2, **options}
    examples = settings.pop("examples", Examples())
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=1, per_device_eval_batch_size=1,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, seed=3, **settings,
    )  # fmt: skip
    own = {"train_dataset": examples, "eval_dataset": examples}
    if isinstance(optimizer, OffloadedTraining):
        return optimizer.attach(Trainer(model, arguments, **own))
    return Trainer(model, arguments, **own, optimizers=(optimizer, None))


@pytest.mark.parametrize(
    ("share", "options"),
    [
        (0, {"gradient_accumulation_steps": 4, "examples": OddExamples()}),
        (0.4, {"max_grad_norm": 0.1}),
    ],
    ids=["odd rows", "clipped"],
)
def test_a_trainer_trains_as_in_memory(tmp_path, share, options):
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    found: list[Any] = []
    training: Any = None
    for is_offloaded in (False, True):
        model = resident(folder)
        training = grouped(model)
        if is_offloaded:
            training = offloaded(model, SETTINGS, tmp_path, experts_in_memory=share)
        trainer = trainer_of(model, training, tmp_path / str(is_offloaded), **options)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found.append((losses, whole(training) if is_offloaded else dict(model.state_dict())))
    (expected, wanted), (losses, weights) = found
    assert len(losses) == training.num_steps == STEPS
    assert all(map(math.isfinite, losses))
    if "max_grad_norm" in options:  # the norm is summed in another order
        assert losses == pytest.approx(expected, rel=1e-3)
    else:
        assert losses == expected
        assert_equal(weights, wanted)
    training.check()
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
    """The limit of a call before the step, or of the settings, whichever is smaller."""
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
    """A state that was just taken can be loaded, as in accelerate; an unwritten one is refused."""
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


def whole(training: OffloadedTraining) -> dict[str, torch.Tensor]:
    stacked = {
        f"{site.name}.{name}": tensor
        for layer, site in enumerate(training.sites)
        for name, tensor in training.stacked(layer).items()
    }
    return {**{name: p.detach() for name, p in here(training.model).items()}, **stacked}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(("what", "by_accelerate"), [("all", True), ("experts", False)])
def test_a_scaler_scales_back_and_skips_overflows(tmp_path, what, by_accelerate):
    """The third step overflows; experts are in memory and on the disk."""
    models = [stack(), stack()]
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(what == "all" or ".experts." in name)
    training = offloaded(models[1], SETTINGS, tmp_path, experts_in_memory=0.4)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2) for _ in range(2)]
    training.attach(scalers[1])
    with pytest.raises(UnsupportedUseError, match="this GradScaler is attached already"):
        training.attach(scalers[1])
    optimizers: list[Any] = [grouped(models[0]), training]
    if by_accelerate:
        Accelerator(cpu=True)  # has the state of all
        optimizers = [
            AcceleratedOptimizer(optimizer, scaler=scaler)
            for optimizer, scaler in zip(optimizers, scalers, strict=True)
        ]
    for number, x in enumerate(batches(5)):
        for model, optimizer, scaler in zip(models, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            for part in (x, x.flip(0)):
                scaler.scale(model.loss(part) * (torch.inf if number == 2 else 1)).backward()
            if number == 3 and not by_accelerate:
                scaler.unscale_(optimizer)
            if by_accelerate:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
        assert not training.optimizer.has_gradient
        assert not by_accelerate or optimizers[1].step_was_skipped == (number == 2)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**10
    assert training.num_steps == 4
    assert_same_parameters(training, models[0])
    training.check()
    training.backward([lambda: models[1].loss(batches(1)[0])])
    with pytest.raises(UnsupportedUseError, match="known when all gradients are"):
        scalers[1].unscale_(training)
    training.close()


def test_trainer_saves_and_goes_on_whole(tmp_path):
    """Its checkpoints equal those of a run in memory, and resumed runs have the same course."""
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    model = resident(folder)
    trainer_of(model, grouped(model), tmp_path / "a", **options).train()
    wanted = model.state_dict()
    for number, start in enumerate((None, 2)):
        model = resident(folder)
        (storage := tmp_path / str(number)).mkdir()
        training = offloaded(model, SETTINGS, storage, experts_in_memory=0.5 * (number % 2))
        trainer = trainer_of(model, training, tmp_path / "b", **options)
        checkpoint = start and str(tmp_path / "b" / f"checkpoint-{start}")
        trainer.train(resume_from_checkpoint=checkpoint)
        assert_equal(whole(training), dict(wanted))
        trainer.save_model(str(tmp_path / "c"))
        assert_equal(dict(resident(tmp_path / "c").state_dict()), dict(wanted))
        training.check()
        training.close()
    saved = [resident(tmp_path / name / "checkpoint-2").state_dict() for name in "ab"]
    assert_equal(*map(dict, saved))
    model = resident(folder)
    plain = offloaded(model, SETTINGS, None, experts_in_memory=1)
    for other, reason in (
        ((plain, None), r"`training\.attach\(trainer\)` before it resumes"),
        ((None, None), "different number of parameter groups"),
    ):
        arguments = TrainingArguments(output_dir=str(tmp_path / "b"), use_cpu=True, report_to=[])
        trainer = Trainer(model, arguments, train_dataset=Examples(), optimizers=other)
        with pytest.raises((CheckpointError, ValueError), match=reason):
            trainer.train(resume_from_checkpoint=True)
        plain.close()
        model = resident(folder)
    records = next((tmp_path / "b" / "checkpoint-3" / "experts").iterdir())
    content = bytearray(records.read_bytes())
    content[len(content) // 3] ^= 1
    records.write_bytes(content)
    model = resident(folder)
    training = offloaded(model, SETTINGS, None, experts_in_memory=1)
    trainer = trainer_of(model, training, tmp_path / "b", **options)
    with pytest.raises(CheckpointError, match="is damaged"):
        trainer.train(resume_from_checkpoint=True)
    training.close()


def test_trainer_takes_back_its_best_model(tmp_path):
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    options: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 1, "max_steps": 2, "learning_rate": 10.0,
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True,
        "warmup_steps": 0, "metric_for_best_model": "loss",
    }  # fmt: skip
    found: dict[str, torch.Tensor] = {}
    training: Any = None
    for name in "ab":
        model = resident(folder)
        training = grouped(model)
        if name == "b":
            training = offloaded(model, SETTINGS, None, experts_in_memory=1)
        for group in training.param_groups:
            group["lr"] = 0.5  # so far that the first step is the best
        trainer = trainer_of(model, training, tmp_path / name, **options)
        trainer.train()
        assert trainer.state.best_global_step == 1
        if name == "b":
            found = whole(training)
    # transformers itself does not find the names of this family's checkpoints
    assert_equal(found, dict(resident(tmp_path / "a" / "checkpoint-1").state_dict()))
    training.close()


def test_what_a_trainer_could_not_save_is_refused_first(tmp_path):
    folder = checkpoint_of(MIXTRAL, tmp_path / "first")
    model = resident(folder)
    training = offloaded(model, SETTINGS, None, experts_in_memory=1)
    steps: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    best: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps"}
    with pytest.raises(UnsupportedUseError, match="save_only_model leaves out"):
        trainer_of(model, training, tmp_path, save_only_model=True, eval_steps=1, **best, **steps)
    with pytest.raises(UnsupportedUseError, match="give the model"):
        training.attach(Trainer(args=TrainingArguments(use_cpu=True), model_init=lambda: model))
    trainer = trainer_of(model, training, tmp_path / "a", save_only_model=True, **steps)
    for loop in (trainer, trainer.accelerator):
        with pytest.raises(UnsupportedUseError, match="attached already"):
            training.attach(loop)
    trainer.train()
    with pytest.raises(CheckpointError, match="left it out, or the save has failed"):
        trainer_of(model, training, tmp_path / "a", **steps).train(resume_from_checkpoint=True)
    with (
        mock.patch.object(training._processes, "size", 2),
        pytest.raises(UnsupportedUseError, match="trains offloaded experts in one process"),
    ):
        trainer_of(model, training, tmp_path)
    with mock.patch(
        "moe_runtime.training.offload.offloaded_training.available_host_bytes", return_value=1
    ):
        with pytest.raises(CapacityError, match="save_strategy='no'"):
            trainer_of(model, training, tmp_path, **steps)
        trainer_of(model, training, tmp_path)
    training.close()
