"""A stack of layers whose experts are spread over ranks and trained off memory, for the tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from offloaded_models import Stack, batches, budget_for, freeze, here, rate_of, save, stack
from torch import Tensor

import moe_runtime
from moe_runtime.errors import MoERuntimeError, UnsupportedUseError
from moe_runtime.parallel import LayoutGroups, Overlap, ParallelExperts, ParallelLayout
from moe_runtime.training.offload import OffloadedTraining
from moe_runtime.training.optimizer import DenseAdamW
from moe_runtime.types import ExpertKey

PARTS = 4
"""Micro-batches of a step, over all ranks."""
STEPS = 4
Inputs = list[list[Tensor]]


def inputs_of(steps: int = STEPS) -> Inputs:
    """Three tokens a micro-batch: most experts get none, and some of the four parts nobody's."""
    found = batches(steps * PARTS, 3, dtype=torch.float64)
    return [found[step * PARTS : (step + 1) * PARTS] for step in range(steps)]


def make_groups(timeout_s: float = 120.0) -> LayoutGroups:
    size = dist.get_world_size()
    return LayoutGroups(ParallelLayout(world_size=size, ep=size), timeout_s=timeout_s)


def spread_stack(groups: LayoutGroups, dtype: torch.dtype = torch.float64) -> Stack:
    """The stack of one process, of which this rank has its experts."""
    model = stack(dtype=dtype, bias=True)
    for layer in model.layers:
        whole: Any = layer.experts
        share = ParallelExperts(
            whole.num_experts, whole.hidden_size, whole.intermediate_size, groups,
            activation=whole.activation.spec, bias=True, dtype=dtype,
            # all rows of an expert at once, as offloaded experts are computed
            overlap=Overlap(is_local_first=False),
        )  # fmt: skip
        share.take(whole.stacked())
        layer.experts = share
    return model


def share_of(loss: Callable[[Tensor], Tensor], x: Tensor, num_parts: int) -> Tensor:
    return loss(x) / num_parts


def open_training(
    model: Stack, settings: moe_runtime.AdamW, folder: Path, share: float,
    groups: LayoutGroups | None, resume: Any = None,
) -> OffloadedTraining:  # fmt: skip
    training = moe_runtime.offload_training(
        model,
        host_memory=budget_for(model, settings, experts_in_memory=share),
        activation_memory=2**16,
        storage_dir=folder,
        optimizer=settings,
        resumes=resume is not None,
        groups=groups,
    )
    if resume is not None:
        training.load_state_dict(resume)
    return training


def own_parameters(training: OffloadedTraining) -> dict[str, Tensor]:
    """Copies of this rank's parameters; those of its experts by logical name."""
    found = {name: p.detach().clone() for name, p in here(training.model).items()}
    for key in training.optimizer.records.experts:
        for name, tensor in training.expert(key).items():
            found[f"layers.{key.layer}.experts.{name}.{key.expert}"] = tensor
    return found


def closed(training: OffloadedTraining) -> dict[str, Tensor]:
    found = own_parameters(training)
    training.close()
    return found


