"""`heterogeneous_mlp`: block-sparse products with the activation between them.

Shape suffixes: T tokens, K choices a token, R = T*K routed rows, E experts, D model, N hidden
columns of all experts together.
"""

from __future__ import annotations

from typing import Literal, cast

from torch import Tensor

from moe_runtime.kernels.block_sparse import dsd, expert_topology, sdd
from moe_runtime.kernels.block_sparse.topology import BLOCK_SIZES
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.expert_mlp import ActivationSpec
from moe_runtime.kernels.expert_mlp.op import validate_routing
from moe_runtime.kernels.heterogeneous_mlp.experts import PackedExperts
from moe_runtime.kernels.heterogeneous_mlp.reference import heterogeneous_mlp_reference
from moe_runtime.kernels.token_sort import token_sort
from moe_runtime.kernels.triton_support import resolve_impl

HeterogeneousMlpImpl = Literal["auto", "triton", "torch", "reference"]
IMPLS: tuple[HeterogeneousMlpImpl, ...] = ("auto", "triton", "torch", "reference")


def heterogeneous_mlp(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: PackedExperts,
    *,
    activation: ActivationSpec,
    block_rows: int | None = None,
    waits: bool = False,
    checks_ids: bool = False,
    impl: HeterogeneousMlpImpl = "auto",
) -> Tensor:
    """Runs every token through its experts, which differ in width, and sums by gate weight.

    The hidden values of all experts are one block-sparse `[R, N]` matrix (MegaBlocks, Gale et al.,
    2022), in which an expert has as many columns as it is wide. No token is dropped; neither
    tokens nor widths are padded in any dense matrix. Differentiable in `x`, `weights` and the
    parameters, without atomics.

    Args:
        x_TD: `[T, D]` in the dtype of the experts.
        ids_TK: `[T, K]` integers; an id that names no expert adds nothing.
        weights_TK: `[T, K]` gate weights, any floating dtype.
        experts: The parameters.
        activation: The formula between the products.
        block_rows: Rows of a block; None chooses by the rows an expert has on average.
        waits: Waits once for the device to learn how many blocks there are. Else there is room for
            every row on the widest expert. On a CPU nothing is ever spent on blocks that are not
            needed.
        checks_ids: Reports ids that are neither an expert nor the number of experts (waits).
        impl: `triton` needs a GPU, `torch` is the CPU path, `reference` the specification. `auto`
            is `triton` on a GPU and `torch` elsewhere.

    Returns:
        `[T, D]` in the dtype of `x`.

    Raises:
        ValueError: Shapes, dtypes or devices do not fit, or `impl` cannot run here.
        TritonUnavailableError: `impl` comes out as `triton` and Triton is not installed.
    """
    chosen = cast(HeterogeneousMlpImpl, resolve_impl(impl, x_TD.device, IMPLS))
    _validate(x_TD, ids_TK, weights_TK, experts)
    order = token_sort(ids_TK, experts.num_experts, check_ids=checks_ids, impl=chosen)
    if chosen == "reference":
        return heterogeneous_mlp_reference(x_TD, ids_TK, weights_TK, experts, activation)
    num_rows, num_choices = ids_TK.numel(), ids_TK.shape[1]
    topology = expert_topology(
        order.offsets_E1,
        experts.columns,
        num_rows=num_rows,
        block_rows=block_rows or choose_block_rows(num_rows, experts.num_experts),
        impl=chosen,
    )
    if waits or x_TD.is_cpu:
        topology = topology.trimmed()

    def project(weight_ND: Tensor) -> Tensor:
        return sdd(
            x_TD,
            weight_ND.T,
            topology,
            sorted_tokens=order,
            gathers_choices=num_choices,
            impl=chosen,
        )

    gate = None if experts.gate is None else project(experts.gate)
    hidden = activation(gate, project(experts.up))
    y_RD = dsd(hidden, experts.down, topology, impl=chosen)
    return combine(y_RD, weights_TK, order, impl=chosen)


def choose_block_rows(num_rows: int, num_experts: int) -> int:
    """The largest block that the rows of an average expert fill, and at least the smallest."""
    mean = num_rows / num_experts
    return max((size for size in BLOCK_SIZES if size <= mean), default=BLOCK_SIZES[0])


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
