"""The first snippets and commands of the README run as they stand, on the pocket model."""

import re
import shlex
from pathlib import Path

import pytest

from moe_runtime.cli.main import main
from moe_runtime.models.pocket import pocket_path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_snippet_runs(capsys: pytest.CaptureFixture[str]) -> None:
    snippet = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert '"path/to/checkpoint"' in snippet
    assert '"7GiB"' in snippet
    small = snippet.replace("path/to/checkpoint", str(pocket_path())).replace("7GiB", "64MiB")
    exec(compile(small, "README.md", "exec"), {})
    said = capsys.readouterr().out
    assert said.startswith("The experts are")
    assert "hits=" in said


def test_commands_that_need_only_a_model_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    lines = [
        'moe-runtime run MODEL -p "Hello" --trace trace.npz',
        "moe-runtime pack MODEL OUT --code none",
        "moe-runtime pack MODEL OUT --quantize int4",
    ]
    for number, line in enumerate(lines):
        assert line in page, line
        words = [str(pocket_path()) if word == "MODEL" else word for word in shlex.split(line)]
        words = [f"out{number}" if word == "OUT" else word for word in words]
        more = ["-n", "4"] if words[1] == "run" else []
        assert main([*words[1:], *more]) == 0, capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"trace.npz", "out1", "out2"}
