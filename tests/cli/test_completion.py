"""Shells complete commands, options and words; bash is asked, where there is one."""

import shutil
import subprocess

import pytest
from fixture_types import Capsys
from warm_python import warm_python

from moe_runtime.cli.main import main


def script(shell: str, capsys: Capsys) -> str:
    assert main(["--completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_asks_the_program(shell, capsys):
    assert f"_MOE_RUNTIME_COMPLETE=complete_{shell}" in script(shell, capsys)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["bench", "la"], {"latency", "layer"}),
        (["--completion", "z"], {"zsh"}),
        (["run", "model", "--host"], {"--host-memory"}),
        (["pack", "model", "out", "--code", "p"], {"planes"}),
        (["run", ""], set()),
    ],
)
def test_bash_completes(typed, expected, tmp_path, capsys):
    file = tmp_path / "completion.bash"
    file.write_text(script("bash", capsys), encoding="utf-8")
    words = " ".join(f"'{word}'" for word in ["moe-runtime", *typed])
    program = tmp_path / "moe-runtime"
    program.write_text(f'#!/bin/sh\nexec {warm_python()} -P -m moe_runtime.cli.program "$@"\n')
    program.chmod(0o755)
    ask = f"PATH={tmp_path}:$PATH; source {file}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; "
    ask += "_moe_runtime_completion moe-runtime; "
    done = subprocess.run(
        ["bash", "--norc", "-c", ask + 'printf "%s\\n" "${COMPREPLY[@]}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


def test_another_shell_is_refused(capsys):
    assert main(["--completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
