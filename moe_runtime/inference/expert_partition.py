"""A model's experts divided among processes that run the same forward passes.

Every process computes the dense part for all tokens, but only its own experts; it gets rows of
others by one exchange per layer. Kernels, inputs and the order of sums are those of a single
process, so the placement changes no bit.

Shape suffixes: R routed rows, D model.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.parallel.communication.transport import (
    Transport,
    arithmetic_facts,
    exchange_bytes,
    numbers_of_all,
    require_same,
    software_facts,
)
from moe_runtime.parallel.placement_map import PlacementMap, load_placement_map
from moe_runtime.policies.placement.shares import Holders, hold_by_shares, shares_of_ranks
from moe_runtime.policies.prediction import Event, Guess, Predictor
from moe_runtime.types import ExpertKey, ModelSignature, RuntimeStats

_SUMMED = (
    *("hits", "late_hits", "misses", "bytes_read", "readahead_bytes", "expert_slots"),
    *("computed_misses", "planned_s", "spent_s"),
    *("copied_bytes", "budget_bytes", "baseline_rss_bytes", "peak_rss_bytes"),
    *("guesses", "useful_guesses", "late_guesses", "wasted_guesses"),
)
_SLOWEST = ("stall_s", "load_s", "predict_s")
COUNTED = (*_SUMMED, *_SLOWEST)
"""Statistics that differ between the processes of a model."""

EXPERTS_FOR_A_COPY = 8
"""A layer has at most one copy for this many experts; DeepSeek-V3 has 32 for 256."""
_MEASURED_BYTES = 64 * 2**20
"""Weights of a measured product: more than a processor's cache holds."""


class ExpertPartition:
    """The experts of this process, and the exchange of rows with others."""

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
        busy = {rank for layer in self._holders for held_by in layer for rank in held_by}
        if len(busy) < size:
            idle = min(set(range(size)) - busy)
            what = "memory and speed leave" if placement is None else "the placement map leaves"
            raise ValueError(f"{what} process {idle} of {size} without experts")

    def owns(self, key: ExpertKey) -> bool:
        return self.transport.rank in self._holders[key.layer][key.expert]

    def own_rows(self, layer: int, rows: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """The visited experts that this process computes, with their rows."""
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

    def require_same_model(
        self, checkpoint: Checkpoint, experts: ExpertMap, place: torch.device
    ) -> None:
        """Raises RankFailureError: processes differ in the model or its settings. Collective."""
        import transformers

        config = checkpoint.config.to_dict()
        require_same(
            self.transport,
            {
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
            },
        )

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
    find_loads: Callable[[], np.ndarray | None] = lambda: None,
) -> ExpertPartition | None:
    """Narrows ``experts`` to the share of this process; None for a single process.

    Without a map, shares are those of memory, or of speed where all experts fit. Known loads are
    balanced, and hot experts get copies where there is room. A collective call.

    Args:
        num_slots: experts that fit in the memory of this process.
        measure: the speed of this process; None in all of them if they have one processor.
        find_loads: ``[L, E]`` from earlier runs, or None; called in the first process.

    Raises:
        CheckpointError: the map is damaged, or for another model or number of processes.
        ValueError: a process would have no experts.
    """
    placed = None
    if placement is not None:
        placed = load_placement_map(placement)
        placed.require(signature, num_ranks=transport.size)
    if transport.size == 1:
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
    if placed is None and transport.size <= min(sizes):
        loads_LE = loads_of_first(transport, find_loads)
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
    experts.layouts = {key: lay for key, lay in experts.layouts.items() if partition.owns(key)}
    return partition


def loads_of_first(
    transport: Transport, find: Callable[[], np.ndarray | None]
) -> np.ndarray | None:
    """Loads ``[L, E]`` that the first process finds, in all of them; a collective call."""
    found = find() if transport.rank == 0 else None
    packed = b"" if found is None else found.astype(np.int64).tobytes()
    messages = dict.fromkeys(range(transport.size), packed) if packed else {}
    arrived, (num_layers, *_) = exchange_bytes(
        transport, messages, note=0 if found is None else len(found)
    )
    return np.frombuffer(arrived[0], np.int64).reshape(num_layers, -1) if arrived else None


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
