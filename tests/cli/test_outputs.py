"""What commands write: an old file is lost to no refused, failed or ended command."""

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from bench_commands import BENCH_INPUTS
from command_lines import COMMANDS as ALL_COMMANDS
from fixture_types import Patch
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.cli.main import main
from moe_runtime.cli.strict import OUTPUTS
from moe_runtime.errors import CheckpointError
from moe_runtime.files import OutputFile
from moe_runtime.inference.loading import load
from moe_runtime.lab.traces import read_trace, write_trace
from moe_runtime.memory.source import ExpertSource
from moe_runtime.policies.prediction import Shape
from moe_runtime.types import ExpertKey

PROMPT = "The store reads an expert"
SHAPE = Shape(num_layers=2, num_experts=8, top_k=2)


def run(checkpoint: Path, *words: str) -> int:
    return main(["run", str(checkpoint), "--prompt", PROMPT, "-n", "2", *words])


def write_old(folder: Path) -> list[str]:
    """Outputs of an earlier run, and the words that ask for new ones."""
    (folder / "trace.npz").write_bytes(b"old trace")
    (folder / "timeline.json").write_bytes(b"old timeline")
    return ["--trace", str(folder / "trace.npz"), "--timeline", str(folder / "timeline.json")]


def assert_old(folder: Path) -> None:
    assert (folder / "trace.npz").read_bytes() == b"old trace"
    assert (folder / "timeline.json").read_bytes() == b"old timeline"
    assert sorted(os.listdir(folder)) == ["timeline.json", "trace.npz"]


def failing_reads(monkeypatch: Patch) -> None:
    """A disk that gives out when the second layer's experts are read."""
    real: Callable[..., Any] = ExpertSource.fetch

    def fetch(source: ExpertSource, key: ExpertKey, *rest: Any, **options: Any) -> Any:
        if key.layer == 1:
            raise CheckpointError("the disk is gone")
        return real(source, key, *rest, **options)

    monkeypatch.setattr(ExpertSource, "fetch", fetch)


@pytest.mark.parametrize(
    "words",
    [
        ["--max-new-tokens", "100000"],
        ["--host-memory", "1KiB"],
        ["--chat"],
        ["--predictor", "none.npz", "--prefetch", "observe"],
        ["--max-tokens", "1"],
    ],
    ids=lambda words: words[0],
)
def test_a_refused_run_leaves_old_outputs(checkpoint, tmp_path, words):
    outputs = write_old(tmp_path)
    assert run(checkpoint, *outputs, *words) == 2
    assert_old(tmp_path)


def test_an_option_that_sampling_alone_knows_is_refused_without_it(checkpoint, capsys):
    for option, value in (("--top-p", "0.5"), ("--seed", "3")):
        assert run(checkpoint, option, value) == 2
        assert capsys.readouterr().err == (
            f"moe-runtime: error: {option} has no effect without sampling: give --temperature too\n"
        )


def test_a_run_that_fails_in_its_first_step_leaves_old_outputs(
    checkpoint, tmp_path, monkeypatch, capsys
):
    outputs = write_old(tmp_path)
    failing_reads(monkeypatch)
    assert run(checkpoint, *outputs) == 2
    assert capsys.readouterr().err == "moe-runtime: error: the disk is gone\n"
    assert_old(tmp_path)


def test_a_run_replaces_both(checkpoint, tmp_path):
    assert run(checkpoint, *write_old(tmp_path)) == 0
    assert read_trace(tmp_path / "trace.npz").num_steps == 2
    names = [event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())]
    assert (names.count("prefill"), names.count("decode")) == (1, 1)
    assert sorted(os.listdir(tmp_path)) == ["timeline.json", "trace.npz"]


def test_devices_are_refused(checkpoint, capsys):
    for option in ("--trace", "--timeline"):
        assert run(checkpoint, option, "/dev/null") == 2
        assert capsys.readouterr().err.endswith(
            f"/dev/null: the {option[2:]} cannot be written: is a device, pipe or open stream, "
            "expected the name of a file\n"
        )
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_outputs_go_through_links(checkpoint, tmp_path):
    (tmp_path / "link.npz").symlink_to("trace.npz")
    assert run(checkpoint, "--trace", str(tmp_path / "link.npz")) == 0
    assert (tmp_path / "link.npz").is_symlink()
    assert read_trace(tmp_path / "trace.npz").num_steps == 2
    assert sorted(os.listdir(tmp_path)) == ["link.npz", "trace.npz"]


def test_what_a_killed_run_left_is_kept_and_named(checkpoint, tmp_path, capsys):
    outputs = write_old(tmp_path)
    (tmp_path / "trace.npz.part").write_bytes(b"MOETRACE and more")
    (tmp_path / "timeline.json.part").write_bytes(b"[\n{}")
    assert run(checkpoint, *outputs) == 0
    err = capsys.readouterr().err
    for name, content in (("trace.npz", b"MOETRACE and more"), ("timeline.json", b"[\n{}")):
        kept = tmp_path / f"{name}.interrupted"
        assert f"warning: {kept}: holds what an interrupted run left of {name}\n" in err
        assert kept.read_bytes() == content
        assert not (tmp_path / f"{name}.part").exists()
    assert read_trace(tmp_path / "trace.npz").num_steps == 2


