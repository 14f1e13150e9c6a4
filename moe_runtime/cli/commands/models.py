"""``moe-runtime models``: list and remove the models in the hub's cache on this disk."""

import sys
from datetime import datetime
from typing import Annotated

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.strict import StrictCommand, expanded
from moe_runtime.config import format_bytes


def models_app() -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        help="Show and remove models of the hub that are on this disk.", no_args_is_help=True
    )
    app.command("list", cls=StrictCommand)(expanded(show))
    app.command(cls=StrictCommand)(expanded(remove))
    return app


def show(as_json: options.Json = False) -> None:
    """List the models in the hub's cache: family, format, size, and when each was last read."""
    from huggingface_hub import constants

    from moe_runtime.checkpoints.hub import cached_models, damage

    def used(seconds: float) -> datetime:
        return datetime.fromtimestamp(seconds).astimezone()

    found, unread = cached_models(), damage()
    num_bytes = sum(one.num_bytes + one.unfinished_bytes for one in found)
    if as_json:
        names = ("name", "family", "formats", "num_bytes", "unfinished_bytes", "revisions")
        described = [
            {
                **{name: getattr(one, name) for name in names},
                "last_used": used(one.used_s).isoformat("T", "seconds"),
                "folder": str(one.folder),
            }
            for one in found
        ]
        cache = str(constants.HF_HUB_CACHE)
        console.print_json(
            {"cache": cache, "num_bytes": num_bytes, "models": described, "damaged": unread}
        )
        return
    headers = [("model", "left"), ("family", "left"), ("format", "left")]
    columns = [*headers, ("on disk", "right"), ("last used", "right")]
    rows = []
    for one in found:
        size = format_bytes(one.num_bytes)
        if one.unfinished_bytes:
            size += f" + {format_bytes(one.unfinished_bytes)} unfinished"
        day = f"{used(one.used_s):%Y-%m-%d}"
        rows.append((one.name, one.family, " ".join(one.formats), size, day))
    title = f"{constants.HF_HUB_CACHE}: {len(found)} models, {format_bytes(num_bytes)}"
    if rows:
        console.print_table(title, columns, rows)
    else:
        console.say_line(f"no models in {constants.HF_HUB_CACHE}")
    for line in unread:
        console.say_line(f"damaged, to be removed by hand: {line}")


def remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    yes: Annotated[bool, typer.Option("--yes", "-y")] = False,
) -> None:
    """Remove models from the hub's cache; files that other revisions share stay.

    Args:
        names: OWNER/NAME, or OWNER/NAME@REVISION for one of its revisions.
        yes: Do not ask.
    """
    from moe_runtime.checkpoints.hub import removal_of

    num_bytes, removal = removal_of(names)
    what = f"{', '.join(names)}: {format_bytes(num_bytes)}"
    if not yes:
        if not sys.stdin.isatty():
            raise ValueError(f"{what} would be removed; give --yes: there is no terminal to ask")
        print(console.one_line(f"remove {what}? [y/N]"), end=" ", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            console.say_line("nothing was removed")
            raise typer.Exit(2)
    removal.execute()
    console.say_line(f"removed {what}")
