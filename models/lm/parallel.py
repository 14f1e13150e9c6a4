"""The language model over several processes: its experts under a layout, its dense part sharded."""

from moe_runtime.layer.experts import Experts
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.parallel import LayoutGroups, Overlap, ParallelExperts


def spread_experts(
    model: LanguageModel, groups: LayoutGroups, *, overlap: Overlap | None = None
) -> None:
    """Leaves this rank its share of every routed layer's experts.

    Afterwards the forward and backward passes are collective calls. The numbers stay those of the
    model in one process, whose initial values the experts keep.

    Args:
        model: The whole model, with equal parameters on all ranks.
        groups: The layout's groups.
        overlap: How the exchange of tokens is hidden.

    Raises:
        ValueError: The layout has slices that do not divide the experts' width.
    """
    for layer in model.routed_layers():
        own = layer.experts
        assert isinstance(own, Experts)
        whole = own.stacked()
        share = ParallelExperts(
            own.num_experts,
            own.hidden_size,
            own.intermediate_size,
            groups,
            activation=own.activation.spec,
            has_gate=own.activation.has_gate,
            bias=whole.down_bias is not None,
            overlap=overlap,
            impl=own.impl,
            recompute=own.recompute,
            device=whole.device,
            dtype=whole.dtype,
        )
        share.take(whole)
        layer.experts = share
    model.replicas = groups.group("dense", "tp", "cp", "dp")
    for layer in model.routed_layers():
        layer.gate.batch_group = model.replicas


def shard_dense(model: LanguageModel, groups: LayoutGroups) -> None:
    """Shards everything but the experts over the ranks with FSDP2, one unit a block.

    To be called after `spread_experts`. Gradients of what is sharded are averaged by FSDP2 in the
    backward pass.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    group = groups.group("dense", "tp", "cp", "dp")
    if group is None:
        return
    experts = {
        parameter for layer in model.routed_layers() for parameter in layer.experts.parameters()
    }
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=experts)
    fully_shard(model, mesh=mesh, ignored_params=experts)
    register_fsdp_forward_method(model, "losses")
