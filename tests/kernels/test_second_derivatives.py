"""Second derivatives, of named inputs too: right, or refused in one line. torch's own refusal is
passed over where inputs are named, and what is missing counts as zero."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from moe_runtime.kernels.block_sparse import ExpertColumns, dsd, expert_topology, sdd
from moe_runtime.kernels.combine import combine
from moe_runtime.kernels.expert_mlp import StackedExperts, expert_mlp
from moe_runtime.kernels.grouped_gemm import grouped_gemm
from moe_runtime.kernels.linear import frozen_linear
from moe_runtime.kernels.token_sort import SortedTokens, token_sort
from moe_runtime.layer.aux import AttachLoss
from moe_runtime.models.lm.attention import RotaryTable
from moe_runtime.models.lm.layers import linear_cross_entropies, rms_norm
from moe_runtime.parallel import Overlap, expert_parallel
from moe_runtime.parallel.communication.transport import LocalTransport
from moe_runtime.parallel.rows import (
    Expansion,
    Splitting,
    assembled_rows,
    combine_rows,
    merge_rows,
    tie_rows,
)
from moe_runtime.routing import Routing

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.tensor([[2, 0], [0, 2], [2, 2], [0, 2], [2, 0]])  # expert 1 has none
ORDER = token_sort(IDS, 3, impl="reference")
DEVICE_ORDER = SortedTokens(*[tensor.to(DEVICE) for tensor in ORDER])
TOPOLOGY = expert_topology(
    ORDER.offsets_E1, ExpertColumns.of((20, 16, 7), block_columns=16), num_rows=10, block_rows=16
)
SOURCE, PLACE = ORDER.order_R // 2, ORDER.inverse_R.view(5, 2)
HERE, THERE = torch.tensor([0, 3, 4, 8]), torch.tensor([1, 2, 5, 6, 7, 9])
TARGETS = torch.arange(5) % 7
FROZEN = torch.linspace(-1, 1, 21, dtype=torch.float64).cos().view(7, 3)
ROTARY = RotaryTable(4, 5, 10.0).double()

Case = tuple[Callable[..., Tensor], list[Tensor], str]


def some(*shape: int) -> Tensor:
    values = torch.linspace(-2, 3, torch.Size(shape).numel(), dtype=torch.float64).sin()
    return values.view(shape)


def on_device(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In fp32, where Triton computes."""
    return lambda *inputs: function(*(x.to(DEVICE, torch.float32) for x in inputs))


def spread(overlap: Overlap) -> Callable[..., Tensor]:
    def layer(x: Tensor, weights: Tensor) -> Tensor:
        routing = Routing(IDS, weights, 3)
        return expert_parallel(
            x, routing, lambda rows, _: rows.tanh(), LocalTransport(), overlap=overlap
        )

    return layer


def expanded(x: Tensor) -> Tensor:
    rows = Expansion(x, SOURCE, PLACE, [6])
    return torch.cat([*rows.parts, rows.last()]).tanh()


def split(y: Tensor) -> Tensor:
    parts = Splitting(y, HERE, THERE)
    return torch.cat([parts.first_AD, parts.second(torch.empty(6, 3, dtype=y.dtype))]).tanh()


