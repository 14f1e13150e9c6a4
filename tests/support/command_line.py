"""The program's commands, as its functions declare them."""

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from moe_runtime.cli.main import build_app


def all_commands() -> dict[str, Any]:
    """Every command with its name, those of groups as `group command`."""
    return dict(_commands(get_command(build_app()), ""))


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command
