"""``~`` at the beginning of a name is the home folder, wherever a name is given as text."""

import json
import os
import shutil
from pathlib import Path

import pytest
from fixture_types import Patch
from synthetic_routes import make_routes
from traces import trace_of
from training_runs import CONFIG, write_run

from moe_runtime.benchmarks.suite import Rules
from moe_runtime.benchmarks.suite.peers import split_peer
from moe_runtime.checkpoints.opening import find_checkpoint
from moe_runtime.cli.commands.finetune import _patterns
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError
from moe_runtime.files import at_home
from moe_runtime.lab.traces import write_trace
from moe_runtime.policies.prediction import Shape
from moe_runtime.serving.http.starting import adapters_of
from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.run_config import TrainConfig

REPLAY = ["--policy", "lru", "--capacity", "50%", "--json"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A home folder with a trace; the current folder is another one."""
    folder, here = tmp_path / "home", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.chdir(here)
    routes = make_routes(Shape(num_layers=2, num_experts=8, top_k=2), num_sequences=2)
    write_trace(folder / "trace.npz", trace_of(routes))
    return folder


def test_only_a_beginning_is_the_home_folder(home):
    for name, path in {
        "~": f"{home}",
        "~/x": f"{home}/x",
        "./~": "./~",
        "./~/x": "./~/x",
        "x/~": "x/~",
        "/~": "/~",
        "": "",
    }.items():
        assert at_home(name) == path
    assert at_home("~root/x") == os.path.join(os.path.expanduser("~root"), "x")
    with pytest.raises(
        ValueError, match=r"^~no-one/x: no home folder ~no-one is known; \./~no-one"
    ):
        at_home("~no-one/x")


def test_words_of_the_command_line(home, monkeypatch, capsys):
    """Arguments, options, lists of either, and files of options: nothing is written here."""
    assert main(["replay", "~/trace.npz", *REPLAY]) == 0
    assert main(["report", "~/trace.npz", "--output=~/page.html", "--predictor", "none"]) == 0
    assumed = "experts of 16 MiB (assumed: the trace does not say) over"
    assert assumed in (home / "page.html").read_text()
    monkeypatch.setitem(Rules.__init__.__kwdefaults__, "most", 1)  # rounds of a measurement
    bench = ["bench", "policies", "~/trace.npz", "--policy", "lru", "--time", "1"]
    assert main([*bench, "--precision", "1", "--output=~/results.json"]) == 0
    assert main(["bench", "report", "~/results.json", "-o", "~/bench.html"]) == 0
    (home / "more.toml").write_text('policy = "lru"\ncapacity = "50%"\n')
    capsys.readouterr()
    assert main(["replay", "~/trace.npz", "--config", "~/more.toml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    for name in ("page.html", "results.json", "bench.html"):
        assert (home / name).is_file()
    assert list(Path().iterdir()) == []


def test_an_output_is_no_input_by_another_name(home, capsys):
    whole = (home / "trace.npz").read_bytes()
    assert main(["report", "~/trace.npz", "-o", str(home / "trace.npz")]) == 2
    assert main(["report", str(home / "trace.npz"), "-o", "~/trace.npz"]) == 2
    assert (home / "trace.npz").read_bytes() == whole
    assert main(["report", "~/trace.npz", "-o", "~no-one/page.html"]) == 2
    assert "no home folder ~no-one is known" in capsys.readouterr().err.splitlines()[-1]


def test_a_dot_makes_it_a_plain_name(home):
    Path("~").mkdir()
    assert main(["place", "~/trace.npz", "--gpus", "2", "-o", "./~/map"]) == 0
    assert os.listdir("~") == ["map"]
    assert not (home / "map").exists()
    shutil.copy(home / "trace.npz", "~")
    whole = Path("~/trace.npz").read_bytes()
    assert main(["report", "./~/trace.npz", "-o", "./~/trace.npz", "--predictor", "none"]) == 2
    assert Path("~/trace.npz").read_bytes() == whole
    assert _patterns("./~", print) == ["./~/**/*.txt"]


def test_names_within_words(home, capsys):
    for name in ("peer.py", "python", "model"):
        (home / name).touch()
    expected = (f"{home}/peer.py", "odd", f"{home}/python", f"{home}/model")
    assert split_peer("~/peer.py:odd@~/python=~/model") == expected
    assert adapters_of(["a=~/one"], ["m"])[0].folder == home / "one"
    (home / "checkpoint").mkdir()
    assert find_checkpoint("~/checkpoint") == home / "checkpoint"
    with pytest.raises(CheckpointError, match="no home folder ~no-one is known"):
        find_checkpoint("~no-one/x")
    learned = ["replay", "~/trace.npz", "--policy", "predicted", "--capacity", "50%"]
    assert main([*learned, "--predictor", "~/none.npz"]) == 2
    assert f"{home}/none.npz" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key", ["run.output", "run.storage_dir", "run.trace", "run.start_from", "tokenizer.path"]
)
def test_every_path_of_a_run_s_configuration(home, tmp_path, key):
    config = CONFIG.replace("vocab_size = 300", "") if key == "tokenizer.path" else CONFIG
    path = write_run(tmp_path / "run", config=config)
    table, name = key.split(".")

    def found(value: str) -> Path:
        budget = () if name == "start_from" else ("run.host_memory=1GiB",)
        settings = (f"{key}={value}", *budget)
        tree = read_tree(TrainConfig, path, settings=settings)
        return getattr(getattr(tree, table), name)

    assert found("~/x") == home / "x"
    assert found("./~/x") == Path("~/x")
    with pytest.raises(ValueError, match=rf"{key} is ~no-one/x: no home folder ~no-one is known"):
        found("~no-one/x")


def test_a_run_whose_folders_are_at_home(home, capsys):
    (home / "disk").mkdir()
    path = write_run(Path("run"))
    (Path("run") / "texts").rename(home / "texts")
    text = path.read_text().replace('"texts/', '"~/texts/').replace('"out"', '"~/out"')
    path.write_text(text)
    budget = ["--set", "run.host_memory=1GiB", "--set", "run.storage_dir=~/disk"]
    words = ["train", str(path), "--set", "run.steps=1", "--set", "run.trace=~/routes.npz", *budget]
    assert main(words) == 0, capsys.readouterr().err
    assert (home / "out" / "summary.json").is_file()
    assert (home / "routes.npz").is_file()
    assert sorted(os.listdir("run")) == ["train.toml"]
