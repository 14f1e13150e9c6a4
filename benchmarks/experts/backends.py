"""The case ``experts``: one layer of experts by this project and by transformers, in one process.

A repetition of an implementation takes every number of tokens, forward and if asked with backward,
for a while. Every call has other routing than the one before, so that at few tokens weights come
from memory, as in a model. An implementation whose outputs differ gets no numbers
(``results``). Peers compute the same in processes of their own (``peers``).
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from moe_runtime.benchmarks.experts.layers import OURS, PEERS, time_block
from moe_runtime.benchmarks.experts.peers import ExpertsPeer
from moe_runtime.benchmarks.experts.results import ExpertsPlan, num_equal, require_all_equal
from moe_runtime.benchmarks.suite.peer_process import PeerProgram
from moe_runtime.benchmarks.suite.results import (
    Metric,
    describe_system,
    make_results,
    quality_of,
    versions,
)
from moe_runtime.benchmarks.suite.runner import Number, Rules, peer_failures, run_in_turn


def metrics_of(plan: ExpertsPlan) -> dict[str, Metric]:
    """Seconds of each kind of call."""
    return {name: Metric("s") for name, _, _ in plan.calls()}


class ExpertsSystem:
    """An implementation.

    Attributes:
        name: of the implementation.
        versions: of the packages that matter.
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
        self.versions = versions()
        self.compared = self.equal = 0
        self._expected = expected

    def repeat(self) -> Mapping[str, Number]:
        """Measures every kind of call; before the first time, compares results.

        Raises:
            PeerFailedError: it cannot compute this layer, or its results differ.
        """
        self.plan.layer.select(self.name)
        with peer_failures():
            if not self.compared:
                self._compare()
            return {
                name: time_block(self.plan.call(tokens, trains=trains), self.plan.block_s)
                for name, tokens, trains in self._calls()
            }

    def _calls(self) -> Iterator[tuple[str, int, bool]]:
        layer = self.plan.layer
        for name, tokens, trains in self.plan.calls():
            if self.name == OURS or self.name in layer.contenders(tokens, trains=trains):
                yield name, tokens, trains

    def _compare(self) -> None:
        for name, tokens, trains in self._calls():
            found = self.plan.call(tokens, trains=trains)(0)
            self.compared += tokens
            self.equal += num_equal(self.plan, found, self._expected[name], trains=trains)
        require_all_equal(self)


def measure_experts(
    plan: ExpertsPlan,
    rules: Rules,
    clock: Callable[[], float],
    *,
    settings: Mapping[str, Any],
    peers: Sequence[PeerProgram] = (),
    on_repetition: Callable[[str, int], None] = lambda name, number: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measures this project, every implementation of transformers, and peers.

    Returns:
        The content of a results file.
    """
    from moe_runtime.inference.hugging_face.backend import register_with_transformers

    register_with_transformers()
    plan.layer.select(OURS)
    expected = {name: plan.call(tokens, trains=trains)(0) for name, tokens, trains in plan.calls()}
    systems: list[ExpertsSystem | ExpertsPeer] = [
        ExpertsSystem(name, plan, expected) for name in (OURS, *PEERS)
    ]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        systems += [ExpertsPeer(one, plan, expected, Path(folder), running) for one in peers]
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
                system_versions=one.versions,
                quality=quality_of(one),
            )
            for one in systems
        ],
    )
