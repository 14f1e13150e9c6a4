"""What ranks do in the test of tokens that stay with their experts."""

from __future__ import annotations

from dataclasses import astuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.models.lm.parallel import spread_experts
from moe_runtime.parallel import ExpertSlots, LayoutGroups, ParallelLayout
from moe_runtime.research.staying_tokens import hidden_states

NUM_EXPERTS, WIDTH = 6, 16


def model_of(**changes: object) -> LanguageModel:
    torch.manual_seed(3)
    moe = {"num_experts": NUM_EXPERTS, "top_k": 2, "intermediate_size": 8, **changes}
    config = LanguageModelConfig(
        hidden_size=WIDTH, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4,
        max_positions=16, vocab_size=50, dense_layers=(1,), intermediate_size=12,
        moe=ExpertsConfig(**moe),  # type: ignore[arg-type]
    )  # fmt: skip
    return LanguageModel(config).double().eval()


def spread(ids_BC: Tensor, ranks: list[list[list[int]]], stays: bool) -> tuple[Tensor, tuple]:
    """Hidden states by all ranks, with experts of each routed layer where `ranks` says."""
    model = model_of()
    groups = LayoutGroups(ParallelLayout(world_size=dist.get_world_size(), ep=len(ranks[0])))
    slots = [ExpertSlots.from_ranks(own, NUM_EXPERTS) for own in ranks]
    spread_experts(model, groups, slots=slots)
    found, sent = hidden_states(model, ids_BC, stays=stays)
    return found, astuple(sent)
