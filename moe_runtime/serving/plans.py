"""The plans of an engine's steps when several processes compute them together.

Each process has an engine and its own experts of the model. The first process gets requests and
chooses tokens. Before each step it sends the others a plan: new requests, cancelled ones, and the
tokens that the last step chose. Equal plans make equal steps, so nothing else is sent.

Shape suffixes: N numbers.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from moe_runtime.inference.expert_layer import OffloadedExperts
from moe_runtime.inference.expert_partition import (
    COUNTED,
    ExpertPartition,
    add_up,
    counted,
    recounted,
)
from moe_runtime.parallel.communication.elastic import GroupChangedError
from moe_runtime.parallel.communication.transport import Transport, require_same
from moe_runtime.serving.requests import FinishReason, GenerationRequest
from moe_runtime.types import RuntimeStats

Kind = Literal["step", "rest", "end", "part"]

_KINDS: tuple[Kind, ...] = ("step", "rest", "end", "part")
_ENDINGS: tuple[FinishReason | None, ...] = (None, "stop", "length", "error")
_SENT_FIELDS = (
    *("prompt_ids", "max_new_tokens", "num_prompt_logprobs", "priority", "client", "prefix_owner"),
    "returns_routing",
)
"""Fields of a request on which steps depend; only the first process chooses tokens."""
_BLOCK = 32
"""Numbers in the first exchange of each plan; a longer plan takes a second one."""
_WORD_BYTES = 8
_REPORT_S = 0.5
"""Seconds between two statistics of the other processes while there is work."""
BEAT_S = 2.0
"""Seconds between two plans without work, so that a lost process is noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The input of the next step.

    Attributes:
        kind: a step, a rest without work, the end, or that the processes part and meet in the next
            group.
        beside_tokens: most prompt tokens of a step in which sequences also decode.
        state: checksum of the engine's state after the last step.
        chosen: a token for each sequence that the last step advanced, in order, and the reason if
            the answer ended with it.
        cancelled: numbers of sequences that end before the step.
        came: new requests, their numbers, and the tokens of their answers that an earlier group of
            processes chose.
    """

    kind: Kind
    beside_tokens: int = 0
    state: int = 0
    chosen: Sequence[tuple[int, FinishReason | None]] = ()
    cancelled: Sequence[int] = ()
    came: Sequence[tuple[int, Sequence[int], GenerationRequest]] = ()

    def numbers(self) -> np.ndarray:
        """``[N]`` int64."""
        text = b""
        if self.came:
            came = [
                [number, answer, *(getattr(request, name) for name in _SENT_FIELDS)]
                for number, answer, request in self.came
            ]
            text = json.dumps(came).encode()
            text = text.ljust(-(-len(text) // _WORD_BYTES) * _WORD_BYTES)
        chosen = [token * len(_ENDINGS) + _ENDINGS.index(end) for token, end in self.chosen]
        head = (_KINDS.index(self.kind), self.beside_tokens, self.state, len(chosen))
        plain = [*head, len(self.cancelled), *chosen, *self.cancelled]
        return np.concatenate([np.array(plain, np.int64), np.frombuffer(text, np.int64)])

    @staticmethod
    def of(numbers_N: np.ndarray) -> Plan:
        kind, beside_tokens, state, num_chosen, num_cancelled, *plain = numbers_N.tolist()
        cancelled_end = num_chosen + num_cancelled
        text = numbers_N[5 + cancelled_end :].tobytes()
        chosen = [divmod(number, len(_ENDINGS)) for number in plain[:num_chosen]]
        return Plan(
            kind=_KINDS[kind],
            beside_tokens=beside_tokens,
            state=state,
            chosen=[(token, _ENDINGS[end]) for token, end in chosen],
            cancelled=plain[num_chosen:cancelled_end],
            came=[_request_of(*words) for words in (json.loads(text) if text else ())],
        )


def _request_of(
    number: int, answer: Sequence[int], prompt_ids: Sequence[int], *others: Any
) -> tuple[int, Sequence[int], GenerationRequest]:
    named: dict[str, Any] = dict(zip(_SENT_FIELDS[1:], others, strict=True))
    return number, answer, GenerationRequest(prompt_ids=tuple(prompt_ids), **named)


def partition_of(model: Any) -> ExpertPartition | None:
    """The division of a model's experts among processes; None for other models."""
    layers = (part for part in model.modules() if isinstance(part, OffloadedExperts))
    partitions = (layer.partition for layer in layers)
    return next((one for one in partitions if one is not None), None)


