"""Output of all commands. Results go to stdout, everything else to stderr."""

import contextlib
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_runtime.config import CHOSE, format_bytes
from moe_runtime.errors import CapacityError, MoERuntimeWarning

if TYPE_CHECKING:
    from pathlib import Path

    from rich.progress import Progress as Bar


_NUMPY_BYTES = 512 << 20
TRANSFORMERS_BYTES = 3 << 29
"""Address space of a process that has imported numpy, and torch with transformers."""

_DOWNLOAD_LINE_S = 30.0
"""Seconds between two lines of a download that is slow."""
_LONGEST_LINE = 1000
"""Characters of a message."""

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the bytes done and the bytes in total."""


@dataclass
class Session:
    """The state of the running command.

    `words` are those of the command line. `say` reports an error when several processes run the
    command. `on_loaded` gets the models of `serve` before it announces them.
    """

    words: Sequence[str] = ()
    debug: bool = False
    as_json: bool = False
    say: Callable[[Exception, str], None] | None = None
    on_loaded: Callable[[Sequence[Any]], None] | None = None

    def begin(self, *, debug: bool, as_json: bool) -> None:
        """Takes the command's options and silences libraries."""
        require_address_space()
        self.debug = debug
        self.as_json = as_json
        if not debug:
            import warnings

            warnings.simplefilter("ignore")
            warnings.simplefilter("always", MoERuntimeWarning)
            said = set[str]()

            def show(message: Warning | str, *_: Any, **__: Any) -> None:
                if (text := f"warning: {message}") not in said:
                    said.add(text)
                    say_line(text)

            warnings.showwarning = show

    def fail(self, error: Exception, message: str) -> None:
        sys.stdout.flush()
        if self.say is not None:
            self.say(error, message)
            return
        if launched_rank():
            return  # all processes have the same words; the first one reports the error
        print(f"moe-runtime: error: {message}", file=sys.stderr)
        if self.as_json:
            print_json({"error": message})


def require_address_space(num_bytes: int = _NUMPY_BYTES) -> None:
    """Refuses a limit on address space (`ulimit -v`) that is too small to import libraries.

    OpenBLAS would retry for ever, and torch would end the process.
    """
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < num_bytes:
        raise CapacityError(
            f"address space is limited to {format_bytes(limit)} (ulimit -v), but the libraries "
            f"alone take {format_bytes(num_bytes, up=True)}; raise the limit",
            smallest_bytes=num_bytes,
        )


def launched_rank() -> int | None:
    """The rank of this process under `torchrun`; None without it."""
    rank = os.environ.get("RANK")
    return int(rank) if rank and "TORCHELASTIC_RUN_ID" in os.environ else None


def num_launched() -> int:
    """The number of processes that `torchrun` started; 1 without it."""
    return 1 if launched_rank() is None else int(os.environ.get("WORLD_SIZE", "1"))


