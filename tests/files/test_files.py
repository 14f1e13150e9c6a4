"""An output file is whole or as it was: at every fault and kill, whatever its name leads to."""

import errno
import fcntl
import itertools
import os
import stat
import warnings
from pathlib import Path

import pytest
from injected_faults import CHANGING, LOOKING, at_call, fail, outcomes_of_kills

from moe_runtime import files
from moe_runtime.cli.main import describe
from moe_runtime.errors import CheckpointError, MoERuntimeWarning
from moe_runtime.files import (
    OutputFile,
    check_draft_path,
    check_not_in_progress,
    check_output_folder,
    check_output_path,
    draft_of,
    keep_interrupted,
    make_folders,
    remove_abandoned,
    require_apart,
    write_atomically,
)


def write(path: Path | str, content: bytes = b"new") -> None:
    with write_atomically(path) as file:
        file.write(content)


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "file"
    with write_atomically(path) as file:
        file.write(b"new")
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "absent" / "file")


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, MemoryError, OSError])
def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path, kind):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half() -> None:
        with write_atomically(path) as file:
            file.write(b"new")
            raise kind

    with pytest.raises(kind):
        write_half()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.filterwarnings("ignore::moe_runtime.errors.MoERuntimeWarning")
def test_a_full_disk_at_any_call_leaves_old_or_new(tmp_path):
    path = tmp_path / "file"
    seen = set()
    for number in itertools.count(1):
        path.write_bytes(b"old")
        failed = False
        with at_call(number, fail, (*CHANGING, *LOOKING)) as made:
            try:
                write(path)
            except OSError:
                failed = True
        if len(made) < number:
            break
        where = (number, made[number - 1])
        seen.add(made[number - 1])
        assert path.read_bytes() == (b"old" if failed else b"new"), where
        # Where removing itself fails, the partial file stays until somebody tidies up.
        remove_abandoned(tmp_path)
        assert os.listdir(tmp_path) == ["file"], where
    assert seen >= {"open", "fdopen", "fsync", "fchmod", "replace", "close"}


@pytest.mark.parametrize("call", ["fdopen", "fsync", "replace"])
def test_a_failed_write_leaves_no_partial_file(tmp_path, monkeypatch, call):
    monkeypatch.setattr(os, call, lambda *_, **__: fail(call))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_a_kill_at_any_call_leaves_old_or_new_and_the_next_writer_tidies_up(tmp_path):
    program = (
        "import pathlib\n"
        "from moe_runtime.files import write_atomically\n"
        "path = pathlib.Path('file')\n"
        "def prepare(): path.write_text('old')\n"
        "def write():\n"
        "    with write_atomically('file') as file: file.write(b'new')\n"
        "def state():\n"
        "    found = path.read_text()\n"
        "    write()\n"
        "    return f'{found} {os.listdir()} {path.read_text()}'\n"
    )
    found = outcomes_of_kills(program, tmp_path)
    assert set(found) == {"old ['file'] new", "new ['file'] new"}
    assert found[-1].startswith("new")
    assert len(found) > 5


def test_links_are_followed_and_stay(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("second")
    (tmp_path / "second").symlink_to("there/target")
    (tmp_path / "dangling").symlink_to(tmp_path / "there" / "absent")
    write(tmp_path / "link")
    write(tmp_path / "dangling")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "dangling").is_symlink()
    assert (tmp_path / "there" / "target").read_bytes() == b"new"
    assert (tmp_path / "there" / "absent").read_bytes() == b"new"


def test_folders_are_made_where_a_link_leads_that_leads_to_nothing(tmp_path):
    (tmp_path / "out").symlink_to("disk/of/runs")
    make_folders(tmp_path / "out" / "data")
    make_folders(tmp_path / "out")
    assert (tmp_path / "disk" / "of" / "runs" / "data").is_dir()
    assert os.readlink(tmp_path / "out") == "disk/of/runs"


def test_links_in_a_circle_are_refused(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(CheckpointError, match="symbolic links"):
        check_output_path(tmp_path / "a", "report")


def test_what_nothing_can_replace_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "open").open("wb") as stream:
        for path in ("/dev/null", tmp_path / "pipe", f"/dev/fd/{stream.fileno()}"):
            with pytest.raises(OSError, match="is a device, pipe or open stream"):
                write(path)
            with pytest.raises(CheckpointError, match="is a device, pipe or open stream"):
                check_output_path(path, "trace")
    assert sorted(os.listdir(tmp_path)) == ["open", "pipe"]


