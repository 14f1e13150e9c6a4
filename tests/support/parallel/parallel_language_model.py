"""The language model's loss and gradients under a layout, and in one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.models.lm.parallel import (
    Stage,
    StageModule,
    divide_sequences,
    shard_dense,
    spread_experts,
)
from moe_runtime.parallel import LayoutGroups, ParallelLayout
from moe_runtime.parallel.parallel_experts import copy_part
from moe_runtime.training.ranks import Pipeline
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


def make_model(num_layers: int, *, is_tied: bool) -> LanguageModel:
    torch.manual_seed(5)
    config = replace(CONFIG, num_layers=num_layers, tie_embeddings=is_tied)
    model = LanguageModel(config).double()
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
    named = logical_tensors(model, model.state_dict(), gradients)
    return {name: tensor for name, tensor in named.items() if name.startswith("exp_avg.")}


def backward(model: LanguageModel, parts: list[Tensor], share: float) -> float:
    total = 0.0
    for windows in parts:
        losses = model.losses(windows[:, :-1], windows[:, 1:])
        loss = (losses.cross_entropy + losses.auxiliary) / len(parts)
        (loss * share).backward()
        total += float(loss.detach())
    return total


class Reference:
    """The same in one process."""

    def __init__(self, batches: list[Tensor], num_layers: int, *, is_tied: bool) -> None:
        whole = make_model(num_layers, is_tied=is_tied)
        self.loss = backward(whole, batches, 1.0)
        self.gradients = named_gradients(whole)
        gradients = [p.grad for p in whole.parameters() if p.grad is not None]
        self.norm = float(torch.nn.utils.get_total_norm(gradients))


class RankModel:
    """One rank's part of the model under a layout: of every layer, or of its stage's."""

    def __init__(
        self,
        groups: LayoutGroups,
        index: int,
        num_parts: int,
        reference_of: Callable[..., Reference],
    ) -> None:
        layout = groups.layout
        self.groups, self.is_tied = groups, index % 3 > 0
        # Stages that are uneven, and one for each rank.
        num_layers = max(3, layout.pp)
        self.reference: Reference = reference_of(num_layers, is_tied=self.is_tied)
        self.model = make_model(num_layers, is_tied=self.is_tied)
        self.stage = layout.coordinates(groups.rank, "dense")["pp"]
        self.scale = layout.dp / layout.tp / num_parts
        module = self.pipeline = None
        stages = groups.group("dense", "pp")
        groups.make_ends()
        if stages is not None:
            module = StageModule(self.model, Stage(self.stage, layout.pp), loss_scale=self.scale)
            schedule = "gpipe" if index % 4 == 0 else "1f1b"
            self.pipeline = Pipeline([module], stages, schedule=schedule, loss_scale=self.scale)
        spread_experts(self.model, groups)
        divide_sequences(self.model, groups)
        if index % 2:
            shard_dense(self.model, groups, root=module)

    def backward(self, parts: list[Tensor]) -> float:
        """The loss of the whole model, as this rank's share of the mean over the ranks."""
        if self.pipeline is None:
            return backward(self.model, parts, 1 / self.groups.layout.tp)
        losses = self.pipeline.backward(parts)
        return sum(float(x.cross_entropy + x.auxiliary) for x in losses) / len(parts)

    def reduce(self) -> float:
        """Reduces the gradients; their norm."""
        named = dict(self.model.named_parameters())
        dense = [p for name, p in named.items() if ".experts." not in name]
        experts = [p for name, p in named.items() if ".experts." in name]
        self.groups.reduce_dense_gradients(dense)
        self.groups.reduce_expert_gradients(experts)
        embedding = named.get("embedding.weight")
        if self.pipeline is not None and self.is_tied and embedding is not None:
            self.groups.sum_end_gradients([embedding])
            if self.stage > 0:
                dense = [p for p in dense if p is not embedding]
        return self.groups.gradient_norm(dense, experts)


def compare_gradients(layouts: list[ParallelLayout]) -> int:
    """Compares under every layout, with FSDP2 under every second; runs on every rank of a pool."""
    random = torch.Generator().manual_seed(0)
    # As many micro-batches as data parallelism and stages can want.
    num_parts = dist.get_world_size()
    windows = torch.randint(VOCAB, (2 * num_parts, CONTEXT + 1), generator=random)
    batches = list(windows.chunk(num_parts))
    reference_of = functools.cache(functools.partial(Reference, batches))
    groups: LayoutGroups | None = None
    for index, layout in enumerate(layouts):
        groups = LayoutGroups(layout, timeout_s=200, reuse=groups)
        rank_model = RankModel(groups, index, num_parts, reference_of)
        reference = rank_model.reference
        data_rank = layout.coordinates(groups.rank, "dense")["dp"]
        loss = torch.tensor(
            rank_model.backward(batches[data_rank :: layout.dp]), dtype=torch.float64
        )
        dist.all_reduce(loss)
        what = f"{layout}, rank {groups.rank}"
        torch.testing.assert_close(
            float(loss) / layout.world_size, reference.loss, rtol=1e-12, atol=0, msg=what
        )
        norm = rank_model.reduce()
        torch.testing.assert_close(norm, reference.norm, rtol=1e-10, atol=0, msg=what)
        found = named_gradients(rank_model.model)
        assert found.keys() <= reference.gradients.keys()
        assert len(found) > 0
        for name, gradient in found.items():
            expected = reference.gradients[name]
            wanted = torch.empty_like(gradient)
            copy_part(expected, wanted)
            one, other = (t.to_local() if isinstance(t, DTensor) else t for t in (gradient, wanted))
            difference = float((one - other).abs().max()) if one.numel() else 0.0
            assert difference <= 1e-9 * float(expected.abs().max()), (name, what, difference)
    return len(layouts)


def meshes(layout: ParallelLayout) -> list[tuple[str, ...] | list[int]]:
    """Names and own groups of both meshes of a layout."""
    groups = LayoutGroups(layout, timeout_s=200)
    found: list[tuple[str, ...] | list[int]] = []
    for side in ("dense", "expert"):
        mesh = groups.mesh(side)
        assert mesh.mesh_dim_names is not None
        found.append(mesh.mesh_dim_names)
        for name in mesh.mesh_dim_names:
            ranks = dist.get_process_group_ranks(mesh.get_group(name))
            assert ranks == groups.ranks(side, name)
            found.append(ranks)
    return found


def refused(layout: ParallelLayout) -> str:
    try:
        LayoutGroups(layout)
    except ValueError as error:
        return str(error)
    return ""
