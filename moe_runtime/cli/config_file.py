"""``--config FILE.toml``: a file whose keys are the names of a command's options."""

import tomllib
from pathlib import Path

import typer

from moe_runtime.config import nearest


def apply_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's values the defaults of the command's options; the command line wins.

    Keys are written as the options are, with ``-`` or ``_``.

    Raises:
        ValueError: the file is not TOML, or has a key that is no option.
        OSError: the file cannot be read.
    """
    if path is None:
        return None
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not a TOML file: {error}") from None
    values = {key.replace("-", "_"): value for key, value in entries.items()}
    known = {
        param.opts[0].removeprefix("--").replace("-", "_"): param.name
        for param in ctx.command.params
        if param.opts[0].startswith("--") and param.name not in ("config", "help")
    }
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{path}: unknown key {key!r}; {nearest(key, known)}")
        if isinstance(value, dict | list):
            raise ValueError(f"{path}: {key} must be a single value, got {value!r}")
    ctx.default_map = {known[key]: value for key, value in values.items()}
    return path
