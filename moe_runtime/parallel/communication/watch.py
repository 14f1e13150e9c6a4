"""Waiting for a collective, and naming the rank that is missing.

A rank that has waited for some time leaves a note in the key-value store: the processes that one of
its threads waits for. It renews the note while it waits. When a wait fails, the search follows the
notes to the process that writes or renews none.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from moe_runtime.errors import RankFailureError

# Raised whenever ranks of two versions of this room would not understand each other.
PROTOCOL = 4
DEFAULT_TIMEOUT_S = 300.0
# Share of the timeout in which other ranks must show that they wait.
_NOTE_SHARE = 0.2
# Notes that a waiting rank writes in that time; the first comes after one interval.
_NOTES = 4
_MAX_NOTE_S = 2.0
_POLL_S = 0.02


def backend_limit(timeout_s: float) -> timedelta:
    """Timeout of a group's own collectives: shorter, which leaves time to find the missing rank."""
    return timedelta(seconds=timeout_s - min(_MAX_NOTE_S, timeout_s * _NOTE_SHARE))


def device_of(group: dist.ProcessGroup, preferred: torch.device) -> torch.device:
    """The device a group's backend takes tensors on: `preferred` if it can (NCCL needs a GPU)."""
    kinds = [device.type for device in group._device_types]
    if preferred.type in kinds:
        return preferred
    return torch.device(kinds[0], torch.accelerator.current_device_index())


class Arriving:
    """Rows under way; `wait()` returns what arrived, in the order of the ranks that sent it."""

    def __init__(self, wait: Callable[[], Tensor]) -> None:
        self.wait = functools.cache(wait)


@dataclass(frozen=True, slots=True)
class Note:
    """What one thread of a process has written.

    Attributes:
        has_given_up: It no longer waits: it has named `others` as missing, and may end.
        stamp: Differs between two notes of a thread.
        step: The exchange it waits in, counted by its group.
        others: The processes that it waits for, or has named.
    """

    has_given_up: bool
    stamp: str
    step: int
    others: tuple[str, ...]
    thread: str = ""


class _OwnNotes:
    """The notes of this process, one line for each of its threads."""

    def __init__(self) -> None:
        self.by_thread: dict[int, str] = {}
        self.stamps = itertools.count()
        self.lock = threading.Lock()


@functools.cache
def _notes_by(process: str) -> _OwnNotes:
    """Shared by all groups of a process: one key of the store holds all its notes."""
    return _OwnNotes()


class Notes:
    """The notes of all processes that share a store, in any group."""

    def __init__(self, store: dist.Store, process: str) -> None:  # pyright: ignore[reportPrivateImportUsage]
        """`process` is the name of this process, without spaces."""
        # Each group sees the store through a prefix of its own.
        while isinstance(store, dist.PrefixStore):  # pyright: ignore[reportPrivateImportUsage]
            store = store.underlying_store
        self._store = store
        self._process = process
        self._own = _notes_by(process)

    @property
    def is_left(self) -> bool:
        """Whether the store may hold a note of this thread, from a wait in any group."""
        return threading.get_ident() in self._own.by_thread

    def write(self, others: Iterable[str], step: int, *, gives_up: bool = False) -> None:
        """Notes that this thread waits for processes now, or has named them as missing."""
        thread = threading.get_ident()
        with self._own.lock:
            kind, stamp = "names" if gives_up else "waits", next(self._own.stamps)
            self._own.by_thread[thread] = " ".join([kind, f"{thread} {stamp} {step}", *others])
            self._put()

    def remove(self, *, of_all_threads: bool = False) -> None:
        """Removes the note of this thread, or those of all threads of this process."""
        with self._own.lock:
            if of_all_threads:
                self._own.by_thread.clear()
            self._own.by_thread.pop(threading.get_ident(), None)
            self._put()

    def of(self, process: str) -> tuple[Note, ...]:
        """The last note of each thread of a process that has not gone on since."""
        key = f"moe/waiting/{process}"
        lines = self._store.get(key).decode().splitlines() if self._store.check([key]) else []
        notes: list[Note] = []
        for line in lines:
            kind, thread, stamp, step, *others = line.split()
            notes.append(Note(kind == "names", stamp, int(step), tuple(others), thread))
        return tuple(notes)

    def _put(self) -> None:
        self._store.set(f"moe/waiting/{self._process}", "\n".join(self._own.by_thread.values()))


