"""SlimFit: against masks and torch's AdamW, what autograd keeps, and runs that resume."""

import math
from pathlib import Path

import pytest
import torch
from language_models import VOCAB, experts, shape
from torch import Tensor, nn
from training_runs import error_of, states_equal, train, write_run

from moe_runtime.benchmarks.cases.ablation import KeptActivations
from moe_runtime.layer import Experts
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.research.slimfit import SlimFit, distance
from moe_runtime.training.optimizer import decays
from moe_runtime.training.run_config import OptimizerConfig

STEPS = 9
CONFIG = OptimizerConfig(peak_rate=1e-2, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=0.5)
WORDS = ("--set", "research.frozen_share=0.5", "--set", "model.num_layers=4")


def tiny_model() -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(shape(num_layers=4, moe=experts()))


def loss_of(model: LanguageModel, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    ids_BC = torch.randint(VOCAB, (2, 9), generator=generator)
    losses = model.losses(ids_BC[:, :-1], ids_BC[:, 1:])
    return losses.cross_entropy + losses.auxiliary


def by_masks(model: LanguageModel) -> dict[str, float]:
    """The definition: half of the layers of each kind, by what they changed when last trained."""
    named = dict(model.named_parameters())
    layers = model.config.num_layers
    found = dict.fromkeys(named, math.inf)
    groups = [
        {"params": [p for n, p in named.items() if decays(n, p) == is_decayed], "weight_decay": w}
        for is_decayed, w in ((True, CONFIG.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), eps=CONFIG.eps, fused=True)
    for step in range(STEPS):
        for name in named:
            if name.startswith("blocks.0."):
                kind = [name.replace("blocks.0.", f"blocks.{layer}.") for layer in range(layers)]
                order = sorted(range(layers), key=lambda layer: (found[kind[layer]], layer))
                for place, layer in enumerate(order):
                    named[kind[layer]].requires_grad_(place >= layers // 2)
        loss_of(model, step).backward()
        gradients = [p.grad for p in named.values() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        for gradient in gradients if norm > CONFIG.clip_norm else ():
            gradient *= CONFIG.clip_norm / norm
        before = {name: p.detach().clone() for name, p in named.items() if p.grad is not None}
        adamw.step()
        adamw.zero_grad()
        for name, old in before.items():
            changes = [
                abs(new / was - 1) for new, was in zip(*_numbers(named[name], old), strict=True)
            ]
            found[name] = sum(changes) / len(changes)
    return found


def _numbers(*tensors: Tensor) -> list[list[float]]:
    return [tensor.detach().double().flatten().tolist() for tensor in tensors]


def test_weights_are_those_of_masks():
    expected, model = tiny_model(), tiny_model()
    distances = by_masks(expected)
    optimizer = SlimFit(model, CONFIG, share=0.5)
    num_frozen = set()
    for step in range(STEPS):
        num_frozen.add(len(optimizer.frozen()))
        optimizer.backward([lambda step=step: loss_of(model, step)], rate=0.01)
        optimizer.step(0.01)
    (number,) = num_frozen
    assert 2 * number == sum(name.startswith("blocks.") for name in distances)
    wanted = dict(expected.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad
        assert torch.equal(parameter, wanted[name])
        assert optimizer.distances[name] == pytest.approx(distances[name], rel=1e-4)


def test_weights_that_are_zero_do_not_count():
    assert distance(torch.tensor([2.0, 0.0]), torch.tensor([3.0, 9.0])) == 0.5
    assert distance(torch.zeros(3), torch.ones(3)) == math.inf


def test_inputs_of_frozen_weights_are_not_kept():
    """Two linear maps: each keeps its input for its own weight, and the last its weight."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False))
    kept = KeptActivations(model)
    x, found = torch.randn(32, 8), []
    for frozen in (None, *model):
        model.requires_grad_(True)
        if frozen is not None:
            frozen.requires_grad_(False)
        kept.most = 0
        with kept.counting():
            model(x).sum().backward()
        found.append(kept.most)
    assert found == [4 * 32 * (8 + 16), 4 * 32 * 16, 4 * 32 * 8]


def test_networksthat_are_frozen_keep_pre_activations_alone():
    """The gradient of the input has the same bits."""
    torch.manual_seed(5)
    networks = Experts(4, 32, 16)
    kept, found = KeptActivations(networks), []
    ids_TK = torch.randint(4, (24, 2))
    for frozen in (False, True):
        networks.requires_grad_(not frozen)
        x_TD = torch.ones(24, 32, requires_grad=True)
        kept.most = 0
        with kept.counting():
            networks(x_TD, ids_TK, torch.full((24, 2), 0.5)).sum().backward()
        found.append((kept.most, x_TD.grad))
    assert found[0][0] - found[1][0] == 4 * 24 * 32 - 4
    assert torch.equal(found[0][1], found[1][1])


def test_a_bad_step_changes_no_distance():
    model = tiny_model()
    optimizer = SlimFit(model, CONFIG, share=0.5)
    optimizer.backward([lambda: loss_of(model, 0) * math.nan], rate=0.01)
    assert optimizer.step(0.01).bad_parameters
    assert set(optimizer.distances.values()) == {math.inf}


def last_checkpoint(path: Path) -> Path:
    return path.parent / "out" / "checkpoints" / "step-00000008.pt"


def test_a_stopped_run_goes_on_to_the_bit(tmp_path, capsys):
    whole, stopped = write_run(tmp_path / "whole"), write_run(tmp_path / "stopped")
    assert train(whole, *WORDS) == 0
    assert train(stopped, *WORDS) == 0
    last_checkpoint(stopped).unlink()
    assert train(stopped, *WORDS, "--resume") == 0
    assert states_equal(last_checkpoint(whole), last_checkpoint(stopped))
    line = error_of(capsys, whole, *WORDS[2:], "--resume")
    assert "research.frozen_share = 0.5, the configuration now says None" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["research.frozen_share=1"], "[research]: frozen_share must lie in [0, 1), got 1.0"),
        (
            ["run.host_memory=1GiB"],
            "run.host_memory cannot be combined with the keys of [research]",
        ),
        (["run.snapshot_every=1"], "run.snapshot_every cannot be combined with"),
    ],
)
def test_what_cannot_be_frozen_is_refused(words, message, tmp_path, capsys):
    settings = [part for word in words for part in ("--set", word)]
    assert message in error_of(capsys, write_run(tmp_path), *WORDS, *settings)
