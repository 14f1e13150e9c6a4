"""`--shape` of `bench latency` and `bench throughput`: files that are there for one run."""

import os
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from moe_runtime.benchmarks.commands.texts import AskedModel
from moe_runtime.benchmarks.suite.peers import find_peers
from moe_runtime.benchmarks.synthetic import model_shapes
from moe_runtime.benchmarks.synthetic import shape_checkpoint as module
from moe_runtime.benchmarks.synthetic.model_shapes import INDEX_NAME, SHAPES, ModelShape
from moe_runtime.benchmarks.synthetic.shape_checkpoint import shape_checkpoint
from moe_runtime.cli.main import describe, main
from moe_runtime.errors import CapacityError, CheckpointError, UnsupportedModelError
from moe_runtime.files import held


def files_of(shape: ModelShape, folder: Path, *, keep: bool = False, needs_gguf: bool = False):
    return shape_checkpoint(shape, folder, keep=keep, needs_gguf=needs_gguf, say=lambda line: None)


def entries(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_files_are_there_within_the_block_and_kept_ones_longer(shape, tmp_path):
    with files_of(shape, tmp_path) as files:
        assert (files.checkpoint / INDEX_NAME).is_file()
    assert entries(tmp_path) == []
    with files_of(shape, tmp_path, keep=True) as files:
        index = files.checkpoint / INDEX_NAME
    made, said = index.stat().st_mtime_ns, list[str]()
    with shape_checkpoint(shape, tmp_path, keep=False, needs_gguf=False, say=said.append) as again:
        assert again == files
    assert said == [f"{files.checkpoint} is there from an earlier run, and stays"]
    assert index.stat().st_mtime_ns == made


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (INDEX_NAME, '{"metadata": 1, "weight_map": []}'),
        ("config.json", "{"),
        ("generation_config.json", '{"do_sample": true}'),
        ("model-00001-*", "cut off"),
    ],
)
def test_a_damaged_file_is_written_again(name, text, shape, tmp_path):
    with files_of(shape, tmp_path, keep=True) as files:
        (path,) = files.checkpoint.glob(name)
    whole = path.read_bytes()
    path.write_text(text)
    with files_of(shape, tmp_path, keep=True):
        assert path.read_bytes() == whole


