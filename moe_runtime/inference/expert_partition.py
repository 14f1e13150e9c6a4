"""A model's experts divided among processes that run the same forward passes.

Every process computes the dense part for all tokens, but only its own experts; it gets rows of
others by one exchange per layer. Kernels, inputs and the order of sums are those of a single
process, so the placement changes no bit.

Shape suffixes: R routed rows, D model.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.parallel.communication.elastic import ElasticGroup
from moe_runtime.parallel.communication.transport import (
    Transport,
    arithmetic_facts,
    exchange_bytes,
    numbers_of_all,
    require_same,
    software_facts,
)
from moe_runtime.parallel.placement_map import PlacementMap, load_placement_map, resize_layer
from moe_runtime.parallel.slots import ExpertSlots
from moe_runtime.policies.placement.base import count_by_layer
from moe_runtime.policies.placement.shares import Holders, hold_by_shares, shares_of_ranks
from moe_runtime.policies.prediction import Event, Guess, Predictor
from moe_runtime.types import ExpertKey, ModelSignature, RuntimeStats

if TYPE_CHECKING:
    from moe_runtime.parallel.parallel_experts import RebalanceRule

_SUMMED = (
    *("hits", "late_hits", "misses", "bytes_read", "readahead_bytes", "expert_slots"),
    *("computed_misses", "planned_s", "spent_s"),
    *("copied_bytes", "budget_bytes", "baseline_rss_bytes", "peak_rss_bytes"),
    *("guesses", "useful_guesses", "late_guesses", "wasted_guesses"),
)
_SLOWEST = ("stall_s", "load_s", "predict_s")
COUNTED = (*_SUMMED, *_SLOWEST)
"""Statistics that differ between the processes of a model."""

PASSES_FOR_A_LOOK = 512
"""Forward passes between two looks at the loads."""
EXPERTS_FOR_A_COPY = 8
"""A layer has at most one copy for this many experts; DeepSeek-V3 has 32 for 256."""
_MEASURED_BYTES = 64 * 2**20
"""Weights of a measured product: more than a processor's cache holds."""


