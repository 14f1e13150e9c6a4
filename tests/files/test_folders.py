"""A folder is replaced as a whole or not at all."""

import errno
import itertools
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Patch
from injected_faults import CHANGING, LOOKING, at_call, fail, outcomes_of_kills

from moe_runtime import files
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.files import partial_name, recover_folder, replace_folder


def of_a_lower_layer(one: Path, other: Path) -> bool:
    """What an overlay filesystem says of a folder that was there when it was mounted."""
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(one), None, str(other))


WAYS: dict[str, tuple[str, Any]] = {
    "exchange": ("_OLD_SUFFIX", ".old"),
    "without exchange": ("_exchange", lambda one, other: False),
    "lower layer": ("_exchange", of_a_lower_layer),
}


@pytest.fixture(params=WAYS)
def exchange(request: pytest.FixtureRequest, monkeypatch: Patch) -> None:
    monkeypatch.setattr(files, *WAYS[request.param])


@pytest.fixture
def old(tmp_path: Path, exchange: None) -> Path:
    folder = tmp_path / "model"
    fill(folder, "old")
    return folder


def fill(folder: Path, content: str) -> None:
    (folder / "sub").mkdir(parents=True, exist_ok=True)
    for name in ("a", "sub/b"):
        (folder / name).write_text(content)


def content(folder: Path) -> set[str]:
    """What its two files say: one word when the folder is whole."""
    return {(folder / name).read_text() for name in ("a", "sub/b")}


def replace(folder: Path) -> None:
    with replace_folder(folder) as new:
        fill(new, "new")


def test_a_folder_appears_when_it_is_whole(tmp_path):
    with replace_folder(tmp_path / "made" / "model") as new:
        fill(new, "new")
        assert not (tmp_path / "made" / "model").exists()
    assert content(tmp_path / "made" / "model") == {"new"}
    assert os.listdir(tmp_path / "made") == ["model"]


def test_the_old_folder_goes_as_a_whole(old):
    (old / "stale").write_text("old")
    old.chmod(0o750)
    replace(old)
    assert content(old) == {"new"}
    assert not (old / "stale").exists()
    assert stat.S_IMODE(old.stat().st_mode) == 0o750
    assert os.listdir(old.parent) == ["model"]


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_fails_leaves_the_old_folder(old, kind):
    def write_half() -> None:
        with replace_folder(old) as new:
            (new / "a").write_text("new")
            raise kind

    with pytest.raises(kind):
        write_half()
    assert content(old) == {"old"}
    assert os.listdir(old.parent) == ["model"]


@pytest.mark.filterwarnings("ignore::moe_runtime.errors.MoERuntimeWarning")
def test_a_full_disk_at_any_call_leaves_old_or_new(old):
    seen = set()
    for number in itertools.count(1):
        shutil.rmtree(old)
        fill(old, "old")
        failed = False
        with at_call(number, fail, (*CHANGING, *LOOKING)) as made:
            try:
                replace(old)
            except OSError:
                failed = True
        if len(made) < number:
            break
        where = (number, made[number - 1])
        seen.add(made[number - 1])
        recover_folder(old)
        assert content(old) in ({"old"}, {"new"}), where
        assert failed or content(old) == {"new"}, where
        assert os.listdir(old.parent) == ["model"], where
    assert seen >= {"mkdir", "open", "fsync", "unlink", "rmdir"}


LOWER_LAYER = (
    "def exchange(one, other): raise OSError(18, 'Invalid cross-device link')\n"
    "files._exchange = exchange\n"
)


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("", id="exchange"),
        pytest.param("files._exchange = lambda one, other: False\n", id="without exchange"),
        pytest.param(LOWER_LAYER, id="lower layer", marks=pytest.mark.long),
    ],
)
def test_a_kill_at_any_call_leaves_old_or_new(tmp_path, way):
    program = (
        "import pathlib, shutil\n"
        "from moe_runtime import files\n"
        f"{way}"
        "path = pathlib.Path('model')\n"
        "def fill(folder, text):\n"
        "    (folder / 'sub').mkdir()\n"
        "    for name in ('a', 'sub/b'): (folder / name).write_text(text)\n"
        "def prepare():\n"
        "    shutil.rmtree(path, ignore_errors=True)\n"
        "    path.mkdir()\n"
        "    fill(path, 'old')\n"
        "def write():\n"
        "    with files.replace_folder('model') as new: fill(new, 'new')\n"
        "def state():\n"
        "    is_there = path.exists()\n"
        "    files.recover_folder(path)\n"
        "    texts = {(path / name).read_text() for name in ('a', 'sub/b')}\n"
        "    return f'{is_there} {texts} {os.listdir()}'\n"
    )
    found = outcomes_of_kills(program, tmp_path)
    whole = {f"True {{{text!r}}} ['model']" for text in ("old", "new")}
    # Without an exchange there is a moment without the name; the next writer gives it back.
    nameless = {"False {'old'} ['model']"} if way else set()
    assert set(found) == whole | nameless
    assert found[-1] == "True {'new'} ['model']"
    assert len(found) > 15


