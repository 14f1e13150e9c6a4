"""`heterogeneous_mlp`: validation, choice of the implementation, autograd.

Shape suffixes: T tokens, K choices a token, E experts, D model, N hidden columns of all experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from moe_runtime.kernels.block_sparse import expert_topology
from moe_runtime.kernels.block_sparse.topology import BLOCK_SIZES
from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.expert_mlp.op import ExpertMlpImpl, check_impl, validate_routing
from moe_runtime.kernels.expert_mlp.paths import resolve_path
from moe_runtime.kernels.expert_mlp.reference import precise_dtype
from moe_runtime.kernels.expert_mlp.steps import TorchSteps
from moe_runtime.kernels.heterogeneous_mlp.by_expert import ByExpert
from moe_runtime.kernels.heterogeneous_mlp.experts import PackedExperts
from moe_runtime.kernels.heterogeneous_mlp.gradients import Gradients, Needs
from moe_runtime.kernels.heterogeneous_mlp.reference import heterogeneous_mlp_reference
from moe_runtime.kernels.native import require_native
from moe_runtime.kernels.token_sort import SortedTokens, token_sort
from moe_runtime.kernels.triton_support import require_triton


class Path(Protocol):
    """An implementation."""

    def forward(
        self,
        x_TD: Tensor,
        weights_TK: Tensor,
        order: SortedTokens,
        experts: PackedExperts,
        activation: ActivationSpec,
        *,
        keeps: bool,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output ``[T, D]``, and what `backward` is given again if it `keeps` anything."""
        ...

    def backward(
        self,
        grad_TD: Tensor,
        x_TD: Tensor,
        weights_TK: Tensor,
        kept: tuple[Tensor, ...],
        order: SortedTokens,
        experts: PackedExperts,
        activation: ActivationSpec,
        *,
        needs: Needs,
    ) -> Gradients:
        """The gradients that are needed."""
        ...


def heterogeneous_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: PackedExperts,
    *,
    activation: ActivationSpec,
    block_rows: int | None = None,
    waits: bool = False,
    recompute: bool = False,
    checks_ids: bool = False,
    impl: ExpertMlpImpl = "auto",
) -> Tensor:
    """Runs every token through its experts, which differ in width, and sums by gate weight.

    On a GPU the hidden values of all experts are one block-sparse `[R, N]` matrix (MegaBlocks, Gale
    et al., 2022), in which an expert has as many columns as it is wide; on a CPU the experts are
    computed one after another. No token is dropped; neither tokens nor widths are padded in any
    dense matrix. Differentiable in `x`, `weights` and the parameters, without atomics; kept for
    that are `x`, the pre-activations and the order of the rows.

    Args:
        x_TD: `[T, D]` in the dtype of the experts.
        ids_TK: `[T, K]` integers; an id that names no expert adds nothing.
        weights_TK: `[T, K]` gate weights, any floating dtype.
        experts: The parameters.
        activation: The formula between the products.
        block_rows: Rows of a block; None chooses by the rows an expert has on average.
        waits: Waits once for the device to learn how many blocks there are. Else there is room for
            every row on the widest expert.
        recompute: Computes the pre-activations again in the backward pass instead of keeping them.
        checks_ids: Reports ids that are neither an expert nor the number of experts (waits).
        impl: `triton` needs a GPU; `native` is the CPU path with the C kernels, `torch` the same in
            plain torch; `reference` is the specification. `auto` decides by device and dtype alone.

    Returns:
        `[T, D]` in the dtype of `x`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or `impl` cannot run here.
        NativeUnavailableError: `impl="native"` and the library was not built.
        TritonUnavailableError: `impl` comes out as `triton` and Triton is not installed.
    """
    check_impl(impl)
    _validate(x_TD, ids_TK, weights_TK, experts)
    chosen = impl if impl == "reference" else resolve_path(impl, x_TD)
    sorts_by = "torch" if chosen == "native" else chosen
    order = token_sort(ids_TK, experts.num_experts, check_ids=checks_ids, impl=sorts_by)  # type: ignore[arg-type]
    if chosen == "reference":
        return heterogeneous_mlp_reference(x_TD, ids_TK, weights_TK, experts, activation)
    if chosen == "triton":
        path = _by_blocks(x_TD, order, experts, block_rows, waits=waits)
    else:
        steps = TorchSteps()
        if chosen == "native":
            from moe_runtime.kernels.expert_mlp.native_path import NativeSteps

            steps = NativeSteps(require_native())
        path = ByExpert(steps)
    operands = (x_TD, weights_TK, *experts.differentiated().values())
    is_differentiated = any(t is not None and t.requires_grad for t in operands)
    keeps = torch.is_grad_enabled() and is_differentiated and not recompute
    call = _Call(path, order, experts, activation, keeps)
    out_TD = cast(Tensor, _HeterogeneousMlp.apply(*operands, call))
    if experts.down_bias is None:
        return out_TD
    return out_TD + _summed_bias(ids_TK, weights_TK, experts.down_bias).to(out_TD.dtype)


