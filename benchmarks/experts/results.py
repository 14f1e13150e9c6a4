"""What an implementation of a layer of experts is asked, and what its results are held to.

Two tokens are computed in float64 as well: the distance, in the 2-norm, may be what the roundings
on the way allow. There are K + 6 of them in the type of the weights (gate, up, activation, their
product, an expert's output, its weighting, K terms of the sum) and D + F in fp32 in the sums of
products, each an independent relative error of at most the unit roundoff, so that a sum in which
numbers cancel cancels their errors as well. With backward the gradient of x passes them twice.
Formats that round what they multiply add what that may move. All other tokens are compared with
this project's, or with those of decoded weights, by twice the bound.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_runtime.benchmarks.experts.layers import ExpertLayer, kinds_of_calls
from moe_runtime.benchmarks.suite.runner import PeerFailedError

ROUTINGS = 8
"""Every call has another one of so many."""
_IN_FLOAT64 = 2


@dataclass(frozen=True, kw_only=True)
class ExpertsPlan:
    """What is asked of every implementation.

    Attributes:
        layer: the experts.
        tokens: numbers of tokens of a call.
        trains: whether calls with backward are measured, too.
        block_s: seconds that a repetition takes for each kind of call.
    """

    layer: ExpertLayer
    tokens: Sequence[int]
    trains: bool
    block_s: float

    def calls(self) -> Iterator[tuple[str, int, bool]]:
        """As ``kinds_of_calls``."""
        return kinds_of_calls(self.tokens, trains=self.trains)

    def call(self, num_tokens: int, *, trains: bool) -> Callable[[int], Tensor]:
        """A call by its number: the output, or the gradient of x, there when it returns."""
        layer = self.layer
        routes = [layer.routing(num_tokens, seed) for seed in range(ROUTINGS)]
        x = layer.tokens(num_tokens)

        def compute(number: int) -> Tensor:
            ids, weights = routes[number % ROUTINGS]
            if not trains:
                with torch.no_grad():
                    return layer.module(x, ids, weights)
            leaf = x.clone().requires_grad_()
            layer.module.requires_grad_(True)
            layer.module(leaf, ids, weights.clone().requires_grad_()).backward(x)
            layer.module.zero_grad(set_to_none=True)
            layer.module.requires_grad_(False)
            assert leaf.grad is not None
            return leaf.grad

        def run(number: int) -> Tensor:
            out = compute(number)
            if out.is_cuda:
                torch.cuda.synchronize(out.device)
            return out

        return run


class Compared(Protocol):
    """Whose results were compared."""

    compared: int
    equal: int


def num_equal(plan: ExpertsPlan, found: Tensor, expected: Tensor, *, trains: bool) -> int:
    """How many tokens of a call's first routing are near enough to what they should be.

    Args:
        plan: see there.
        found: of the implementation, ``[T, D]``.
        expected: this project's.
        trains: whether both are gradients of x.
    """
    bound, found = rounding_bound(plan.layer, trains=trains), found.to(expected.device)
    exact = in_float64(plan.layer, len(found), trains=trains)
    near = _distance(found, expected) <= 2 * bound  # which no NaN is
    near[: len(exact)] &= _distance(found[: len(exact)], exact) <= bound
    return int(near.sum())


def require_all_equal(one: Compared) -> None:
    """Refuses an implementation whose results differ.

    Raises:
        PeerFailedError: they do.
    """
    if one.equal < one.compared:
        raise PeerFailedError(
            f"{one.compared - one.equal} of {one.compared} tokens differ by more than "
            "roundings allow; its times would be those of other work"
        )


def rounding_bound(layer: ExpertLayer, *, trains: bool) -> float:
    """How far, relative to its norm, a token's result may be from the exact one."""
    units = (torch.finfo(dtype).eps / 2 for dtype in (layer.dtype, torch.float32))
    own, fp32 = units
    sums = (layer.top_k + 6) * own + (layer.dim_model + layer.dim_hidden) * fp32
    return (2 if trains else 1) * sums + layer.input_rounding


def in_float64(
    layer: ExpertLayer, num_tokens: int, *, trains: bool, count: int = _IN_FLOAT64
) -> Tensor:
    """What the first tokens of a call's first routing give without roundings, ``[T, D]``."""
    count = min(num_tokens, count)
    ids, weights = (part[:count] for part in layer.routing(num_tokens, 0))
    few, places = layer.in_float64(ids)
    x = layer.tokens(num_tokens)[:count].double()
    if not trains:
        with torch.no_grad():
            return few(x, places, weights.double())
    leaf = x.clone().requires_grad_()
    few(leaf, places, weights.double()).backward(x)
    assert leaf.grad is not None
    return leaf.grad


def _distance(found: Tensor, exact: Tensor) -> Tensor:
    exact = exact.double()
    return (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
