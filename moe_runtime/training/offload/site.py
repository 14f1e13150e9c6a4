"""The modules of routed experts in a model, and the processes that share them.

Each process has its own experts, states and files. `moe_runtime.parallel` dispatches tokens to
experts, so each process has whole gradients of its experts. Other gradients are summed over
processes, as are the numbers that decide whether a step is clipped or skipped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.expert_mlp import ActivationSpec, StackedExperts
from moe_runtime.kernels.expert_mlp.op import resolve_activation
from moe_runtime.layer import Experts, MoELayer
from moe_runtime.parallel import LayoutGroups, ParallelExperts
from moe_runtime.parallel.communication.transport import FlatTransport, ranks_here
from moe_runtime.parallel.communication.watch import CollectiveMonitor, backend_limit
from moe_runtime.training.offload.records import ExpertTensor, RecordLayout, StateFormat
from moe_runtime.training.optimizer import decays


@dataclass(frozen=True, kw_only=True)
class ExpertsSite:
    """A module of routed experts, described for the module that replaces it.

    Attributes:
        module: its expert parameters are stacked, one slice for each expert.
        own: experts whose parameters the module has, by place in the stacks, -1 for an empty one;
            all when omitted.
        groups: the processes that share the experts of a whole module; `own` are then the experts
            of this process.
        first: name of the first product's parameter: `gate_up_proj` or `up_proj`.
        activation: a formula, or a function of the pre-activations in the module's layout.
        keeps_dtype: the output has the dtype of the input, under autocast too.
    """

    name: str
    module: nn.Module
    num_experts: int
    first: str
    has_gate: bool
    is_transposed: bool
    is_concatenated: bool
    activation: ActivationSpec | Callable[[Tensor], Tensor]
    impl: str = "auto"
    recompute: bool = False
    keeps_dtype: bool = True
    own: tuple[int, ...] | None = None
    num_processes: int = 1
    groups: LayoutGroups | None = None

    @property
    def experts_here(self) -> tuple[int, ...]:
        if self.own is None:
            return tuple(range(self.num_experts))
        return tuple(sorted(expert for expert in self.own if expert >= 0))

    def parameters_of(self, expert: int) -> list[Tensor]:
        """An expert's tensors in its module, in the order of `parameter_names`."""
        place = expert
        if self.own is not None and self.groups is None:
            place = self.own.index(expert)
        stacks = (self.module.get_parameter(name).detach() for name in self.parameter_names)
        return [stack[place] for stack in stacks]

    @property
    def dim_preactivation(self) -> int:
        """Columns of the first product."""
        return self.module.get_parameter(self.first).shape[2 if self.is_transposed else 1]

    def put(self, model: nn.Module, experts: nn.Module) -> None:
        """Replaces this module by another, and deletes its parameters."""
        if isinstance(self.module, ParallelExperts):
            self.module.compute_with(experts)
            return
        if self.groups is None:
            model.set_submodule(self.name, experts)
        else:
            spread = self.spread()
            spread.compute_with(experts)
            model.set_submodule(self.name, spread)
        for name in self.parameter_names:
            del self.module._parameters[name]

    def divided(self, groups: LayoutGroups) -> ExpertsSite:
        """The same experts, divided among the processes of a layout."""
        spread = dataclasses.replace(self, groups=groups).spread()
        own, size = tuple(spread.experts_here), spread.slots.num_ranks
        return dataclasses.replace(self, groups=groups, own=own, num_processes=size)

    def spread(self) -> ParallelExperts:
        """A module that sends rows to the processes of their experts; its parameters are empty."""
        down = self.module.get_parameter("down_proj").shape
        hidden, width = (down[2], down[1]) if self.is_transposed else (down[1], down[2])
        return ParallelExperts(
            self.num_experts, hidden, width, self.groups, has_gate=self.has_gate, device="meta"
        )

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """The stacked parameters of the module, in the order of a record: matrices first."""
        present = {name for name, _ in self.module.named_parameters(recurse=False)}
        return tuple(name for name in self._names if name in present)

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.first, "down_proj", f"{self.first}_bias", "down_proj_bias")

    def layout(self, state: StateFormat | None = None) -> RecordLayout:
        """The layout of an expert's record: fp32, or fp64 for experts in fp64."""
        parameters = {name: self.module.get_parameter(name) for name in self.parameter_names}
        dtypes = {parameter.dtype for parameter in parameters.values()}
        dtype = torch.float64 if dtypes == {torch.float64} else torch.float32
        if not any(parameter.requires_grad for parameter in parameters.values()):
            state = StateFormat(trains=False)
        return RecordLayout(
            [
                ExpertTensor(name, tuple(p.shape[1:]), decays(name, p), p.requires_grad)
                for name, p in parameters.items()
            ],
            dtype,
            state,
        )

    def gradients(
        self, names: Sequence[str], tensors: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        """Tensors of one expert in the order of `StackedExperts.tensors`; None if missing."""
        named = {name: tensor[None] for name, tensor in zip(names, tensors, strict=True)}
        return tuple(named.get(name) for name in self._names)

    def stacked(self, names: Sequence[str], tensors: Sequence[Tensor]) -> StackedExperts:
        """One expert's tensors for kernels, in slot 0."""
        named = {name: tensor[None] for name, tensor in zip(names, tensors, strict=True)}
        return StackedExperts(
            gate_up=named[self.first],
            down=named["down_proj"],
            gate_up_bias=named.get(f"{self.first}_bias"),
            down_bias=named.get("down_proj_bias"),
            has_gate=self.has_gate,
            is_transposed=self.is_transposed,
            is_concatenated=self.is_concatenated,
        )


def layer_sites(model: nn.Module) -> list[ExpertsSite]:
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, MoELayer)]
    return [
        _site(f"{name}.experts" if name else "experts", layer.experts) for name, layer in layers
    ]


