"""Process groups that come and go while their processes live, independent of the default group.

All of it goes through gloo, for tensors on the CPU. Shape suffixes: P ranks, N numbers, R bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.errors import RankFailureError
from moe_runtime.parallel.communication.transport import FlatTransport, LocalTransport, Transport

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
