"""Who is missing: waiting for a collective, and naming the rank that it waits for.

A collective that fails says that a connection closed or that time ran out, not whose fault it was.
Nothing is exchanged for this while all goes well. A rank that has waited for some time leaves a
note in the group's key-value store; when the wait ends badly, whoever left no note is missing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.errors import RankFailureError

# Raised whenever ranks of two versions of this room would not understand each other.
PROTOCOL = 2
DEFAULT_TIMEOUT_S = 300.0
# How long a rank waits in silence before it leaves a note, as a share of the timeout.
_NOTE_SHARE = 0.2
_MAX_NOTE_S = 2.0
_POLL_S = 0.02


def backend_limit(timeout_s: float) -> timedelta:
    """How long a group's own collectives may wait, if who is missing is to be known in time."""
    return timedelta(seconds=timeout_s - min(_MAX_NOTE_S, timeout_s * _NOTE_SHARE))


def device_of(group: dist.ProcessGroup, preferred: torch.device) -> torch.device:
    """Where a group's backend takes a tensor: where it lies if it may (NCCL knows GPUs only)."""
    kinds = [device.type for device in group._device_types]
    if preferred.type in kinds:
        return preferred
    kind = kinds[0]
    return torch.device(kind, torch.accelerator.current_device_index())


class GroupWatch:
    """Waits for the collectives of one process group.

    Attributes:
        rank: this process's rank in the group.
        size: number of processes.
        timeout_s: seconds after which a wait ends with `RankFailureError`.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Leaves this process's address in the store.

        Raises:
            ValueError: The timeout is not positive, or this process is not in the group.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError("this process is not a member of the process group")
        # Asked of the group itself, which need not be part of the default group.
        rank = self.rank = group.rank()
        self.size = group.size()
        self.timeout_s = timeout_s
        self._note_s = min(_MAX_NOTE_S, timeout_s * _NOTE_SHARE)
        self._store = group.get_group_store()
        self._step = 0
        self._has_met = False
        self._store.set(f"moe/process/{rank}", f"{socket.gethostname()} {os.getpid()} {PROTOCOL}")

    def all_to_all(
        self,
        group: dist.ProcessGroup,
        rows: Tensor,
        send_splits: list[int],
        receive_splits: list[int],
        what: str,
        out: Tensor | None = None,
    ) -> PendingRows:
        """Starts a variable all-to-all of the rows (the first dimension) of a contiguous tensor."""
        self._meet()
        if out is None:
            out = rows.new_empty((sum(receive_splits), *rows.shape[1:]))
        self._step += 1
        try:
            work = dist.all_to_all_single(
                out, rows, receive_splits, send_splits, group=group, async_op=True
            )
        except RuntimeError as error:
            raise self._failure(error, self._step, time.monotonic(), what) from error
        assert work is not None
        return PendingRows(self, work, out, rows, self._step, what)

    def all_reduce(self, group: dist.ProcessGroup, values: Tensor, what: str) -> None:
        """Sums a tensor over the ranks, in place.

        Raises:
            RankFailureError: A rank died, stalled or is at another collective.
        """
        self._meet()
        self._step += 1
        try:
            work = dist.all_reduce(values, group=group, async_op=True)
        except RuntimeError as error:
            raise self._failure(error, self._step, time.monotonic(), what) from error
        assert work is not None
        self.wait(work, self._step, values.device.type == "cpu", what)

    @contextlib.contextmanager
    def over_torch(self, what: str) -> Iterator[None]:
        """Names who is missing when a collective of torch's own fails within the block.

        FSDP2, `DTensor`s and checkpoints wait as long as the backend lets them, which
        `backend_limit` makes shorter than `timeout_s`. All ranks enter the block.

        Args:
            what: What is done in the block.

        Raises:
            RankFailureError: A rank died or stalled.
        """
        self._step += 1
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if not _is_of_an_exchange(error):
                raise
            raise self._failure(error, self._step, started, what) from error

    def wait(self, work: dist.Work, step: int, on_cpu: bool, what: str) -> None:
        """Waits for a collective.

        The death of a process is looked for, too: what is missing here may be kept back by a rank
        that lives and waits for the dead one. It is not an error at once, as a process may also
        have ended in good order, with its part of this collective done.

        Raises:
            RankFailureError: It failed, took longer than `timeout_s`, or a process has ended and
                what is missing does not come soon.
        """
        if not on_cpu:
            # Puts a dependency on the stream; the backend has a watchdog of its own.
            work.wait()
            return
        started = time.monotonic()
        # The last part of the time is for reading the others' notes.
        deadline = started + self.timeout_s - self._note_s
        while True:
            left = deadline - time.monotonic()
            slice_s = max(min(self._note_s / 2, left), 0.001)
            try:
                work.wait(timedelta(seconds=slice_s))
            except RuntimeError as error:
                if work.is_completed() or left <= 0:
                    raise self._failure(error, step, started, what) from error
                try:
                    self._leave_note(step)
                except RuntimeError:
                    raise self._failure(error, step, started, what) from error
                if self.ended_ranks():
                    deadline = min(deadline, time.monotonic() + self._note_s)
            else:
                return

    def _meet(self) -> None:
        """Waits for everybody's address, once: who speaks another protocol is told before messages
        of other sizes than expected are on their way.

        Raises:
            RankFailureError: A rank has another protocol, or does not come.
        """
        if self._has_met:
            return
        deadline = time.monotonic() + self.timeout_s
        keys = [f"moe/process/{rank}" for rank in range(self.size)]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = tuple(r for r, key in enumerate(keys) if not self._store.check([key]))
                raise self._named(missing, f"did not arrive within {self.timeout_s:g} s", "")
            time.sleep(_POLL_S)
        protocols = [int(self._note(key).split()[2]) for key in keys]
        theirs_P1 = torch.tensor(protocols).view(-1, 1)
        check_agreement([("the dispatch protocol", PROTOCOL)], theirs_P1, self.rank)
        self._has_met = True

    def ended_ranks(self) -> tuple[int, ...]:
        """Ranks whose processes ran on this machine and are gone."""
        try:
            others = [rank for rank in range(self.size) if rank != self.rank]
            return tuple(rank for rank in others if self._has_ended(rank))
        except RuntimeError:
            # The store went with the process that kept it.
            return ()

    def _leave_note(self, step: int) -> None:
        self._store.set(f"moe/waiting/{self.rank}", str(step))

    def _failure(
        self, error: RuntimeError, step: int, started: float, what: str
    ) -> RankFailureError:
        try:
            self._leave_note(step)
            missing, dead = self._missing(step, started)
        except RuntimeError:
            return RankFailureError(
                f"exchange {step} ({what}) failed ({_first_line(error)}), and the store of the "
                "process group does not answer: the process that keeps it (rank 0, unless a "
                "launcher does) has ended"
            )
        if dead:
            who, did = dead, "has ended"
        elif missing:
            who, did = missing, f"did not arrive within {self.timeout_s:g} s"
        else:
            return RankFailureError(
                f"exchange {step} ({what}) failed although every rank reached it: "
                f"{_first_line(error)}"
            )
        where = f"; rank {self.rank} waited for it in exchange {step} ({what}): "
        return self._named(tuple(who), did, where + _first_line(error))

    def _named(self, ranks: tuple[int, ...], did: str, where: str) -> RankFailureError:
        noun = "rank" if len(ranks) == 1 else "ranks"
        names = ", ".join(map(str, ranks))
        return RankFailureError(f"{noun} {names} of {self.size} {did}{where}", ranks=ranks)

    def _missing(self, step: int, started: float) -> tuple[list[int], list[int]]:
        """Ranks that left no note of this step, and ranks whose processes are gone."""
        called = time.monotonic()
        deadline = max(started + self.timeout_s, called + self._note_s)
        others = [rank for rank in range(self.size) if rank != self.rank]
        while True:
            missing = [rank for rank in others if self._note(f"moe/waiting/{rank}") != str(step)]
            dead = [rank for rank in others if self._has_ended(rank)]
            # A connection closes a little before its process is seen to be gone.
            if dead or time.monotonic() > (deadline if missing else called + self._note_s):
                return missing, dead
            time.sleep(_POLL_S)

    def _note(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _has_ended(self, rank: int) -> bool:
        """Whether a process of this machine is gone; False for other machines."""
        host, pid, *_ = (*self._note(f"moe/process/{rank}").split(), "", "")
        return bool(pid) and host == socket.gethostname() and _is_gone(pid)


class PendingRows:
    """Rows on their way. Keeps what is being sent alive until it has left."""

    def __init__(
        self, watch: GroupWatch, work: dist.Work, out: Tensor, sent: Tensor, step: int, what: str
    ) -> None:
        self._watch = watch
        self._work = work
        self._sent: Tensor | None = sent
        self.rows = out
        self._step = step
        self._what = what

    def wait(self) -> Tensor:
        """The rows that arrived, in the order of the ranks that sent them.

        Raises:
            RankFailureError: A rank died, stalled or is at another collective.
        """
        if self._sent is not None:
            self._watch.wait(self._work, self._step, self.rows.device.type == "cpu", self._what)
            self._sent = None
        return self.rows


def check_agreement(what: Iterable[tuple[str, int]], theirs_PN: Tensor, rank: int) -> None:
    """Compares this rank's numbers with those of all ranks.

    Args:
        what: Name and own value of each number.
        theirs_PN: `[P, N]` int64 on the CPU: the numbers of every rank.
        rank: This rank.

    Raises:
        RankFailureError: Some rank has other numbers.
    """
    names, own = zip(*what, strict=True)
    differs = theirs_PN != torch.tensor(own, dtype=torch.int64)
    if not bool(differs.any()):
        return
    ranks = tuple(differs.any(dim=1).nonzero().flatten().tolist())
    first = ranks[0]
    column = int(differs[first].nonzero()[0])
    raise RankFailureError(
        f"ranks disagree about {names[column]}: rank {first} has "
        f"{int(theirs_PN[first, column])}, rank {rank} has {own[column]}; start all ranks with the "
        "same version, model and settings",
        ranks=ranks,
    )


def _is_gone(pid: str) -> bool:
    try:
        stat = Path("/proc", pid, "stat").read_text()
    except OSError:
        return Path("/proc").is_dir()
    # The state follows the command's closing bracket; Z is a process nobody has collected yet.
    return stat.rpartition(")")[2].split()[0] in "ZX"


def _is_of_an_exchange(error: RuntimeError) -> bool:
    """Whether a collective failed; gloo says so in its text alone."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _first_line(error: RuntimeError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__
