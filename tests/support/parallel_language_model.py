"""The language model's loss and gradients under a layout, and in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.models.lm.parallel import divide_sequences, shard_dense, spread_experts
from moe_runtime.parallel import LayoutGroups, ParallelLayout
from moe_runtime.parallel.logical import copy_part
from moe_runtime.training.sharded import logical_tensors

CONTEXT, VOCAB = 16, 40
CONFIG = LanguageModelConfig(
    hidden_size=16,
    num_layers=3,
    num_heads=16,
    num_kv_heads=8,
    head_dim=4,
    max_positions=CONTEXT,
    vocab_size=VOCAB,
    intermediate_size=24,
    dense_layers=(1,),
    moe=ExpertsConfig(
        num_experts=8,
        top_k=2,
        intermediate_size=8,
        shared_experts=1,
        bias=True,
        capacity_factor=1.25,
        loss_weights={"load_balance": 0.1, "sequence_balance": 0.1},
    ),
)


def make_model() -> LanguageModel:
    torch.manual_seed(5)
    model = LanguageModel(CONFIG).double()
    # Scores far enough apart that rounding in another order decides nothing.
    for layer in model.routed_layers():
        assert layer.gate.weight is not None
        torch.nn.init.normal_(layer.gate.weight, std=1.0)
    return model


def named_gradients(model: LanguageModel) -> dict[str, Tensor]:
    """By the names that checkpoints have."""
    gradients = {
        name: {"exp_avg": p.grad, "exp_avg_sq": p.grad}
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    named = logical_tensors(model, gradients)
    return {name: tensor for name, tensor in named.items() if name.startswith("exp_avg.")}


def backward(model: LanguageModel, parts: list[Tensor], share: float) -> float:
    total = 0.0
    for windows in parts:
        losses = model.losses(windows[:, :-1], windows[:, 1:])
        loss = (losses.cross_entropy + losses.auxiliary) / len(parts)
        (loss * share).backward()
        total += float(loss.detach())
    return total


def compare_gradients(layouts: list[ParallelLayout]) -> int:
    """Compares under every layout, with FSDP2 under every second; runs on every rank of a pool."""
    random = torch.Generator().manual_seed(0)
    # As many micro-batches as data parallelism can want.
    num_parts = dist.get_world_size()
    windows = torch.randint(VOCAB, (2 * num_parts, CONTEXT + 1), generator=random)
    batches = list(windows.chunk(num_parts))
    whole = make_model()
    expected_loss = backward(whole, batches, 1.0)
    expected = named_gradients(whole)
    gradients = [p.grad for p in whole.parameters() if p.grad is not None]
    expected_norm = float(torch.nn.utils.get_total_norm(gradients))
    groups: LayoutGroups | None = None
    for index, layout in enumerate(layouts):
        groups = LayoutGroups(layout, timeout_s=200, reuse=groups)
        model = make_model()
        spread_experts(model, groups)
        divide_sequences(model, groups)
        if index % 2:
            shard_dense(model, groups)
        lane = layout.coordinates(groups.rank, "dense")["dp"]
        loss = torch.tensor(
            backward(model, batches[lane :: layout.dp], 1 / layout.tp), dtype=torch.float64
        )
        dist.all_reduce(loss)
        what = f"{layout}, rank {groups.rank}"
        torch.testing.assert_close(
            float(loss) / layout.world_size, expected_loss, rtol=1e-12, atol=0, msg=what
        )
        dense = [p for name, p in model.named_parameters() if ".experts." not in name]
        experts = [p for name, p in model.named_parameters() if ".experts." in name]
        groups.reduce_dense_gradients(dense)
        groups.reduce_expert_gradients(experts)
        norm = groups.gradient_norm(dense, experts)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-10, atol=0, msg=what)
        found = named_gradients(model)
        assert found.keys() <= expected.keys()
        for name, gradient in found.items():
            wanted = torch.empty_like(gradient)
            copy_part(expected[name], wanted)
            one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (gradient, wanted))
            difference = float((one - other).abs().max()) if one.numel() else 0.0
            assert difference <= 1e-9 * float(expected[name].abs().max()), (name, what, difference)
    return len(layouts)
