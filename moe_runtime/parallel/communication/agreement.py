"""Whether all processes of a group run the same: compared once, before anything depends on it."""

from __future__ import annotations

import platform
import socket
import zlib
from collections.abc import Mapping

import torch

from moe_runtime.parallel.communication.transport import Transport
from moe_runtime.parallel.communication.watch import check_agreement


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
