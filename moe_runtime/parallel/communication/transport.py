"""How rows travel between the ranks of an expert-parallel group, and groups that come and go.

Another way to move rows (shared memory, one-sided writes) implements the protocol `Transport`.
Groups of `open_transport` are independent of the default group and use gloo.

Shape suffixes: P ranks, C chunks, N numbers, R rows or bytes, D model.
"""

from __future__ import annotations

import platform
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.errors import RankFailureError
from moe_runtime.parallel.cluster import Link, fit_link
from moe_runtime.parallel.communication.watch import (
    DEFAULT_TIMEOUT_S,
    Arriving,
    CollectiveMonitor,
    check_agreement,
    device_of,
)


class Pending(Protocol):
    """Rows on their way."""

    def wait(self) -> Tensor:
        """The rows that arrived, in the order of the ranks that sent them."""
        ...


class Transport(Protocol):
    """Moves rows between the ranks of a group. All ranks call it in the same order."""

    rank: int
    size: int

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        """Sends row `p` to rank `p`, on any device; `[P, N]` int64 in and out, row `p` from rank
        `p`."""
        ...

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> Sequence[object]:
        """Prepares the exchanges of `C` chunks, given the rows per rank of each (on the CPU)."""
        ...

    def exchange(
        self, rows_RD: Tensor, route: object, *, reverse: bool = False, out: Tensor | None = None
    ) -> Pending:
        """Starts moving rows, ordered by destination; `reverse` takes them back along the route.

        `out` is memory for the arriving rows, to save a copy; may be ignored.
        """
        ...


@dataclass(frozen=True, slots=True)
class _FlatRoute:
    send: list[int]
    receive: list[int]


