"""A small model of `MoELayer`s, in memory and offloaded, and the steps that both are trained by."""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import moe_runtime
from moe_runtime.checkpoints.absent import AbsentTensor
from moe_runtime.files import write_atomically
from moe_runtime.layer import MoELayer
from moe_runtime.training.offload import OffloadedTraining
from moe_runtime.training.optimizer import DenseAdamW, clip_scale

WIDTH, HIDDEN, EXPERTS, LAYERS = 16, 24, 6, 3


class Stack(nn.Module):
    """Residual `MoELayer`s between two linear layers."""

    def __init__(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        num_layers: int = LAYERS,
        num_experts: int = EXPERTS,
        **options: Any,
    ) -> None:
        super().__init__()
        settings = {"top_k": 2, **options}
        self.first = nn.Linear(8, WIDTH, dtype=dtype)
        self.layers = nn.ModuleList(
            MoELayer(WIDTH, HIDDEN, num_experts, dtype=dtype, **settings) for _ in range(num_layers)
        )
        self.last = nn.Linear(WIDTH, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)

    def loss(self, x: Tensor) -> Tensor:
        """Some scalar that every output and every gate's loss has a part in."""
        out = self(x)
        auxiliary = sum(layer.aux.loss for layer in self.layers)  # type: ignore[union-attr]
        return out.square().mean() + 0.01 * auxiliary


def stack(**options: Any) -> Stack:
    """The same weights on every call."""
    torch.manual_seed(7)
    return Stack(**options)


def freeze(model: nn.Module, what: str | None) -> None:
    """Freezes the parameters whose names begin so; none without."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(what is None or not name.startswith(what))


def here(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a model that its optimizer has not."""
    named = model.named_parameters()
    return {name: p for name, p in named if not isinstance(p, AbsentTensor)}


def batches(num: int, tokens: int = 7, *, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Inputs so few that some experts get no token at most steps."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, 8, generator=generator).to(dtype) for _ in range(num)]


def rate_of(step: int) -> float:
    """A schedule with another rate at every step."""
    return 0.02 / (1 + step)


def train_in_memory(
    model: Stack, windows: list[list[Tensor]], settings: moe_runtime.AdamW
) -> list[float]:
    """torch's AdamW on stacked parameters, micro-batches one after another."""
    named = dict(model.named_parameters())
    adamw = DenseAdamW(
        named,
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    losses = []
    for step, window in enumerate(windows):
        parts = [model.loss(x) * (1 / len(window)) for x in window]
        for loss in parts:
            loss.backward()
        adamw.step(rate_of(step), clip_scale(adamw.norm(), settings.clip_norm))
        adamw.forget()
        losses.append(float(sum(part.detach() for part in parts)))
    return losses


def budget_for(model: nn.Module, settings: moe_runtime.AdamW, *, experts_in_memory: float) -> int:
    """Bytes that hold a share of the experts that this process has."""
    from moe_runtime.training.offload.entry import find_sites, layouts_of
    from moe_runtime.training.offload.memory import dense_bytes

    sites = find_sites(model)
    layouts = layouts_of(sites, settings.state_format)
    record = max((layout.record_bytes for layout in layouts.values()), default=2**12)
    parameters = [site.module.get_parameter(n) for site in sites for n in site.parameter_names]
    slots = max(3, round(experts_in_memory * len(layouts)))
    return dense_bytes(model, parameters) + 2**16 + (slots + 1) * record


def save(training: OffloadedTraining, file: Path, losses: list[float]) -> None:
    """A checkpoint with everything that a run needs to go on."""
    state = {
        "model": training.model.state_dict(),
        "optimizer": training.state_dict(),
        "losses": list(losses),
    }

    def job(copied: dict[str, Any]) -> None:
        with write_atomically(file) as opened:
            torch.save(copied, opened)

    training.write(state, lambda found: found["optimizer"], job)


def offloaded(
    model: nn.Module, settings: moe_runtime.AdamW, folder: Path | None, *, experts_in_memory: float,
    **options: Any,
) -> OffloadedTraining:  # fmt: skip
    """Offloads a model with a budget that holds a share of its experts."""
    budget = budget_for(model, settings, experts_in_memory=experts_in_memory)
    budget += options.get("copy_memory", 0)
    resume = options.pop("resume", None)
    training = moe_runtime.offload_training(
        model,
        host_memory=budget,
        activation_memory=2**16,
        storage_dir=folder,
        optimizer=settings,
        resumes=resume is not None,
        **options,
    )
    if resume is not None:
        with contextlib.ExitStack() as refused:
            refused.callback(training.close)
            training.load_state_dict(resume)
            refused.pop_all()
    return training


def train_offloaded(
    training: OffloadedTraining, loss: Callable[[Tensor], Tensor], windows: list[list[Tensor]]
) -> list[float]:
    """Windows of micro-batches, grouped."""
    losses = []
    for step, window in enumerate(windows):
        share = 1 / len(window)
        parts = [partial(_part, loss, x, share) for x in window]
        losses.append(float(sum(training.backward(parts, rate=rate_of(step)))))
        training.step(rate_of(step))
        training.check()
    return losses


def _part(loss: Callable[[Tensor], Tensor], x: Tensor, share: float) -> Tensor:
    return loss(x) * share


def assert_same_parameters(training: OffloadedTraining, expected: Stack) -> None:
    """Every parameter agrees to the bit."""
    named = dict(expected.named_parameters())
    for name, parameter in here(training.model).items():
        assert torch.equal(parameter, named[name]), name
    for layer in range(len(expected.layers)):
        for name, stacked in training.stacked(layer).items():
            assert torch.equal(stacked, named[f"layers.{layer}.experts.{name}"]), (layer, name)


def assert_trains_as_in_memory(
    folder: Path | None,
    settings: moe_runtime.AdamW,
    windows: list[list[Tensor]],
    *,
    experts_in_memory: float,
    **options: Any,
) -> None:
    """The same parameters to the bit after the same windows."""
    expected, model = stack(), stack()
    train_in_memory(expected, windows, settings)
    training = offloaded(model, settings, folder, experts_in_memory=experts_in_memory, **options)
    train_offloaded(training, model.loss, windows)
    assert_same_parameters(training, expected)
    training.close()