def choose_block_rows(num_rows: int, num_experts: int) -> int:
    """The largest block that the rows of an average expert fill, and at least the smallest."""
    mean = num_rows / num_experts
    return max((size for size in BLOCK_SIZES if size <= mean), default=BLOCK_SIZES[0])


class _Call(NamedTuple):
    """What the operator is told beside the tensors that it differentiates."""

    path: Path
    order: SortedTokens
    experts: PackedExperts
    activation: ActivationSpec
    keeps: bool


class _HeterogeneousMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weights_TK: Tensor, *parameters_and_call: Any) -> Tensor:
        *parameters, call = parameters_and_call
        out_TD, kept = call.path.forward(
            x_TD, weights_TK, call.order, call.experts, call.activation, keeps=call.keeps
        )
        ctx.save_for_backward(x_TD, weights_TK, *call.order, *parameters, *kept)
        ctx.path, ctx.activation = call.path, call.activation
        ctx.columns = call.experts.columns
        return out_TD

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_TD, weights_TK, *rest = ctx.saved_tensors
        order, parameters, kept = SortedTokens(*rest[:4]), rest[4:9], tuple(rest[9:])
        names = Needs._fields[2:]
        experts = PackedExperts(**dict(zip(names, parameters, strict=True)), columns=ctx.columns)
        found = ctx.path.backward(
            grads[0],
            x_TD,
            weights_TK,
            kept,
            order,
            experts,
            ctx.activation,
            needs=Needs(*ctx.needs_input_grad[:-1]),
        )
        return *found, None


def _by_blocks(
    x_TD: Tensor,
    order: SortedTokens,
    experts: PackedExperts,
    block_rows: int | None,
    *,
    waits: bool,
) -> Path:
    require_triton(x_TD.device)
    from moe_runtime.kernels.heterogeneous_mlp.by_blocks import ByBlocks

    num_rows = len(order.order_R)
    topology = expert_topology(
        order.offsets_E1,
        experts.columns,
        num_rows=num_rows,
        block_rows=block_rows or choose_block_rows(num_rows, experts.num_experts),
        impl="triton",
    )
    return ByBlocks(topology.trimmed() if waits or x_TD.is_cpu else topology)


def _summed_bias(ids_TK: Tensor, weights_TK: Tensor, bias_ED: Tensor) -> Tensor:
    """`out[t] = sum_k weights[t, k] * bias[ids[t, k]]`, in fp32 (fp64 for fp64)."""
    precise = precise_dtype(bias_ED)
    num_experts = len(bias_ED)
    # The last column is for slots without an expert.
    names = torch.where((ids_TK < 0) | (ids_TK > num_experts), num_experts, ids_TK).long()
    weights_TE1 = weights_TK.new_zeros(len(ids_TK), num_experts + 1, dtype=precise)
    for k in range(ids_TK.shape[1]):
        # One choice at a time no two are added to the same place: the same bits in every run.
        weights_TE1 = weights_TE1.scatter_add(
            1, names[:, k, None], weights_TK[:, k, None].to(precise)
        )
    return weights_TE1[:, :-1] @ bias_ED.to(precise)


def _validate(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, experts: PackedExperts) -> None:
    if x_TD.ndim != 2 or x_TD.shape[1] != experts.dim_model:
        raise ValueError(f"x must be [T, {experts.dim_model}], got {list(x_TD.shape)}")
    if x_TD.dtype != experts.dtype or x_TD.device != experts.up.device:
        raise ValueError(
            f"x must be {experts.dtype} on {experts.up.device} like the experts, got {x_TD.dtype} "
            f"on {x_TD.device}"
        )
    validate_routing(x_TD, ids_TK, weights_TK)
    if not ids_TK.shape[1]:
        raise ValueError(f"ids must be [{len(x_TD)}, K], got {list(ids_TK.shape)}")
