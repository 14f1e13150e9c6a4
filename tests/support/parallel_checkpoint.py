"""Saving under one layout and resuming under another, for the tests of checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from moe_runtime.parallel import ExpertSlots, ParallelExperts


def make(placement: list[list[int]], seed: int) -> ParallelExperts:
    group = dist.group.WORLD
    assert group is not None
    slots = ExpertSlots.from_ranks(placement, 4)
    return ParallelExperts(4, 6, 8, group, slots=slots, bias=True, seed=seed, dtype=torch.float64)


def save(path: str, placement: list[list[int]], seed: int) -> None:
    state = make(placement, seed).logical_state()
    dcp.save(state, checkpoint_id=path)  # pyright: ignore[reportPrivateImportUsage]


def load(path: str, placement: list[list[int]], seed: int) -> bool:
    """Whether experts read from the checkpoint equal those made with the seed it was made with."""
    experts, expected = make(placement, seed + 1), make(placement, seed)
    state = experts.logical_state()
    dcp.load(state, checkpoint_id=path)  # pyright: ignore[reportPrivateImportUsage]
    pairs = zip(experts.parameters(), expected.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)
