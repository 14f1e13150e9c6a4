"""Where an output may lie is known before work begins, and nothing there changes by the look."""

import errno
import os
from pathlib import Path

import pytest

from moe_runtime import files
from moe_runtime.errors import CheckpointError
from moe_runtime.files import (
    check_output_folder,
    check_output_path,
    require_apart,
    write_atomically,
)


def write(path: Path | str, content: bytes = b"new") -> None:
    with write_atomically(path) as file:
        file.write(content)


def test_places_that_cannot_be_written_are_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError, match="is a folder, expected the name of a report file"):
        check_output_path(tmp_path, "report")
    with pytest.raises(CheckpointError, match=r"the report cannot be written: there is no folder"):
        check_output_path(tmp_path / "absent" / "file", "report")
    real = os.open

    def read_only(name: Path, flags: int, *rest: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(name))
        return real(name, flags, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        with pytest.raises(CheckpointError, match=r"file: the report cannot be .*: Read-only file"):
            check_output_path(path, "report")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        with pytest.raises(CheckpointError, match="no right to write"):
            check_output_path(path, "report")
    check_output_path(path, "report")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("name", ["out/", "out/."])
def test_a_folder_s_name_is_no_file_s(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="is a folder, expected the name of a trace file"):
        check_output_path(f"{tmp_path}/{name}", "trace")
    with pytest.raises(IsADirectoryError):
        write(f"{tmp_path}/{name}")
    assert os.listdir(tmp_path) == []


def test_what_nothing_can_take_the_place_of_is_known_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    assert Path("/proc") in files.mount_points()
    with monkeypatch.context() as patch:
        # A file that is mounted alone, as into a container.
        patch.setattr(files, "mount_points", lambda: {path})
        with pytest.raises(CheckpointError, match=r"the trace cannot be .*: is a mount point"):
            check_output_path(path, "trace")
        with pytest.raises(OSError, match="is a mount point"):
            write(path)
    tmp_path.chmod(0o1777)
    check_output_path(path, "trace")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(CheckpointError, match=r"the trace cannot .*: belongs to another user"):
        check_output_path(path, "trace")
    check_output_path(tmp_path / "new", "trace")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_folders_that_cannot_be_made_are_known_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    check_output_folder(tmp_path / "new" / "below", "plots")
    check_output_folder(tmp_path, "plots")
    for name in ("file", "file/below"):
        with pytest.raises(CheckpointError, match=r"the plots cannot .*: .*file is no folder"):
            check_output_folder(tmp_path / name, "plots")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_whether_a_folder_can_be_written_to_does_not_depend_on_what_is_in_it(
    tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "probe"
    {
        "folder": path.mkdir,
        "link": lambda: path.symlink_to("/dev/full"),  # which no byte can be written to
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    before = path.lstat()
    # Opened for reading as well, a pipe does not keep a writer waiting.
    reader = os.open(path, os.O_RDWR | os.O_NONBLOCK) if kind == "pipe" else None
    check_output_folder(tmp_path / "new", "plots")
    assert path.lstat() == before
    assert os.listdir(tmp_path) == ["probe"]
    if reader is not None:
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        os.close(reader)


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a.part"), ("link", "a"), ("a.part", "link")])
def test_two_outputs_lie_apart(tmp_path: Path, names: tuple[str, str]) -> None:
    (tmp_path / "link").symlink_to("a")
    first, second = (tmp_path / name for name in names)
    with pytest.raises(ValueError, match="trace and timeline must be different files"):
        require_apart(first, second, ("trace", "timeline"))
    require_apart(first, tmp_path / "b", ("trace", "timeline"))
