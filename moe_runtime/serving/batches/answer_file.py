"""A file of answers, a line of JSON each, that grows while they come and is taken up again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from moe_runtime.errors import CheckpointError, named_file
from moe_runtime.files import is_at, place_of, write_atomically

BEGINNING = '{"id": "batch_req_'


class AnswerFile:
    """Answers by request id, in the order in which they come until `finish` sorts them.

    A context manager that leaves whole lines, however it ends.

    Raises:
        CheckpointError: the file holds something else, or answers to other requests.
        BlockingIOError: another process writes it.
    """

    def __init__(self, path: Path, asked: Mapping[str, int]) -> None:
        self._path = path
        self._asked = asked
        self._end = 0
        # where each answer lies: its first byte and the one after its last
        self._places: dict[int, tuple[int, int]] = {}
        self._failed: set[int] = set()
        self._place = place_of(path)
        self._is_new = not self._place.exists()
        with named_file(path), contextlib.ExitStack() as stack:
            self._file = stack.enter_context(_open(self._place))
            self._read()
            self._cut()  # a line that a kill cut short
            stack.pop_all()

    @property
    def answered(self) -> frozenset[int]:
        return frozenset(self._places.keys() - self._failed)

    def add(self, record: Mapping[str, Any]) -> None:
        """Writes a line, whole or not at all. One with an ``error`` is answered again in a later
        run."""
        line = f"{json.dumps(record, ensure_ascii=False, allow_nan=False)}\n".encode()
        assert line.startswith(BEGINNING.encode())
        with named_file(self._path):
            done = 0
            try:
                while done < len(line):
                    done += os.pwrite(self._file.fileno(), line[done:], self._end + done)
            except OSError:
                self._cut()  # or a shorter line would leave an end of this one behind itself
                raise
        self._note(record, len(line))

    def finish(self) -> None:
        """Sorts the answers by request, one for each, and replaces the file atomically."""
        places = [self._places[number] for number in sorted(self._places)]
        in_order = [start for start, _ in places] == [0, *(end for _, end in places)][:-1]
        if in_order and self._end == (places[-1][1] if places else 0):
            return
        with write_atomically(self._path) as file:
            for start, end in places:
                file.write(os.pread(self._file.fileno(), end - start, start))

    def __enter__(self) -> AnswerFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._cut()
            if self._is_new and not self._end:
                self._place.unlink(missing_ok=True)
        finally:
            self._file.close()

    def _cut(self) -> None:
        os.ftruncate(self._file.fileno(), self._end)

    def _note(self, record: Mapping[str, Any], num_bytes: int) -> None:
        number = self._asked[record["id"]]
        self._places[number] = (self._end, self._end + num_bytes)
        self._end += num_bytes
        self._failed.discard(number)
        if record.get("error") is not None:
            self._failed.add(number)

    def _read(self) -> None:
        for number, line in enumerate(self._file, start=1):
            is_whole = line.endswith(b"\n")
            if not is_whole and line[: len(BEGINNING)] == BEGINNING.encode()[: len(line)]:
                break  # the process that wrote it was killed
            record = _record_of(line)
            if record is None and line.startswith(BEGINNING.encode()):
                raise CheckpointError(
                    f"{self._path}, line {number}: is an answer that was cut short; remove this "
                    "line, and the same command answers its request again"
                )
            if record is None or not is_whole:
                raise CheckpointError(
                    f"{self._path}, line {number}: is no answer of this command, so nothing here "
                    "is touched; give another --output"
                )
            if record["id"] not in self._asked:
                raise CheckpointError(
                    f"{self._path}, line {number}: answers something else than these prompts with "
                    "this model and these options; give another --output"
                )
            self._note(record, len(line))


def _open(place: Path) -> IO[bytes]:
    """The file, locked against other processes."""
    with contextlib.ExitStack() as stack:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = stack.enter_context(os.fdopen(os.open(place, flags, 0o666), "r+b"))
        is_held = False
        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # other errors: filesystems without locks
            is_held = isinstance(error, BlockingIOError)
        if is_held or not is_at(place, file.fileno()):
            raise BlockingIOError(errno.EAGAIN, "another process is writing it", str(place))
        stack.pop_all()
    return file


def _record_of(line: bytes) -> dict[str, Any] | None:
    if not line.startswith(BEGINNING.encode()):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("id"), str) else None
