"""The case ``experts``: one layer of experts by this project, by transformers and by peers.

A repetition of an implementation takes every number of tokens, forward and if asked with backward,
for a while. Every call has other routing than the one before, so that at few tokens weights come
from memory, as in a model. An implementation whose outputs differ gets no numbers.

Two tokens are computed in float64 as well: the distance, in the 2-norm, may be what the roundings
on the way allow. There are K + 6 of them in the type of the weights (gate, up, activation, their
product, an expert's output, its weighting, K terms of the sum) and D + F in fp32 in the sums of
products, each an independent relative error of at most the unit roundoff, so that a sum in which
numbers cancel cancels their errors as well. With backward the gradient of x passes them twice.
Formats that round what they multiply add what that may move. All other tokens are compared with
this project's, or with those of decoded weights, by twice the bound.

Peers run in processes of their own. The layer goes there in files: bf16, or codes and scales, as
they lie, in numpy's format. A peer computes forward passes alone. Between its turns its threads
stand still: some would go on spinning, and take a core from the others.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_runtime.benchmarks.cases.expert_layers import (
    OURS,
    PEERS,
    CallsPlan,
    CallsSystem,
    ExpertLayer,
)
from moe_runtime.benchmarks.suite.peers import PeerProcess, PeerProgram, started
from moe_runtime.benchmarks.suite.results import measure_systems
from moe_runtime.benchmarks.suite.runner import (
    BenchSystem,
    Number,
    Rules,
)

_TIMEOUT_S = 900.0
ROUTINGS = 8
"""Every call has another one of so many."""
_IN_FLOAT64 = 2


@dataclass(frozen=True, kw_only=True)
class ExpertsPlan(CallsPlan):
    """What is asked of every implementation of a layer of experts."""

    layer: ExpertLayer

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


def num_equal(plan: ExpertsPlan, found: Tensor, expected: Tensor, *, trains: bool) -> int:
    """How many tokens of a call's first routing are near enough to what they should be.

    Args:
        found: of the implementation, ``[T, D]``.
    """
    bound, found = rounding_bound(plan.layer, trains=trains), found.to(expected.device)
    exact = in_float64(plan.layer, len(found), trains=trains)
    near = distance(found, expected) <= 2 * bound  # which no NaN is
    near[: len(exact)] &= distance(found[: len(exact)], exact) <= bound
    return int(near.sum())


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


def distance(found: Tensor, exact: Tensor) -> Tensor:
    """Relative distance of each token's result, in the 2-norm."""
    exact = exact.double()
    return (found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)


class ExpertsSystem(CallsSystem):
    """An implementation."""

    def __init__(self, name: str, plan: ExpertsPlan, expected: Mapping[str, Tensor]) -> None:
        super().__init__(name, plan)
        self.plan, self._expected = plan, expected

    def repeat(self) -> Mapping[str, Number]:
        """As of all, by this implementation."""
        self.plan.layer.select(self.name)
        return super().repeat()

    def takes(self, num_tokens: int, *, trains: bool) -> bool:
        contenders = self.plan.layer.contenders(num_tokens, trains=trains)
        return self.name == OURS or self.name in contenders

    def call(self, num_tokens: int, *, trains: bool) -> Callable[[int], Tensor]:
        return self.plan.call(num_tokens, trains=trains)

    def num_equal(self, metric: str, found: Tensor, *, trains: bool) -> tuple[int, int]:
        equal = num_equal(self.plan, found, self._expected[metric], trains=trains)
        return len(found), equal


def measure_experts(
    plan: ExpertsPlan,
    rules: Rules,
    settings: Mapping[str, Any],
    peers: Sequence[PeerProgram] = (),
) -> dict[str, Any]:
    """Measures this project, every implementation of transformers, and peers."""
    from moe_runtime.inference.hugging_face.backend import register_with_transformers

    register_with_transformers()
    plan.layer.select(OURS)
    expected = {name: plan.call(tokens, trains=trains)(0) for name, tokens, trains in plan.calls()}
    systems: list[BenchSystem] = [ExpertsSystem(name, plan, expected) for name in (OURS, *PEERS)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        systems += [ExpertsPeer(one, plan, expected, Path(folder), running) for one in peers]
        return measure_systems("experts", systems, plan.metrics(), rules, settings)


class ExpertsPeer(BenchSystem):
    """A peer in a process of its own; tokens are compared."""

    def __init__(
        self,
        program: PeerProgram,
        plan: ExpertsPlan,
        expected: Mapping[str, Tensor],
        folder: Path,
        running: ExitStack,
    ) -> None:
        """What it is held to."""
        super().__init__(program.name, {})
        self._program, self._plan, self._expected = program, plan, expected
        self._folder, self._running = folder, running
        self._process: PeerProcess | None = None

    def repeat(self) -> Mapping[str, Number]:
        """Measures every kind of forward pass; before the first time, compares results."""
        process = self._process or self._start()
        calls = [(name, tokens) for name, tokens, trains in self._plan.calls() if not trains]
        if not self.compared:
            for name, tokens in calls:
                self._ask(process, tokens, None)
                found = _tensor(np.load(self._folder / f"{tokens}.npy"))
                self.compared += tokens
                expected = self._expected[name]
                self.equal += num_equal(self._plan, found, expected, trains=False)
            self.require_all_equal()
        return {
            name: self._ask(process, tokens, self._plan.block_s)["seconds"]
            for name, tokens in calls
        }

    def _start(self) -> PeerProcess:
        write_layer(self._plan, self._folder)
        process = self._running.enter_context(started(self._program, _TIMEOUT_S, stands_still=True))
        self.versions = process.ask("start", settings=self._program.settings)["versions"]
        process.ask("load_experts", folder=str(self._folder))
        self._process = process
        return process

    def _ask(self, process: PeerProcess, tokens: int, block_s: float | None) -> dict[str, Any]:
        return process.ask("experts", folder=str(self._folder), tokens=tokens, block_s=block_s)


def write_layer(plan: ExpertsPlan, folder: Path) -> None:
    """Writes the weights of a layer, and tokens and routings of every call, unless they are
    there."""
    layer = plan.layer
    if (folder / f"{plan.tokens[-1]}.npz").exists():  # the last file
        return
    for name, part in layer.handed_parts():
        np.save(folder / f"{name}.npy", _bits(part))
    for tokens in plan.tokens:
        routes = [layer.routing(tokens, seed) for seed in range(ROUTINGS)]
        ids = np.stack([ids.cpu().numpy() for ids, _ in routes])
        weights = np.stack([weights.float().cpu().numpy() for _, weights in routes])
        np.savez(folder / f"{tokens}.npz", x=_bits(layer.tokens(tokens)), ids=ids, weights=weights)


def _bits(values: Tensor) -> np.ndarray[Any, Any]:
    array = values.cpu().contiguous()
    is_bf16 = array.dtype == torch.bfloat16
    return array.view(torch.int16).numpy().view(np.uint16) if is_bf16 else array.numpy()


def _tensor(bits: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
