"""The same model trained with transformers' own blocks and with ours: the same losses."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.export import export_hugging_face
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.training.loop import learning_rate
from moe_runtime.training.optimizer import Optimizer
from moe_runtime.training.run_config import OptimizerConfig

NUM_STEPS = 50
NUM_EXPERTS, TOP_K = 8, 2
BALANCE = 0.05
OPTIMIZER = OptimizerConfig(peak_rate=3e-3, warmup_steps=5, weight_decay=0.1)


def batches() -> list[Tensor]:
    """Sequences with something to learn: a noisy counting modulo 60."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(NUM_STEPS):
        start = torch.randint(60, (4, 1), generator=generator)
        stride = torch.randint(1, 4, (4, 1), generator=generator)
        ids = (start + stride * torch.arange(25)) % 60
        noise = torch.rand(ids.shape, generator=generator) < 0.1
        found.append(torch.where(noise, torch.randint(60, ids.shape, generator=generator), ids))
    return found


def our_curve(model: LanguageModel) -> list[float]:
    optimizer = Optimizer(model, OPTIMIZER)
    curve: list[float] = []
    for step, ids in enumerate(batches()):
        losses = model.losses(ids[:, :-1], ids[:, 1:])
        optimizer.backward([lambda loss=losses.cross_entropy + losses.auxiliary: loss], rate=1.0)
        optimizer.step(learning_rate(OPTIMIZER, step, NUM_STEPS))
        curve.append(losses.cross_entropy.item())
    return curve


def switch_balance(logits: Tensor) -> Tensor:
    """Switch Transformer's loss of one layer, written out once more."""
    probabilities = logits.softmax(-1)
    chosen = F.one_hot(logits.topk(TOP_K).indices, NUM_EXPERTS).sum(1).float()
    return NUM_EXPERTS * (chosen.mean(0) / TOP_K * probabilities.mean(0)).sum()


def their_curve(model: Any) -> list[float]:
    """Plain torch around the transformers model: its forward, AdamW, clipping."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    curve: list[float] = []
    for step, ids in enumerate(batches()):
        outputs = model(ids[:, :-1], output_router_logits=True, use_cache=False)
        loss = F.cross_entropy(outputs.logits.flatten(0, 1), ids[:, 1:].reshape(-1))
        balance = torch.stack([switch_balance(logits) for logits in outputs.router_logits])
        (loss + BALANCE * balance.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(OPTIMIZER, step, NUM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


@pytest.mark.long
@pytest.mark.parametrize(
    "implementation", [pytest.param("eager", marks=pytest.mark.long), "grouped_mm"]
)
def test_same_curve_as_transformers(implementation, tmp_path):
    from transformers import AutoModelForCausalLM

    config = LanguageModelConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=24,
        vocab_size=60,
        moe=ExpertsConfig(
            num_experts=NUM_EXPERTS,
            top_k=TOP_K,
            intermediate_size=32,
            loss_weights={"load_balance": BALANCE},
        ),
    )
    torch.manual_seed(1)
    ours = LanguageModel(config)
    export_hugging_face(ours, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, experts_implementation=implementation
    ).train()
    mine, reference = our_curve(ours), their_curve(theirs)
    assert reference[-1] < reference[0] - 1  # both have learnt something
    assert max(abs(a - b) for a, b in zip(mine, reference, strict=True)) < 1e-4
