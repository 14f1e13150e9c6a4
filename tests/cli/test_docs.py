"""The commands that a page shows are run as they stand there."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from moe_runtime.cli.main import main
from moe_runtime.lab.traces import read_trace
from moe_runtime.models.pocket import pocket_path

ROOT = Path(__file__).resolve().parents[2]


def test_from_recording_to_prefetching(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "prediction.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\n(printf .*?)```", page, re.DOTALL)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "pocket").symlink_to(pocket_path())
    monkeypatch.chdir(tmp_path)
    shown = []
    for line in block.splitlines():
        if not line.startswith("moe-runtime "):
            subprocess.run(["sh", "-c", line], check=True)
            continue
        assert main(shlex.split(line)[1:]) == 0, capsys.readouterr().err
        shown.append(capsys.readouterr().out)
    assert len(set(read_trace(tmp_path / "trace.npz").token_request.tolist())) == 5
    assert "combined" in shown[1]
    assert "modelled time" in shown[-1]


def test_one_prompt_does_not_suffice_and_the_error_says_what_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "one.npz")
    assert main(["run", str(pocket_path()), "-p", "Lists are", "-n", "9", "--trace", path]) == 0
    assert main(["predictor", "evaluate", path]) == 2
    assert "record more prompts, as `run --prompts FILE --trace` does" in capsys.readouterr().err