class FlatTransport:
    """One variable all-to-all over the whole group: NCCL or gloo, whichever the group has.

    Args:
        timeout_s: Seconds after which waiting for another rank is an error that names it. On a GPU
            the backend's own timeout holds.
        what: Name of the rows in errors.

    Raises:
        ValueError: This process is not in the group, or the timeout is not positive.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        what: str = "rows",
    ) -> None:
        self.group = group
        self._watch = CollectiveMonitor(group, timeout_s)
        self.rank, self.size = self._watch.rank, self._watch.size
        self._what = what

    def meet(self, within_s: float) -> None:
        """Waits for the other processes of the group; raises RankFailureError: one did not come."""
        self._watch.meet(within_s)

    def leave(self) -> None:
        """Ends the group for this process; others that wait for it in the group go on."""
        self._watch.leave()
        del self.group

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        splits = [1] * self.size
        sent_PN = numbers_PN.contiguous().to(device_of(self.group, numbers_PN.device))
        arrived = self._watch.all_to_all(sent_PN, splits, splits, f"counts of {self._what}")
        return arrived.wait().to(numbers_PN.device)

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> list[_FlatRoute]:
        pairs = zip(sent_CP.tolist(), received_CP.tolist(), strict=True)
        return [_FlatRoute(send, receive) for send, receive in pairs]

    def exchange(
        self, rows_RD: Tensor, route: object, *, reverse: bool = False, out: Tensor | None = None
    ) -> Pending:
        assert isinstance(route, _FlatRoute)
        send, receive = (route.receive, route.send) if reverse else (route.send, route.receive)
        return self._watch.all_to_all(rows_RD.contiguous(), send, receive, self._what, out)


class LocalTransport:
    """A group of one process, which needs no process group."""

    rank = 0
    size = 1

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        return numbers_PN

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> list[None]:
        return [None] * sent_CP.shape[0]

    def exchange(
        self, rows_RD: Tensor, route: object, *, reverse: bool = False, out: Tensor | None = None
    ) -> Pending:
        return Arriving(lambda: rows_RD)


@dataclass(frozen=True, slots=True)
class _GridRoute:
    """Rows of one chunk between each (node, local rank) and this rank, and of the step between.

    In the middle, this rank has rows from each local rank of its node for each node's rank of its
    own local number.
    """

    sent_NM: Tensor
    middle_MN: Tensor
    received_NM: Tensor


class HierarchicalTransport:
    """Two-dimensional all-to-all: within the node first, then between equal local ranks.

    Between nodes there are `m` times fewer messages, each `m` times larger (`m` ranks per node).
    What arrives is the same, in the same order. From Tutel, here for ragged rows: the counts of the
    middle step travel with one small exchange per layer.

    Args:
        inside: The ranks of this node.
        across: The ranks of the same local number on all nodes. The rank in the whole group is
            `rank across * ranks inside + rank inside`.
    """

    def __init__(
        self,
        inside: dist.ProcessGroup,
        across: dist.ProcessGroup,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._inside = FlatTransport(inside, timeout_s=timeout_s, what="rows inside the node")
        self._across = FlatTransport(across, timeout_s=timeout_s, what="rows between nodes")
        self.size = self._inside.size * self._across.size
        self.rank = self._across.rank * self._inside.size + self._inside.rank

    def parts(self) -> tuple[FlatTransport, FlatTransport]:
        """Exchanges within this node alone, and with the ranks of the same local number alone."""
        return self._inside, self._across

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        ones_NM = torch.ones((self._across.size, self._inside.size), dtype=torch.int64)
        sent_PN = numbers_PN.to(device_of(self._inside.group, numbers_PN.device))
        arrived = self.exchange(sent_PN, _GridRoute(ones_NM, ones_NM.T, ones_NM))
        return arrived.wait().to(numbers_PN.device)

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> list[_GridRoute]:
        grid = (len(sent_CP), self._across.size, self._inside.size)
        sent_CNM, received_CNM = sent_CP.reshape(grid), received_CP.reshape(grid)
        middle_MCN = self._inside.exchange_numbers(sent_CNM.permute(2, 0, 1)).cpu()
        middle_CMN = middle_MCN.transpose(0, 1)
        return [
            _GridRoute(*counts) for counts in zip(sent_CNM, middle_CMN, received_CNM, strict=True)
        ]

    def exchange(
        self, rows_RD: Tensor, route: object, *, reverse: bool = False, out: Tensor | None = None
    ) -> Pending:
        assert isinstance(route, _GridRoute)
        sent_NM, middle_MN, received_NM = route.sent_NM, route.middle_MN, route.received_NM
        inside = _FlatRoute(sent_NM.sum(dim=0).tolist(), middle_MN.sum(dim=1).tolist())
        across = _FlatRoute(middle_MN.sum(dim=0).tolist(), received_NM.sum(dim=1).tolist())
        # The first step is under way at once; waiting for its rows starts the second one.
        if reverse:
            first = self._across.exchange(rows_RD, across, reverse=True)

            def finish() -> Tensor:
                middle_RD = _swap_blocks(first.wait(), middle_MN.T)
                arrived_RD = self._inside.exchange(middle_RD, inside, reverse=True).wait()
                return _swap_blocks(arrived_RD, sent_NM.T)
        else:
            first = self._inside.exchange(_swap_blocks(rows_RD, sent_NM), inside)

            def finish() -> Tensor:
                middle_RD = _swap_blocks(first.wait(), middle_MN)
                return self._across.exchange(middle_RD, across).wait()

        return Arriving(finish)


def _swap_blocks(rows_RD: Tensor, sizes_AB: Tensor) -> Tensor:
    """Rows in blocks ordered `(a, b)`, of the given sizes, reordered to `(b, a)`; contiguous."""
    blocks = rows_RD.split(sizes_AB.flatten().tolist())
    num_a, num_b = sizes_AB.shape
    return torch.cat([blocks[a * num_b + b] for b in range(num_b) for a in range(num_a)])


def require_same(transport: Transport, facts: Mapping[str, str]) -> None:
    """Compares texts by name between processes; a collective call, with the same names."""
    sums = [(f"{name} (its checksum)", zlib.crc32(text.encode())) for name, text in facts.items()]
    named = [("the facts to compare (their number)", len(facts)), *sums]
    # A fixed number of columns, so that versions with other facts can be compared at all.
    own_N = torch.zeros(64, dtype=torch.int64)
    own_N[: len(named)] = torch.tensor([number for _, number in named])
    theirs_PN = transport.exchange_numbers(own_N.expand(transport.size, -1).contiguous())
    check_agreement(named, theirs_PN[:, : len(named)], transport.rank)


def ranks_here(transport: Transport) -> list[int]:
    """Ranks of the group on this machine, this one included; a collective call."""
    own = zlib.crc32(socket.gethostname().encode())
    theirs = numbers_of_all(transport, [own])
    return [rank for rank, (number,) in enumerate(theirs) if number == own]


def numbers_of_all(transport: Transport, numbers: Sequence[int]) -> list[list[int]]:
    """The integers of each process; a collective call with equally many."""
    own_N = torch.tensor([*numbers], dtype=torch.int64)
    return transport.exchange_numbers(own_N.expand(transport.size, -1).contiguous()).tolist()


def software_facts() -> dict[str, str]:
    """Versions that decide how processes talk to each other, for `require_same`."""
    import moe_runtime

    return {
        "the version of moe_runtime": moe_runtime.__version__,
        "the version of torch": torch.__version__,
    }


def arithmetic_facts() -> dict[str, str]:
    """Facts that decide the bits of a matrix product, operands aside, for `require_same`."""
    instructions = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "the processor's instructions": instructions,
        "the number of torch's threads": str(torch.get_num_threads()),
    }


SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)


def time_exchanges(
    transport: Transport,
    *,
    sizes: Sequence[int] = SIZES,
    repeats: int = 5,
    device: torch.device | str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[int, float]]:
    """Times exchanges in which every rank sends the same number of bytes; a collective call.

    Args:
        transport: The group, of at least two ranks.
        sizes: Bytes that a rank sends to the others together.
        repeats: Exchanges of each size; the first does not count.

    Returns:
        `(bytes sent by a rank, median seconds of this rank)` for each size, as `fit_link` takes
            them.

    Raises:
        ValueError: The group has one rank only.
    """
    if transport.size < 2:
        raise ValueError("exchanges are measured between at least two ranks")
    others = transport.size - 1
    nothing_P1 = torch.zeros((transport.size, 1), dtype=torch.int64)
    measured = []
    for size in sizes:
        rows = max(1, size // others)
        counts = torch.full((1, transport.size), rows)
        counts[0, transport.rank] = 0
        (route,) = transport.routes(counts, counts)
        payload = torch.zeros((rows * others, 1), dtype=torch.uint8, device=device)
        times = []
        for _ in range(repeats + 1):
            # Ranks start together: counts are exchanged, which ends when all have come.
            transport.exchange_numbers(nothing_P1)
            started = clock()
            arrived = transport.exchange(payload, route).wait()
            if arrived.is_cuda:
                torch.cuda.synchronize()
            times.append(clock() - started)
        measured.append((rows * others, statistics.median(times[1:])))
    return measured


def measure_link(transport: Transport, **options: Any) -> Link:
    """Latency and bandwidth of an exchange between all ranks, the same on all of them.

    A collective call; arguments as of `time_exchanges`. The slowest rank's time of a size counts.
    """
    measured = time_exchanges(transport, **options)
    own_N = torch.tensor([round(1e9 * seconds) for _, seconds in measured])
    theirs_PN = transport.exchange_numbers(own_N.expand(transport.size, -1).contiguous())
    slowest_N = theirs_PN.amax(dim=0).tolist()
    return fit_link([size for size, _ in measured], [1e-9 * time for time in slowest_N])


Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
"""Keys and values that processes share before they have a group."""


def open_store(host: str, port: int, *, is_keeper: bool, timeout_s: float) -> Store:
    """The store of a service: its keeper opens it (port 0 takes a free one), others join."""
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=is_keeper, wait_for_workers=False, timeout=limit
    )


def open_transport(store: Store, rank: int, size: int, *, meet_s: float) -> Transport:
    """The transport of a new gloo group of the processes that share a store, once all have come.

    Raises:
        RankFailureError: one of them did not come within so many seconds.
    """
    if size == 1:
        return LocalTransport()
    try:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=meet_s))
    except RuntimeError as error:
        raise RankFailureError(
            f"{size} processes did not meet within {meet_s:g} s: {str(error).splitlines()[0]}"
        ) from error
    backend._set_default_timeout(timedelta(seconds=DEFAULT_TIMEOUT_S))
    group = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    transport = FlatTransport(group)
    transport.meet(meet_s)
    return transport


def exchange_bytes(
    transport: Transport, messages: Mapping[int, bytes], note: int = 0
) -> tuple[dict[int, bytes], list[int]]:
    """Sends bytes to some ranks, this one included; a collective call.

    Where no rank has anything to send, only a few numbers travel. Returns the bytes by the rank
    they came from, and every rank's note.
    """
    numbers_PN = torch.zeros((transport.size, 3), dtype=torch.int64)
    for rank, message in messages.items():
        numbers_PN[rank, 0] = len(message)
    numbers_PN[:, 1] = numbers_PN[:, 0].sum()
    numbers_PN[:, 2] = note
    received_PN = transport.exchange_numbers(numbers_PN)
    notes = received_PN[:, 2].tolist()
    if not bool(received_PN[:, 1].any()):
        return {}, notes
    (route,) = transport.routes(numbers_PN[None, :, 0], received_PN[None, :, 0])
    sent = b"".join(messages[rank] for rank in sorted(messages))
    sent_R1 = torch.from_numpy(np.frombuffer(bytearray(sent), np.uint8))[:, None]
    arrived_R1 = transport.exchange(sent_R1, route).wait()
    parts = arrived_R1.flatten().split(received_PN[:, 0].tolist())
    return {rank: part.numpy().tobytes() for rank, part in enumerate(parts) if part.numel()}, notes