def stacked(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    experts = StackedExperts(gate_up=gate_up, down=down)
    return expert_mlp(x, IDS, weights, experts, activation="silu", impl="torch")


EXPERTS, SPREAD = "these experts have no second derivatives", "spread experts have no second"
REFUSED: dict[str, Case] = {
    "sdd": (lambda a, b: sdd(a, b, TOPOLOGY), [some(10, 4), some(4, 43)], EXPERTS),
    "dsd": (
        lambda values, b: dsd(values, b, TOPOLOGY),
        [some(*TOPOLOGY.values_shape), some(43, 4)],
        EXPERTS,
    ),
    "combine": (
        on_device(lambda y, weights: combine(y, weights, DEVICE_ORDER, impl="triton")),
        [some(10, 3), some(5, 2)],
        EXPERTS,
    ),
    "grouped_gemm": (
        on_device(lambda x, w: grouped_gemm(x, w, DEVICE_ORDER.offsets_E1, impl="triton")),
        [some(10, 16), some(3, 16, 16)],
        EXPERTS,
    ),
    "expert_mlp": (stacked, [some(5, 4), some(5, 2), some(3, 6, 4), some(3, 4, 3)], EXPERTS),
    "combine_rows": (
        lambda y, weights: combine_rows(y, weights, SOURCE, PLACE),
        [some(10, 3), some(5, 2)],
        SPREAD,
    ),
    "local first": (spread(Overlap()), [some(5, 3), some(5, 2)], SPREAD),
    "exchanged": (spread(Overlap(is_local_first=False)), [some(5, 3), some(5, 2)], SPREAD),
    "expanded": (expanded, [some(5, 3)], SPREAD),
    "split": (split, [some(10, 3)], SPREAD),
    "norm": (lambda x, w: rms_norm(x, w, 1e-6), [some(5, 2, 3), some(2, 3)], "this norm has no"),
    "loss": (
        lambda hidden, weight: linear_cross_entropies(hidden, weight, TARGETS)[0],
        [some(5, 3), some(7, 3)],
        "this loss has no",
    ),
}
RIGHT: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "frozen": (lambda x: frozen_linear(x, FROZEN).tanh(), [some(5, 3)]),
    "rotation": (lambda x: ROTARY(x).tanh(), [some(1, 5, 2, 4)]),
    "merged": (lambda a, b: merge_rows(a, b, HERE, THERE).tanh(), [some(4, 3), some(6, 3)]),
    "assembled": (
        lambda a, b: assembled_rows(torch.cat([a.detach(), b.detach()]), [a, b]).tanh(),
        [some(4, 3), some(6, 3)],
    ),
    "tied": (lambda y, x: tie_rows(y.tanh(), x) * x.sum(), [some(5, 3), some(2)]),
    "attached": (lambda x: AttachLoss.apply(x.tanh(), x.new_ones(()), 1.0), [some(5, 3)]),
}


def leaves(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_every_pair_of_inputs(name):
    """Also where the gradient that comes in is a constant; first derivatives stay as they are."""
    function, tensors, message = REFUSED[name]
    plain = torch.autograd.grad(function(*(inputs := leaves(tensors))).square().sum(), inputs)
    for is_constant in (False, True):
        out = function(*(inputs := leaves(tensors)))
        loss = out.sum() if is_constant else out.square().sum()
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        for gradient, again in product(first, inputs):
            with pytest.raises(RuntimeError, match=message):
                torch.autograd.grad(gradient.sum(), again, retain_graph=True)
        if not is_constant:
            torch.testing.assert_close([gradient.detach() for gradient in first], [*plain])


@pytest.mark.parametrize("name", RIGHT)
def test_right_where_autograd_sees_through(name):
    function, tensors = RIGHT[name]
    assert gradgradcheck(function, leaves(tensors))


def test_a_checkpoint_unpacks_once():
    """torch allows no more; the mark reads what was saved as well."""
    x, weight = leaves([some(5, 3), some(3)])
    out = checkpoint(rms_norm, x, weight, 1e-6, use_reentrant=False)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (plain,) = torch.autograd.grad(rms_norm(x, weight, 1e-6).square().sum(), x)
    assert torch.equal(first, plain)
    with pytest.raises(RuntimeError, match="this norm has no second derivatives"):
        torch.autograd.grad(first.sum(), weight)


class Looking(TorchDispatchMode):
    """Sees operators, and changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("activation", ["silu", torch.tanh])
def test_operators_refuse_as_functions_do(activation):
    """Where somebody looks at operators the gradient is one of them, and so it is of a function."""
    x, weights, gate_up, down = leaves([some(5, 4), some(5, 2), some(3, 3, 4), some(3, 4, 3)])
    experts = StackedExperts(gate_up=gate_up, down=down, has_gate=False)
    with Looking():
        out = expert_mlp(x, IDS, weights, experts, activation=activation, impl="torch")
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=EXPERTS):
            torch.autograd.grad(first.sum(), down)