def test_what_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch):
    old = tmp_path / "model"
    fill(old, "old")
    real = os.unlink

    def unlink(path: str, **options: int) -> None:
        if os.path.basename(path) == "a":
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        with pytest.warns(MoERuntimeWarning, match=r"could not be removed; .*model does not need"):
            replace(old)
    assert content(old) == {"new"}
    replace(old)
    assert os.listdir(old.parent) == ["model"]


def test_what_is_kept_goes_over(old):
    (old / "kept").mkdir()
    (old / "kept" / "link").symlink_to("elsewhere")
    (old / "notes").write_text("mine")
    (old / "gone").write_text("old")
    with replace_folder(old, keeps=lambda path: path.name != "gone") as new:
        fill(new, "new")
    assert content(old) == {"new"}
    assert (old / "notes").read_text() == "mine"
    assert os.readlink(old / "kept" / "link") == "elsewhere"
    assert not (old / "gone").exists()


def test_long_names_that_begin_alike_share_nothing_beside_them(tmp_path):
    one, other = (tmp_path / ("n" * 245 + last) for last in "12")
    with replace_folder(one) as first, replace_folder(other) as second:
        fill(first, "first")
        fill(second, "second")
        recover_folder(one)
        recover_folder(other)
    assert (content(one), content(other)) == ({"first"}, {"second"})
    fill(partial_name(one).with_suffix(".old"), "older")
    recover_folder(other)
    assert content(other) == {"second"}
    assert len(os.listdir(tmp_path)) == 3


def test_links_to_a_folder_stay(old):
    link = old.with_name("link")
    link.symlink_to("model")
    replace(link)
    assert link.is_symlink()
    assert content(old) == {"new"}


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(NotADirectoryError):
        replace(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "old"


def test_a_folder_with_a_long_name_is_put_back(tmp_path):
    """Where it stepped aside there was no room for all of its name."""
    folder = tmp_path / ("n" * 245)
    fill(partial_name(folder).with_suffix(".old"), "old")
    recover_folder(folder)
    assert content(folder) == {"old"}
    assert os.listdir(tmp_path) == [folder.name]


def test_a_new_folder_that_is_taken_for_left_behind_is_made_again(old, monkeypatch):
    real, made = Path.mkdir, []

    def mkdir(folder: Path, *args: Any, **options: Any) -> None:
        real(folder, *args, **options)
        if folder.name.endswith(".partial"):
            made.append(folder)
            if len(made) == 1:
                folder.rmdir()

    monkeypatch.setattr(Path, "mkdir", mkdir)
    replace(old)
    assert len(made) == 2
    assert content(old) == {"new"}
    assert os.listdir(old.parent) == ["model"]


def test_without_locks_a_name_of_the_caller_s_own_is_used_again(old, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", no_locks)
    left = partial_name(old, "00000000")
    fill(left, "half")
    (left / "stale").write_text("half")
    with replace_folder(old, token="00000000") as new:
        assert new == left
        fill(new, "new")
    assert content(old) == {"new"}
    assert not (old / "stale").exists()
    assert os.listdir(old.parent) == ["model"]


def test_a_name_of_the_caller_s_own_is_not_taken_from_a_living_process(old):
    with replace_folder(old, token="00000000") as new:
        fill(new, "first")
        with pytest.raises(BlockingIOError), replace_folder(old, token="00000000"):
            pass
        assert content(new) == {"first"}
    assert content(old) == {"first"}


def test_the_working_directory_is_replaced_and_entered_again(old, monkeypatch):
    monkeypatch.chdir(old)
    replace(Path("."))
    assert Path("a").read_text() == "new"
    assert content(old) == {"new"}
