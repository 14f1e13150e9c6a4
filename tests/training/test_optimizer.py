"""The schedule and the optimizer against their definitions."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from moe_runtime.training.loop import learning_rate
from moe_runtime.training.optimizer import Optimizer
from moe_runtime.training.run_config import OptimizerConfig


def rates_of_torch(num_steps: int, end: float) -> list[float]:
    """Half a cosine from a peak of 2, by torch."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps, eta_min=end)
    rates = []
    for _ in range(num_steps):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [pytest.approx(end)]
    return rates


def test_the_rate_warms_up_and_follows_the_cosine():
    config = OptimizerConfig(peak_rate=2.0, warmup_steps=4, final_share=0.1)
    rates = [learning_rate(config, step, 24) for step in range(24)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    # Half way down the cosine lies the mean of peak and end.
    middle = learning_rate(OptimizerConfig(peak_rate=2.0, final_share=0.1), 10, 20)
    assert middle == pytest.approx(1.1)
    assert rates[4:] == pytest.approx(rates_of_torch(20, 0.2))


@pytest.mark.parametrize("final_share", [0.0, 0.1])
@pytest.mark.parametrize(
    ("warmup", "steps", "expected"),
    [(0, 1, [1.0]), (5, 3, [0.2, 0.4, 0.6]), (1, 1, [1.0]), (1, 2, [1.0, 1.0])],
)
def test_short_runs_have_a_rate(warmup, steps, expected, final_share):
    config = OptimizerConfig(peak_rate=1.0, warmup_steps=warmup, final_share=final_share)
    rates = [learning_rate(config, step, steps) for step in range(steps)]
    assert rates == pytest.approx(expected)
    # no step of a run comes to the end, and none behind it rises again
    assert learning_rate(config, 2 * steps + 8, steps) == pytest.approx(final_share)


class Toy(nn.Module):
    """A stack of matrices, its biases, a norm's gain and a matrix that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.experts = nn.Parameter(torch.randn(3, 4, 5))
        self.experts_bias = nn.Parameter(torch.randn(3, 4))
        self.gain = nn.Parameter(torch.randn(5))
        self.frozen = nn.Parameter(torch.randn(5, 5), requires_grad=False)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.einsum("efd,d->ef", self.experts, x * self.gain) + self.experts_bias
        return hidden.square().sum()


def adamw_by_hand(
    parameters: list[torch.Tensor],
    gradients: list[list[torch.Tensor]],
    rates: list[float],
    config: OptimizerConfig,
    decay: list[bool],
) -> list[torch.Tensor]:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with clipping by the global norm, fp64."""
    values = [p.double() for p in parameters]
    first = [torch.zeros_like(v) for v in values]
    second = [torch.zeros_like(v) for v in values]
    beta1, beta2 = config.betas
    for step, (grads, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        factor = min(1.0, config.clip_norm / norm) if config.clip_norm else 1.0
        for i, grad in enumerate(grads):
            g = grad.double() * factor
            values[i] = values[i] * (1 - rate * config.weight_decay * decay[i])
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            root = (second[i] / (1 - beta2**step)).sqrt() + config.eps
            values[i] = values[i] - rate * (first[i] / (1 - beta1**step)) / root
    return values


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_steps_are_adamw_with_clipping_and_decay_of_matrices(clip_norm):
    config = OptimizerConfig(peak_rate=0.1, weight_decay=0.3, clip_norm=clip_norm)
    model = Toy()
    names = ["experts", "experts_bias", "gain"]
    start = [model.get_parameter(name).detach().clone() for name in names]
    optimizer = Optimizer(model, config)
    gradients: list[list[torch.Tensor]] = []
    rates = [0.1, 0.05, 0.2, 0.01]
    for rate in rates:
        x = torch.randn(5)
        loss = model.loss(x)
        grads = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
        gradients.append([grad.clone() for grad in grads])
        # In two parts, as micro-batches come.
        optimizer.backward([lambda x=x: model.loss(x) / 2] * 2, rate=rate)
        outcome = optimizer.step(rate)
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads))
        assert outcome.gradient_norm == pytest.approx(norm, rel=1e-5)
    expected = adamw_by_hand(start, gradients, rates, config, [True, False, False])
    for name, value in zip(names, expected, strict=True):
        # fp32 arithmetic on values of order one, four steps.
        assert torch.allclose(model.get_parameter(name).double(), value, atol=2e-6), name
    assert torch.equal(model.frozen, Toy().frozen)


def test_gradients_that_are_not_finite_change_nothing_and_are_named():
    model = Toy()
    optimizer = Optimizer(model, OptimizerConfig(peak_rate=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    bad = model.experts_bias.sum() * math.inf + model.gain.sum()
    optimizer.backward([lambda: bad], rate=0.1)
    outcome = optimizer.step(0.1)
    assert outcome.bad_parameters == ("experts_bias",)
    assert not math.isfinite(outcome.gradient_norm)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    optimizer.backward([model.gain.sum], rate=0.1)
    assert optimizer.step(0.1).bad_parameters == ()
    assert not torch.equal(model.gain, before["gain"])


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="no trainable parameter"):
        Optimizer(nn.Linear(2, 2).requires_grad_(False), OptimizerConfig(peak_rate=1.0))


def test_an_interrupted_step_leaves_no_gradients_to_the_next():
    def stop() -> torch.Tensor:
        raise KeyboardInterrupt

    found = []
    for is_interrupted in (False, True):
        toy = Toy()
        optimizer = Optimizer(toy, OptimizerConfig(peak_rate=1e-2))
        generator = torch.Generator().manual_seed(0)
        first, second = torch.randn(2, 5, generator=generator)
        if is_interrupted:
            with pytest.raises(KeyboardInterrupt):
                optimizer.backward([partial(toy.loss, second), stop], rate=1e-2)
        optimizer.backward([partial(toy.loss, first)], rate=1e-2)
        optimizer.step(1e-2)
        found.append([parameter.detach() for parameter in toy.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
