"""Whatever is wrong with its input, a command ends with one line and exit code 2."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import bad_input_words
import numpy as np
import pytest
from warm_python import warm_python

from moe_runtime.cli.main import describe, main
from moe_runtime.lab.traces import Trace
from moe_runtime.lab.traces.format import write_trace
from moe_runtime.types import ModelSignature

SCRIPT = Path(__file__).resolve().parents[1] / "bad_input.py"
PROGRAM = [sys.executable, "-P", "-m", "moe_runtime.cli.program"]


def test_every_command_is_given_bad_input():
    bad_input_words.commands()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_thousand_bad_inputs_end_in_one_line_or_in_success(seed):
    words = [warm_python(), "-P", str(SCRIPT), "--seed", seed, "--cases", "1000"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "FILE"),
        ("replay", "FILE", "--num-experts", "8"),
        ("report", "FILE", "-o", "page.html"),
        ("place", "FILE", "--gpus", "2"),
        ("predictor", "evaluate", "FILE"),
        ("train", "FILE"),
        ("simulate", "layer", "--machine", "FILE"),
        ("run", "MODEL", "-p", "The", "--config", "FILE"),
        ("run", "MODEL", "-p", "The", "-n", "1", "--placement", "FILE"),
        ("run", "MODEL", "-p", "The", "-n", "1", "--predictor", "./FILE"),
    ],
)
def test_files_without_an_end_are_refused_unread(words, checkpoint, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    endless = {name: Path(name) for name in ("zero.npz", "zero.json", "zero.jsonl", "zero.toml")}
    for path in endless.values():
        path.symlink_to("/dev/zero")
    os.mkfifo("pipe.npz")
    for name in (*endless, "pipe.npz"):
        given = {"FILE": name, "./FILE": f"./{name}", "MODEL": str(checkpoint)}
        line = refused(*(given.get(word, word) for word in words))
        assert "a pipe, socket or device, expected a regular file" in line
    assert sorted(os.listdir()) == sorted([*endless, "pipe.npz"])


def test_a_prompt_without_an_end_is_refused(checkpoint, refused):
    line = refused("run", str(checkpoint), "--prompt-file", "/dev/zero")
    assert "/dev/zero: larger than 64 MiB" in line


@pytest.mark.parametrize("command", [["inspect"], ["run", "-p", "The"]])
def test_a_mistyped_folder_is_refused_with_the_nearest_one(
    command, checkpoint, refused, monkeypatch, tmp_path
):
    import huggingface_hub

    asked = []

    def model_info(self: object, repository: str, *, timeout: float, **_: object) -> None:
        asked.append((repository, timeout))
        raise ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    (tmp_path / "models" / "pocket").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    line = refused(*command, "models/pockett")
    assert "neither a directory nor a repository to download: " in line
    assert "no route to host; did you mean models/pocket?" in line
    assert len(asked) == 1  # not six times, with pauses between
    assert asked[0][1] <= 10
    assert "did you mean" in refused(*command, str(tmp_path / "models" / "pockett"))


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role\nnot supported') }}", "System role not supported"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[7].content }}", "UndefinedError"),
    ],
)
def test_a_chat_template_that_raises_is_the_checkpoints_fault(
    template, reason, checkpoint, tmp_path, refused
):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text()) | {"chat_template": template}
    file.unlink()
    file.write_text(json.dumps(settings))
    line = refused("run", str(tmp_path), "-p", "The", "--chat", "-n", "1")
    assert "this model's chat template cannot be used" in line
    assert reason in line


def shell(command: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command of the shell in which ``"$@"`` is the program."""
    return subprocess.run(
        ["sh", "-c", command, "sh", *PROGRAM, *words], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("command", "code", "line"),
    [
        ('"$@" >&-', 2, "moe-runtime: error: stdout is closed, so there is no place for results"),
        ('"$@" 2>&-', 0, ""),
        ('"$@" <&-', 0, ""),
        ('"$@" >&- 2>&- <&-', 2, ""),
        ('"$@" >&- 2>/dev/full', 2, ""),
        ('"$@" >/dev/full', 2, "moe-runtime: error: stdout cannot be written: No space left"),
        ('{ "$@"; echo $? >&2; } | true', 0, "141"),
        ('{ PYTHONUNBUFFERED=1 "$@"; echo $? >&2; } | true', 0, "141"),
    ],
)
def test_streams_that_are_closed_or_full(command, code, line):
    done = shell(command, "predictor", "list")
    assert done.returncode == code
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == bool(line)


def test_only_a_stream_that_cannot_be_written_is_blamed(monkeypatch, capsys):
    """An unnamed file may be full as well, and another pipe's reader may be gone."""

    def fail(number: int) -> None:
        raise OSError(number, os.strerror(number))

    for number in (errno.ENOSPC, errno.EPIPE):
        monkeypatch.setattr("moe_runtime.cli.main._command", lambda number=number: fail(number))
        assert main(["doctor"]) == 2
        assert capsys.readouterr().err == f"moe-runtime: error: {os.strerror(number)}\n"