class ExpertPartition:
    """The experts of this process, and the exchange of rows with others.

    Attributes:
        group: of processes that come and go; None if they stay the same.
        is_first: whether this is the process that requests come to.
    """

    def __init__(
        self,
        transport: Transport,
        experts_of_layer: Sequence[int],
        placement: PlacementMap | None = None,
        holders: Holders | None = None,
    ) -> None:
        """Divides the experts by a map, or as ``holders`` says, or each layer's into runs of about
        equal length. Raises ValueError: a process would have no experts."""
        size = transport.size
        self.transport = transport
        self.group = transport if isinstance(transport, ElasticGroup) else None
        self.is_first = transport.rank == 0 if self.group is None else self.group.is_first
        self._held_by: dict[str, list[list[int]]] = {}  # experts by lasting name and layer
        self._holders: Holders
        if placement is not None:
            self._holders = []
            for layer, number in enumerate(experts_of_layer):
                held = placement.experts_of_ranks(layer)
                ranks = range(len(held))
                self._holders.append([[r for r in ranks if e in held[r]] for e in range(number)])
        elif size > min(experts_of_layer):
            raise ValueError(
                f"{size} processes cannot share the {min(experts_of_layer)} experts of a "
                f"layer; start at most {min(experts_of_layer)}"
            )
        else:
            self._holders = holders or hold_by_shares(experts_of_layer, [1] * size)
        self._loads: list[np.ndarray] = []
        self._rules: dict[int, RebalanceRule] = {}
        self._passes = 0
        busy = {rank for layer in self._holders for held_by in layer for rank in held_by}
        if len(busy) < size:
            idle = min(set(range(size)) - busy)
            what = "memory and speed leave" if placement is None else "the placement map leaves"
            raise ValueError(f"{what} process {idle} of {size} without experts")

    def form(self) -> None:
        """Forms the next group, and divides the experts anew so that the fewest move.

        Raises:
            RankFailureError: a process was lost meanwhile.
            ElasticError: there is no next group.
        """
        assert self.group is not None
        self._holders = self.group.form(self._divide)
        if self.is_first:
            moved = f"{self._num_moved} experts moved"
            self.group.say(f"{self.transport.size} processes divide the model; {moved}")

    def _divide(self, names: Sequence[str]) -> list[list[list[int]]]:
        """Ranks by layer and expert; a process that stays keeps what it holds, as far as shares
        allow."""
        sizes = [*map(len, self._holders)]
        before = self._held_by or {names[0]: [[*range(size)] for size in sizes]}
        known = [*names, *(name for name in before if name not in names)]
        self._num_moved, holders = 0, []
        self._held_by = {name: [] for name in names}
        for layer, size in enumerate(sizes):
            held = [before[name][layer] if name in before else [] for name in known]
            ranks = resize_layer(held, len(names), [1.0] * size)
            for name, had, has in zip(names, held, ranks, strict=False):
                self._held_by[name].append(has)
                self._num_moved += len({*has} - {*had})
            owner = {expert: rank for rank, has in enumerate(ranks) for expert in has}
            holders.append([[owner[expert]] for expert in range(size)])
        return holders

    def owns(self, key: ExpertKey) -> bool:
        return self.transport.rank in self._holders[key.layer][key.expert]

    def own_rows(self, layer: int, rows: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """The visited experts that this process computes, with their rows."""
        if self._rules:
            self._passes += layer == 0
            if layer == 0 and self._passes % PASSES_FOR_A_LOOK == 0:
                self._rebalance()
            loads_E = self._loads[layer]
            for expert, own in rows.items():
                loads_E[expert] += len(own)
        computed_by = self._computed_by(layer, rows)
        return {e: rows[e] for e in rows if computed_by[e] == self.transport.rank}

    def _computed_by(self, layer: int, rows: Mapping[int, list[int]]) -> dict[int, int]:
        """The process for each visited expert: the holder with the fewest rows so far, largest
        experts first.

        An expert's rows stay together: a product of fewer rows may round differently.
        """
        holders = self._holders[layer]
        chosen = {expert: holders[expert][0] for expert in rows}
        replicated = [expert for expert in rows if len(holders[expert]) > 1]
        if not replicated:
            return chosen
        num_rows = [0] * self.transport.size
        for expert in rows:
            if len(holders[expert]) == 1:
                num_rows[chosen[expert]] += len(rows[expert])
        for expert in sorted(replicated, key=lambda e: (-len(rows[e]), e)):
            rank = chosen[expert] = min(holders[expert], key=lambda r: (num_rows[r], r))
            num_rows[rank] += len(rows[expert])
        return chosen

    def follow_loads(self) -> None:
        """From now on experts move where EPLB's placement by the latest loads is better balanced.

        The first process decides. A process reads experts that come to it when tokens need them.
        Layers with another number of experts in each process stay.
        """
        from moe_runtime.parallel.parallel_experts import RebalanceRule

        self._loads = [np.zeros(len(held)) for held in self._holders]
        for layer in range(len(self._holders)):
            numbers = {len(held) for held in self._held(layer)}
            if len(numbers) == 1:
                self._rules[layer] = RebalanceRule(numbers.pop() * self.transport.size)

    @property
    def follows_loads(self) -> bool:
        """Whether this process may get any expert."""
        return bool(self._rules)

    def _held(self, layer: int) -> list[list[int]]:
        """The experts of each process."""
        holders, size = self._holders[layer], self.transport.size
        return [[e for e, ranks in enumerate(holders) if r in ranks] for r in range(size)]

    def _rebalance(self) -> None:
        moved: dict[int, list[list[int]]] = {}
        if self.transport.rank == 0:
            for layer, rule in self._rules.items():
                num_experts = len(self._holders[layer])
                slots = ExpertSlots.from_ranks(self._held(layer), num_experts)
                if (new := rule.look(self._loads[layer], slots)[0]) is not None:
                    held = [new.experts_of(rank) for rank in range(self.transport.size)]
                    moved[layer] = [
                        [rank for rank, own in enumerate(held) if expert in own]
                        for expert in range(num_experts)
                    ]
        for loads_E in self._loads:
            loads_E[:] = 0
        arrived = _from_first(self.transport, json.dumps([*moved.items()]).encode())
        for layer, holders in json.loads(arrived):
            self._holders[layer] = holders

    def require_same_model(
        self, checkpoint: Checkpoint, experts: ExpertMap, place: torch.device
    ) -> None:
        """Raises RankFailureError: processes differ in the model or its settings. Collective."""
        import transformers

        config = checkpoint.config.to_dict()
        facts = {
            **software_facts(),
            **arithmetic_facts(),
            "the placement of the experts": str(self._holders),
            "the version of transformers": transformers.__version__,
            "the kind of device": place.type,
            "the dtype": str(checkpoint.dtype),
            "the model's configuration": str(
                sorted((k, str(v)) for k, v in config.items() if k != "_name_or_path")
            ),
            "the types of the model's experts": " and ".join(experts.type_names),
            "the model's dense tensors": str(
                sorted((name, e.dtype, e.shape) for name, e in experts.dense_entries.items())
            ),
        }
        if self.group is None:
            require_same(self.transport, facts)
        else:
            self.group.agree("model", facts)

    def exchange(self, layer: int, rows: Mapping[int, list[int]], out_RD: Tensor) -> None:
        """Adds the rows of other processes to ``out_RD``; a collective call.

        Args:
            rows: rows of each visited expert, the same in all processes.
            out_RD: ``[R, D]`` with this process's rows.

        Raises:
            RankFailureError: another process died or stalled.
        """
        rank, size = self.transport.rank, self.transport.size
        rows_of_rank: list[list[int]] = [[] for _ in range(size)]
        computed_by = self._computed_by(layer, rows)
        for expert, rows_here in rows.items():
            rows_of_rank[computed_by[expert]] += rows_here
        own = rows_of_rank[rank]
        sent = [0 if other == rank else len(own) for other in range(size)]
        received = [0 if p == rank else len(theirs) for p, theirs in enumerate(rows_of_rank)]
        (route,) = self.transport.routes(torch.tensor([sent]), torch.tensor([received]))
        own_RD = out_RD[torch.tensor(own, dtype=torch.int64, device=out_RD.device)]
        arrived_RD = self.transport.exchange(own_RD.repeat(size - 1, 1), route).wait()
        arriving = [row for p, theirs in enumerate(rows_of_rank) if p != rank for row in theirs]
        out_RD[torch.tensor(arriving, dtype=torch.int64, device=out_RD.device)] = arrived_RD


def divide_experts(
    transport: Transport,
    experts: ExpertMap,
    signature: ModelSignature,
    placement: str | Path | None,
    num_slots: int,
    measure: Callable[[], int] | None = None,
    recorded: Path | None = None,
) -> ExpertPartition | None:
    """Narrows ``experts`` to the share of this process; None for a single process.

    Without a map, shares are those of memory, or of speed where all experts fit. Known loads are
    balanced, and hot experts get copies where there is room. A collective call.

    Args:
        num_slots: experts that fit in the memory of this process.
        measure: the speed of this process; None in all of them if they have one processor.
        recorded: the checkpoint, if loads are those of the routing that its runs kept.

    Raises:
        CheckpointError: the map is damaged, or for another model or number of processes.
        ValueError: a process would have no experts.
    """
    placed = None
    if placement is not None:
        placed = load_placement_map(placement)
        placed.require(signature, num_ranks=transport.size)
    is_elastic = isinstance(transport, ElasticGroup)
    if transport.size == 1 and not is_elastic:
        if placed is not None:
            warnings.warn(
                "the placement map has no effect: one process has all experts; start several with "
                "torchrun, or leave the map out",
                MoERuntimeWarning,
                stacklevel=2,
            )
        return None
    sizes = [module.num_experts for module in experts.modules]
    holders = None
    if placed is None and not is_elastic and transport.size <= min(sizes):
        loads_LE = _kept_loads(transport, signature, recorded)
        room, wanted = [number for (number,) in numbers_of_all(transport, [num_slots])], sum(sizes)
        num_copies = 0
        if loads_LE is not None:
            spare = max(0, sum(room) - wanted) // len(sizes)
            num_copies = min(spare, max(sizes) // EXPERTS_FOR_A_COPY)
        wanted += num_copies * len(sizes)
        speeds = [1] * transport.size
        if measure is not None and sum(room) > wanted:
            speeds = [number for (number,) in numbers_of_all(transport, [measure()])]
        shares = shares_of_ranks(room, speeds, wanted)
        holders = hold_by_shares(sizes, shares, loads_LE, num_copies)
    partition = ExpertPartition(transport, sizes, placed, holders)
    experts.least_slot_bytes = experts.slot_bytes
    if not is_elastic:
        experts.layouts = {key: lay for key, lay in experts.layouts.items() if partition.owns(key)}
    return partition


def _kept_loads(
    transport: Transport, signature: ModelSignature, recorded: Path | None
) -> np.ndarray | None:
    """``[L, E]`` tokens of each expert in the latest routing that the first process has; a
    collective call."""
    if recorded is None:
        return None
    from moe_runtime.lab.traces.recent import read_recent

    packed = b""
    recent = read_recent(signature, recorded) if transport.rank == 0 else None
    if recent is not None:
        ids_LTK = recent.expert_ids.swapaxes(0, 1).astype(np.int64)
        packed = count_by_layer(ids_LTK, signature.num_experts).tobytes()
    arrived = _from_first(transport, packed)
    return np.frombuffer(arrived, np.int64).reshape(signature.num_layers, -1) if arrived else None


def _from_first(transport: Transport, message: bytes) -> bytes:
    """What the first process sends to all; a collective call."""
    is_sent = transport.rank == 0 and message
    messages = dict.fromkeys(range(transport.size), message) if is_sent else {}
    return exchange_bytes(transport, messages)[0].get(0, b"")


def measure_products(place: torch.device, dtype: torch.dtype) -> int:
    """Megabytes of weights that products of one row read in a second."""
    from moe_runtime.kernels.linear import linear

    weight_NK = torch.ones(_MEASURED_BYTES // 2048 // dtype.itemsize, 2048, dtype=dtype)
    weight_NK, times = weight_NK.to(place), []
    with torch.inference_mode():
        for _ in range(5):
            begun_s = time.perf_counter()
            linear(weight_NK[:1], weight_NK)[0, 0].item()  # waits for a GPU
            times.append(time.perf_counter() - begun_s)
    return max(1, int(weight_NK.nbytes / min(times) / 1e6))


class OwnGuesses:
    """A predictor that guesses only experts of this process."""

    def __init__(self, predictor: Predictor, partition: ExpertPartition) -> None:
        self.needs_history = predictor.needs_history
        self._predictor = predictor
        self._partition = partition

    def observe(self, event: Event) -> None:
        self._predictor.observe(event)

    def predict(self, now: int, horizon: int) -> list[Guess]:
        made = self._predictor.predict(now, horizon)
        return [guess for guess in made if self._partition.owns(guess[0])]

    def finish(self, sequence: int) -> None:
        self._predictor.finish(sequence)


def add_up(parts: Sequence[RuntimeStats]) -> RuntimeStats:
    """The statistics of all processes: sums, and the longest times."""
    changes = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    times = {name: max(getattr(part, name) for part in parts) for name in _SLOWEST}
    return replace(parts[0], **changes, **times)


def counted(stats: RuntimeStats) -> list[float]:
    """The values of `COUNTED`."""
    return [getattr(stats, name) for name in COUNTED]


def recounted(like: RuntimeStats, numbers: Sequence[float]) -> RuntimeStats:
    """The statistics of another process, from its values of `COUNTED`."""
    pairs = zip(COUNTED, numbers, strict=True)
    return replace(like, **{name: type(getattr(like, name))(value) for name, value in pairs})