def find_missing(
    process: str,
    others: Iterable[str],
    notes_of: Callable[[str], Sequence[Note]],
    has_ended: Callable[[str], bool],
    first_stamps: dict[tuple[str, str], str],
) -> tuple[set[str], set[str], set[str]]:
    """Follows the notes from one process, which waits for others, to the processes they end at.

    Args:
        first_stamps: By process and thread; filled in the first call, kept for later ones.

    Returns:
        Processes that are gone and had not named another; those that are not known to be gone and
        were not seen to wait; those that wait, as their second note has shown.
    """
    others = tuple(others)
    # Stamps of all processes that any note leads to: each needs two notes before it is followed.
    notes_by_process: dict[str, Sequence[Note]] = {}
    ahead = [*others]
    while ahead:
        one = ahead.pop()
        if one not in notes_by_process:
            notes = notes_by_process[one] = notes_of(one)
            for note in notes:
                first_stamps.setdefault((one, note.thread), note.stamp)
            ahead += [other for note in notes for other in note.others]
    ended, missing, waiting = set[str](), set[str](), set[str]()
    ahead, seen = [*others], {process}
    while ahead:
        one = ahead.pop()
        if one in seen:
            continue
        seen.add(one)
        notes = notes_by_process[one]
        named = [note for note in notes if note.has_given_up]
        if not named and has_ended(one):
            ended.add(one)
        elif named or any(note.stamp != first_stamps[one, note.thread] for note in notes):
            if not named:
                waiting.add(one)
            ahead += [other for note in named or notes for other in note.others]
        else:
            missing.add(one)
    return ended, missing, waiting


