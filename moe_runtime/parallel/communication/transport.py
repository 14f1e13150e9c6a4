"""How rows travel between the ranks of an expert-parallel group, and groups that come and go.

Another way of moving rows (shared memory, one-sided writes) fits under dispatch by the protocol
`Transport`. Groups of `open_group` are independent of the default group and use gloo.

Shape suffixes: P ranks, C chunks, N numbers, R rows or bytes, D model.
"""

from __future__ import annotations

import functools
import platform
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.errors import RankFailureError
from moe_runtime.parallel.cluster import Link, fit_link
from moe_runtime.parallel.communication.watch import (
    DEFAULT_TIMEOUT_S,
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

        `out` is where to write what arrives, to save a copy; may be ignored.
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

    Raises:
        ValueError: This process is not in the group, or the timeout is not positive.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self._group = group
        self._watch = CollectiveMonitor(group, timeout_s)
        self.rank = self._watch.rank
        self.size = self._watch.size

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        splits = [1] * self.size
        sent_PN = numbers_PN.contiguous().to(device_of(self._group, numbers_PN.device))
        arrived = self._watch.all_to_all(self._group, sent_PN, splits, splits, "counts")
        return arrived.wait().to(numbers_PN.device)

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> list[_FlatRoute]:
        pairs = zip(sent_CP.tolist(), received_CP.tolist(), strict=True)
        return [_FlatRoute(send, receive) for send, receive in pairs]

    def exchange(
        self, rows_RD: Tensor, route: object, *, reverse: bool = False, out: Tensor | None = None
    ) -> Pending:
        assert isinstance(route, _FlatRoute)
        send, receive = (route.receive, route.send) if reverse else (route.send, route.receive)
        return self._watch.all_to_all(self._group, rows_RD.contiguous(), send, receive, "rows", out)


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
        return Arrived(rows_RD)


class Arrived:
    """Rows that need not travel."""

    def __init__(self, rows_RD: Tensor) -> None:
        self._rows_RD = rows_RD

    def wait(self) -> Tensor:
        return self._rows_RD


@dataclass(frozen=True, slots=True)
class _GridRoute:
    """Rows of one chunk as blocks: sent to and received from each (node, local rank); in the middle
    of each local rank of this node for each node's rank of this local number."""

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
        self._inside, self._across = inside, across
        self._watch_inside = CollectiveMonitor(inside, timeout_s)
        self._watch_across = CollectiveMonitor(across, timeout_s)
        self._num_inside, self._num_nodes = self._watch_inside.size, self._watch_across.size
        self.size = self._num_inside * self._num_nodes
        self.rank = self._watch_across.rank * self._num_inside + self._watch_inside.rank

    def parts(self) -> tuple[FlatTransport, FlatTransport]:
        """Exchanges within this node alone, and with the ranks of the same local number alone."""
        inside = FlatTransport(self._inside, timeout_s=self._watch_inside.timeout_s)
        return inside, FlatTransport(self._across, timeout_s=self._watch_across.timeout_s)

    def exchange_numbers(self, numbers_PN: Tensor) -> Tensor:
        ones_NM = torch.ones((self._num_nodes, self._num_inside), dtype=torch.int64)
        sent_PN = numbers_PN.to(device_of(self._inside, numbers_PN.device))
        arrived = self.exchange(sent_PN, _GridRoute(ones_NM, ones_NM.T, ones_NM))
        return arrived.wait().to(numbers_PN.device)

    def routes(self, sent_CP: Tensor, received_CP: Tensor) -> list[_GridRoute]:
        num_chunks = sent_CP.shape[0]
        grid = (num_chunks, self._num_nodes, self._num_inside)
        sent_CNM, received_CNM = sent_CP.reshape(grid), received_CP.reshape(grid)
        splits = [1] * self._num_inside
        device = device_of(self._inside, sent_CNM.device)
        sent_MCN = sent_CNM.permute(2, 0, 1).contiguous().to(device)
        middle_MCN = self._watch_inside.all_to_all(
            self._inside, sent_MCN, splits, splits, "counts of the middle step"
        )
        middle_MCN = middle_MCN.wait().cpu()
        return [
            _GridRoute(sent_CNM[c], middle_MCN[:, c], received_CNM[c]) for c in range(num_chunks)
        ]

    def exchange(
        self, rows_RD: Tensor, route: object, *, reverse: bool = False, out: Tensor | None = None
    ) -> Pending:
        assert isinstance(route, _GridRoute)
        if reverse:
            return self._exchange_back(rows_RD, route)
        first = self._watch_inside.all_to_all(
            self._inside,
            _swap_blocks(rows_RD, route.sent_NM),
            route.sent_NM.sum(dim=0).tolist(),
            route.middle_MN.sum(dim=1).tolist(),
            "rows inside the node",
        )

        def finish() -> Tensor:
            return self._watch_across.all_to_all(
                self._across,
                _swap_blocks(first.wait(), route.middle_MN),
                route.middle_MN.sum(dim=0).tolist(),
                route.received_NM.sum(dim=1).tolist(),
                "rows between nodes",
            ).wait()

        return _TwoSteps(finish)

    def _exchange_back(self, rows_RD: Tensor, route: _GridRoute) -> Pending:
        first = self._watch_across.all_to_all(
            self._across,
            rows_RD.contiguous(),
            route.received_NM.sum(dim=1).tolist(),
            route.middle_MN.sum(dim=0).tolist(),
            "rows between nodes",
        )

        def finish() -> Tensor:
            arrived = self._watch_inside.all_to_all(
                self._inside,
                _swap_blocks(first.wait(), route.middle_MN.T),
                route.middle_MN.sum(dim=1).tolist(),
                route.sent_NM.sum(dim=0).tolist(),
                "rows inside the node",
            ).wait()
            return _swap_blocks(arrived, route.sent_NM.T)

        return _TwoSteps(finish)


class _TwoSteps:
    """The first step is under way; `wait` starts the second one."""

    def __init__(self, finish: Callable[[], Tensor]) -> None:
        self.wait = functools.cache(finish)


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


def processes_here(transport: Transport) -> int:
    """Processes of the group that run on this machine, this one included; a collective call."""
    own = torch.tensor([zlib.crc32(socket.gethostname().encode())])
    theirs_P1 = transport.exchange_numbers(own.expand(transport.size, -1).contiguous())
    return int((theirs_P1 == own).sum())


def software_facts() -> dict[str, str]:
    """Versions that decide how processes talk to each other, for `require_same`."""
    import moe_runtime

    return {
        "the version of moe_runtime": moe_runtime.__version__,
        "the version of torch": torch.__version__,
    }


def arithmetic_facts() -> dict[str, str]:
    """What decides the bits of a matrix product besides its operands, for `require_same`."""
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
"""What processes share before they have a group: a place for keys and values."""


def open_store(host: str, port: int, *, is_keeper: bool, timeout_s: float) -> Store:
    """What all processes of a service share: opened by its keeper (port 0: a free one), joined by
    others."""
    limit = timedelta(seconds=timeout_s)
    return dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        host, port, is_master=is_keeper, wait_for_workers=False, timeout=limit
    )