def own_parts(model: Stack, window: list[Tensor]) -> list[Callable[[], Tensor]]:
    """The losses of this rank's micro-batches."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = window[rank::size]
    return [partial(share_of, model.loss, x, len(own)) for x in own]


def train_offloaded_over_ranks(
    folder: Path, settings: moe_runtime.AdamW, share: float, until: int = STEPS,
    grouped: bool = True, dtype: torch.dtype = torch.float64, frozen: str | None = None,
) -> tuple[dict[str, Tensor], list[float], list[float]]:  # fmt: skip
    """Trains from the last checkpoint in the folder, or the beginning; one after every step."""
    groups = make_groups() if dist.is_initialized() else None
    model = stack(dtype=dtype, bias=True) if groups is None else spread_stack(groups, dtype)
    freeze(model, frozen)
    file, state = folder / "checkpoint.pt", None
    if file.exists():
        state = torch.load(file, weights_only=True)
    training = open_training(
        model, settings, folder, share, groups, None if state is None else state["optimizer"]
    )
    if state is not None:
        model.load_state_dict(state["model"])
    losses = [] if state is None else state["losses"]
    norms = []
    every = inputs_of()
    while len(losses) < until:
        step = len(losses)
        parts = own_parts(model, [x.to(dtype) for x in every[step]])
        if grouped:
            found = training.backward(parts, rate=rate_of(step))
        else:
            found = [part() for part in parts]
            for loss in found:
                loss.backward()
        norms.append(training.step(rate_of(step)).gradient_norm)
        losses.append(mean_over_ranks(float(sum(found))))
        save(training, file, losses)
        training.check()
    return closed(training), losses, norms


def mean_over_ranks(value: float) -> float:
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def other_bits_than_in_memory(folder: Path, share: float) -> list[str]:
    """Parameters that differ when these ranks train in memory and off it, in fp32 unclipped."""
    settings = moe_runtime.AdamW(weight_decay=0.1)
    groups = make_groups()
    model = spread_stack(groups, torch.float32)
    named = dict(model.named_parameters())
    adamw = DenseAdamW(named, lr=1.0, betas=settings.betas, eps=settings.eps, weight_decay=0.1)
    experts = [p for name, p in named.items() if ".experts." in name]
    dense = [p for name, p in named.items() if ".experts." not in name]
    for step, window in enumerate(inputs_of()):
        for part in own_parts(model, [x.float() for x in window]):
            part().backward()
        groups.reduce_dense_gradients(dense)
        groups.reduce_expert_gradients(experts)
        adamw.step(rate_of(step))
        adamw.forget()
    expected = {}
    for name, parameter in named.items():
        if ".experts." not in name:
            expected[name] = parameter
            continue
        here: Any = model.get_submodule(name.rpartition(".")[0])
        for place, expert in enumerate(here.experts_here):
            expected[f"{name}.{expert}"] = parameter[place]
    found, _, _ = train_offloaded_over_ranks(folder, settings, share, dtype=torch.float32)
    names = found.keys() | {name for name in expected if not name.endswith(".-1")}
    nothing = torch.empty(0)
    pairs = ((name, found.get(name, nothing), expected.get(name, nothing)) for name in names)
    return [name for name, one, other in pairs if not torch.equal(one, other)]


def without_tokens(folder: Path) -> dict[str, Tensor]:
    """The last rank has no token at all in any step."""
    groups = make_groups()
    model = spread_stack(groups)
    training = open_training(model, moe_runtime.AdamW(weight_decay=0.1), folder, 0.0, groups)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for step, window in enumerate(inputs_of(3)):
        x = torch.cat(window)[: 0 if is_last else None]
        training.backward([lambda x=x: model(x).square().sum()], rate=rate_of(step))
        training.step(rate_of(step))
        training.check()
    return closed(training)


def with_a_bad_gradient(folder: Path, culprit: int) -> tuple[tuple[str, ...], int, bool]:
    """A step whose loss is not finite on one rank: who is named, how often, and was it undone?"""
    groups = make_groups()
    model = spread_stack(groups)
    training = open_training(model, moe_runtime.AdamW(), folder, 0.0, groups)
    before = own_parameters(training)
    factor = float("inf") if dist.get_rank() == culprit else 1.0
    x = inputs_of(1)[0][dist.get_rank()]
    training.backward([lambda: model.loss(x) * factor])
    outcome = training.step()
    skipped, after = training.skipped_steps, closed(training)
    same = all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    return outcome.bad_parameters, skipped, same


def train_until_failure(folder: Path, settings: moe_runtime.AdamW) -> str:
    """Trains again and again until another rank ends; what was said then."""
    groups = make_groups()
    model = spread_stack(groups)
    training = open_training(model, settings, folder, 0.5, groups)
    losses: list[float] = []
    try:
        while True:
            step = len(losses)
            parts = own_parts(model, inputs_of()[step % STEPS])
            losses.append(float(sum(training.backward(parts, rate=rate_of(step)))))
            training.step(rate_of(step))
            if len(losses) <= STEPS:
                save(training, folder / "checkpoint.pt", losses)
    except MoERuntimeError as error:
        return f"{type(error).__name__}: {error}"


def after_a_norm_too_early(folder: Path) -> dict[str, Tensor]:
    """One step, begun again once more gradients were refused behind the norm."""
    model = spread_stack(make_groups())
    training = open_training(model, moe_runtime.AdamW(weight_decay=0.1), folder, 0.5, make_groups())
    parts = own_parts(model, inputs_of(1)[0])

    training.backward(parts[:1], is_last=False)
    training.clip_grad_norm(math.inf)
    for go_back in (lambda: training.backward(parts[1:], is_last=False), parts[1]().backward):
        with pytest.raises(UnsupportedUseError, match="after the last backward pass of a step"):
            go_back()
    training.zero_grad()
    for part in parts:
        part().backward()
    training.clip_grad_norm(math.inf)
    training.step(rate_of(0))
    return closed(training)


def refusals(folder: Path) -> list[str]:
    """What cannot be trained so is refused, in one line each."""
    size, messages = dist.get_world_size(), []
    whole = LayoutGroups(ParallelLayout(world_size=size, ep=size))
    copies = LayoutGroups(ParallelLayout(world_size=size, ep=1))
    sliced = LayoutGroups(ParallelLayout(world_size=size, etp=size))
    cases = (
        (spread_stack(whole), None),
        (spread_stack(copies), copies),
        (spread_stack(sliced), sliced),
        (stack(), whole),
    )
    for model, groups in cases:
        try:
            moe_runtime.offload_training(model, storage_dir=folder, groups=groups)
        except (ValueError, MoERuntimeError) as error:
            messages.append(str(error))
    return messages


def expert_key(name: str) -> ExpertKey:
    """Of a logical name of `own_parameters`."""
    words = name.split(".")
    return ExpertKey(int(words[1]), int(words[-1]))
