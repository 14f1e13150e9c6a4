"""Experts in the files of a checkpoint: positional reads of whole experts, past the page cache."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.store.layout import ExpertLayout, Extent
from moe_runtime.store.slab import host_view
from moe_runtime.store.transfer import Block, OnDone, Priority, Read, ReadQueue
from moe_runtime.types import ExpertKey

READ_BYTES = 4 * 2**20
"""Bytes of one positional read: large enough for full bandwidth, small enough to be overtaken."""


class CheckpointFile:
    """One open file. Reads go past the page cache where the file system allows it.

    The page cache would hold a second copy of every expert that the store keeps, and count against
    the same memory limit.
    """

    def __init__(self, path: Path, *, direct: bool = True) -> None:
        """Opens the file.

        Raises:
            CheckpointError: the file cannot be opened.
        """
        self.path = path
        self.direct = direct and hasattr(os, "O_DIRECT")
        try:
            self._fd = self._open()
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from None

    def read(self, offset: int, into: memoryview, needed_bytes: int) -> int:
        """Fills a buffer from the file.

        Args:
            offset: where to begin; whole blocks, as the buffer's address and length.
            into: the buffer.
            needed_bytes: how many bytes must arrive; the file may end after them.

        Returns:
            The number of bytes read.

        Raises:
            OSError: the disk reports an error.
            EOFError: the file ends too early.
        """
        done = 0
        while done < needed_bytes:
            moved = os.preadv(self._fd, [into[done:]], offset + done)
            if moved == 0:
                raise EOFError(f"the file ends at byte {offset + done}")
            done += moved
        return done

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _open(self) -> int:
        if self.direct:
            try:
                return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            except OSError:
                # tmpfs and some network file systems know no direct I/O
                self.direct = False
        return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)


class ExpertSource:
    """The slowest tier: the experts of a checkpoint, read by byte range from its original files."""

    def __init__(
        self, layouts: Mapping[ExpertKey, ExpertLayout], *, io_threads: int = 4, direct: bool = True
    ) -> None:
        """Opens the files that hold the experts.

        Args:
            layouts: where each expert lies.
            io_threads: how many reads are in flight at once.
            direct: go past the page cache where possible.

        Raises:
            CheckpointError: a file cannot be opened.
            ValueError: there would be no reading thread.
        """
        self._layouts = dict(layouts)
        paths = {extent.file for layout in layouts.values() for extent in layout.extents}
        self._files = {path: CheckpointFile(path, direct=direct) for path in sorted(paths)}
        self._queue = ReadQueue(io_threads)

    def fetch(
        self, key: ExpertKey, slot: torch.Tensor, priority: Priority, on_done: OnDone
    ) -> Read:
        """Starts to read an expert into a slot; ``on_done`` is called from a reading thread."""
        buffer = host_view(slot)
        blocks: list[Block] = []
        for extent in self._layouts[key].extents:
            for begin in range(0, extent.num_bytes, READ_BYTES):
                blocks.append(partial(self._read_block, key, extent, begin, buffer))
        return self._queue.submit(blocks, priority, on_done)

    def promote(self, key: ExpertKey, read: Read) -> None:
        """Serves the rest of a read before all read-aheads."""
        self._queue.promote(read)

    def cancel(self, read: Read) -> bool:
        """Takes back a read that has not begun; says whether it could be."""
        return self._queue.cancel(read)

    def close(self) -> None:
        """Ends the reading threads and closes the files."""
        self._queue.close()
        for file in self._files.values():
            file.close()

    def _read_block(self, key: ExpertKey, extent: Extent, begin: int, buffer: memoryview) -> int:
        size = min(READ_BYTES, extent.num_bytes - begin)
        place = extent.slot_offset + begin
        needed = max(0, min(size, extent.needed_bytes - begin))
        try:
            return self._files[extent.file].read(
                extent.offset + begin, buffer[place : place + size], needed
            )
        except (OSError, EOFError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CheckpointError(
                f"cannot read expert {key.expert} of MoE layer {key.layer} "
                f"from {extent.file}: {reason}"
            ) from None
