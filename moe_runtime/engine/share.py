"""A model's experts divided among processes that all run the same forward passes.

Every process holds the dense part and computes the same tokens, but reads, keeps and computes its
own experts only; the rows of the others arrive by one exchange a layer. A row is computed by the
same kernel from the same inputs as in a single process, and rows are summed by every process in the
order of a token's choices, so the number of processes changes no bit of the output.

Shape suffixes: R routed rows, D model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_runtime.parallel.transport import Transport
from moe_runtime.policies.prediction import Event, Guess, Predictor
from moe_runtime.types import ExpertKey, RuntimeStats

_SUMMED = (
    *("hits", "late_hits", "misses", "bytes_read", "readahead_bytes", "expert_slots"),
    *("budget_bytes", "baseline_rss_bytes", "peak_rss_bytes"),
    *("guesses", "useful_guesses", "late_guesses", "wasted_guesses"),
)
_SLOWEST = ("stall_s", "load_s", "predict_s")


class ExpertShare:
    """Which experts this process computes, and how it gets the rows of the others.

    Attributes:
        transport: the processes.
    """

    def __init__(self, transport: Transport, experts_of_layer: Sequence[int]) -> None:
        """Divides the experts of every layer into runs of equal length, up to one.

        Args:
            transport: the processes.
            experts_of_layer: number of experts of each layer.

        Raises:
            ValueError: there are more processes than experts.
        """
        if transport.size > min(experts_of_layer):
            raise ValueError(
                f"{transport.size} processes cannot share the {min(experts_of_layer)} experts of a "
                f"layer; start at most {min(experts_of_layer)}"
            )
        self.transport = transport
        self._owners = [
            [expert * transport.size // number for expert in range(number)]
            for number in experts_of_layer
        ]

    def owns(self, key: ExpertKey) -> bool:
        """Whether this process computes an expert."""
        return self._owners[key.layer][key.expert] == self.transport.rank

    def own_rows(self, layer: int, rows: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """Those of a layer's visited experts that this process computes, with their rows."""
        return {e: rows[e] for e in rows if self.owns(ExpertKey(layer, e))}

    def exchange(self, layer: int, rows: Mapping[int, list[int]], out_RD: Tensor) -> None:
        """Completes a layer's rows with those that other processes computed; a collective call.

        Args:
            layer: number of the layer.
            rows: rows of each visited expert, the same in all processes.
            out_RD: ``[R, D]`` where this process's own rows are in their places.

        Raises:
            RankFailureError: another process died or stalled.
        """
        rank, size = self.transport.rank, self.transport.size
        rows_of_rank: list[list[int]] = [[] for _ in range(size)]
        for expert, rows_here in rows.items():
            rows_of_rank[self._owners[layer][expert]] += rows_here
        own = rows_of_rank[rank]
        sent = [0 if other == rank else len(own) for other in range(size)]
        received = [0 if p == rank else len(theirs) for p, theirs in enumerate(rows_of_rank)]
        (route,) = self.transport.routes(torch.tensor([sent]), torch.tensor([received]))
        own_RD = out_RD[torch.tensor(own, dtype=torch.int64, device=out_RD.device)]
        arrived_RD = self.transport.exchange(own_RD.repeat(size - 1, 1), route).wait()
        arriving = [row for p, theirs in enumerate(rows_of_rank) if p != rank for row in theirs]
        out_RD[torch.tensor(arriving, dtype=torch.int64, device=out_RD.device)] = arrived_RD


class OwnGuesses:
    """A predictor's guesses about the experts of one process."""

    def __init__(self, predictor: Predictor, share: ExpertShare) -> None:
        self.needs_history = predictor.needs_history
        self._predictor = predictor
        self._share = share

    def observe(self, event: Event) -> None:
        """See ``Predictor.observe``: routing is known to all processes."""
        self._predictor.observe(event)

    def predict(self, now: int, horizon: int) -> list[Guess]:
        """See ``Predictor.predict``."""
        made = self._predictor.predict(now, horizon)
        return [guess for guess in made if self._share.owns(guess[0])]

    def finish(self, sequence: int) -> None:
        """See ``Predictor.finish``."""
        self._predictor.finish(sequence)


def add_up(parts: Sequence[RuntimeStats]) -> RuntimeStats:
    """What all processes of a model did together: sums, and the longest of the times."""
    changes = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    times = {name: max(getattr(part, name) for part in parts) for name in _SLOWEST}
    return replace(parts[0], **changes, **times)
