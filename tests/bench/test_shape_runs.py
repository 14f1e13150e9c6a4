"""`bench latency` and `bench throughput` with `--shape`: what is given to systems, and to which."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_python import warm_python

from moe_runtime.benchmarks.cases.texts import TextPlan
from moe_runtime.benchmarks.suite import read_results
from moe_runtime.benchmarks.suite.comparing import heading_words
from moe_runtime.benchmarks.synthetic.model_shapes import SHAPES, ModelShape
from moe_runtime.cli.main import main


def know_the_shape(shape: ModelShape, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For commands, as `tiny`, with a cache of its own and peers that start quickly."""
    monkeypatch.setitem(SHAPES, "tiny", shape)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(
        "moe_runtime.benchmarks.suite.peers.this_python", lambda: Path(warm_python())
    )


def noted(case: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is given from now on to each prompt or batch, with its number; all are asked as ever."""
    plan, given = TextPlan, list[Any]()
    real = plan.ask

    def ask(self: Any, process: Any, number: int, ids: Any) -> Any:
        given.append((number, ids))
        return real(self, process, number, ids)

    monkeypatch.setattr(plan, "ask", ask)
    return given


@pytest.mark.parametrize("case", ["latency", "throughput"])
def test_the_command_measures_a_shape_beside_transformers(
    case, shape, tmp_path, monkeypatch, capsys
):
    """All are given text, from the disk where it may be kept, and nothing stays behind."""
    know_the_shape(shape, tmp_path, monkeypatch)
    path = tmp_path / "r.json"
    words = ["--shape", "tiny", "--layers", "1", "--prompt-tokens", "5", "-n", "3", "--quick"]
    words += ["--time", "1", "--threads", "1", "--peer", "transformers", "-o", str(path)]
    words += ["--batch", "2"] if case == "throughput" else []
    given = noted(case, monkeypatch)
    assert main(["bench", case, *words]) == 0
    results = read_results(path)
    assert results["settings"]["model"] == "tiny"
    assert (results["settings"]["layers"], results["settings"]["weights"]) == (1, "random")
    assert "flatter predictors" in results["settings"]["caution"]
    for one in results["measurements"]:
        assert one["failure"] is None
        assert one["quality"]["compared"] == 6
    # ours, untimed, then two repetitions' warm-up and answers: the same text for all
    assert len({json.dumps(ids) for number, ids in given if number == 0}) == 1
    assert given[0][1] is not None
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    err = capsys.readouterr().err
    assert "writing random weights of tiny-1-layers, " in err
    assert "removed after the run" in err
    assert "random weights flatter predictors" in err


STREAMING = """
INSTALL = "pip install torch"
PACKAGES = ()


class Peer:
    def __init__(self, settings):
        self.path = settings["model"]

    def load(self):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(self.path, dtype="auto")

    def stream(self, ids, num_new):
        import torch

        given = torch.tensor([ids])
        rules = {"do_sample": False, "min_new_tokens": num_new}
        found = self.model.generate(given, max_new_tokens=num_new, **rules)
        yield from found[0, len(ids) :].tolist()

    def close(self):
        pass
"""


def test_beside_a_peer_that_writes_its_own_text_all_go_on_with_what_is_likeliest(
    shape, tmp_path, monkeypatch, capsys
):
    know_the_shape(shape, tmp_path, monkeypatch)
    (tmp_path / "streams.py").write_text(STREAMING)
    given = noted("latency", monkeypatch)
    words = ["--shape", "tiny", "--prompt-tokens", "5", "-n", "4", "--quick", "--time", "1"]
    words += ["--peer", str(tmp_path / "streams.py"), "-o", str(tmp_path / "r.json")]
    assert main(["bench", "latency", *words]) == 0
    results = read_results(tmp_path / "r.json")
    assert results["settings"]["followed_by"] == "likeliest tokens"
    assert results["settings"]["prompt_tokens"] == [5, 5]
    assert heading_words(results).endswith("new tokens 4, followed by likeliest tokens")
    for one in results["measurements"]:
        assert (one["failure"], one["quality"]["compared"]) == (None, 8)
    assert given[0][1] is None  # ours says first what all are held to
    assert given[-1][1] is not None
    out, err = capsys.readouterr()
    assert "new tokens 4, followed by likeliest tokens" in " ".join(out.split())
    assert "streams writes its own text: prompts go on as this project finds likeliest" in err


def test_a_peer_of_an_exported_folder_is_refused_without_one(shape, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SHAPES, "tiny", shape)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["bench", "latency", "--shape", "tiny", "--peer", "openvino"]) == 2
    err = capsys.readouterr().err
    assert "name it: --peer openvino=FOLDER" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_peer_that_cannot_run_costs_no_file_and_exit_code_1(shape, tmp_path, monkeypatch, capsys):
    """It is found out before anything is written, and the others are measured all the same."""
    know_the_shape(shape, tmp_path, monkeypatch)
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('no llama here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "r.json"
    words = ["--shape", "tiny", "--prompt-tokens", "5", "-n", "3", "--quick", "--time", "1"]
    words += ["--threads", "1", "--peer", f"llama_cpp@{sys.executable}", "-o", str(path)]
    assert main(["bench", "latency", *words]) == 1
    ours, peer = read_results(path)["measurements"]
    assert ours["summary"]
    assert peer["failure"].startswith("ImportError: no llama here")
    out, err = capsys.readouterr()
    assert "latency: tiny, layers 2, weights random" in " ".join(out.split())
    assert "model.gguf" not in err
    assert err.index("llama_cpp: cannot run, and is left out") < err.index("writing random weights")
    assert err.splitlines()[-1].endswith("llama_cpp: asked for, and without numbers; exit code 1")
