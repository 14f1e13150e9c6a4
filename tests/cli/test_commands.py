"""The command line as a whole: help, first screen, exit codes, inspect and doctor."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fixture_types import Patch

from moe_runtime.cli.commands import doctor as machine
from moe_runtime.cli.disk import measure_disk
from moe_runtime.cli.main import describe, main
from moe_runtime.errors import CheckpointError
from moe_runtime.inference.inspection import CheckpointSummary
from moe_runtime.types import ModelSignature

COMMANDS = ("run", "inspect", "doctor", "replay", "train")


def test_alone_it_shows_where_to_begin(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert f"moe-runtime {command}" in out
    assert len(out.splitlines()) < 24


def test_version(capsys):
    from importlib.metadata import version

    from moe_runtime.kernels.native import describe

    assert main(["--version"]) == 0
    first, native, libraries = capsys.readouterr().out.splitlines()
    assert first.startswith(f"moe-runtime {version('moe-runtime')}")
    assert str(describe().isa or describe().problem) in native
    assert f"torch {version('torch')}, transformers {version('transformers')}" in libraries

    # A command after it is not begun.
    assert main(["--version", "--json", "run"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["version"] == version("moe-runtime")
    assert found["native"]["isa"] == describe().isa
    # A machine runs a part of what was built, the fastest of it.
    usable, built = found["native"]["usable"], found["native"]["built"]
    assert [isa for isa in built if isa in usable] == usable
    assert found["versions"]["python"] == platform.python_version()


@pytest.mark.parametrize("group", ["bench", "predictor"])
def test_a_group_alone_shows_its_help(group, capsys):
    assert main([group]) == 2
    out, err = capsys.readouterr()
    assert f"moe-runtime {group} [OPTIONS] COMMAND" in out
    assert err == ""


def test_json_alone_is_no_command(capsys):
    assert main(["--json"]) == 2
    assert "--json comes after the command's name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "Did you mean 'run'?"),
        (["run"], "MODEL"),
        (["inspect"], "MODEL"),
        (["doctor", "--read-siz", "1MiB"], "--read-size"),
        (["doctor", "--read-size", "big"], "--read-size: expected a size such as 7GiB"),
        (["doctor", "--read-size", "1"], "--read-size"),
        (["doctor", "no/such/place"], "no such file"),
        (["inspect", "x", "--host-memory", "0.5"], "--host-memory must be a size"),
        (["inspect", "x", "--host-memory", "2.0"], "size with its unit, such as 7GiB"),
        (["bench", "latency", "x", "--cap", "2"], "--cap: expected a size with its unit"),
        (["--jsn"], "--jsn"),
        (["inspect", ""], "got no name"),
        (["replay", ""], "TRACE: is empty"),
        (["run", "m", "--prompt-file", ""], "--prompt-file: is empty"),
    ],
)
def test_wrong_words_get_one_line(words, message, refused):
    assert message in refused(*words)


def test_help_is_quick_because_nothing_heavy_is_imported():
    """Asserted on what is imported, not on seconds: those depend on what else runs here."""
    program = (
        "import sys; from moe_runtime.cli.main import main; code = main(['run', '--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'huggingface_hub'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, capture_output=True)


def test_errors_of_the_hub_and_of_files_are_not_called_bugs():
    from huggingface_hub.errors import RepositoryNotFoundError

    assert describe(CheckpointError("a\nb")) == (2, "a b")
    assert describe(FileNotFoundError(2, "No such file", "x.txt")) == (2, "x.txt: No such file")
    assert issubclass(RepositoryNotFoundError, OSError)
    allocation = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 9 bytes")
    assert describe(allocation)[0] == 2
    code, message = describe(ZeroDivisionError("division by zero"))
    assert code == 1
    assert message.startswith("ZeroDivisionError: division by zero")


def summary_of(path: str, **_: object) -> CheckpointSummary:
    """A checkpoint of 4 layers with 8 experts of 100 bytes each."""
    return CheckpointSummary(
        path=Path(path),
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        num_layers=4,
        num_experts=8,
        total_experts=32,
        top_k=2,
        expert_dtype="bfloat16",
        bits_per_weight=16.0,
        dense_bytes=1000,
        embedding_bytes=0,
        expert_bytes=3200,
        bytes_per_expert=100,
        slot_bytes=100,
        stand_in_bytes=0,
        draft_bytes=0,
        reserve_bytes=500,
        max_tokens=4096,
        token_bytes=1,
        known_tokens=None,
        context_step_bytes=1024,
        signature=ModelSignature(
            model_type="olmoe", num_layers=4, num_experts=8, top_k=2, vocab_size=100
        ),
    )


@pytest.fixture
def fake_summary(monkeypatch: Patch) -> None:
    monkeypatch.setattr("moe_runtime.inference.inspection.inspect_checkpoint", summary_of)
    monkeypatch.setattr("moe_runtime.cli.commands.inspect._quantisations", lambda _: {})


@pytest.mark.usefixtures("fake_summary")
def test_inspect_says_what_a_budget_buys(capsys):
    assert main(["inspect", "some/model", "--json", "--host-memory", "2500B"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["path"] == "some/model"
    assert summary["num_experts"] == 8
    bought = {row["budget_bytes"]: row["expert_slots"] for row in summary["budgets"]}
    # Smallest; an eighth, a quarter, half, three quarters, all of 32 experts; the asked one.
    assert bought == {1700: 2, 1900: 4, 2300: 8, 2500: 10, 3100: 16, 3900: 24, 4700: 32}
    shares = {row["budget_bytes"]: row["resident_share"] for row in summary["budgets"]}
    assert shares[4700] == 1.0
    assert shares[3100] == 0.5
    assert summary["auto"]["budget"] == "2.442 KiB"
    assert summary["auto"]["policy"] == "lru"
    assert "0 steps of this model were seen" in summary["auto"]["reason"]


@pytest.mark.usefixtures("fake_summary")
def test_inspect_shows_tables(capsys):
    assert main(["inspect", "some/model", "--host-memory", "1600B"]) == 0
    out = capsys.readouterr().out
    assert "4 layers of 8, 2 of them for each token" in out
    assert "1.661 KiB" in out
    assert "too small" in out
    assert "100%" in out
    assert "what --policy auto takes" not in out  # nothing can be chosen for what is too small


@pytest.mark.usefixtures("fake_summary")
def test_inspect_says_how_fast_memory_and_disk_let_it_be(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("moe_runtime.cli.commands.inspect.measure_memory", lambda: 18_000.0)
    disk = SimpleNamespace(direct_bytes_per_s=None, buffered_bytes_per_s=100.0)
    monkeypatch.setattr("moe_runtime.cli.commands.inspect.measure_disk", lambda *_, **__: disk)
    assert main(["inspect", "some/model", "--json", "--speed", "--host-memory", "1500B"]) == 0
    found = json.loads(capsys.readouterr().out)
    rates = {row["budget_bytes"]: row.get("even_tokens_per_s") for row in found["budgets"]}
    assert rates[1500] is None  # too small
    # A token reads 1000 bytes of dense weights and 800 of experts, half of them from the disk.
    assert rates[3100] == pytest.approx(1 / (1800 / 18_000 + 400 / 100))
    assert rates[4700] == found["this_machine"]["even_tokens_per_s"] == pytest.approx(10)
    assert main(["inspect", "some/model", "--speed", "--host-memory", "1500B"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "100% of the experts fit" in out


def test_doctor_reports_every_area(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("moe_runtime.cli.disk._SCRATCH_BYTES", 1 << 22)
    monkeypatch.setattr("moe_runtime.cli.disk._SCRATCH_BLOCK_BYTES", 1 << 20)
    assert main(["doctor", str(tmp_path), "--read-size", "64KiB", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    names = {finding["name"] for finding in report["findings"]}
    assert names >= {"python", "packages", "processor", "native kernel", "gpu", "triton", "memory"}
    assert {"disk", "quantised experts"} <= names
    for finding in report["findings"]:
        assert finding["status"] in ("ok", "note")
        assert bool(finding["advice"]) == (finding["status"] == "note")
    assert os.listdir(tmp_path) == []


def test_doctor_says_what_to_do_when_something_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(machine, "_REQUIRED", ("numpy", "not-installed-anywhere"))
    (tmp_path / "tiny").write_bytes(b"x")
    assert main(["doctor", str(tmp_path / "tiny")]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "PROBLEM packages missing: not-installed-anywhere" in out
    assert "pip install not-installed-anywhere" in out
    assert "too few for reads" in out


def test_disk_speed_reads_a_large_file_that_is_there(tmp_path):
    file = tmp_path / "shard.safetensors"
    file.write_bytes(os.urandom(1 << 20))
    (tmp_path / "small").write_bytes(b"x")
    speed = measure_disk(tmp_path, read_bytes=10_000, seconds=0.1)
    assert speed.path == file
    assert speed.read_bytes == 12288
    assert speed.buffered_bytes_per_s > 0
    assert speed.direct_bytes_per_s is None or speed.direct_bytes_per_s > 0


def test_an_option_that_takes_one_value_is_not_given_twice(refused):
    line = refused("replay", "none.npz", "--policy", "lru", "--policy", "sieve")
    assert "--policy: expected once, got 2 times; give it once, with commas between" in line
    many = ["--set", "run.steps=1", "--set", "run.steps=2", "--dry-run", "--dry-run"]
    assert "none.npz" in refused("train", "none.npz", *many)
