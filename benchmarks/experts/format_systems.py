"""The case ``experts`` with ``--formats``: one layer's experts computed from their codes.

A format is a system, and so is a plain read of as many bytes of the same memory by the same
threads, and every peer that has the format. They take turns; the next format begins when they are
done, so that experts of one format are in memory at a time.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moe_runtime.benchmarks.experts.backends import ExpertsSystem
from moe_runtime.benchmarks.experts.format_layers import FormatLayer, make_format_layer
from moe_runtime.benchmarks.experts.layers import LayerSizes, kinds_of_calls, time_block
from moe_runtime.benchmarks.experts.peers import ExpertsPeer
from moe_runtime.benchmarks.experts.results import ROUTINGS, ExpertsPlan, in_float64
from moe_runtime.benchmarks.suite.peer_files import describe_peer
from moe_runtime.benchmarks.suite.peer_process import PeerProgram
from moe_runtime.benchmarks.suite.results import (
    Metric,
    describe_system,
    make_results,
    quality_of,
    versions,
)
from moe_runtime.benchmarks.suite.runner import (
    MeasuredSystem,
    Number,
    PeerFailedError,
    Rules,
    middle,
    peer_failures,
    run_in_turn,
)
from moe_runtime.kernels.native import require_native

_READ = "read"
# Why the measuring ended, the worst first.
_ENDS = ("interrupted", "failed", "time", "most", "narrow")


@dataclass(frozen=True)
class FormatsPlan:
    """What is asked of every format.

    Attributes:
        names: of formats.
        sizes: of the layer.
        memory: bytes that experts of a format may take.
        tokens: numbers of tokens of a call.
        block_s: seconds that a repetition takes for each number.
    """

    names: Sequence[str]
    sizes: LayerSizes
    memory: int
    tokens: Sequence[int]
    block_s: float

    def metrics(self) -> dict[str, Metric]:
        """Of each number of tokens: seconds, bytes of the experts, and the share of reading."""
        kinds = {"s": Metric("s"), "bytes": Metric("bytes", is_judged=False)}
        kinds["of_read"] = Metric("share", better="more")
        words = [(number, what) for number in self.tokens for what in kinds]
        return {f"forward_{number}_{what}": kinds[what] for number, what in words}


class PlainRead:
    """Reads as many bytes as the calls of a format, of its experts; nothing is compared."""

    def __init__(self, name: str, plan: ExpertsPlan, layer: FormatLayer) -> None:
        """A system of that name, of the experts of a format's plan."""
        self.name, self.versions = name, versions()
        self.compared = self.equal = 0
        self._plan, self._memory, self._library = plan, layer.memory, require_native()
        self._bytes = dict[int, int]()
        for number in plan.tokens:
            ids = (layer.routing(number, seed)[0] for seed in range(ROUTINGS))
            visited = median(len(one.unique()) for one in ids)
            self._bytes[number] = int(visited * layer.expert_bytes)

    def repeat(self) -> Mapping[str, Number]:
        """Seconds of each number of tokens, and the bytes."""
        found: dict[str, Number] = {}
        for number, num_bytes in self._bytes.items():
            places = len(self._memory) - num_bytes + 1

            def read(call: int, size: int = num_bytes, places: int = places) -> None:
                first = call * size % places
                self._library.read(self._memory[first : first + size])

            found[f"forward_{number}_s"] = time_block(read, self._plan.block_s)
            found[f"forward_{number}_bytes"] = num_bytes
        return found


def measure_formats(
    plan: FormatsPlan,
    rules: Rules,
    clock: Callable[[], float],
    *,
    settings: Mapping[str, Any],
    peers: Sequence[PeerProgram] = (),
    on_repetition: Callable[[str, int], None] = lambda name, number: None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Measures every format, reads and peers; each has an equal part of the time that is left.

    Returns:
        The content of a results file.

    Raises:
        NativeUnavailableError: the native library was not built.
    """
    require_native().set_num_threads(torch.get_num_threads())
    begin = clock()
    rows, ends, counts = list[dict[str, Any]](), set[str](), dict[str, int]()
    for done, name in enumerate(plan.names):
        if is_stopping():
            ends.add("interrupted")
            break
        try:
            with peer_failures():
                layer = make_format_layer(name, plan.sizes, plan.memory)
        except PeerFailedError as error:
            failed = MeasuredSystem(failure=str(error))
            rows.append(describe_system(name, failed, {}, system_versions=versions(), quality=None))
            continue
        counts[name] = layer.num_experts
        own = ExpertsPlan(layer=layer, tokens=plan.tokens, trains=False, block_s=plan.block_s)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
            systems = [*_systems(own, layer, peers, Path(folder), running)]
            left_s = (rules.max_s - (clock() - begin)) / (len(plan.names) - done)
            found, ended = run_in_turn(
                systems,
                replace(rules, max_s=left_s),
                clock,
                on_repetition=on_repetition,
                is_stopping=is_stopping,
            )
        ends.add(ended)
        reads = found[f"{_READ}, {name}"]
        rows += [
            describe_system(
                one.name,
                _of_read(found[one.name], reads),
                plan.metrics(),
                system_versions=one.versions,
                quality=quality_of(one),
            )
            for one in systems
        ]
    ended = next((one for one in _ENDS if one in ends), "failed")
    return make_results("experts", {**settings, "experts_made": counts}, ended, rows)


def _systems(
    plan: ExpertsPlan,
    layer: FormatLayer,
    peers: Sequence[PeerProgram],
    folder: Path,
    running: ExitStack,
) -> Iterator[ExpertsSystem | PlainRead | ExpertsPeer]:
    name = layer.format_name
    expected = {
        metric: in_float64(layer, number, trains=False, count=number)
        for metric, number, _ in kinds_of_calls(plan.tokens, trains=False)
    }
    yield ExpertsSystem(name, plan, expected)
    yield PlainRead(f"{_READ}, {name}", plan, layer)
    for one in peers:
        if name in describe_peer(one.file)["FORMATS"]:
            settings = {**one.settings, "format": name}
            program = replace(one, name=f"{one.name}, {name}", settings=settings)
            yield ExpertsPeer(program, plan, expected, folder, running)


def _of_read(measured: MeasuredSystem, reads: MeasuredSystem) -> MeasuredSystem:
    """Medians of repetitions, and the share of the speed of reading that each had."""
    found = []
    for own, read in zip(measured.repetitions, reads.repetitions, strict=False):
        medians = {name: middle(value) for name, value in own.items()}
        shares = {
            name.removesuffix("s") + "of_read": middle(read[name]) / value
            for name, value in medians.items()
            if name.endswith("_s") and measured is not reads
        }
        found.append(medians | shares)
    return MeasuredSystem(repetitions=found, failure=measured.failure)
