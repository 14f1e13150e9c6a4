"""Pipeline stages of the language model, one after another in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.models.lm.parallel import Stage, StageModule, check_stages

CONFIG = LanguageModelConfig(
    hidden_size=8,
    num_layers=5,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    max_positions=8,
    vocab_size=11,
    intermediate_size=6,
    dense_layers=(0, 3),
    moe=ExpertsConfig(num_experts=3, top_k=1, intermediate_size=4, zero_experts={"copy": 1}),
)


def make_model(config: LanguageModelConfig = CONFIG, **options: Any) -> LanguageModel:
    torch.manual_seed(1)
    model = LanguageModel(config, **options).double()
    for layer in model.routed_layers():
        # Scores of the gate before matter.
        torch.nn.init.normal_(layer.gate.get_parameter("residual"))
    return model


@pytest.mark.parametrize("count", range(1, 6))
def test_every_block_is_in_one_stage(count):
    blocks = [Stage(index, count).blocks(5) for index in range(count)]
    assert [number for own in blocks for number in own] == list(range(5))
    sizes = [len(own) for own in blocks]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_in_turn_are_the_model(count, is_tied):
    """Loss and gradients, those of the gates' losses included; what travels is as announced."""
    config = replace(CONFIG, tie_embeddings=is_tied)
    windows = torch.randint(11, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = make_model(config)
    losses = whole.losses(windows[:, :-1], windows[:, 1:])
    (0.5 * (losses.cross_entropy + losses.auxiliary)).backward()
    expected = losses.detach()
    stages = [
        StageModule(make_model(config), Stage(i, count), loss_scale=0.5) for i in range(count)
    ]
    travels: tuple[torch.Tensor, ...] = ()
    for stage in stages:
        announced = stage.received_of(windows)
        assert [(t.shape, t.dtype) for t in travels] == [(t.shape, t.dtype) for t in announced]
        out = stage(*travels, windows=windows)
        travels = out if isinstance(out, tuple) else (out,)
        assert [t.shape for t in travels] == [t.shape for t in stage.sent_of(windows)]
    (loss,) = travels
    (0.5 * loss).backward()
    torch.testing.assert_close(loss.detach(), expected.cross_entropy)
    auxiliary = sum(float(losses.auxiliary) for stage in stages for losses in stage.found)
    assert auxiliary == pytest.approx(float(expected.auxiliary), rel=1e-12)
    loads = [losses.max_load for stage in stages for losses in stage.found]
    assert expected.max_load is not None
    assert sum(float(x) for x in loads if x is not None) == pytest.approx(float(expected.max_load))
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, parameter in stage.model.named_parameters():
            if parameter.grad is not None:  # the first gate reads nobody's scores
                found[name] = found.get(name, torch.zeros_like(parameter)) + parameter.grad
    gradients = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-13, msg=name)


def test_what_stages_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"parallel.pp \(6\) must be at most the model.num_layers"):
        check_stages(CONFIG, 6)
    with pytest.raises(ValueError, match="5 blocks cannot be divided into 6 stages"):
        StageModule(make_model(), Stage(0, 6), loss_scale=1.0)
    moe = ExpertsConfig(num_experts=3, top_k=1, intermediate_size=4, gate="rl_r")
    sampled = LanguageModel(replace(CONFIG, moe=moe))
    with pytest.raises(ValueError, match="which only the last stage of a pipeline knows"):
        StageModule(sampled, Stage(0, 2), loss_scale=1.0)
    counting = replace(moe, gate="softmax_topk", loss_weights={"global_balance": 0.1})
    model = LanguageModel(replace(CONFIG, moe=counting), recompute=True)
    with pytest.raises(ValueError, match=r"leave run.recompute or parallel.pp out"):
        StageModule(model, Stage(0, 2), loss_scale=1.0)
