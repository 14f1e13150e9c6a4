"""``--config FILE.toml``: a file whose keys are the names of a command's options."""

from pathlib import Path
from typing import Any

import typer

from moe_runtime.config import nearest
from moe_runtime.files import at_home, read_toml


def apply_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's values the defaults of the command's options; the command line wins.

    Keys are written as the options are, with ``-`` or ``_``.

    Raises:
        ValueError: the file is not TOML, or has a key that is no option.
        OSError: the file cannot be read.
    """
    if path is None:
        return None
    path = Path(at_home(str(path)))
    values = {key.replace("-", "_"): value for key, value in read_toml(path).items()}
    known = {
        param.opts[0].removeprefix("--").replace("-", "_"): param
        for param in ctx.command.params
        if param.opts[0].startswith("--") and param.name not in ("config", "help")
    }
    defaults = {}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}; {nearest(key, known)}")
        defaults[known[key].name] = _as_given(known[key], value, f"{path}: {key}")
    ctx.default_map = defaults
    return path


def _as_given(option: Any, value: object, name: str) -> bool | str | list[str]:
    """A value of the file as the words of a command line would give it.

    Raises:
        ValueError: it is none that the option can have.
    """
    if getattr(option, "is_flag", False):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return value
    values = value if isinstance(value, list) and getattr(option, "multiple", False) else [value]
    if any(isinstance(one, dict | list | bool) for one in values):
        raise ValueError(f"{name} must be a single value, got {value!r}")
    # As text, so that 3.5 is as little a whole number as on the command line.
    words = [str(one) for one in values]
    return words if getattr(option, "multiple", False) else words[0]
