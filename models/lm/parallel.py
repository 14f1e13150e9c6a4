"""The language model over several processes: experts under a layout, the dense part divided.

Attention and dense feed-forward are divided by torch's `parallelize_module` and `fully_shard`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from moe_runtime.layer.experts import Experts
from moe_runtime.models.lm.attention import Attention, SequencePart
from moe_runtime.models.lm.blocks import DenseFeedForward
from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.layers import Linear
from moe_runtime.models.lm.model import LanguageModel, Losses
from moe_runtime.parallel import ExpertSlots, LayoutGroups, ParallelExperts
from moe_runtime.parallel.groups import FSDP
from moe_runtime.routing import MoEPlusPlus, Reinforce
from moe_runtime.routing.base import score_dtype

M = TypeVar("M", bound=nn.Module)


def spread_experts(
    model: LanguageModel,
    groups: LayoutGroups,
    *,
    make: Callable[..., ParallelExperts] = ParallelExperts,
    slots: Sequence[ExpertSlots] | None = None,
    **options: Any,
) -> None:
    """Leaves this rank its share of every routed layer's experts; results equal one process's bits.

    Afterwards the forward and backward passes are collective calls.

    Args:
        make: as `ParallelExperts`, which also takes the other options.
        slots: of each routed layer that is here; equal runs of experts when omitted.
    """
    for number, layer in enumerate(model.routed_layers()):
        own = layer.experts
        assert isinstance(own, Experts)
        names = {name for name, _ in own.named_parameters()}
        share = make(
            own.num_experts,
            own.hidden_size,
            own.intermediate_size,
            groups,
            **options,
            **({} if slots is None else {"slots": slots[number]}),
            activation=own.activation.spec,
            has_gate=own.activation.has_gate,
            bias="down_proj_bias" in names,
            impl=own.impl,
            recompute=own.recompute,
            device=own.down_proj.device,
            dtype=own.down_proj.dtype,
        )
        # experts without memory are initialised in their tiers
        if not own.down_proj.is_meta:
            share.take(own.stacked())
        layer.experts = share
    model.replicas = groups.make("dense", "dp")
    model.is_whole = False
    for layer in model.routed_layers():
        layer.gate.batch_group = model.replicas


def check_layout(config: LanguageModelConfig, *, tp: int, cp: int, contexts: set[int]) -> None:
    """Refuses an impossible division of the dense part."""
    if config.num_kv_heads % tp:
        raise ValueError(
            f"parallel.tp ({tp}) must divide model.num_kv_heads ({config.num_kv_heads})"
        )
    width = config.intermediate_size
    if width is not None and width % tp:
        raise ValueError(f"parallel.tp ({tp}) must divide model.intermediate_size ({width})")
    for context in sorted(contexts):
        if context % (tp * cp):
            raise ValueError(
                f"parallel.tp * parallel.cp ({tp * cp}) must divide the sequences of {context} "
                "tokens"
            )
        if cp > 1 and context % (2 * cp):
            raise ValueError(
                f"2 * parallel.cp ({2 * cp}) must divide the sequences of {context} tokens: every "
                "process has a piece of the front and one of the back"
            )


def divide_sequences(model: LanguageModel, groups: LayoutGroups) -> None:
    """Leaves this rank its heads of every attention and its part of every sequence.

    Call it after `spread_experts`, on all ranks. Gates see all tokens of a sequence.
    """
    device = next(model.parameters()).device.type
    both = groups.make("dense", "tp", "cp")
    if both is None:
        return
    folds = groups.layout.cp
    model.part = SequencePart(DeviceMesh.from_group(both, device), folds=folds)
    for layer in model.routed_layers():
        layer.parts = model.part
    of_context = groups.make("dense", "cp")
    if of_context is not None:
        part = SequencePart(DeviceMesh.from_group(of_context, device), folds=folds)
        for attention in _modules(model, Attention):
            attention.part = part
    groups.make("dense", "cp", "dp")
    if groups.make("dense", "tp") is not None:
        mesh = _dense_mesh(groups, device)
        split_fused(model)
        for block in model.own_blocks():
            parallelize_module(block, mesh["tp"], _plan(block))
        for attention in _modules(model, Attention):
            attention.num_heads //= groups.layout.tp
            attention.num_kv_heads //= groups.layout.tp


def shard_dense(
    model: LanguageModel,
    groups: LayoutGroups,
    *,
    root: nn.Module | None = None,
    keeps_gathered: bool = False,
) -> None:
    """Shards everything but the experts over the ranks with FSDP2, one unit a block.

    Call it after the others, on all ranks.

    Args:
        root: the module that is called, if it is not the model's `losses`.
        keeps_gathered: parameters stay gathered from the forward to the backward pass.
    """
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    if groups.make("dense", "cp", "dp") is None:
        return
    experts = {
        parameter for layer in model.routed_layers() for parameter in layer.experts.parameters()
    }
    mesh = _dense_mesh(groups, next(model.parameters()).device.type)[FSDP]
    if groups.layout.tp == 1:
        split_fused(model)
    options: dict[str, Any] = {"mesh": mesh, "ignored_params": experts}
    if keeps_gathered:
        options["reshard_after_forward"] = False
    for block in model.own_blocks():
        fully_shard(block, **options)
    fully_shard(root or model, **options)
    if root is None:
        register_fsdp_forward_method(model, "losses")


def leave_exchanges(model: LanguageModel) -> None:
    """Makes `torch.compile` skip the exchanges of rows and compile the code between them."""
    for layer in model.routed_layers():
        experts: Any = layer.experts
        experts.forward = torch.compiler.disable(experts.forward)
    parts: set[Any] = {model.part, *(attention.part for attention in _modules(model, Attention))}
    for part in parts - {None}:
        part.gather = torch.compiler.disable(part.gather)


class LinearParts(nn.Module):
    """A linear map that concatenates several maps `[columns, D]`."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, weight_FD in weights.items():
            part = Linear(*reversed(weight_FD.shape), bias=False, device="meta")
            part.weight = nn.Parameter(weight_FD.detach().clone())
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D]` to the columns of all parts, in order."""
        return torch.cat([part(x) for part in self.children()], dim=-1)


def split_fused(module: nn.Module) -> None:
    """Gives parts of fused products their own weights, so that each can be divided."""
    for path, shares in list(_fused(module).items()):
        whole = module.get_submodule(path)
        assert isinstance(whole, nn.Linear), "it was split before"
        parent, _, name = path.rpartition(".")
        parts = LinearParts(_split(whole.weight, shares))
        setattr(module.get_submodule(parent), name, parts)


def by_parts(model: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Views of tensors, by the names that they have when fused products are split."""
    fused = {f"{path}.weight": shares for path, shares in _fused(model).items()}
    views: dict[str, Tensor] = {}
    for name, tensor in named.items():
        path = name.removesuffix(".weight")
        parts = _split(tensor, fused[name]) if name in fused else None
        views |= {f"{path}.{n}.weight": t for n, t in parts.items()} if parts else {name: tensor}
    return views


def _fused(module: nn.Module) -> dict[str, dict[str, int]]:
    """The row shares of fused products' parts, by path."""
    found: dict[str, dict[str, int]] = {}
    for path, child in module.named_modules():
        start = f"{path}." if path else ""
        if isinstance(child, Attention):
            found[f"{start}qkv_proj"] = {
                "q": child.num_heads,
                "k": child.num_kv_heads,
                "v": child.num_kv_heads,
            }
        elif isinstance(child, DenseFeedForward):
            found[f"{start}gate_up_proj"] = {"gate": 1, "up": 1}
    return found


def _split(weight_FD: Tensor, shares: Mapping[str, int]) -> dict[str, Tensor]:
    unit = weight_FD.shape[0] // sum(shares.values())
    rows = weight_FD.split([share * unit for share in shares.values()])
    return dict(zip(shares, rows, strict=True))


def _plan(block: nn.Module) -> dict[str, ParallelStyle]:
    """Divides columns of input products and rows of output products; between them all tokens are
    present."""
    plan: dict[str, ParallelStyle] = {}
    for path, module in block.named_modules():
        if isinstance(module, Attention):
            first, last = "qkv_proj", "o_proj"
            # the second argument is the table of positions
            layouts, wanted = (Shard(1), None), (Replicate(), None)
        elif isinstance(module, DenseFeedForward):
            first, last = "gate_up_proj", "down_proj"
            layouts, wanted = (Shard(1),), (Replicate(),)
        else:
            continue
        plan[path] = PrepareModuleInput(
            input_layouts=layouts,  # pyright: ignore[reportArgumentType]
            desired_input_layouts=wanted,  # pyright: ignore[reportArgumentType]
        )
        plan[f"{path}.{first}.*"] = ColwiseParallel()
        plan[f"{path}.{last}"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def _dense_mesh(groups: LayoutGroups, device_type: str) -> DeviceMesh:
    """The ranks of a stage by `tp` and the rest of the layout, without dimensions of size 1."""
    tensor, rest = groups.group("dense", "tp"), groups.group("dense", "cp", "dp")
    if tensor is None or rest is None:
        group, name = (rest, FSDP) if tensor is None else (tensor, "tp")
        assert group is not None, "a mesh is of several ranks"
        return DeviceMesh.from_group(group, device_type, mesh_dim_names=(name,))
    ranks = torch.tensor(groups.ranks("dense", "tp", "cp", "dp")).view(-1, groups.layout.tp)
    return DeviceMesh.from_group(
        [rest, tensor], device_type, mesh=ranks, mesh_dim_names=(FSDP, "tp")
    )


def _modules(model: nn.Module, kind: type[M]) -> Iterator[M]:
    for module in model.modules():
        if isinstance(module, kind):
            yield module


@dataclass(frozen=True, slots=True)
class Stage:
    """A pipeline stage and the number of stages."""

    index: int
    count: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def blocks(self, num_blocks: int) -> range:
        """The blocks of this stage; the first stages have one more if they do not divide evenly."""
        if num_blocks < self.count:
            raise ValueError(f"{num_blocks} blocks cannot be divided into {self.count} stages")
        each, more = divmod(num_blocks, self.count)
        start = self.index * each + min(self.index, more)
        return range(start, start + each + (self.index < more))


def piece_of(model: LanguageModel) -> LanguageModel:
    """A model with the same modules, from which some can be removed."""
    piece = copy.copy(model)
    piece._modules = dict(model._modules)
    piece.blocks = nn.ModuleList(model.blocks)
    return piece


def keep_stages(model: LanguageModel, stages: Sequence[StageModule]) -> None:
    """Leaves a model only the modules of these stages."""
    for number in range(len(model.blocks)):
        if all(isinstance(stage.model.blocks[number], nn.Identity) for stage in stages):
            model.blocks[number] = nn.Identity()
    for name in ("embedding", "norm", "output"):
        if not any(hasattr(stage.model, name) for stage in stages):
            delattr(model, name)
    model.is_whole = False


def check_stages(config: LanguageModelConfig, num_processes: int, *, per_process: int = 1) -> None:
    """Refuses an impossible division into stages."""
    pairs = config.moe is not None and config.moe.shortcut is not None
    num_blocks = config.num_layers // 2 if pairs else config.num_layers
    if num_processes * per_process > num_blocks:
        blocks = "pairs of layers that model.moe.shortcut makes" if pairs else "model.num_layers"
        if per_process > 1:
            raise ValueError(
                f"parallel.pp ({num_processes}) with {per_process} stages for each process needs "
                f"{num_processes * per_process} of {blocks}, got {num_blocks}"
            )
        raise ValueError(
            f"parallel.pp ({num_processes}) must be at most the {blocks} ({num_blocks})"
        )


class StageModule(nn.Module):
    """One stage of a model as `torch.distributed.pipelining` calls it.

    Stages pass on the residual stream and, for gates that read the previous gate's scores (MoE++),
    these scores. Each stage adds its gates' losses to the gradients. ``found`` has this stage's
    shares of the losses of every call; the cross-entropy is 0 in all stages but the last.
    ``saving`` is a context for each forward pass, in which autograd keeps its tensors.
    """

    def __init__(
        self,
        model: LanguageModel,
        stage: Stage,
        *,
        loss_scale: float,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """Leaves the model the blocks of this stage, in place."""
        super().__init__()
        self.model = model
        self.stage = stage
        self.found: list[Losses] = []
        self.saving: Callable[[], AbstractContextManager[object]] = nullcontext
        self._autocast = autocast
        own = stage.blocks(len(model.blocks))
        _refuse(model)
        for layer in model.routed_layers():
            layer.attach_losses = True
            layer.loss_scale = loss_scale / model.num_routed
        self._scores_in, self._scores_out = (
            _scores_before(model, n) for n in (own[0], own[-1] + 1)
        )
        for number in range(len(model.blocks)):
            if number not in own:
                model.blocks[number] = nn.Identity()  # the others keep their numbers
        if not stage.is_last:
            del model.norm, model.output
        if not (stage.is_first or (stage.is_last and model.config.tie_embeddings)):
            del model.embedding
        model.is_whole = False

    def forward(self, *received: Tensor, windows: Tensor) -> tuple[Tensor, ...] | Tensor:
        """The input of the next stage for windows `[B, C + 1]`; the loss in the last stage."""
        ids_BC, targets_BC = windows[:, :-1], windows[:, 1:]
        model = self.model
        with self._autocast(), self.saving():
            x, *scores = (model.embed(ids_BC),) if self.stage.is_first else received
            x, logits = model.through_blocks(x, ids_BC, scores[0] if scores else None)
            if self.stage.is_last:
                losses = model.losses_after(x, targets_BC)
            else:
                losses = model.gate_losses(x.new_zeros((), dtype=score_dtype(x)))
        self.found.append(losses.detach())
        if self.stage.is_last:
            return losses.cross_entropy
        return (x, logits) if self._scores_out and logits is not None else (x,)

    def received_of(self, windows: Tensor) -> tuple[Tensor, ...]:
        """Tensors from the previous stage for windows `[B, C + 1]`, on device `meta`."""
        return () if self.stage.is_first else self._passed(windows, self._scores_in)

    def sent_of(self, windows: Tensor) -> tuple[Tensor, ...]:
        """Results of this stage for windows `[B, C + 1]`, on device `meta`."""
        if self.stage.is_last:
            return (torch.empty((), device="meta", dtype=score_dtype(self._weight)),)
        return self._passed(windows, self._scores_out)

    @property
    def _weight(self) -> Tensor:
        return next(self.model.parameters())

    def _passed(self, windows: Tensor, num_scores: int) -> tuple[Tensor, ...]:
        batch, context = windows.shape[0], windows.shape[1] - 1
        parts = 1 if self.model.part is None else self.model.part.size
        shape = (batch, context // parts, self.model.config.hidden_size)
        # tensors without `requires_grad` get no gradient back
        wanted = {"device": "meta", "requires_grad": True}
        stream = torch.empty(shape, dtype=self._weight.dtype, **wanted)
        if not num_scores:
            return (stream,)
        # gates see all tokens
        shape = (batch * context, num_scores)
        return stream, torch.empty(shape, dtype=score_dtype(stream), **wanted)


def _refuse(model: LanguageModel) -> None:
    for layer in model.routed_layers():
        if isinstance(layer.gate, Reinforce):
            raise ValueError(
                f"{layer.gate.name} learns from each token's loss, which only the last stage of a "
                "pipeline knows; leave parallel.pp out, or take another gate"
            )
        if model.recompute and layer.gate.step_counts_E is not None:
            raise ValueError(
                "the loss global_balance counts the calls before, and run.recompute repeats calls "
                "in another order within a pipeline; leave run.recompute or parallel.pp out"
            )


def _scores_before(model: LanguageModel, number: int) -> int:
    """The scores for each token that gates before a block pass on; 0 for none."""
    before = [block.routed for block in list(model.own_blocks())[:number]]
    gates = [layer.gate for layer in before if layer is not None]
    residuals = [gate.residual for gate in gates if isinstance(gate, MoEPlusPlus)]
    return len(residuals[-1]) if residuals and residuals[-1] is not None else 0