@pytest.mark.parametrize("number", [0, 1])
def test_what_another_run_is_writing_is_refused(checkpoint, tmp_path, capsys, number):
    outputs = write_old(tmp_path)
    other = OutputFile(outputs[1 + 2 * number], is_draft=True)
    assert run(checkpoint, *outputs) == 2
    assert "another process is writing" in capsys.readouterr().err
    other.discard()
    assert_old(tmp_path)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    folder = tmp_path / "input"
    folder.mkdir()
    write_trace(folder / "t.npz", trace_of(make_routes(SHAPE, num_sequences=4, length=20)))
    return folder / "t.npz"


DRAW_LITTLE = ["--policy", "lru", "--predictor", "none"]
OPTIONS = {"-o": "--output"}
COMMANDS = {
    "report": (["report", "TRACE", "--max-accesses", "50", *DRAW_LITTLE], "-o"),
    "predictor fit": (["predictor", "fit", "TRACE", "--predictor", "popularity"], "-o"),
    "place": (["place", "TRACE", "--gpus", "2", "--algorithm", "greedy"], "-o"),
    "simulate layer": (["simulate", "layer", "--ranks", "8", "--degrees", "1"], "--plot"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_known_before_the_work_and_costs_no_output(
    trace, tmp_path, capsys, monkeypatch, name
):
    folder = tmp_path / "out"
    folder.mkdir()
    words, option = COMMANDS[name]
    path = folder / ("old.npz" if name == "predictor fit" else "old.png")
    path.write_bytes(b"old")
    words = [word.replace("TRACE", str(trace)) for word in words]

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moe_runtime.files.new_held", full)
        # Neither reading nor computing is reached.
        patch.setattr("moe_runtime.lab.traces.readers.read_any_trace", None)
        patch.setattr("moe_runtime.lab.traces.read_trace", None)
        patch.setattr("moe_runtime.lab.simulate.scaling.sweep_scaling", None)
        assert main([*words, option, str(path)]) == 2
    assert capsys.readouterr().err.endswith("cannot be written: No space left on device\n")
    with monkeypatch.context() as patch:
        patch.setattr("moe_runtime.files.os.replace", full)
        assert main([*words, option, str(path)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert path.read_bytes() == b"old"
    assert os.listdir(folder) == [path.name]


INPUTS = {
    "run": [
        (["run", "MODEL", "-p", "x", "--timeline"], "MODEL/config.json"),
        (["run", "MODEL", "-p", "x", "--trace"], "MODEL/model.safetensors"),
        (["run", "MODEL", "--prompts", "FILE", "--trace"], "FILE"),
        (["run", "MODEL", "--prompt-file", "FILE", "--timeline"], "FILE"),
        (["run", "MODEL", "-p", "x", "--image", "FILE", "--trace"], "FILE"),
    ],
    "report": [
        (["report", "TRACE", "--output"], "TRACE"),
        (["report", "PLOT", "-o", "FILE", "--png"], "FOLDER"),
    ],
    "place": [(["place", "TRACE", "--gpus", "2", "--output"], "TRACE")],
    "simulate layer": [(["simulate", "layer", "--machine", "FILE", "--plot"], "FILE")],
    "finetune": [
        (["finetune", "MODEL", "FILE", "--dry-run", "--trace"], "FILE"),
        (["finetune", "MODEL", "FILE", "--dry-run", "--trace"], "MODEL/tokenizer.json"),
        (["finetune", "MODEL", "x", "--held-out", "FILE", "--dry-run", "--trace"], "FILE"),
        (["finetune", "MODEL", "FILE", "--dry-run", "--output"], "MODEL"),
        (["finetune", "MODEL", "FILE", "--dry-run", "--output"], "MODEL/run"),
    ],
    "predictor fit": [
        (["predictor", "fit", "TRACE", "--output"], "TRACE"),
        (["predictor", "fit", "--model", "MODEL", "--text", "FILE", "-o"], "MODEL/config.json"),
    ],
    "generate": [(["generate", "MODEL", "--prompts", "FILE", "--output"], "FILE")],
    **BENCH_INPUTS,
}
FILES_THAT_ARE_READ = {
    *("--api-keys", "--config", "--from", "--golden", "--machine", "--placement", "--prompt-file"),
    *(
        "--adapter",
        "--arrivals",
        "--image",
        "--lora-from",
        "--prompts",
        "--routing",
        "--text",
        "--train",
    ),
}
SCRATCH = {"--storage-dir"}
"""Folders for files that have gone when the command ends, under names that nothing else has."""


def test_every_option_that_names_a_path_is_an_output_or_an_input():
    paths = set()
    for command in ALL_COMMANDS.values():
        kinds = get_type_hints(command.callback)
        named = {param.opts[0] for param in command.params if "Path" in str(kinds.get(param.name))}
        paths |= {option for option in named if option.startswith("--")}
    assert paths == OUTPUTS | FILES_THAT_ARE_READ | SCRATCH


@pytest.mark.parametrize("command", ["run", "report", "place", "predictor fit", "simulate layer"])
def test_a_name_of_no_file_is_no_output(checkpoint, trace, tmp_path, capsys, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    words, option = COMMANDS.get(command, (["run", str(checkpoint), "-p", "x"], "--trace"))
    words = [word.replace("TRACE", str(trace)) for word in words]
    Path("defaults.toml").write_text(f'{OPTIONS.get(option, option)[2:]} = "o/"\n')
    folder, stream = "is a folder, expected the name of a file", "do not go to standard output"
    asked = [([option, "o/"], folder), ([option, "o/."], folder), ([option, "-"], stream)]
    asked.append(([option, ""], "is empty, expected the name of a file"))
    if any("--config" in param.opts for param in ALL_COMMANDS[command].params):
        asked.append((["--config", "defaults.toml"], folder))
    for more, complaint in asked:
        assert main([*words, *more]) == 2
        err = capsys.readouterr().err
        assert (err.count("\n"), complaint in err) == (1, True)
    assert sorted(os.listdir()) == ["defaults.toml", "input"]


@pytest.mark.parametrize("name", ["-", ""])
def test_a_name_of_no_folder_is_no_output(tmp_path, capsys, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for words in (["finetune", "m", "d", "--output"], ["report", "t.npz", "--png"]):
        assert main([*words, name]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), words[-1] in err) == ("", 1, True)
    assert os.listdir() == []


def test_the_table_has_every_command_with_outputs():
    options = {n: {o for p in c.params for o in p.opts} for n, c in ALL_COMMANDS.items()}
    assert INPUTS.keys() == {name for name, opts in options.items() if opts & OUTPUTS}


@pytest.mark.parametrize(("words", "output"), [case for cases in INPUTS.values() for case in cases])
def test_an_output_that_is_an_input_is_refused(checkpoint, trace, tmp_path, capsys, words, output):
    text = tmp_path / "file.txt"
    text.write_text("The store reads an expert. " * 40)
    plot = trace.with_suffix(".png")  # a trace all the same
    plot.write_bytes(trace.read_bytes())
    places = {"MODEL": str(checkpoint), "TRACE": str(trace), "FILE": str(text), "PLOT": str(plot)}
    places["FOLDER"] = str(plot.parent)
    for name, place in places.items():
        words = [place if word == name else word for word in words]
        output = output.replace(name, place)
    link = tmp_path / "link"
    link.symlink_to(output)
    before = {file: file.read_bytes() for file in (text, trace, *checkpoint.iterdir())}
    for asked in (output, str(link)):
        assert main([*words, asked]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "would replace" in err or "would lie among" in err
    assert {file: file.read_bytes() for file in before} == before
    assert sorted(checkpoint.iterdir()) == sorted(before.keys() - {text, trace})


def test_a_new_file_beside_the_inputs_is_an_output(checkpoint, trace):
    for _ in range(2):
        assert main(["place", str(trace), "--gpus", "2", "-o", str(trace.parent / "map")]) == 0


def test_plots_go_where_nothing_else_lies(trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("moe_runtime.lab.traces.readers.read_any_trace", None)  # it is not reached
    (tmp_path / "file").write_bytes(b"")
    words = ["report", str(trace), "-o", str(tmp_path / "plots" / "page.png"), "--png"]
    (tmp_path / "plots").mkdir()
    for folder, reason in (("plots", "among the plots"), ("file/below", "is not a folder")):
        assert main([*words, str(tmp_path / folder)]) == 2
        err = capsys.readouterr().err
        assert (err.count("\n"), reason in err) == (1, True)
    assert os.listdir(tmp_path / "plots") == []


def test_load_refuses_one_file_for_trace_and_timeline(checkpoint, tmp_path):
    (tmp_path / "link").symlink_to("x")
    trace, timeline = tmp_path / "x", tmp_path / "link"
    with pytest.raises(ValueError, match="trace and timeline must be different files"):
        load(checkpoint, trace=trace, timeline=timeline)
    assert os.listdir(tmp_path) == ["link"]


@pytest.mark.parametrize("option", ["trace", "timeline"])
def test_a_loaded_model_holds_its_outputs(checkpoint, tmp_path, option):
    outputs: dict[str, Any] = {"trace": tmp_path / "t.npz", "timeline": tmp_path / "t.json"}
    held: Any = load(checkpoint, **{option: outputs[option]}).moe
    with held:
        with pytest.raises(CheckpointError, match="another process is writing"):
            load(checkpoint, **outputs)
        assert os.listdir(tmp_path) == [f"{outputs[option].name}.part"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", ["trace", "timeline"])
def test_load_refuses_an_output_that_is_a_file_of_the_checkpoint(checkpoint, option):
    file = checkpoint / "model.safetensors"
    before = file.read_bytes()
    with pytest.raises(ValueError, match=f"the {option} would replace"):
        load(checkpoint, **{option: file})  # type: ignore[arg-type]
    assert file.read_bytes() == before