def test_nothing_is_written_for_a_run_that_cannot_be(tmp_path, monkeypatch, capsys):
    """Its prompts are not there, or its results would replace a file that is kept of the shape."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_shapes, "write_checkpoint", fails)
    words = ["bench", "latency", "--shape", "olmoe-tiny"]
    (tmp_path / "none.txt").write_text("\n")
    assert main([*words, "--prompts", str(tmp_path / "none.txt")]) == 2
    assert "holds no prompts" in capsys.readouterr().err
    assert main([*words, "--prompt-tokens", "1000000"]) == 2
    assert "but the model knows 40960 positions" in capsys.readouterr().err
    kept = tmp_path / "moe-runtime" / "shapes" / "olmoe-tiny" / "model" / "config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    assert main([*words, "-o", str(kept)]) == 2
    assert f"the results would replace {kept}" in capsys.readouterr().err
    assert kept.read_text() == "{}"


def test_the_gguf_file_comes_beside_a_kept_checkpoint(shape, tmp_path):
    pytest.importorskip("gguf", reason="extra peers is not installed")
    with files_of(shape, tmp_path, keep=True):
        before = entries(tmp_path)
    with files_of(shape, tmp_path, needs_gguf=True) as files:
        assert files.gguf.read_bytes()[:4] == b"GGUF"
        assert files.checkpoint == tmp_path / shape.name / "model"
    assert entries(tmp_path) == before
    with files_of(shape, tmp_path, keep=True, needs_gguf=True) as files:
        pass
    assert sorted([*before, f"{shape.name}/model.gguf"]) == entries(tmp_path)


@pytest.mark.parametrize(("keep", "after"), [(False, 7), (True, 0)])
def test_an_interrupted_writer_leaves_nothing(shape, tmp_path, monkeypatch, keep, after):
    """Ctrl-C in the middle of a weight, the first one or a later one."""
    real, made = model_shapes.write_checkpoint, []

    def interrupted(*args: Any, **options: Any) -> None:
        def make(plan: Any, seed: int) -> Any:
            made.append(plan)
            if len(made) > after:
                os.kill(os.getpid(), signal.SIGINT)
            return drawn(plan, seed)

        from moe_runtime.benchmarks.synthetic.model_shapes import make_parts as drawn

        real(*args, **options, make=make)

    monkeypatch.setattr(model_shapes, "write_checkpoint", interrupted)
    with pytest.raises(KeyboardInterrupt), files_of(shape, tmp_path, keep=keep):
        pass
    assert entries(tmp_path) == []
    assert len(made) == after + 1


def test_what_killed_runs_left_is_removed_by_the_next(shape, tmp_path):
    """Of whatever shape; what a living process holds stays."""
    names = (
        f"{shape.name}.0123abcd.partial",
        "other.0123abcd.partial",
        "other/model.gguf.9.partial",
    )
    places = [tmp_path / name for name in names]
    living = tmp_path / "living.0123abcd.partial"
    for place in (*places, living):
        (place / "model").mkdir(parents=True)
        (place / "model" / "weights").write_bytes(b"x")
    with held(living), files_of(shape, tmp_path):
        assert [place.exists() for place in (*places, living)] == [False, False, False, True]


def fails(*args: Any, **options: Any) -> None:
    raise OSError("broken")


def test_two_runs_do_not_write_what_is_kept_at_once(shape, tmp_path, monkeypatch):
    """The second is refused while the first writes, and reads what is there afterwards."""
    real = model_shapes.write_checkpoint

    def meanwhile(*args: Any, **options: Any) -> None:
        with (
            pytest.raises(BlockingIOError, match="another process is writing") as refused,
            files_of(shape, tmp_path, keep=True),
        ):
            pass
        assert describe(refused.value)[1].count(str(tmp_path / shape.name)) == 1
        real(*args, **options)

    monkeypatch.setattr(model_shapes, "write_checkpoint", meanwhile)
    with files_of(shape, tmp_path, keep=True) as files:
        monkeypatch.setattr(model_shapes, "write_checkpoint", fails)
        with files_of(shape, tmp_path, keep=True) as again:
            assert again == files


def test_two_processes_may_write_one_gguf_file(shape, tmp_path):
    """Each into a file of its own: one that was half written is not gone on with."""
    pytest.importorskip("gguf", reason="extra peers is not installed")
    from moe_runtime.benchmarks.synthetic.gguf_files import write_gguf

    target = tmp_path / "model.gguf"
    with files_of(shape, tmp_path, keep=True) as files:
        write_gguf(shape, files.checkpoint, target)
        whole = target.read_bytes()
        seen: list[int] = []

        def meanwhile(done: int, total: int) -> None:
            if not seen:
                seen.append(done)
                write_gguf(shape, files.checkpoint, target)

        write_gguf(shape, files.checkpoint, target, progress=meanwhile)
    assert target.read_bytes() == whole
    assert [one.name for one in tmp_path.iterdir() if one.is_file()] == ["model.gguf"]


def test_a_cache_folder_that_cannot_be_written_is_named(shape, tmp_path):
    (tmp_path / "cache").write_text("")
    with (
        pytest.raises(CheckpointError, match=r"cache.* XDG_CACHE_HOME names another folder"),
        files_of(shape, tmp_path / "cache" / "shapes"),
    ):
        pass


class Disk(NamedTuple):
    """What `shutil.disk_usage` says."""

    free: int


@pytest.mark.parametrize(("needs_gguf", "num_files"), [(False, 1), (True, 2)])
def test_a_disk_without_room_is_refused_before_anything_is_written(
    shape, tmp_path, monkeypatch, needs_gguf, num_files
):
    if needs_gguf:
        pytest.importorskip("gguf", reason="extra peers is not installed")
    # As much again stays free.
    needed = 2 * num_files * shape.total_bytes
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: Disk(needed - 1))
    with (
        pytest.raises(CapacityError, match=f"files of {shape.name} need .* of disk, and"),
        files_of(shape, tmp_path, needs_gguf=needs_gguf),
    ):
        pass
    assert entries(tmp_path) == []
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: Disk(needed))
    with files_of(shape, tmp_path, needs_gguf=needs_gguf):
        pass


def test_no_gguf_file_is_promised_of_another_family(tmp_path):
    with (
        pytest.raises(UnsupportedModelError, match="no GGUF file is made of mixtral-8x7b"),
        files_of(SHAPES["mixtral-8x7b"], tmp_path, needs_gguf=True),
    ):
        pass


def test_peers_that_read_gguf_files_are_given_that_of_the_shape(tmp_path):
    (tmp_path / "own.gguf").write_bytes(b"")
    asked = AskedModel(
        "checkpoint", [], tmp_path, {}, {"llama_cpp": "no reason"}, tmp_path / "shape.gguf"
    )
    words = ["transformers", "llama_cpp", f"llama_cpp={tmp_path / 'own.gguf'}"]
    given = find_peers(words, {"model": "checkpoint", "num_threads": 1})
    made = [*map(asked.given_to, given)]
    found = [one.settings["model"] for one in made]
    assert [one.failure for one in made] == [None, "no reason", None]
    assert found == ["checkpoint", str(tmp_path / "shape.gguf"), str(tmp_path / "own.gguf")]