def say_line(text: str) -> None:
    """Prints a line of the program on stderr."""
    print(f"moe-runtime: {one_line(text)}", file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """The text without line breaks and terminal escapes, cut in its middle if it is long."""
    words = " ".join(text.split())
    if len(words) > _LONGEST_LINE:
        half = _LONGEST_LINE // 2
        words = f"{words[:half]} ... {words[-half:]}"
    return _printable(words)


def _printable(text: str) -> str:
    """The text with control characters escaped, except line breaks."""
    return "".join(
        char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text
    )


def print_json(value: dict[str, Any]) -> None:
    """Prints one JSON object on stdout."""
    print(json.dumps(value, ensure_ascii=False, allow_nan=False), flush=True)


def quiet_transformers(session: Session) -> None:
    """Keeps the log lines and bars of transformers and huggingface_hub out of our output."""
    require_address_space(TRANSFORMERS_BYTES)
    if session.debug:
        return
    import huggingface_hub.utils as hub
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hub.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        hub.disable_progress_bars()


def terminal_bar(*columns: Any, **options: Any) -> "Bar":
    """A bar on stderr; arguments as of rich's `Progress`."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), **{"transient": True, **options})


@contextlib.contextmanager
def loading_bar() -> Iterator[Progress]:
    """Shows a bar on stderr while the `with` block loads; without a terminal lines of downloads."""
    if not sys.stderr.isatty():
        lines = _DownloadLines()
        yield lines
        lines.end()
        return
    from rich import progress
    from rich.table import Column

    columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),
        progress.BarColumn(bar_width=10),
        progress.DownloadColumn(True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(compact=True),
    )
    with terminal_bar(*columns, expand=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(stage: str, done: int, total: int) -> None:
            if stage.startswith(CHOSE):
                bar.console.print(_printable(f"moe-runtime: {stage}"), markup=False)
            else:
                bar.update(task, description=stage, completed=done, total=total or None)

        yield show


class _DownloadLines:
    """Prints a line at the start and end of a download, and every tenth of it or half minute."""

    def __init__(self) -> None:
        self._total = self._shown = 0
        self._begun_s = self._shown_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage.startswith(CHOSE):
            say_line(stage)
        if not stage.startswith("downloading"):
            self.end()
            return
        now_s = time.monotonic()
        if total != self._total:
            self.end()
            self._total, self._shown, self._begun_s, self._shown_s = total, done, now_s, now_s
            say_line(f"downloading {format_bytes(total)}")
        elif done - self._shown >= total / 10 or now_s - self._shown_s >= _DOWNLOAD_LINE_S:
            self._shown, self._shown_s = done, now_s
            say_line(f"downloaded {format_bytes(done)} of {format_bytes(total)}")

    def end(self) -> None:
        if self._total:
            taken_s = time.monotonic() - self._begun_s
            say_line(f"downloaded {format_bytes(self._total)} in {taken_s:.0f} s")
        self._total = 0


def fetch_model(model: str, *, weights: bool = True) -> "Path":
    """``find_checkpoint`` with a bar for downloads."""
    from moe_runtime.checkpoints.opening import find_checkpoint

    with loading_bar() as progress:
        return find_checkpoint(model, weights=weights, progress=progress)


def print_parts(title: str, parts: Sequence[tuple[str, bool]]) -> None:
    """Prints a text on stdout; chosen parts are green on a terminal, else in double brackets."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    shown = Text(f"{_printable(title)}: ", style="bold")
    for text, is_chosen in parts:
        marks = ("[[", "]]") if is_chosen and not console.is_terminal else ("", "")
        style = "not bold green" if is_chosen else "not bold"
        shown.append(f"{marks[0]}{_printable(text)}{marks[1]}", style)
    console.print(shown, soft_wrap=True)


def print_facts(title: str, facts: dict[str, Any], *, as_json: bool) -> None:
    """Prints facts on stdout as one JSON object or as a table."""
    if as_json:
        print_json(facts)
    else:
        print_rows(title, [(name, str(fact)) for name, fact in facts.items()], to_stderr=False)


def print_rows(title: str, rows: Sequence[tuple[str, str]], *, to_stderr: bool) -> None:
    print_table(title, [("", "left"), ("", "left")], rows, to_stderr=to_stderr)


def print_table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    *,
    to_stderr: bool = False,
) -> None:
    """Prints a table; `columns` are header and alignment ("left" or "right") of each.

    On a narrow terminal each row becomes a list: a line for the left-aligned first cells, and one
    for each other cell.
    """
    from rich import box
    from rich.cells import cell_len
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(stderr=to_stderr)
    has_header = any(header for header, _ in columns)
    table = Table(
        title=Text(_printable(title), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD if has_header else box.SIMPLE,
        show_header=has_header,
        pad_edge=False,
    )
    for (header, align), *cells in zip(columns, *rows, strict=True):
        texts = [_printable(text) for text in (header, *cells)]
        if align == "left":
            longest = max(map(cell_len, " ".join(texts).split()), default=0)
            width = min(longest, console.width // 2)
            table.add_column(texts[0], overflow="fold", min_width=width)
            continue
        # headers wrap: a column is as wide as its longest number or word
        width = max(map(cell_len, (*texts[0].split(), *texts[1:], " ")))
        lines = textwrap.wrap(texts[0], width)
        table.add_column("\n".join(lines), justify="right", no_wrap=True, min_width=width)
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    num_labels = next((n for n, (_, align) in enumerate(columns) if align != "left"), len(columns))
    least = console.measure(table, options=console.options.update(width=_LONGEST_LINE)).minimum
    if num_labels == len(columns) or least <= console.width:
        console.print(table)
        return
    console.print(table.title)
    for row in rows:
        console.print(Text(_printable("  ".join(row[:num_labels]))))
        for (header, _), cell in list(zip(columns, row, strict=True))[num_labels:]:
            console.print(Text(_printable(f"  {header}: {cell}")))
