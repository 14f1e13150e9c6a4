"""The checkpoint of a named shape, for one run: written before it, removed after it or kept.

It lies in the user's cache folder, which is on a disk where the folder for temporary files may be
in memory. What is kept there serves every later run of the same shape.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import platformdirs

from moe_runtime.bench.synthetic.checkpoint_writer import is_complete, write_checkpoint
from moe_runtime.bench.synthetic.gguf_copy import require_copy, write_gguf
from moe_runtime.bench.synthetic.model_shapes import ModelShape
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError
from moe_runtime.files import held, make_folders
from moe_runtime.folders import recover_folder, remove_or_warn, replace_folder
from moe_runtime.places import partial_name

# What stays free of the disk, and never more than the files themselves.
_SPARE_BYTES = 2 << 30
_LINES = 10
"""Lines of progress of a file."""

Say = Callable[[str], None]


class ShapeFiles(NamedTuple):
    """Where a model lies: as a folder of safetensors, and the same weights as a GGUF file."""

    checkpoint: Path
    gguf: Path


def shapes_folder() -> Path:
    """Where checkpoints of shapes lie."""
    return platformdirs.user_cache_path("moe-runtime") / "shapes"


@contextmanager
def shape_checkpoint(
    shape: ModelShape, folder: Path, *, keep: bool, needs_gguf: bool, say: Say
) -> Iterator[ShapeFiles]:
    """The files of a shape, which are there within the block.

    Args:
        shape: whose weights are drawn.
        folder: has a folder for each shape.
        keep: leave them for later runs; a process that is interrupted keeps no part of one.
        needs_gguf: whether the GGUF file is there, too.
        say: is given lines of progress.

    Raises:
        UnsupportedModelError: no GGUF file can be made of the shape.
        CapacityError: the disk has too little room.
        OSError: they cannot be written.
    """
    place = folder / shape.name
    kept = _files_in(place)
    has_gguf = kept.gguf.is_file()
    if needs_gguf and not has_gguf:
        require_copy(shape)
    make_folders(folder)
    recover_folder(place)
    has_checkpoint = is_complete(shape, kept.checkpoint)
    num_missing = (not has_checkpoint) + (needs_gguf and not has_gguf)
    _require_room(folder, num_missing * shape.total_bytes, shape.name)
    with ExitStack() as stack:
        new = kept
        if num_missing and not keep:
            new = _files_in(stack.enter_context(_removed_after(place)))
        files = ShapeFiles(
            (kept if has_checkpoint else new).checkpoint, (kept if has_gguf else new).gguf
        )
        if has_checkpoint:
            say(f"{kept.checkpoint} is there from an earlier run, and stays")
        else:
            after = "kept there" if keep else "removed after the run"
            size = format_bytes(shape.total_bytes)
            say(f"writing random weights of {shape.name}, {size}, to {new.checkpoint}; {after}")
            with replace_folder(new.checkpoint) as whole:
                write_checkpoint(shape, whole, progress=_progress(say, "checkpoint"))
        if needs_gguf and not has_gguf:
            say(f"writing the same as {new.gguf}")
            write_gguf(shape, files.checkpoint, new.gguf, progress=_progress(say, "GGUF file"))
        yield files


def _files_in(place: Path) -> ShapeFiles:
    return ShapeFiles(place / "model", place / "model.gguf")


@contextmanager
def _removed_after(place: Path) -> Iterator[Path]:
    """A folder of this run; were the process killed, the next one would remove it."""
    folder = partial_name(place)
    try:
        folder.mkdir()
        with held(folder):
            yield folder
    finally:
        remove_or_warn(folder, "no run needs it")


def _require_room(folder: Path, num_bytes: int, name: str) -> None:
    needed, free = num_bytes + min(num_bytes, _SPARE_BYTES), shutil.disk_usage(folder).free
    if free < needed:
        raise CapacityError(
            f"files of {name} need {format_bytes(needed, up=True)} of disk, and {folder} has "
            f"{format_bytes(free)} free; fewer --layers need less, XDG_CACHE_HOME names another "
            "folder"
        )


def _progress(say: Say, what: str) -> Callable[[int, int], None]:
    """Says about every tenth how much is written."""
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        if done * _LINES // total > said:
            said = done * _LINES // total
            say(f"{what}: {format_bytes(done)} of {format_bytes(total)}")

    return progress
