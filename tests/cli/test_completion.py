"""Shells complete commands, options and words; bash is asked, where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import all_commands

from moe_runtime.cli.main import main

COMMANDS = all_commands()


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["--completion", shell]) == 0
    return capsys.readouterr().out


def spelled() -> list[str]:
    return [
        name
        for command in COMMANDS.values()
        for param in command.params
        if param.param_type_name == "option"
        for name in param.opts
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_there(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = set(script(shell, capsys).replace("'", " ").replace('"', " ").split())
    for name in COMMANDS:
        assert words.issuperset(name.split())
    for option in spelled():
        assert (option.lstrip("-") if shell == "fish" else option) in words


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["ru"], {"run"}),
        (["bench", "la"], {"latency", "layer"}),
        (["--ver"], {"--version"}),
        (["--completion", "z"], {"zsh"}),
        (["run", "model", "--host"], {"--host-memory"}),
        (["bench", "latency", "model", "--prec"], {"--precision"}),
        (["pack", "model", "out", "--code", "p"], {"planes"}),
        (["run", ""], set()),
    ],
)
def test_bash_completes(
    typed: list[str], expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "completion.bash"
    file.write_text(script("bash", capsys), encoding="utf-8")
    words = " ".join(f"'{word}'" for word in ["moe-runtime", *typed])
    ask = f"source {file}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _moe_runtime; "
    done = subprocess.run(
        ["bash", "--norc", "-c", ask + 'printf "%s\\n" "${COMPREPLY[@]}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--completion", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err