def open_group(
    store: Store, name: str, rank: int, size: int, *, timeout_s: float
) -> dist.ProcessGroup:
    """Makes a gloo group of the processes that call this with the same store and name.

    Returns when all of them have come. A name is used once in the life of the store.
    """
    own = dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
        name, store
    )
    limit = timedelta(seconds=timeout_s)
    try:
        backend = dist.ProcessGroupGloo(own, rank, size, limit)
    except RuntimeError as error:
        raise RankFailureError(
            f"the group {name!r} of {size} processes did not come together within "
            f"{timeout_s:g} s: {str(error).splitlines()[0]}"
        ) from error
    group = dist.ProcessGroup(own, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    return group


def open_transport(store: Store, name: str, rank: int, size: int, *, timeout_s: float) -> Transport:
    """As `open_group`, as the transport that dispatch takes; nothing is made for one process."""
    if size == 1:
        return LocalTransport()
    group = open_group(store, name, rank, size, timeout_s=timeout_s)
    return FlatTransport(group, timeout_s=timeout_s)


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
    arrived_R1 = transport.exchange(_as_rows(sent), route).wait()
    parts = arrived_R1.flatten().split(received_PN[:, 0].tolist())
    return {rank: part.numpy().tobytes() for rank, part in enumerate(parts) if part.numel()}, notes


def _as_rows(data: bytes) -> Tensor:
    if not data:
        return torch.empty((0, 1), dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).unsqueeze(1)
