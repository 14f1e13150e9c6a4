"""The slowest tier: files of records, and the threads that read and write them."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from moe_runtime.errors import CheckpointError
from moe_runtime.memory.reads import Block, Read, ReadQueue
from moe_runtime.memory.slab import host_view
from moe_runtime.memory.source import READ_BYTES
from moe_runtime.training.offload.states.entries import Version
from moe_runtime.training.offload.states.record_file import RecordFile
from moe_runtime.training.offload.states.records import ORDER, RecordLayout, Sections, checksum
from moe_runtime.training.offload.states.saved import records_path
from moe_runtime.types import ExpertKey

OpenFile = Callable[[Path, int, int], RecordFile]
"""Opens a file of records: path, bytes of a slot, slots to allocate."""


class Disk:
    """Versions of records in `experts-*.records`, waiting gradients in `gradients-*.scratch`.

    Args:
        folder: where the files are; it must exist.
        layouts: of every expert's record; each size of record has a file.
        io_threads: reads and writes in flight at once.
        direct: go past the page cache where possible.
        open_file: opens the files; for tests that take a disk's place.

    Raises:
        CheckpointError: the folder is missing or cannot be written.
        CapacityError: the disk has not enough room.
    """

    def __init__(
        self,
        folder: Path,
        layouts: Mapping[ExpertKey, RecordLayout],
        *,
        io_threads: int = 4,
        direct: bool = True,
        open_file: OpenFile | None = None,
    ) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"storage_dir {folder} is not a directory; make it first")
        self.folder = folder
        self._open = open_file or partial(RecordFile, direct=direct)
        self._files: dict[int, RecordFile] = {}
        self._scratch: dict[int, RecordFile] = {}
        self._parking: dict[ExpertKey, int] = {}
        self._parked: dict[ExpertKey, str] = {}
        numbers = Counter(layout.state_bytes for layout in layouts.values())
        with contextlib.ExitStack() as opened:
            for layout in layouts.values():
                size = layout.state_bytes
                if size not in self._files:
                    path = records_path(folder, layout)
                    file = self._files[size] = self._open(path, size, numbers[size])
                    opened.callback(file.close)
            self._queue = ReadQueue(io_threads)
            opened.pop_all()

    def has_file(self, layout: RecordLayout) -> bool:
        """Whether there is a file of such records."""
        return layout.state_bytes in self._files

    def take(self, layout: RecordLayout) -> int:
        """A free slot for a new version."""
        return self._files[layout.state_bytes].take()

    def hold(self, layout: RecordLayout, slot: int) -> None:
        """Keeps a version from being overwritten."""
        self._files[layout.state_bytes].hold(slot)

    def drop(self, layout: RecordLayout, slot: int) -> None:
        """Lets go of a version."""
        self._files[layout.state_bytes].drop(slot)

    def read(
        self,
        key: ExpertKey,
        layout: RecordLayout,
        version: Version | None,
        sections: Sections,
        record: Tensor,
        read: Read,
    ) -> None:
        """Starts to read sections into a record; another thread tells of the end.

        The thread that reads the last block compares the sections with what was written.
        """
        blocks: list[Block] = []
        slot = None if version is None else version.slot
        for file, offset, content in self._ranges(key, layout, slot, sections, record):
            blocks.extend(
                partial(file.fetch, offset + begin, content[begin : begin + READ_BYTES])
                for begin in range(0, len(content), READ_BYTES)
            )
        left = itertools.count(1 - len(blocks))

        def move(block: Block) -> int:
            moved = block()
            if next(left) == 0:
                self._compare(key, layout, version, sections, record)
            return moved

        self._queue.submit([partial(move, block) for block in blocks], read)

    def _compare(
        self,
        key: ExpertKey,
        layout: RecordLayout,
        version: Version | None,
        sections: Sections,
        record: Tensor,
    ) -> None:
        """Compares sections that were read with what this run wrote.

        Raises:
            CheckpointError: the disk gave other bytes; names the file and the expert.
        """
        expected = {} if version is None else dict(version.sections)
        if key in self._parked:
            expected[Sections.GRADIENT] = self._parked[key]
        for section in ORDER:
            known = expected.get(section)
            if section not in sections or known is None:
                continue
            if checksum(layout.section(record, section)) != known:
                is_parked = section == Sections.GRADIENT
                path = (
                    self._parking_place(key, layout)[0].path
                    if is_parked
                    else records_path(self.folder, layout)
                )
                raise CheckpointError(
                    f"{path}: expert {key.expert} of MoE layer {key.layer} is damaged: its "
                    f"{section.name.lower() if section.name else section} is not what this run "
                    "wrote there; check the disk, and go on from the last checkpoint"
                )

    def write(
        self,
        key: ExpertKey,
        layout: RecordLayout,
        version: Version | None,
        sections: Sections,
        record: Tensor,
        write: Read,
    ) -> None:
        """Starts to write sections of a record: a new version, or a gradient that waits."""
        blocks: list[Block] = []
        if version is not None:
            blocks.append(partial(_seal, layout, version, record))
        if Sections.GRADIENT in sections:
            blocks.append(partial(self._seal_gradient, key, layout, record))
        slot = None if version is None else version.slot
        for file, offset, content in self._ranges(key, layout, slot, sections, record):
            blocks.extend(
                partial(file.write, offset + begin, content[begin : begin + READ_BYTES])
                for begin in range(0, len(content), READ_BYTES)
            )
        self._queue.submit(blocks, write)

    def is_under_way(self, transfer: Read) -> bool:
        """Whether a transfer was started and its end is still to be told."""
        return self._queue.is_under_way(transfer)

    def sync(self) -> None:
        """Returns when all versions that were written lie on the disk."""
        for file in self._files.values():
            file.sync()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        files = [*self._files.values(), *self._scratch.values()]
        return sum(file.num_slots * file.slot_bytes for file in files)

    def close(self) -> None:
        """Ends the threads and closes the files."""
        self._queue.close()
        for file in [*self._files.values(), *self._scratch.values()]:
            file.close()

    def _ranges(
        self,
        key: ExpertKey,
        layout: RecordLayout,
        slot: int | None,
        sections: Sections,
        record: Tensor,
    ) -> Iterator[tuple[RecordFile, int, memoryview]]:
        """File, offset and memory of each run of neighbouring sections."""
        view = host_view(record)
        if Sections.GRADIENT in sections:
            first, last = layout.place_of(Sections.GRADIENT)
            file, place = self._parking_place(key, layout)
            yield file, place * file.slot_bytes, view[first:last]
        wanted = [index for index, section in enumerate(ORDER[:3]) if section in sections]
        if wanted:
            assert slot is not None
            file = self._files[layout.state_bytes]
            for begin, end in _runs(wanted):
                first, _ = layout.place_of(ORDER[begin])
                _, last = layout.place_of(ORDER[end - 1])
                yield file, slot * file.slot_bytes + first, view[first:last]

    def _seal_gradient(self, key: ExpertKey, layout: RecordLayout, record: Tensor) -> int:
        self._parked[key] = checksum(layout.section(record, Sections.GRADIENT))
        return 0

    def _parking_place(self, key: ExpertKey, layout: RecordLayout) -> tuple[RecordFile, int]:
        size = layout.bytes_of(Sections.GRADIENT)
        if size not in self._scratch:
            self._scratch[size] = self._open(self.folder / f"gradients-{size}.scratch", size, 0)
        file = self._scratch[size]
        if key not in self._parking:
            self._parking[key] = file.take()
        return file, self._parking[key]


def _seal(layout: RecordLayout, version: Version, record: Tensor) -> int:
    version.digest, version.sections = layout.checksums(record)
    return 0


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive numbers, as first and one past the last."""
    first = numbers[0]
    for number, following in zip(numbers, [*numbers[1:], None], strict=True):
        if following != number + 1:
            yield first, number + 1
            if following is not None:
                first = following