def _site(name: str, experts: nn.Module) -> ExpertsSite:
    if isinstance(experts, Experts):
        kind: dict[str, Any] = {
            "has_gate": experts.activation.has_gate,
            "activation": experts.activation.spec,
        }
    # subclasses move experts from batch to batch, so these have no tier
    elif type(experts) is ParallelExperts:
        slots, own = experts.slots, [e for e in experts.experts_here if e >= 0]
        if slots.num_slices > 1 or any(
            len(held) > 1 for slices in slots.holders for held in slices
        ):
            raise UnsupportedModelError(
                f"{name}: experts that are trained offloaded must lie in one process each, without "
                "slices and copies"
            )
        if own != sorted(own):
            raise UnsupportedModelError(
                f"{name}: a process' experts must be placed in ascending order, got {own}"
            )
        kind = {
            "has_gate": experts.has_gate,
            "activation": resolve_activation(experts.activation),
            "own": tuple(experts.experts_here),
            "num_processes": slots.num_ranks,
        }
    else:
        raise UnsupportedModelError(
            f"{name}: {type(experts).__name__} cannot be trained offloaded, only Experts and "
            "ParallelExperts"
        )
    return ExpertsSite(
        name=name,
        module=experts,
        num_experts=experts.num_experts,
        first=experts.first_name,
        is_transposed=False,
        is_concatenated=True,
        impl=experts.impl,
        recompute=experts.recompute,
        keeps_dtype=False,
        **kind,
    )


class OneProcess:
    """A process that trains alone.

    Attributes:
        here: processes on this machine.
        folder_name: of this process's files in the storage folder; empty for the latter itself.
        loss_parts: divisor of an expert's gradients, which are sums over the processes.
    """

    rank = 0
    size = 1
    loss_parts = 1
    here = 1
    folder_name = ""

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Averages the gradients of shared parameters; a collective call, as the following."""

    def sums(self, numbers: Sequence[float]) -> list[float]:
        return list(numbers)

    def gather(self, what: Any) -> list[Any]:
        """The values of all processes, by rank; for one thread besides the training."""
        return [what]


class SpreadProcesses(OneProcess):
    """One process of a layout in which every expert lies whole in one process."""

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
        self.folder_name = f"rank-{self.rank}-of-{self.size}"
        everybody = groups.group("expert", "etp", "ep")
        assert everybody is not None, "several processes share the experts"
        self._everybody = everybody
        self.here = len(ranks_here(FlatTransport(everybody, timeout_s=groups.timeout_s)))
        # another thread than the training one agrees on checkpoints
        background = dist.new_group(
            list(range(self.size)), timeout=backend_limit(groups.timeout_s), backend="gloo"
        )
        assert isinstance(background, dist.ProcessGroup)
        self._background = background
        self._watch = CollectiveMonitor(background, groups.timeout_s)

    def reduce_gradients(self, parameters: Iterable[Tensor]) -> None:
        self._groups.reduce_dense_gradients(parameters)

    def sums(self, numbers: Sequence[float]) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64)
        self._groups.all_reduce(total, self._everybody, "norms")
        return total.tolist()

    def gather(self, what: Any) -> list[Any]:
        found = [None] * self.size
        with self._watch.over_torch("agreeing on a checkpoint"):
            dist.all_gather_object(found, what, group=self._background)
        return found


def processes_of(
    groups: LayoutGroups | None, sites: Sequence[ExpertsSite], model: nn.Module
) -> OneProcess:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise UnsupportedModelError(
            "the model is in DistributedDataParallel, which does not see experts that leave it; "
            "give the model itself, and for several processes `groups` of offload_training"
        )
    processes = OneProcess()
    if groups is not None and groups.layout.world_size > 1:
        processes = SpreadProcesses(groups)
    for site in sites:
        if site.num_processes != processes.size:
            raise ValueError(
                f"{site.name} is spread over {site.num_processes} processes, `groups` has "
                f"{processes.size}; give the model and offload_training the same groups"
            )
    if any(isinstance(p, DTensor) and p.device_mesh.size() > 1 for p in model.parameters()):
        raise UnsupportedModelError(
            "the model has parameters that are divided between processes (tensor parallelism or "
            "FSDP2), which offloaded training cannot save yet; leave them whole"
        )
    return processes