class Plans:
    """Sends an engine's plans from the first process of a group to the others.

    Attributes:
        rank: of this process; 0 sends.
    """

    def __init__(
        self,
        transport: Transport,
        clock: Callable[[], float] = time.monotonic,
        partition: ExpertPartition | None = None,
    ) -> None:
        self.partition = partition
        self.rank = transport.rank
        self._transport, self._clock = transport, clock
        self._reports: list[np.ndarray] = []
        self._reported_s = -math.inf
        self._chosen: list[tuple[int, FinishReason | None]] = []
        self._came: list[tuple[int, Sequence[int], GenerationRequest]] = []
        self.is_resting = False

    @staticmethod
    def of(model: Any) -> Plans | None:
        """Plans for a model whose experts are divided among processes; None for other models."""
        found = partition_of(model)
        return None if found is None else Plans(found.transport, partition=found)

    def require_same(self, facts: dict[str, str]) -> None:
        """Raises RankFailureError unless all processes have the same facts; a collective call."""
        require_same(self._transport, facts)

    def check(self, request: GenerationRequest) -> None:
        """Raises ValueError: several processes do not support the request."""
        given = {"an adapter": request.adapter is not None, "pictures": bool(request.pictures)}
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"{name}: a model in several processes takes none; leave it out")

    def take(self, number: int, answer: Sequence[int], request: GenerationRequest) -> None:
        """Adds a request to the next plan, with its answer so far."""
        self._came.append((number, [*answer], request))

    def chose(self, token: int, ending: FinishReason | None) -> None:
        """Adds a token to the next plan."""
        self._chosen.append((token, ending))

    def send(
        self, kind: Kind, state: int, cancelled: Sequence[int] = (), beside_tokens: int = 0
    ) -> None:
        """Sends the next plan; a collective call, with `receive` of the others.

        Raises:
            RankFailureError: one of them died or stalled.
            GroupChangedError: another process waits to join; the plan says to part.
        """
        group = None if self.partition is None else self.partition.group
        if kind != "end" and group is not None and group.is_awaited:
            kind = "part"
        plan = Plan(
            kind=kind,
            beside_tokens=beside_tokens,
            state=state,
            chosen=self._chosen,
            cancelled=cancelled,
            came=self._came,
        )
        self._chosen, self._came = [], []
        numbers_N, now_s = plan.numbers(), self._clock()
        asks = kind == "rest" or now_s - self._reported_s > _REPORT_S
        first_N = np.zeros(_BLOCK, np.int64)
        first_N[:2] = len(numbers_N), asks
        own = numbers_N[: _BLOCK - 2]
        first_N[2 : 2 + len(own)] = own
        self._send(first_N, 0)
        rest_N = numbers_N[_BLOCK - 2 :]
        if asks or len(rest_N):
            arrived_N = self._send(rest_N, len(COUNTED) * asks)
            if asks:
                self._reports = [*arrived_N.view(np.float64).reshape(-1, len(COUNTED))]
                self._reported_s = now_s
        self.is_resting = kind == "rest"
        if kind == "part":
            raise GroupChangedError("another process joins")

    def receive(self, report: Callable[[], RuntimeStats]) -> Plan:
        """The next plan; a collective call. ``report`` returns this process's statistics.

        Raises:
            RankFailureError: another process died or stalled, or all part.
        """
        first_N = self._receive(_BLOCK, np.zeros(0, np.int64))
        length, asks = first_N[:2].tolist()
        rest = max(0, length - (_BLOCK - 2))
        numbers_N = first_N[2 : 2 + length]
        if asks or rest:
            back_N = np.array(counted(report()) if asks else [], np.float64)
            numbers_N = np.concatenate([numbers_N, self._receive(rest, back_N.view(np.int64))])
        plan = Plan.of(numbers_N)
        if plan.kind == "part":
            raise GroupChangedError("another process joins")
        return plan

    def of_all(self, own: RuntimeStats) -> RuntimeStats:
        """Statistics of all processes, by their last reports."""
        return add_up([own, *(recounted(own, report.tolist()) for report in self._reports)])

    def _send(self, sent_N: np.ndarray, num_back: int) -> np.ndarray:
        others = self._transport.size - 1
        sent = [0, *([len(sent_N)] * others)]
        received = [0, *([num_back] * others)]
        return self._exchange(np.tile(sent_N, others), sent, received)

    def _receive(self, num_received: int, back_N: np.ndarray) -> np.ndarray:
        nothing = [0] * (self._transport.size - 1)
        return self._exchange(back_N, [len(back_N), *nothing], [num_received, *nothing])

    def _exchange(self, sent_N: np.ndarray, sent: list[int], received: list[int]) -> np.ndarray:
        (route,) = self._transport.routes(torch.tensor([sent]), torch.tensor([received]))
        rows_N1 = torch.from_numpy(sent_N)[:, None]
        return self._transport.exchange(rows_N1, route).wait().flatten().numpy()


def checksum(*numbers: int) -> int:
    return zlib.crc32(np.array(numbers, np.int64).tobytes())
