"""Who waits for whom: notes that the processes of a run leave in the store that they share.

A rank that does not come may itself wait, at another exchange or in another group, for the one that
is missing. So a note says that a thread of its process waits, and for whom, and is written anew as
long as that is so. Who looks for the missing process follows the notes: it is at the end of them,
where no note is written, or none anew.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Note:
    """What a thread of a process says of itself.

    Attributes:
        has_given_up: It waits no longer, has named `others` as missing, and its process may end.
        stamp: Differs from one note of a thread to its next.
        step: The exchange it waits in, counted by its group.
        others: The processes that it waits for, or that it has named.
        thread: Differs between the threads of a process.
    """

    has_given_up: bool
    stamp: str
    step: int
    others: tuple[str, ...]
    thread: str = ""


@dataclass
class _Written:
    """The notes of one process: a line for each of its threads, whichever groups it waits in."""

    lines: dict[int, str] = field(default_factory=dict)
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@functools.cache
def _written_by(process: str) -> _Written:
    """One for each process, as one key of the store holds all its notes."""
    return _Written()


class Notes:
    """The notes of all processes that share a store, whatever groups they form."""

    def __init__(self, store: dist.Store, process: str) -> None:  # pyright: ignore[reportPrivateImportUsage]
        """
        Args:
            store: Of any group.
            process: Name of this process, without spaces.
        """
        # Each group sees the store through a prefix of its own.
        while isinstance(store, dist.PrefixStore):  # pyright: ignore[reportPrivateImportUsage]
            store = store.underlying_store
        self._store = store
        self._process = process
        self._own = _written_by(process)

    @property
    def is_left(self) -> bool:
        """Whether a note of this thread may lie in the store, from a wait in any group."""
        return threading.get_ident() in self._own.lines

    def wait_for(self, others: Iterable[str], step: int) -> None:
        """Says that this thread waits now; to be repeated while it does."""
        self._write("waits", step, others)

    def give_up_on(self, others: Iterable[str], step: int) -> None:
        """Says whom this thread has named as missing."""
        self._write("names", step, others)

    def take_back(self) -> None:
        """Says that this thread goes on."""
        with self._own.lock:
            self._own.lines.pop(threading.get_ident(), None)
            self._put()

    def take_all_back(self) -> None:
        """Says that this process goes on with all its threads."""
        with self._own.lock:
            self._own.lines.clear()
            self._put()

    def of(self, process: str) -> tuple[Note, ...]:
        """The last note of each thread of a process that has not gone on since."""
        key = self._key(process)
        lines = self._store.get(key).decode().splitlines() if self._store.check([key]) else []
        notes: list[Note] = []
        for line in lines:
            kind, thread, stamp, step, *others = line.split()
            notes.append(Note(kind == "names", stamp, int(step), tuple(others), thread))
        return tuple(notes)

    def _write(self, kind: str, step: int, others: Iterable[str]) -> None:
        thread = threading.get_ident()
        with self._own.lock:
            self._own.count += 1
            words = (kind, str(thread), str(self._own.count), str(step), *others)
            self._own.lines[thread] = " ".join(words)
            self._put()

    def _put(self) -> None:
        self._store.set(self._key(self._process), "\n".join(self._own.lines.values()))

    def _key(self, process: str) -> str:
        return f"moe/waiting/{process}"


class Inquiry:
    """Follows the notes from one process, time and again, to the processes they end at.

    Attributes:
        ended: Processes that are gone without having named another.
        missing: Processes that live, as far as is known, and have not been seen to wait.
        waiting: Processes that wait, as a second note of theirs has shown.
    """

    def __init__(
        self,
        process: str,
        others: Iterable[str],
        notes_of: Callable[[str], Sequence[Note]],
        has_ended: Callable[[str], bool],
    ) -> None:
        """
        Args:
            process: Who asks.
            others: Whom it waits for.
            notes_of: The last notes of a process, one for each of its threads.
            has_ended: Whether a process is known to be gone.
        """
        self._process = process
        self._others = tuple(others)
        self._notes_of = notes_of
        self._has_ended = has_ended
        self._first_stamps: dict[tuple[str, str], str] = {}
        self.ended: set[str] = set()
        self.missing: set[str] = set()
        self.waiting: set[str] = set()

    def look(self) -> None:
        """Reads the notes once more and says anew who has ended, is missing, or waits."""
        self.ended, self.missing, self.waiting = set(), set(), set()
        notes_by_process = self._notes_ahead()
        ahead, seen = list(self._others), {self._process}
        while ahead:
            process = ahead.pop()
            if process in seen:
                continue
            seen.add(process)
            notes = notes_by_process[process]
            if named := [note for note in notes if note.has_given_up]:
                ahead += _others_of(named)
            elif self._has_ended(process):
                self.ended.add(process)
            elif any(note.stamp != self._first_stamps[process, note.thread] for note in notes):
                self.waiting.add(process)
                ahead += _others_of(notes)
            else:
                self.missing.add(process)

    def _notes_ahead(self) -> dict[str, Sequence[Note]]:
        """The notes of all that any note leads to: who writes a second one shows later."""
        found: dict[str, Sequence[Note]] = {}
        ahead = [*self._others]
        while ahead:
            process = ahead.pop()
            if process not in found:
                notes = found[process] = self._notes_of(process)
                for note in notes:
                    self._first_stamps.setdefault((process, note.thread), note.stamp)
                ahead += _others_of(notes)
        return found


def _others_of(notes: Iterable[Note]) -> list[str]:
    return [other for note in notes for other in note.others]
