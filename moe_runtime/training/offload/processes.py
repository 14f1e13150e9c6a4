"""The processes that train a model together, each with experts, states and files of its own.

Tokens travel to experts by the dispatch of `moe_runtime.parallel`, so a process sees all rows of
its experts and their gradients are whole where they are computed. What has to be added up besides
are the gradients of everything else, and the numbers by which a step is clipped or skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.parallel import LayoutGroups
from moe_runtime.parallel.communication.agreement import processes_here
from moe_runtime.parallel.communication.transport import FlatTransport
from moe_runtime.parallel.communication.watch import CollectiveMonitor, backend_limit
from moe_runtime.training.offload.site import ExpertsModuleSpec


class OneProcess:
    """A process that trains by itself.

    Attributes:
        loss_parts: what the sum of an expert's gradients over the processes is divided by.
    """

    rank = 0
    size = 1
    loss_parts = 1
    here = 1

    @property
    def folder_name(self) -> str:
        """Of this process's files below the storage folder; empty for the folder itself."""
        return ""

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Gives every parameter that all processes have the gradient of the whole step's loss.

        A collective call, as all that follow.
        """

    def sums(self, numbers: Sequence[float]) -> list[float]:
        """Sums over the processes, number by number."""
        return list(numbers)

    def gather(self, what: Any) -> list[Any]:
        """What every process brings, by rank; for one thread at a time, beside the training."""
        return [what]


class SpreadProcesses(OneProcess):
    """One of the processes of a layout in which every expert lies in one of them, whole.

    Raises:
        UnsupportedModelError: the layout has copies or slices of experts, or pipeline stages.
    """

    def __init__(self, groups: LayoutGroups) -> None:
        layout = groups.layout
        for degree, what in ((layout.etp, "slices"), (layout.edp, "copies"), (layout.pp, "stages")):
            if degree > 1:
                raise UnsupportedModelError(
                    f"experts that are trained offloaded must lie in one process each; the layout "
                    f"({layout}) has {degree} {what}"
                )
        self._groups = groups
        self.rank, self.size = groups.rank, layout.world_size
        self.loss_parts = layout.loss_parts
        self._beside: dist.ProcessGroup | None = None
        self._watch: CollectiveMonitor | None = None
        self._everybody = groups.group("expert", "etp", "ep")
        if self._everybody is None:
            return
        self.here = processes_here(FlatTransport(self._everybody, timeout_s=groups.timeout_s))
        # Checkpoints are agreed on in another thread than the one that trains.
        beside = dist.new_group(
            list(range(self.size)), timeout=backend_limit(groups.timeout_s), backend="gloo"
        )
        assert isinstance(beside, dist.ProcessGroup)
        self._beside = beside
        self._watch = CollectiveMonitor(beside, groups.timeout_s)

    @property
    def folder_name(self) -> str:
        return f"rank-{self.rank}-of-{self.size}" if self.size > 1 else ""

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        self._groups.reduce_dense_gradients(parameters)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64)
        self._groups.all_reduce(total, self._everybody, "norms")
        return total.tolist()

    def gather(self, what: Any) -> list[Any]:
        if self._beside is None or self._watch is None:
            return [what]
        found = [None] * self.size
        with self._watch.over_torch("agreeing on a checkpoint"):
            dist.all_gather_object(found, what, group=self._beside)
        return found


def processes_of(
    groups: LayoutGroups | None, sites: Sequence[ExpertsModuleSpec], parameters: Iterable[Tensor]
) -> OneProcess:
    """Who trains a model together; a collective call.

    Args:
        groups: of a layout; None for this process alone.

    Raises:
        UnsupportedModelError: the layout or the model cannot be trained so.
        ValueError: the experts are not spread over these processes.
    """
    processes = OneProcess() if groups is None else SpreadProcesses(groups)
    for site in sites:
        if site.num_processes != processes.size:
            raise ValueError(
                f"{site.name} is spread over {site.num_processes} processes, `groups` has "
                f"{processes.size}; give the model and offload_training the same groups"
            )
    if processes.size > 1 and any(isinstance(parameter, DTensor) for parameter in parameters):
        raise UnsupportedModelError(
            "the model has parameters that are divided between processes (tensor parallelism or "
            "FSDP2), which offloaded training cannot save yet; leave them whole"
        )
    return processes
