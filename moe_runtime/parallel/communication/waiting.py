"""Who waits for whom: notes that the processes of a run leave in the store that they share.

A rank that does not come may itself wait, at another exchange or in another group, for the one that
is missing. So a note says that its process waits, and for whom, and is written anew as long as that
is so. Who looks for the missing process follows the notes: it is at the end of them, where no note
is written, or none anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Note:
    """What a process says of itself.

    Attributes:
        has_given_up: It waits no longer, has named `others` as missing, and may end.
        stamp: Differs from one note of a process to its next.
        step: The exchange it waits in, counted by its group.
        others: The processes that it waits for, or that it has named.
    """

    has_given_up: bool
    stamp: str
    step: int
    others: tuple[str, ...]


class Notes:
    """The notes of all processes that share a store, whatever groups they form.

    Attributes:
        is_left: Whether a note of this object may lie in the store.
    """

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
        self._num_written = 0
        self.is_left = False

    def wait_for(self, others: Iterable[str], step: int) -> None:
        """Says that this process waits now; to be repeated while it does."""
        self._write("waits", step, others)

    def give_up_on(self, others: Iterable[str], step: int) -> None:
        """Says whom this process has named as missing."""
        self._write("names", step, others)

    def take_back(self) -> None:
        """Says that this process goes on."""
        self.is_left = False
        self._store.set(self._key(self._process), "")

    def of(self, process: str) -> Note | None:
        """The last note of a process, if it has not gone on since."""
        key = self._key(process)
        words = self._store.get(key).decode().split() if self._store.check([key]) else []
        if not words:
            return None
        kind, stamp, step, *others = words
        return Note(kind == "names", stamp, int(step), tuple(others))

    def _write(self, kind: str, step: int, others: Iterable[str]) -> None:
        self.is_left = True
        self._num_written += 1
        # Two threads of a process may wait, each with notes of its own.
        stamp = f"{id(self):x}.{self._num_written}"
        self._store.set(self._key(self._process), " ".join((kind, stamp, str(step), *others)))

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
        note_of: Callable[[str], Note | None],
        has_ended: Callable[[str], bool],
    ) -> None:
        """
        Args:
            process: Who asks.
            others: Whom it waits for.
            note_of: The last note of a process.
            has_ended: Whether a process is known to be gone.
        """
        self._process = process
        self._others = tuple(others)
        self._note_of = note_of
        self._has_ended = has_ended
        self._first_stamps: dict[str, str] = {}
        self.ended: set[str] = set()
        self.missing: set[str] = set()
        self.waiting: set[str] = set()

    def look(self) -> None:
        """Reads the notes once more and says anew who has ended, is missing, or waits."""
        self.ended, self.missing, self.waiting = set(), set(), set()
        notes = self._notes_ahead()
        ahead, seen = list(self._others), {self._process}
        while ahead:
            process = ahead.pop()
            if process in seen:
                continue
            seen.add(process)
            note = notes[process]
            if note is not None and note.has_given_up:
                ahead += note.others
            elif self._has_ended(process):
                self.ended.add(process)
            elif note is not None and note.stamp != self._first_stamps[process]:
                self.waiting.add(process)
                ahead += note.others
            else:
                self.missing.add(process)

    def _notes_ahead(self) -> dict[str, Note | None]:
        """The notes of all that any note leads to: who writes a second one shows later."""
        notes: dict[str, Note | None] = {}
        ahead = [*self._others]
        while ahead:
            process = ahead.pop()
            if process not in notes:
                note = notes[process] = self._note_of(process)
                if note is not None:
                    self._first_stamps.setdefault(process, note.stamp)
                    ahead += note.others
        return notes
