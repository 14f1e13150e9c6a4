"""Completion of the command line in a shell, written from the parser: Tab starts no Python.

The scripts know commands, options, and the words of options that take one of a few; everything else
is completed as the name of a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

Shell = Literal["bash", "zsh", "fish"]
_PROGRAM = "moe-runtime"

_BASH = """\
_moe_runtime() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} name=${COMP_WORDS[1]} words=
  if [ "$COMP_CWORD" = 1 ]; then name=; fi
  case "$name" in
    -*) name= ;;
    %(groups)s) if [ "$COMP_CWORD" -gt 2 ]; then name="$name ${COMP_WORDS[2]}"; fi ;;
  esac
  case "$name/$prev" in
%(values)s
    *) case "$name" in
%(options)s
    esac
    case "$name/$cur" in
      /*|%(group_words)s|*/-*) ;;
      *) words= ;;
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _moe_runtime moe-runtime
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
"""zsh reads completions of bash; what ``complete`` means there is loaded first."""


def completion_script(shell: Shell, app: Any) -> str:
    """The script that makes a shell complete the program's words.

    Args:
        shell: whose script.
        app: the program's group of commands, as ``typer.main.get_command`` makes it.
    """
    commands = dict(_commands_of(app, ""))
    if shell == "fish":
        return _fish(app, commands)
    script = _bash(app, commands)
    return _ZSH + script if shell == "zsh" else script


def _commands_of(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands_of(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _groups(app: Any) -> dict[str, list[str]]:
    """Commands of each group of commands."""
    found = app.commands.items()
    return {name: list(group.commands) for name, group in found if hasattr(group, "commands")}


def _options(command: Any) -> list[Any]:
    return [param for param in command.params if param.param_type_name == "option"]


def _names(option: Any) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def _words(option: Any) -> list[str]:
    """The words that an option takes, where they are a few."""
    kind = option.type_descriptor.annotation
    kinds = (kind, *get_args(kind))
    found = next((one for one in kinds if get_origin(one) is Literal), None)
    return list(map(str, get_args(found)))


def _bash(app: Any, commands: dict[str, Any]) -> str:
    groups = _groups(app)
    options = {"": [*app.commands, *(name for one in _options(app) for name in _names(one))]}
    options.update(groups)
    values = []
    for name, command in {"": app, **commands}.items():
        if name:
            found = [word for one in _options(command) for word in _names(one)]
            options[name] = [*dict.fromkeys([*found, "--help"])]
        for option in _options(command):
            words = " ".join(_words(option))
            values += [f'"{name}/{word}") words="{words}" ;;' for word in option.opts if words]
    lines = [f'"{name}") words="{" ".join(words)}" ;;' for name, words in options.items()]
    return _BASH % {
        "groups": "|".join(groups),
        "group_words": "|".join(f"{name}/*" for name in groups),
        "values": "\n".join(f"    {line}" for line in values),
        "options": "\n".join(f"      {line}" for line in lines),
    }


def _fish(app: Any, commands: dict[str, Any]) -> str:
    groups = _groups(app)
    lines = [f"complete -c {_PROGRAM} -n __fish_use_subcommand -f -a '{' '.join(app.commands)}'"]
    for name, words in groups.items():
        seen = f"__fish_seen_subcommand_from {name}; and not "
        seen += f"__fish_seen_subcommand_from {' '.join(words)}"
        lines.append(f"complete -c {_PROGRAM} -n '{seen}' -f -a '{' '.join(words)}'")
    for name, command in {"": app, **commands}.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        for option in _options(command):
            words = " ".join(_words(option))
            for spelled in _names(option):
                kind = "-l" if spelled.startswith("--") else "-s"
                line = f"complete -c {_PROGRAM} -n '{seen or '__fish_use_subcommand'}'"
                line += f" {kind} {spelled.lstrip('-')}"
                if words:
                    line += f" -x -a '{words}'"
                elif not option.is_flag:
                    line += " -r"
                lines.append(line)
    return "\n".join(lines) + "\n"
