"""A configuration can name every gate, and a model with it learns."""

import dataclasses
from typing import Any

import pytest
import torch
from training_runs import train, write_run

from moe_runtime.checkpoints.absent import TrainedElsewhere
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel, Losses
from moe_runtime.routing import GATES
from moe_runtime.training.loop import Trainer
from moe_runtime.training.metrics import StepRecord
from moe_runtime.training.optimizer import Optimizer
from moe_runtime.training.run_config import OptimizerConfig

# What a gate cannot do without; every other setting is left as the gate has it.
SPECIAL: dict[str, dict[str, Any]] = {
    "switch": {"top_k": 1},
    "base": {"top_k": 1},
    "rl_r": {"top_k": 1},
    "hash": {"gate_options": {"vocab_size": 50}},
    "moepp": {"zero_experts": {"zero": 1, "copy": 1, "constant": 1}},
    "group_limited_topk": {"gate_options": {"num_expert_groups": 2}},
    "sam": {"gate_options": {"num_expert_groups": 2}},
}


@pytest.mark.parametrize("gate", GATES)
def test_a_model_learns_with_every_gate(gate):
    settings: dict[str, Any] = {"num_experts": 8, "top_k": 2, "intermediate_size": 16}
    moe = ExpertsConfig(gate=gate, **(settings | SPECIAL.get(gate, {})))
    config = LanguageModelConfig(
        hidden_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=12,
        max_positions=16,
        vocab_size=50,
        moe=moe,
    )
    torch.manual_seed(0)
    model = LanguageModel(config)
    optimizer = Optimizer(model, OptimizerConfig(peak_rate=1e-2))
    ids = torch.randint(50, (4, 17))
    values: list[float] = []
    for _ in range(5):
        losses = model.losses(ids[:, :-1], ids[:, 1:])
        optimizer.backward([lambda loss=losses.cross_entropy + losses.auxiliary: loss], rate=1.0)
        assert not optimizer.step(1e-2).bad_parameters
        model.after_step()
        values.append(losses.cross_entropy.item())
    assert values[-1] < values[0] - 0.05


@pytest.mark.parametrize(("gate", "memory"), [("sigmoid_topk", "64MiB"), ("dense_to_sparse", None)])
def test_a_skipped_step_changes_nothing(tmp_path, monkeypatch, gate, memory):
    """Gradients of the second step are infinite; the third step continues from the first."""
    options = "{ bias_update_rate = 0.01 }" if gate == "sigmoid_topk" else "{}"
    settings = [f"model.moe.gate={gate}", f"model.moe.gate_options={options}", "run.steps=3"]
    if memory is not None:
        settings.append(f"run.host_memory={memory}")
    take, before = Trainer._take_step, LanguageModel.losses
    states: list[dict[str, torch.Tensor]] = []
    skipped: list[bool] = []

    def losses(model: LanguageModel, *batch: torch.Tensor) -> Losses:
        found = before(model, *batch)
        factor = torch.inf if len(states) == 1 else 1.0
        return dataclasses.replace(found, cross_entropy=found.cross_entropy * factor)

    def taken(trainer: Trainer) -> StepRecord:
        record = take(trainer)
        model = trainer._model
        assert isinstance(model, LanguageModel)
        tensors = (*model.named_parameters(), *model.named_buffers())
        here = {name: t for name, t in tensors if not isinstance(t, TrainedElsewhere)}
        states.append({name: t.detach().clone() for name, t in here.items()})
        skipped.append(record.is_skipped)
        return record

    monkeypatch.setattr(LanguageModel, "losses", losses)
    monkeypatch.setattr(Trainer, "_take_step", taken)
    words = [word for setting in settings for word in ("--set", setting)]
    assert train(write_run(tmp_path), *words) == 0
    assert skipped == [False, True, False]
    assert all(torch.equal(states[1][name], value) for name, value in states[0].items())
    moved = {name for name, value in states[1].items() if not torch.equal(states[2][name], value)}
    own = "num_steps" if gate == "dense_to_sparse" else "expert_bias"
    assert {f"blocks.{n}.feed_forward.gate.{own}" for n in range(2)} <= moved
