"""A timeline of a run in the Chrome trace format (a JSON array of "X" events), for Perfetto.

While a run goes on it is ``NAME.part``, which viewers read as well. Times are microseconds.
"""

import json
import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from moe_runtime.errors import named_failure
from moe_runtime.files import OutputFile, check_draft_path
from moe_runtime.types import ExpertKey

COMPUTE = 1
"""Track of the thread that computes; the tracks of reads follow."""
_PROCESS = 1
_FIRST_READ_TRACK = 100
_TRACKS_OF_TIER = 1000


class Timeline:
    """Writes events to a file; may be used from several threads."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._origin_s = time.perf_counter()
        self._events: list[dict[str, Any]] = []  # added to without a lock
        # Where the good content ends, and the last events in it: set together, so that an
        # exception at any point neither loses an event nor writes it twice.
        self._flushed: tuple[int, list[dict[str, Any]]] = (0, [])
        self._flushing = threading.Lock()
        self._tracks: set[int] = set()
        self._output: OutputFile | None = None
        self._closed = False
        check_draft_path(path, "timeline")
        self._describe("process_name", COMPUTE, "moe-runtime")
        self._describe("thread_name", COMPUTE, "compute")

    def slice(
        self, name: str, begin_s: float, end_s: float, *, track: int = COMPUTE, **args: Any
    ) -> None:
        """Notes something that took time."""
        event = {
            "name": name,
            "ph": "X",
            "pid": _PROCESS,
            "tid": track,
            "ts": round(1e6 * (begin_s - self._origin_s), 3),
            "dur": round(1e6 * max(0.0, end_s - begin_s), 3),
            "args": args,
        }
        self._events.append(event)

    def read_track(self, tier: str, number: int, lane: int) -> int:
        """The row of reads into one tier that run beside ``lane`` others."""
        track = _FIRST_READ_TRACK + _TRACKS_OF_TIER * number + lane
        if track not in self._tracks:
            self._tracks.add(track)
            self._describe("thread_name", track, f"{tier} {lane}")
        return track

    def hold(self) -> None:
        """Creates the draft file now, so that no other process can; else `flush` does."""
        with self._flushing, self._named_failure():
            if self._output is None and not self._closed:
                self._output = OutputFile(self._path, is_draft=True)

    def flush(self) -> None:
        """Writes the events so far."""
        with self._flushing, self._named_failure():
            events = self._waiting()
            if self._closed or not events:
                return
            if self._output is None:
                self._output = OutputFile(self._path, is_draft=True)
            text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
            end, _ = self._flushed
            content = f"{',' if end else '['}\n{text}".encode()
            self._flushed = self._output.write_at(end, content), events

    def close(self) -> None:
        """Completes the file; leaves it as it was where nothing was flushed before."""
        if self._output is None or self._closed:
            self._closed = True
            return
        try:
            if self._flushed[0]:
                self.flush()
                with self._named_failure():
                    self._output.write_at(self._flushed[0], b"\n]\n")
                    self._output.finish()
        finally:
            self._closed = True
            self._output.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _describe(self, what: str, track: int, name: str) -> None:
        event = {"name": what, "ph": "M", "pid": _PROCESS, "tid": track, "args": {"name": name}}
        self._events.append(event)

    def _waiting(self) -> list[dict[str, Any]]:
        """The events that are not in the file yet; drops those that are."""
        _, flushed = self._flushed
        if flushed and self._events and self._events[0] is flushed[0]:
            del self._events[: len(flushed)]
        return self._events[:]

    def _named_failure(self) -> AbstractContextManager[None]:
        return named_failure(self._path, "timeline")


def expert_name(key: ExpertKey) -> str:
    """How an expert is called on a timeline."""
    return f"L{key.layer} E{key.expert}"
