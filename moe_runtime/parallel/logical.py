"""Logical names of experts, under which checkpoints keep them whatever the layout was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

_SLICED_DIM = {"gate_proj": 0, "up_proj": 0, "down_proj": 1, "gate_proj_bias": 0, "up_proj_bias": 0}


def logical_views(tensors: Mapping[str, Tensor], experts: Sequence[int]) -> dict[str, Tensor]:
    """Every expert's matrices by name, as views: `{e}.gate_proj`, `{e}.up_proj`, `{e}.down_proj`.

    Args:
        tensors: `[S, ...]` stacked parameters by name, or what is laid out like them:
            `gate_up_proj` (gate rows first) or `up_proj`, `down_proj`, and their biases.
        experts: The expert in each slot; -1 for none.
    """
    views: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for slot, expert in enumerate(experts):
            if expert < 0:
                continue
            if name.startswith("gate_up_proj"):
                suffix = name.removeprefix("gate_up_proj")
                gate, up = tensor[slot].chunk(2)
                views |= {f"{expert}.gate_proj{suffix}": gate, f"{expert}.up_proj{suffix}": up}
            else:
                views[f"{expert}.{name}"] = tensor[slot]
    return views


def as_slices(
    views: Mapping[str, Tensor], group: dist.ProcessGroup, index: int
) -> dict[str, Tensor]:
    """The same views as slices of whole matrices, as `DTensor`s.

    Args:
        group: The ranks that hold the slices, in their order.
        index: Which of them this rank is. The bias of the second matrix belongs to slice 0.
    """
    sliced: dict[str, Tensor] = {}
    for name, view in views.items():
        kind = name.partition(".")[2]
        if kind in _SLICED_DIM:
            mesh = DeviceMesh.from_group(group, view.device.type)
            placements = [Shard(_SLICED_DIM[kind])]
            sliced[name] = DTensor.from_local(view, mesh, placements, run_check=False)
        elif index == 0:
            sliced[name] = view
    return sliced


def copy_part(whole: Tensor, part: Tensor) -> None:
    """Copies a rank's part of a whole tensor into `part`, a `DTensor` or a tensor of the same
    shape."""
    if not isinstance(part, DTensor):
        part.copy_(whole)
        return
    mesh = part.device_mesh
    # What FSDP2 shards further is cut last: its split has a factor, the number of slices before.
    order = sorted(enumerate(part.placements), key=lambda item: hasattr(item[1], "split_factor"))
    for dimension, placement in order:
        cut = getattr(placement, "dim", None)
        if cut is not None:
            pieces = whole.chunk(mesh.size(dimension), cut)
            number = mesh.get_local_rank(dimension)
            whole = pieces[number] if number < len(pieces) else whole.narrow(cut, 0, 0)
    part.to_local().copy_(whole)