def test_permissions_stay(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    (tmp_path / "by open").write_bytes(b"")
    write(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "by open").stat().st_mode


def test_a_long_name_has_room_beside_it(tmp_path):
    write(tmp_path / ("é" * 127))
    assert os.listdir(tmp_path) == ["é" * 127]


def test_a_folder_that_cannot_be_listed_can_be_written_to(tmp_path, monkeypatch):
    real, synced = os.open, []

    def unreadable(name: Path, flags: int, *rest: int) -> int:
        if name == tmp_path and not flags & getattr(os, "O_PATH", 0):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))
        return real(name, flags, *rest)

    def unlisted(name: Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(name))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", unreadable)
        patch.setattr(os, "listdir", unlisted)
        patch.setattr(os, "sync", lambda: synced.append(True))
        check_output_path(tmp_path / "file", "trace")
        write(tmp_path / "file")
    assert synced == [True]
    assert os.listdir(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_in_its_place_is_no_failure(tmp_path, monkeypatch, number):
    """Some filesystems cannot bring a folder to the disk; on others that may fail."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        write(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"new"
    expected = ["what was written there is whole, but a power"] * (number == errno.EIO)
    assert [str(each.message).partition(": ")[2][:44] for each in caught] == expected


@pytest.mark.parametrize("length", [238, 250, 251, 255])
def test_an_output_of_any_name_can_grow(tmp_path, length):
    one, other = (tmp_path / ("n" * (length - 1) + last) for last in "12")
    check_draft_path(one, "trace")
    grown = [OutputFile(path, is_draft=True) for path in (one, other)]
    for number, output in enumerate(grown):
        output.file.write(b"%d" % number)
        output.finish()
    assert (one.read_bytes(), other.read_bytes()) == (b"0", b"1")
    draft_of(one).write_bytes(b"half")
    with pytest.warns(MoERuntimeWarning, match="holds what an interrupted run left"):
        keep_interrupted(one)
    assert len(os.listdir(tmp_path)) == 3
    with pytest.raises(CheckpointError, match="File name too long"):
        check_output_path(tmp_path / ("n" * 256), "trace")


def test_only_what_nobody_writes_any_more_is_removed(tmp_path):
    living = OutputFile(tmp_path / "living")
    living.file.write(b"new")
    (tmp_path / "dead.0123abcd.partial").write_bytes(b"half")
    (tmp_path / "model.partial").mkdir()  # an export of an earlier version
    (tmp_path / "step.shards.partial").mkdir()
    (tmp_path / "step.shards.partial" / "shard").write_bytes(b"half")
    (tmp_path / "other").write_bytes(b"stays")
    remove_abandoned(tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    assert (tmp_path / "other").exists()
    living.finish()
    assert (tmp_path / "living").read_bytes() == b"new"


def test_what_grew_before_a_kill_is_kept_and_named(tmp_path):
    draft = tmp_path / "t.npz.part"
    for number, kept in enumerate(["t.npz.interrupted", "t.npz.interrupted-2"]):
        draft.write_bytes(b"%d" % number)
        with pytest.warns(MoERuntimeWarning, match=rf"{kept}: holds what an interrupted run left"):
            keep_interrupted(tmp_path / "t.npz")
        assert (tmp_path / kept).read_bytes() == b"%d" % number
    draft.write_bytes(b"")
    keep_interrupted(tmp_path / "t.npz")
    assert not draft.exists()


def test_several_may_look_whether_a_draft_is_in_progress(tmp_path):
    """As the processes of one command do at the same time."""
    draft = tmp_path / "t.npz.part"
    draft.write_bytes(b"half")
    with draft.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        check_not_in_progress(tmp_path / "t.npz", "trace")
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is writing"):
            check_not_in_progress(tmp_path / "t.npz", "trace")


def test_what_others_only_look_at_is_kept_once_they_have_looked(tmp_path, monkeypatch):
    draft = tmp_path / "t.npz.part"
    draft.write_bytes(b"half")
    with draft.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        monkeypatch.setattr(files.time, "sleep", lambda _: fcntl.flock(other, fcntl.LOCK_UN))
        with pytest.warns(MoERuntimeWarning, match="holds what an interrupted run left"):
            keep_interrupted(tmp_path / "t.npz")
    assert os.listdir(tmp_path) == ["t.npz.interrupted"]


def test_what_a_living_process_writes_is_not_taken(tmp_path):
    first = OutputFile(tmp_path / "t.npz", is_draft=True)
    first.file.write(b"first")
    with pytest.raises(BlockingIOError, match="another process is writing") as refused:
        OutputFile(tmp_path / "t.npz", is_draft=True)
    assert describe(refused.value)[1].count("t.npz") == 1
    first.finish()
    assert (tmp_path / "t.npz").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["t.npz"]


def test_places_that_cannot_be_written_are_known_at_once(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(CheckpointError, match="is a folder, expected the name of a file"):
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
def test_a_folder_s_name_is_no_file_s(tmp_path, name):
    with pytest.raises(CheckpointError, match="is a folder, expected the name of a file"):
        check_output_path(f"{tmp_path}/{name}", "trace")
    with pytest.raises(IsADirectoryError):
        write(f"{tmp_path}/{name}")
    assert os.listdir(tmp_path) == []


def test_what_nothing_can_take_the_place_of_is_known_at_once(tmp_path, monkeypatch):
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


def test_folders_that_cannot_be_made_are_known_at_once(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    check_output_folder(tmp_path / "new" / "below", "plots")
    check_output_folder(tmp_path, "plots")
    for name in ("file", "file/below"):
        with pytest.raises(CheckpointError, match=r"the plots cannot .*: .*file is not a folder"):
            check_output_folder(tmp_path / name, "plots")
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a.part"), ("link", "a"), ("a.part", "link")])
def test_two_outputs_lie_apart(tmp_path, names):
    (tmp_path / "link").symlink_to("a")
    first, second = (tmp_path / name for name in names)
    with pytest.raises(ValueError, match="trace and timeline must be different files"):
        require_apart(first, second, ("trace", "timeline"))
    require_apart(first, tmp_path / "b", ("trace", "timeline"))
