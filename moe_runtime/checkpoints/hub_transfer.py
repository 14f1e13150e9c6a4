"""Files of the hub on their way here: into huggingface_hub's cache, or their beginnings alone.

Threads are daemons, so that Ctrl-C ends a download at once. What arrived of a file stays beside
its final place as ``DIGEST.incomplete``, and the next download goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, BinaryIO, cast

from moe_runtime.errors import CheckpointError, MoERuntimeError, blamed_on

if TYPE_CHECKING:
    from moe_runtime.checkpoints.dense_weights import Progress

_NUM_THREADS = 4
_WAIT_S = 0.1
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
                shown = next(iter(self._running[:1]), "")
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
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import WeakFileLock, build_hf_headers

        blob, part = blobs / file.digest, blobs / f"{file.digest}.incomplete"
        locks = blobs.parent.parent / ".locks" / blobs.parent.name  # as huggingface_hub has them
        blobs.mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / f"{file.digest}.lock"):
            if blob.exists():  # another process fetched it
                self.count(file.num_bytes)
                return
            with part.open("a+b") as stream:
                begin = stream.seek(0, os.SEEK_END)
                if begin > file.num_bytes:
                    begin = stream.truncate(0)
                self.count(begin)
                http_get(
                    file.url,
                    stream,
                    resume_size=begin,
                    headers=build_hf_headers(),
                    expected_size=file.num_bytes,
                    displayed_filename=file.name,
                    tqdm_class=cast(Any, self._bar),
                )
                stream.flush()
                if not _has_digest(stream, file):
                    stream.truncate(0)
                    raise CheckpointError(
                        f"{file.name}: expected bytes of digest {file.digest}, got others; "
                        "download it again"
                    )
                os.fsync(stream.fileno())
            part.replace(blob)

    def _bar(self, **_: Any) -> _Bar:
        return _Bar(self)


class _Bar:
    """Takes the place of a bar in huggingface_hub's download of one file."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def __enter__(self) -> _Bar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass

    def update(self, num_bytes: float | None = 1) -> None:
        self._transfer.count(int(num_bytes or 0))


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
    """

    def __init__(self, file: HubFile, local: IO[bytes]) -> None:
        self._file = file
        self._local = local
        self._has_bytes = self._place = 0
        local.truncate(file.num_bytes)

    def read(self, size: int) -> bytes:
        """The next bytes; fewer at the file's end."""
        end = min(self._place + size, self._file.num_bytes)
        if end > self._has_bytes:
            # Twice as many each time: a header of many megabytes takes few requests.
            self._load(min(max(end, 2 * self._has_bytes, _FIRST_BYTES), self._file.num_bytes))
        self._local.seek(self._place)
        found = self._local.read(end - self._place)
        self._place = end
        return found

    def _load(self, end: int) -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import (
            build_hf_headers,
            hf_raise_for_status,
            http_stream_backoff,
        )

        asked = {
            **build_hf_headers(),
            "Accept-Encoding": "identity",
            "Range": f"bytes={self._has_bytes}-{end - 1}",
        }
        limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with http_stream_backoff(
            "GET", self._file.url, headers=asked, timeout=limit_s
        ) as response:
            hf_raise_for_status(response)
            begin = self._has_bytes if response.status_code == 206 else 0
            self._local.seek(begin)
            for piece in response.iter_bytes():
                self._local.write(piece[: end - begin])
                begin = min(end, begin + len(piece))
                if begin == end:
                    break
        if begin != end:
            raise CheckpointError(f"{self._file.name}: expected {end} bytes, got {begin}")
        self._has_bytes = end