class CollectiveMonitor:
    """Runs and waits for the collectives of one process group, `timeout_s` at most."""

    def __init__(self, group: dist.ProcessGroup, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """Leaves this process's address in the store."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        if not isinstance(group, dist.ProcessGroup):
            raise ValueError("this process is not a member of the process group")
        self.group = group
        # Asked of the group itself, which need not be part of the default group.
        self.rank, self.size = group.rank(), group.size()
        self.timeout_s = timeout_s
        self._note_s = min(_MAX_NOTE_S, timeout_s * _NOTE_SHARE)
        self._store = group.get_group_store()
        self._step = 0
        # The names of the group's processes by rank, once all have come.
        self._met: list[str] | None = None
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._notes = Notes(self._store, self._process)
        # A process that forms a new group goes on, even if it has named another as missing.
        self._notes.remove(of_all_threads=True)
        self._store.set(f"moe/process/{self.rank}", f"{self._process} {PROTOCOL}")

    def all_to_all(
        self,
        rows: Tensor,
        send_splits: list[int],
        receive_splits: list[int],
        what: str,
        out: Tensor | None = None,
    ) -> Arriving:
        """Starts a variable all-to-all of the rows (the first dimension) of a contiguous tensor."""
        if out is None:
            out = rows.new_empty((sum(receive_splits), *rows.shape[1:]))
        arrived, splits = out, (receive_splits, send_splits)
        work, step = self._start(
            what,
            lambda: dist.all_to_all_single(arrived, rows, *splits, group=self.group, async_op=True),
        )

        def wait() -> Tensor:  # holds `rows` until they have left
            self.wait(work, step, rows.device.type == "cpu", what)
            return arrived

        return Arriving(wait)

    def all_reduce(self, values: Tensor, what: str) -> None:
        """Sums a tensor over the ranks, in place."""
        work, step = self._start(
            what, lambda: dist.all_reduce(values, group=self.group, async_op=True)
        )
        self.wait(work, step, values.device.type == "cpu", what)

    def _start(
        self, what: str, collective: Callable[[], dist.Work | None]
    ) -> tuple[dist.Work, int]:
        self.meet(self.timeout_s)
        self._step += 1
        try:
            work = collective()
        except RuntimeError as error:
            raise self._failure(error, self._step, time.monotonic(), what) from error
        assert work is not None
        return work, self._step

    @contextlib.contextmanager
    def over_torch(self, what: str) -> Iterator[None]:
        """Names the missing rank when one of torch's own collectives fails within the block.

        FSDP2, `DTensor`s and checkpoints wait as long as the backend lets them, which
        `backend_limit` makes shorter than `timeout_s`. All ranks enter the block.
        """
        self._step += 1
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            # gloo marks its errors in their text alone
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            raise self._failure(error, self._step, started, what) from error
        self._go_on()

    def leave(self) -> None:
        """Ends the group for this process; others that wait for it in the group go on."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._notes.write((), self._step, gives_up=True)
        del self.group

    def wait(self, work: dist.Work, step: int, on_cpu: bool, what: str) -> None:
        """Waits for a collective, and watches for ended processes.

        An ended process is no error at once: it may have done its part of this collective.
        """
        if not on_cpu:
            # Puts a dependency on the stream; the backend has a watchdog of its own.
            work.wait()
            self._go_on()
            return
        started = time.monotonic()
        # The last part of the time is for reading the others' notes.
        deadline = started + self.timeout_s - self._note_s
        while True:
            left = deadline - time.monotonic()
            slice_s = max(min(self._note_s / _NOTES, left), 0.001)
            # Asked before: rows that come just after a slice are no failure.
            is_last = left <= 0 or work.is_completed()
            try:
                work.wait(timedelta(seconds=slice_s))
            except RuntimeError as error:
                if is_last:
                    raise self._failure(error, step, started, what) from error
                if not work.is_completed() and self._has_one_ended(step):
                    deadline = min(deadline, time.monotonic() + self._note_s)
            else:
                self._go_on()
                return

    def _has_one_ended(self, step: int) -> bool:
        """Notes that this rank waits; whether a process has ended, the store's included."""
        try:
            self._notes.write(self._members(), step)
        except RuntimeError:
            return True
        return bool(self.ended_ranks())

    def _go_on(self) -> None:
        if self._notes.is_left:
            # Without the store no process reads it.
            with contextlib.suppress(RuntimeError):
                self._notes.remove()

    def meet(self, within_s: float) -> None:
        """Waits for all addresses, once; refuses a rank of another protocol before messages."""
        if self._met is not None:
            return
        deadline = time.monotonic() + within_s
        keys = [f"moe/process/{rank}" for rank in range(self.size)]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = tuple(r for r, key in enumerate(keys) if not self._store.check([key]))
                raise self._named(missing, f"did not arrive within {within_s:g} s")
            time.sleep(_POLL_S)
        members, protocols = zip(*(self._value(key).split() for key in keys), strict=True)
        theirs_P1 = torch.tensor([int(protocol) for protocol in protocols]).view(-1, 1)
        check_agreement([("the dispatch protocol", PROTOCOL)], theirs_P1, self.rank)
        self._met = list(members)

    def ended_ranks(self) -> tuple[int, ...]:
        """Ranks of this machine whose processes are gone, and had not named another."""
        try:
            return tuple(
                rank
                for rank, process in enumerate(self._members())
                if rank != self.rank and _has_ended(process) and not self._has_given_up(process)
            )
        except RuntimeError:
            # The store went with the process that kept it.
            return ()

    def _failure(
        self, error: RuntimeError, step: int, started: float, what: str
    ) -> RankFailureError:
        try:
            members = self._members()
            culprits, did = self._culprits(members, step, started)
        except RuntimeError:
            return RankFailureError(
                f"exchange {step} ({what}) failed ({_first_line(error)}), and the store of the "
                "process group does not answer: the process that keeps it (rank 0, unless a "
                "launcher does) has ended"
            )
        ranks = tuple(rank for rank, process in enumerate(members) if process in culprits)
        elsewhere = sorted(culprits - set(members))
        reason = f"in exchange {step} ({what}): {_first_line(error)}"
        if ranks:
            return self._named(ranks, f"{did}; rank {self.rank} waited for it {reason}")
        if elsewhere:
            # The ranks that this rank waited for wait in another group.
            return RankFailureError(
                f"process {', '.join(elsewhere)} (host and number) of another group {did}; rank "
                f"{self.rank} of {self.size} waited for others that wait for it, {reason}"
            )
        return RankFailureError(
            f"exchange {step} ({what}) failed although every rank reached it: {_first_line(error)}"
        )

    def _named(self, ranks: tuple[int, ...], did: str) -> RankFailureError:
        noun = "rank" if len(ranks) == 1 else "ranks"
        names = ", ".join(map(str, ranks))
        return RankFailureError(f"{noun} {names} of {self.size} {did}", ranks=ranks)

    def _culprits(self, members: list[str], step: int, started: float) -> tuple[set[str], str]:
        """The processes at fault, and what they did; none if all reached the exchange."""
        first_stamps: dict[tuple[str, str], str] = {}
        called = time.monotonic()
        deadline = max(started + self.timeout_s, called + self._note_s)
        while True:
            self._notes.write(members, step)
            ended, missing, waiting = find_missing(
                self._process, members, self._notes.of, _has_ended, first_stamps
            )
            # A connection closes a little before its process is seen to be gone.
            if ended or time.monotonic() > (deadline if missing else called + self._note_s):
                break
            time.sleep(_POLL_S)
        did = "has ended" if ended else f"did not arrive within {self.timeout_s:g} s"
        at_another_step = {
            process
            for process in members
            for note in self._notes.of(process)
            if list(note.others) == members and note.step != step
        }
        culprits = ended or missing or at_another_step
        self._notes.write(culprits, step, gives_up=True)
        # Lives until those that wait know too: it may keep the store, or look missing itself.
        until = time.monotonic() + self._note_s
        while time.monotonic() < until and not all(
            self._has_given_up(process) or _has_ended(process) for process in waiting
        ):
            time.sleep(_POLL_S)
        return culprits, did

    def _has_given_up(self, process: str) -> bool:
        return any(note.has_given_up for note in self._notes.of(process))

    def _members(self) -> list[str]:
        """The names of the group's processes by rank; the rank of one that did not come."""
        if self._met is not None:
            return self._met
        found = [self._value(f"moe/process/{rank}").split() for rank in range(self.size)]
        return [words[0] if words else f"rank-{rank}" for rank, words in enumerate(found)]

    def _value(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""


def check_agreement(what: Iterable[tuple[str, int]], theirs_PN: Tensor, rank: int) -> None:
    """Compares this rank's named numbers with those of all ranks, `[P, N]` int64 on the CPU."""
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


def _has_ended(process: str) -> bool:
    """Whether a process of this machine is gone; False for other machines."""
    host, _, pid = process.rpartition(":")
    if host != socket.gethostname():
        return False
    try:
        stat = Path("/proc", pid, "stat").read_text()
    except OSError:
        return Path("/proc").is_dir()
    # The state follows the command's closing bracket; Z is an ended, uncollected process.
    return stat.rpartition(")")[2].split()[0] in "ZX"


def _first_line(error: RuntimeError) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # without gloo's place in its sources, and its advice
    return re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", lines[0].strip())
