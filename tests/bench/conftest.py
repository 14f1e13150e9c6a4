"""Small checkpoints, and what `bench compare` says of changed results."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_checkpoint import save_text_checkpoint

from moe_runtime.benchmarks.synthetic.model_shapes import ModelShape, make_shape, write_checkpoint
from moe_runtime.cli.main import main


@pytest.fixture
def plots() -> None:
    """For tests of plots."""


@pytest.fixture(autouse=True)
def _without_plots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of `bench report` have none, as where matplotlib is not installed: they take longer
    than the rest of a page."""
    if "plots" not in request.fixturenames:
        monkeypatch.setattr("moe_runtime.benchmarks.commands.report.find_spec", lambda _: None)


@pytest.fixture(scope="session")
def shape() -> ModelShape:
    """Small enough for a second, large enough for several shards and a split expert."""
    return make_shape("olmoe", "olmoe-test", 2, 6, 2, 64, 32, 2, 320, 70_000)


@pytest.fixture(scope="session")
def checkpoint(shape: ModelShape, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / shape.name
    write_checkpoint(shape, folder, seed=3)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_text_checkpoint(folder)
    return folder


Worse = Callable[..., set[tuple[str, str]]]


@pytest.fixture
def worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Worse:
    """Systems and metrics that `bench compare` calls worse where repetitions are changed."""

    def compare(results: dict[str, Any], change: Callable[[Any], None], *words: str) -> Any:
        for one in results["measurements"]:  # as often as it takes to be sure
            one["repetitions"] = [dict(one["repetitions"][0]) for _ in range(3)]
        files = [tmp_path / "before.json", tmp_path / "after.json"]
        files[0].write_text(json.dumps(results))
        for one in results["measurements"]:
            for repetition in one["repetitions"]:
                change(repetition)
        files[1].write_text(json.dumps(results))
        capsys.readouterr()
        code = main(["bench", "compare", *map(str, files), *words, "--json"])
        verdicts = json.loads(capsys.readouterr().out)["verdicts"]
        found = {(one["system"], one["metric"]) for one in verdicts if one["word"] == "worse"}
        assert code == bool(found)
        return found

    return compare