@pytest.mark.parametrize("end", ["2>/dev/full", "2>&-", "2>&1 >/dev/null | true"])
def test_messages_that_are_lost_fail_nothing(tmp_path, end):
    """The table of `run` among them; what the command is for, and its exit code, are there."""
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import sys, warnings\n"
        "import moe_runtime.cli.main as cli\n"
        "from moe_runtime.cli.console import print_rows\n"
        "from moe_runtime.cli.program import program\n"
        "def main():\n"
        "    for _ in range(2000):\n"
        "        print('a message', file=sys.stderr)\n"
        "    print_rows('what the runtime did', [('hits', '1')], to_stderr=True)\n"
        "    open(sys.argv[1], 'w').write('done')\n"
        "    return 0\n"
        "cli.main = main\n"
        "sys.exit(program())\n"
    )
    done, code = tmp_path / "done", tmp_path / "code"
    words = ["sh", "-c", f'{{ "$@"; echo $? > {code}; }} {end}', "sh", sys.executable, "-P"]
    found = subprocess.run([*words, str(starter), str(done)], capture_output=True, check=False)
    assert (found.stdout, found.stderr) == (b"", b"")
    assert (code.read_text(), done.read_text()) == ("0\n", "done")


def test_an_interrupted_import_is_quiet(tmp_path):
    """Whichever module it comes in; ours, or one that has parts in C."""
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import os, signal, sys\n"
        "where = sys.argv.pop(1)\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == where:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from moe_runtime.cli.program import program\n"
        "sys.exit(program())\n"
    )
    for module in ("typer", "moe_runtime.cli.main", "numpy", "numpy.linalg"):
        done = subprocess.run(
            [sys.executable, "-P", str(starter), module, "replay", "none.npz"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", ""), module


def test_an_error_that_a_library_makes_of_ctrl_c_is_not_reported(capsys, monkeypatch, tmp_path):
    def reading(path: Path, **options: object) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    monkeypatch.setattr("moe_runtime.lab.traces.readers.read_any_trace", reading)
    assert main(["replay", str(tmp_path / "none.npz")]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "error",
    [
        ImportError("libtorch_cpu.so: failed to map segment from shared object"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_a_lack_of_memory_is_no_bug_of_ours(error):
    code, line = describe(error)
    assert code == 2
    assert "memory could not be allocated" in line


@pytest.mark.parametrize("kib", [100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_too_little_address_space_is_refused_before_libraries_hang(kib, checkpoint):
    done = shell(f'ulimit -v {kib}; exec "$@"', "run", str(checkpoint), "-p", "The", "-n", "1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("moe-runtime: error: address space is limited to ")
    assert done.stderr.count("\n") == 1


def test_a_message_is_one_printable_line_of_bounded_length():
    code, line = describe(ValueError("a\nb\x1b[31m" + "x" * 100_000 + "the end"))
    assert code == 2
    assert line.startswith("a b\\x1b[31mxxx")
    assert line.endswith("the end")
    assert len(line) < 1100


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "MODEL", "--host-memory", "9" * 400),
        ("run", "MODEL", "-p", "The", "--host-memory", "9" * 400 + ".5"),
        ("run", "MODEL", "-p", "The", "--device-memory", "9999999999GiB"),
        ("doctor", "--read-size", "9" * 400),
        ("replay", "TRACE", "--bandwidth", "9" * 400 + "GB"),
        ("run", "MODEL", "-p", "The", "--temperature", "1e-40"),
        ("run", "MODEL", "-p", "The", "--temperature", "nan"),
        ("run", "MODEL", "-p", "The", "--temperature", "1", "--top-p", "nan"),
        ("place", "TRACE", "--gpus", "2", "--fit", "inf"),
        ("replay", "TRACE", "--bandwidth", "3GB", "--latency", "inf"),
        ("simulate", "layer", "--zipf", "nan"),
    ],
)
def test_numbers_beyond_all_bounds(words, checkpoint, tmp_path, refused):
    given = {"MODEL": str(checkpoint), "TRACE": str(tmp_path / "none.npz")}
    refused(*(given.get(word, word) for word in words))


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "TRACE", "--capacity", "50%"),
        ("replay", "TRACE", "--capacity", "50%", "--bandwidth", "3GB"),
        ("report", "TRACE", "-o", "page.html"),
        ("place", "TRACE", "--gpus", "2", "-o", "map.json"),
        ("predictor", "fit", "TRACE", "-o", "new.npz"),
        ("predictor", "evaluate", "TRACE"),
    ],
)
def test_a_trace_without_a_recorded_choice(words, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ids = np.full((6, 2, 2), 255, np.uint8)
    trace = Trace(
        version=1,
        signature=ModelSignature(
            model_type="none", num_layers=2, num_experts=8, top_k=2, vocab_size=9
        ),
        step_phase=np.ones(6, np.uint8),
        step_start=np.arange(7),
        token_request=np.zeros(6, np.int32),
        token_id=np.zeros(6, np.int32),
        token_position=np.arange(6, dtype=np.int32),
        expert_ids=ids,
        gate_weights=np.zeros(ids.shape, np.float16),
    )
    write_trace("absent.npz", trace)
    line = refused(*({"TRACE": "absent.npz"}.get(word, word) for word in words))
    assert "holds 6 tokens, but no expert of any of them was recorded" in line
    assert os.listdir() == ["absent.npz"]


def test_finetuning_looks_at_the_settings_before_it_trains(checkpoint, tmp_path, refused):
    """They are copied at the end; one of 40 GiB took minutes and the disk."""
    model = tmp_path / "model"
    model.mkdir()
    for file in checkpoint.iterdir():
        (model / file.name).symlink_to(file)
    (model / "generation_config.json").unlink(missing_ok=True)
    with (model / "generation_config.json").open("wb") as file:
        file.truncate(40 << 30)
    (tmp_path / "text.txt").write_text("The store reads an expert from the disk. " * 40)
    words = ["finetune", str(model), str(tmp_path / "text.txt"), "-o", str(tmp_path / "tuned")]
    line = refused(*words, "--context", "16", "--sequences", "1", "--dry-run")
    assert "generation_config.json: larger than 64 MiB" in line
    assert not (tmp_path / "tuned").exists()
