"""The case ``experts``: one layer of experts by this project and by transformers, in one process.

A repetition of an implementation takes every number of tokens, forward and if asked with backward,
for a while. Every call has other routing than the one before, so that at few tokens weights come
from memory, as in a model.

An implementation whose outputs differ gets no numbers. Two tokens are computed in float64 as well:
the distance, in the 2-norm, may be what the roundings on the way allow. There are K + 6 of them in
the type of the weights (gate, up, activation, their product, an expert's output, its weighting, K
terms of the sum) and D + F in fp32 in the sums of products, each an independent relative error of
at most the unit roundoff, so that a sum in which numbers cancel cancels their errors as well. With
backward the gradient of x passes them twice. All other tokens are compared with this project's by
twice the bound.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_runtime.bench.expert_layers import OURS, PEERS, ExpertLayer, time_block
from moe_runtime.bench.results import Metric, describe_system, make_results, versions
from moe_runtime.bench.runner import Number, PeerFailedError, Rules, run_in_turn

_IN_FLOAT64 = 2
_ROUTINGS = 4


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
        """Metric, tokens and whether there is a backward pass, of each kind of call."""
        for trains in (False, True)[: 1 + self.trains]:
            for num_tokens in self.tokens:
                yield f"{'backward' if trains else 'forward'}_{num_tokens}_s", num_tokens, trains

    def call(self, num_tokens: int, *, trains: bool) -> Callable[[int], Tensor]:
        """A call by its number: the output, or the gradient of x."""
        layer = self.layer
        routes = [layer.routing(num_tokens, seed) for seed in range(_ROUTINGS)]
        x = layer.tokens(num_tokens)

        def run(number: int) -> Tensor:
            ids, weights = routes[number % _ROUTINGS]
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

        return run


def metrics_of(plan: ExpertsPlan) -> dict[str, Metric]:
    """Seconds of each kind of call."""
    return {name: Metric("s") for name, _, _ in plan.calls()}


class ExpertsSystem:
    """An implementation.

    Attributes:
        name: of the implementation.
        compared, equal: tokens whose outputs and gradients were compared, and how many agreed.
    """

    def __init__(self, name: str, plan: ExpertsPlan, expected: Mapping[str, Tensor]) -> None:
        """What it is held to.

        Args:
            name: of the implementation.
            plan: see there.
            expected: this project's result by metric, of the first routing.
        """
        self.name, self.plan = name, plan
        self.compared = self.equal = 0
        self._expected = expected

    def repeat(self) -> Mapping[str, Number]:
        """Measures every kind of call; before the first time, compares results.

        Raises:
            PeerFailedError: it cannot compute this layer, or its results differ.
        """
        self.plan.layer.select(self.name)
        try:
            if not self.compared:
                self._compare()
            return {
                name: time_block(self.plan.call(tokens, trains=trains), self.plan.block_s)
                for name, tokens, trains in self._calls()
            }
        except (RuntimeError, NotImplementedError, ValueError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise PeerFailedError(lines[0]) from None

    def _calls(self) -> Iterator[tuple[str, int, bool]]:
        layer = self.plan.layer
        for name, tokens, trains in self.plan.calls():
            if self.name == OURS or self.name in layer.contenders(tokens, trains=trains):
                yield name, tokens, trains

    def _compare(self) -> None:
        for name, tokens, trains in self._calls():
            found = self.plan.call(tokens, trains=trains)(0)
            bound = rounding_bound(self.plan.layer, trains=trains)
            exact = in_float64(self.plan.layer, tokens, trains=trains)
            far = _distance(found, self._expected[name]) > 2 * bound
            far[: len(exact)] |= _distance(found[: len(exact)], exact) > bound
            self.compared += tokens
            self.equal += tokens - int(far.sum())
        if self.equal < self.compared:
            raise PeerFailedError(
                f"{self.compared - self.equal} of {self.compared} tokens differ by more than "
                "roundings allow; its times would be those of other work"
            )


def rounding_bound(layer: ExpertLayer, *, trains: bool) -> float:
    """How far, relative to its norm, a token's result may be from the exact one."""
    units = (torch.finfo(dtype).eps / 2 for dtype in (layer.dtype, torch.float32))
    own, fp32 = units
    passes = 2 if trains else 1
    return passes * ((layer.top_k + 6) * own + (layer.dim_model + layer.dim_hidden) * fp32)


def in_float64(layer: ExpertLayer, num_tokens: int, *, trains: bool) -> Tensor:
    """What the first tokens of a call's first routing give without roundings, ``[T, D]``."""
    count = min(num_tokens, _IN_FLOAT64)
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


def measure_experts(
    plan: ExpertsPlan,
    rules: Rules,
    clock: Callable[[], float],
    *,
    settings: Mapping[str, Any],
    on_repetition: Callable[[str, int], None] = lambda name, number: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measures this project and every implementation of transformers.

    Returns:
        The content of a results file.
    """
    from moe_runtime.inference.hugging_face.backend import register_with_transformers

    register_with_transformers()
    plan.layer.select(OURS)
    expected = {name: plan.call(tokens, trains=trains)(0) for name, tokens, trains in plan.calls()}
    systems = [ExpertsSystem(name, plan, expected) for name in (OURS, *PEERS)]
    found, ended = run_in_turn(
        systems, rules, clock, on_repetition=on_repetition, is_stopping=is_stopping
    )
    return make_results(
        "experts",
        settings,
        ended,
        [
            describe_system(
                one.name,
                found[one.name],
                metrics_of(plan),
                system_versions=versions(),
                quality={"compared": one.compared, "equal": one.equal} if one.compared else None,
            )
            for one in systems
        ],
    )
