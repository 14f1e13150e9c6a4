"""The checkpoint of a named shape in the user's cache folder, removed after a run or kept."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import platformdirs

from moe_runtime.benchmarks.synthetic.config_shape import ConfigShape
from moe_runtime.benchmarks.synthetic.gguf_files import GgufShape, require_copy, write_gguf
from moe_runtime.benchmarks.synthetic.model_shapes import ModelShape
from moe_runtime.config import format_bytes
from moe_runtime.digests import digest
from moe_runtime.errors import CapacityError, CheckpointError
from moe_runtime.files import (
    check_output_folder,
    held,
    make_folders,
    new_held_folder,
    partial_name,
    remove_abandoned,
    remove_or_warn,
    replace_folder,
    write_text,
)

# Free space to leave on the disk, at most the size of the files.
_SPARE_BYTES = 2 << 30
_LINES = 10
"""Lines of progress for a file."""

_MARK = "shape.json"
"""Written last: describes the files in the folder."""

Say = Callable[[str], None]
Shape = ModelShape | ConfigShape | GgufShape


class ShapeFiles(NamedTuple):
    """A model as a folder of safetensors files, and the same weights as a GGUF file."""

    checkpoint: Path
    gguf: Path


def shapes_folder() -> Path:
    return platformdirs.user_cache_path("moe-runtime") / "shapes"


@contextmanager
def shape_checkpoint(
    shape: Shape, folder: Path, *, keep: bool, needs_gguf: bool, say: Say
) -> Iterator[ShapeFiles]:
    """The files of a shape, which exist within the block."""
    place = folder / shape.name
    kept = _files_in(place)
    needs_copy = needs_gguf and not kept.gguf.is_file()
    if needs_copy:
        require_copy(shape)
    try:
        check_output_folder(folder, f"files of {shape.name}")
    except CheckpointError as error:
        raise CheckpointError(f"{error}; XDG_CACHE_HOME names another folder for caches") from None
    with ExitStack() as stack:
        make_folders(folder)
        for left in (folder, *folder.iterdir()):
            if left.is_dir():
                remove_abandoned(left)
        num_missing = (not _is_complete(shape, kept.checkpoint)) + needs_copy
        _require_room(folder, num_missing * shape.total_bytes, shape.name)
        new = kept
        if num_missing and not keep:
            new = _files_in(stack.enter_context(_removed_after(place)))
        make_folders(new.checkpoint.parent)
        with held(place) if num_missing and keep else nullcontext():
            files = _write_missing(shape, kept, new, needs_gguf=needs_gguf, say=say)
        yield files


def _write_missing(
    shape: Shape, kept: ShapeFiles, new: ShapeFiles, *, needs_gguf: bool, say: Say
) -> ShapeFiles:
    """Write the missing files; return where each file is."""
    has_checkpoint, has_gguf = _is_complete(shape, kept.checkpoint), kept.gguf.is_file()
    files = ShapeFiles(
        (kept if has_checkpoint else new).checkpoint, (kept if has_gguf else new).gguf
    )
    if has_checkpoint:
        say(f"{kept.checkpoint} is there from an earlier run, and stays")
    else:
        after = "kept there" if new == kept else "removed after the run"
        size = format_bytes(shape.total_bytes)
        say(f"writing random weights of {shape.name}, {size}, to {new.checkpoint}; {after}")
        with replace_folder(new.checkpoint) as whole:
            shape.write(whole, _progress(say, "checkpoint"))
            write_text(whole / _MARK, _made_of(shape, whole))
    if needs_gguf and not has_gguf:
        assert isinstance(shape, ModelShape), "require_copy refuses others"
        say(f"writing the same as {new.gguf}")
        write_gguf(shape, files.checkpoint, new.gguf, progress=_progress(say, "GGUF file"))
    return files


def _made_of(shape: Shape, folder: Path) -> str:
    """The shape and the sizes of its files, with digests of all but weights."""
    files = sorted(one for one in folder.glob("*") if one.is_file() and one.name != _MARK)
    plain = [one.suffix == ".json" and digest(one.read_bytes()) for one in files]
    sizes = [(one.name, one.stat().st_size) for one in files]
    return repr((shape, *zip(sizes, plain, strict=True)))


def _is_complete(shape: Shape, folder: Path) -> bool:
    mark = folder / _MARK
    return mark.is_file() and mark.read_text() == _made_of(shape, folder)


def _files_in(place: Path) -> ShapeFiles:
    return ShapeFiles(place / "model", place / "model.gguf")


@contextmanager
def _removed_after(place: Path) -> Iterator[Path]:
    """A folder of this run. If the process is killed, the next run removes it."""
    folder = partial_name(place)
    with new_held_folder(folder, place):
        try:
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
    """Report progress about every tenth."""
    said = 0

    def progress(done: int, total: int) -> None:
        nonlocal said
        if done * _LINES // total > said:
            said = done * _LINES // total
            say(f"{what}: {format_bytes(done)} of {format_bytes(total)}")

    return progress
