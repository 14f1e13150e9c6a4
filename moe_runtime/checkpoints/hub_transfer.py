"""Files of the hub on their way here: into huggingface_hub's cache, or their beginnings alone.

Threads are daemons, so that Ctrl-C ends a download at once. What arrived of a file stays beside
its final place as ``DIGEST.incomplete``, and the next download goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO

from moe_runtime.errors import CheckpointError, MoERuntimeError, blamed_on

if TYPE_CHECKING:
    from moe_runtime.checkpoints.dense_weights import Progress

_NUM_THREADS = 4
_WAIT_S = 0.1
_MOST_FAILURES = 5
"""Of requests one after the other, none of which gives a byte."""
_FIRST_BYTES = 1 << 20
"""Of a file whose header is read: most headers are shorter."""


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository.

    Attributes:
        name: its path in the repository.
        url: where it lies.
        num_bytes: its size.
        digest: SHA-256 of its bytes, or Git's SHA-1 of small files; the cache calls it so.
    """

    name: str
    url: str
    num_bytes: int
    digest: str


class Transfer:
    """Work on several files at once, which ends as soon as the block around it does.

    Args:
        total_bytes: of all files.
        progress: called in the caller's thread meanwhile.
    """

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._changing = threading.Lock()
        self._done_bytes = 0
        self._running: list[str] = []
        self._num_begun = 0
        self._is_over = threading.Event()

    def count(self, num_bytes: int) -> None:
        """Notes bytes that arrived.

        Raises:
            InterruptedError: nobody waits for more.
        """
        if self._is_over.is_set():
            raise InterruptedError("the download was ended")
        with self._changing:
            self._done_bytes += num_bytes

    def run(self, what: str, names: Sequence[str], work: Callable[[str], None]) -> None:
        """Calls ``work`` with each name, and waits.

        Raises:
            MoERuntimeError: of the first call that failed.
            MemoryError: likewise.
        """
        waiting, failures = deque(names), list[MoERuntimeError | MemoryError]()

        def call() -> None:
            while waiting and not self._is_over.is_set():
                try:
                    name = waiting.popleft()
                except IndexError:  # another thread was quicker
                    return
                self._running.append(name)
                self._num_begun += 1
                try:
                    with blamed_on(name):
                        work(name)
                except (MoERuntimeError, MemoryError) as error:
                    failures.append(error)
                    self._is_over.set()
                self._running.remove(name)

        threads = [
            threading.Thread(target=call, name="moe-hub", daemon=True)
            for _ in range(min(_NUM_THREADS, len(names)))
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not failures:
                shown = next(iter(self._running[:1]), "").rpartition("/")[2]
                count = f" {self._num_begun}/{len(names)}" if len(names) > 1 else ""
                self._progress(f"{what}{count} {shown}", self._done_bytes, self._total_bytes)
                next((t for t in threads if t.is_alive()), threads[0]).join(_WAIT_S)
        finally:
            self._is_over.set()
        if failures:
            raise failures[0]

    def fetch(self, file: HubFile, blobs: Path) -> None:
        """Puts a file into the cache's folder of contents, from where an earlier try ended.

        Raises:
            CheckpointError: what arrived is not what the hub announced.
            OSError: the hub or the disk failed.
        """
        from huggingface_hub.utils import WeakFileLock

        blob, part = blobs / file.digest, blobs / f"{file.digest}.incomplete"
        locks = blobs.parent.parent / ".locks" / blobs.parent.name  # as huggingface_hub has them
        blobs.mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / f"{file.digest}.lock"):
            if blob.exists():  # another process fetched it
                self.count(file.num_bytes)
                return
            part.touch()
            with part.open("r+b") as stream:
                begin = stream.seek(0, os.SEEK_END)
                if begin > file.num_bytes:
                    begin = stream.truncate(0)
                self.count(begin)
                _read_range(file, stream, begin, file.num_bytes, self.count)
                is_whole = _has_digest(stream, file)
                if begin and not is_whole:  # what was here may be at fault
                    self.count(-file.num_bytes)
                    _read_range(file, stream, 0, file.num_bytes, self.count)
                    is_whole = _has_digest(stream, file)
                if not is_whole:
                    stream.truncate(0)
                    raise CheckpointError(
                        f"{file.name}: expected bytes of digest {file.digest}, got others"
                    )
                os.fsync(stream.fileno())
            part.replace(blob)


def _read_range(
    file: HubFile, stream: IO[bytes], begin: int, end: int, count: Callable[[int], None]
) -> None:
    """Writes a range of a file where it belongs, and asks again where the connection breaks off."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    failures = 0
    while begin < end:
        headers = build_hf_headers(
            headers={"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
        )
        limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        failures += 1
        try:
            with (
                blamed_on(file.name),
                http_stream_backoff(
                    "GET", file.url, headers=headers, timeout=limit_s, retry_on_exceptions=()
                ) as answer,
            ):
                hf_raise_for_status(answer)
                if answer.status_code != 206:  # the whole file comes
                    count(-begin)
                    begin = 0
                stream.seek(begin)
                for piece in answer.iter_bytes():
                    stream.write(piece[: end - begin])
                    count(len(piece))
                    begin, failures = min(end, begin + len(piece)), 0
                    if begin == end:
                        return
        except CheckpointError as error:
            # Errors of the system are the disk's, the hub's own answers, or the end of the wait.
            if failures > _MOST_FAILURES or isinstance(error.__cause__, OSError):
                raise
        if failures > _MOST_FAILURES:
            raise CheckpointError(f"{file.name}: expected {end} bytes, got {begin}")
        time.sleep(failures)


def _has_digest(stream: BinaryIO, file: HubFile) -> bool:
    found = hashlib.sha256()
    if len(file.digest) != 2 * found.digest_size:
        found = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
    stream.seek(0)
    while piece := stream.read(1 << 20):
        found.update(piece)
    return found.hexdigest() == file.digest


class RemoteBeginning:
    """Reads a file of the hub from its beginning, and writes what it reads to a local one.

    The local file gets the size of the remote one, and has a hole where nothing was read.

    Args:
        file: the remote file.
        local: the local one, open to write and read.
        count: is told how many bytes arrived.
    """

    def __init__(self, file: HubFile, local: IO[bytes], count: Callable[[int], None]) -> None:
        self._file = file
        self._local = local
        self._count = count
        self._has_bytes = self._place = 0
        local.truncate(file.num_bytes)

    def read(self, size: int) -> bytes:
        """The next bytes; fewer at the file's end."""
        end = min(self._place + size, self._file.num_bytes)
        if end > self._has_bytes:
            # Twice as many each time: a header of many megabytes takes few requests.
            upto = min(max(end, 2 * self._has_bytes, _FIRST_BYTES), self._file.num_bytes)
            _read_range(self._file, self._local, self._has_bytes, upto, self._count)
            self._has_bytes = upto
        self._local.seek(self._place)
        found = self._local.read(end - self._place)
        self._place = end
        return found
