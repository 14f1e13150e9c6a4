"""Saving under one layout and resuming under another, for the tests of checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from moe_runtime.parallel import ExpertSlots, LayoutGroups, ParallelExperts, ParallelLayout


def make(layout: list[list[int]] | int, seed: int) -> ParallelExperts:
    """Experts by placement, or in so many slices each."""
    options = {"bias": True, "seed": seed, "dtype": torch.float64}
    if isinstance(layout, int):
        size = dist.get_world_size()
        groups = LayoutGroups(ParallelLayout(world_size=size, etp=layout, ep=size // layout))
        return ParallelExperts(4, 6, 8, groups, **options)
    group = dist.group.WORLD
    assert group is not None
    return ParallelExperts(4, 6, 8, group, slots=ExpertSlots.from_ranks(layout, 4), **options)


def save(path: str, layout: list[list[int]] | int, seed: int) -> None:
    state = make(layout, seed).logical_state()
    dcp.save(state, checkpoint_id=path)


def load(path: str, layout: list[list[int]] | int, seed: int) -> bool:
    """Whether experts read from the checkpoint equal those made with the seed it was made with."""
    experts, expected = make(layout, seed + 1), make(layout, seed)
    state = experts.logical_state()
    dcp.load(state, checkpoint_id=path)
    pairs = zip(experts.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)
