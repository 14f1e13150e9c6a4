"""What all commands share on the terminal: the session, the loading bar, tables.

Results go to stdout, everything else to stderr.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, MoERuntimeWarning

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

_NUMPY_BYTES = 512 << 20
TRANSFORMERS_BYTES = 3 << 29
"""Address space of a process that has imported numpy, and torch with transformers."""

_LONGEST_LINE = 1000
"""Characters of a message."""

_DOWNLOAD_LINE_S = 30.0
"""Seconds between two lines of a download that is slow."""
_GAP = 3
"""Characters between two columns of a table; one less of them stands around all."""

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, the bytes done and the bytes in total."""


@dataclass
class Session:
    """What the entry point must know about the running command.

    Attributes:
        debug: errors show a traceback.
        as_json: stdout carries exactly one JSON object.
        say: says what went wrong, with its line, where several processes run the command.
    """

    debug: bool = False
    as_json: bool = False
    say: Callable[[Exception, str], None] | None = None

    def begin(self, *, debug: bool, as_json: bool) -> None:
        """Notes the options of the command and silences the libraries below it."""
        require_address_space()
        self.debug = debug
        self.as_json = as_json
        if not debug:
            import warnings

            warnings.simplefilter("ignore")
            warnings.simplefilter("always", MoERuntimeWarning)
            warnings.showwarning = _show_warning

    def fail(self, error: Exception, message: str) -> None:
        """Shows the one line that an error gets."""
        sys.stdout.flush()
        if self.say is not None:
            self.say(error, message)
            return
        if launched_rank():
            # All processes were given the same words; the first one says what is wrong with them.
            return
        print(f"moe-runtime: error: {message}", file=sys.stderr)
        if self.as_json:
            print_json({"error": message})


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning of ours, as one line."""
    say_line(f"warning: {message}")


def require_address_space(num_bytes: int = _NUMPY_BYTES) -> None:
    """Refuses a limit on address space (``ulimit -v``) that libraries cannot be imported under.

    OpenBLAS tries for ever to get its buffers, and torch ends the process.

    Raises:
        CapacityError: the limit is below that many bytes.
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
    """Number of this process among those that `torchrun` started; None where it did not."""
    rank = os.environ.get("RANK")
    return int(rank) if rank and "TORCHELASTIC_RUN_ID" in os.environ else None


def say_line(text: str) -> None:
    """A line of the program on stderr: progress, or what it has to say beside its result."""
    print(f"moe-runtime: {one_line(text)}", file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    """The text without line breaks and without what a terminal would obey, cut where it is long."""
    words = " ".join(text.split())
    if len(words) > _LONGEST_LINE:
        half = _LONGEST_LINE // 2
        words = f"{words[:half]} ... {words[-half:]}"
    return _printable(words)


def _printable(text: str) -> str:
    """The text with escapes in the place of what a terminal would obey; line breaks stay."""
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


@contextlib.contextmanager
def loading_bar() -> Iterator[Progress]:
    """Shows a bar on stderr while the ``with`` block loads.

    Where stderr is no terminal, lines tell of downloads, and nothing of what is quick.
    """
    if not sys.stderr.isatty():
        lines = _DownloadLines()
        yield lines
        lines.end()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.table import Column

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column(ratio=1, no_wrap=True)),
        BarColumn(bar_width=10),
        DownloadColumn(True),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, expand=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda stage, done, total: bar.update(
            task, description=stage, completed=done, total=total or None
        )


class _DownloadLines:
    """A line at the start and end of a download, and one every tenth or half minute."""

    def __init__(self) -> None:
        self._total = self._shown = 0
        self._begun_s = self._shown_s = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
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
        """Tells that a download is whole, if one has begun."""
        if self._total:
            taken_s = time.monotonic() - self._begun_s
            say_line(f"downloaded {format_bytes(self._total)} in {taken_s:.0f} s")
        self._total = 0


def fetch_model(model: str, *, weights: bool = True) -> "Path":
    """Finds a checkpoint as ``find_checkpoint`` does, under a bar while it is downloaded."""
    from moe_runtime.checkpoints.model_files import find_checkpoint

    with loading_bar() as progress:
        return find_checkpoint(model, weights=weights, progress=progress)


def print_rows(title: str, rows: Sequence[tuple[str, str]], *, to_stderr: bool) -> None:
    """Prints a table of two columns: what, and its value."""
    print_table(title, [("", "left"), ("", "left")], rows, to_stderr=to_stderr)


def print_table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    *,
    to_stderr: bool = False,
) -> None:
    """Prints a table, without what a terminal would obey: names may come from anywhere.

    On a terminal too narrow for it there are several tables: each has the columns that come first
    and are aligned left, and as many of the others as fit. Numbers stay on one line, and words
    are not broken, but for those of more than half of the terminal.

    Args:
        title: a line above it.
        columns: header and alignment (``"left"`` or ``"right"``) of each column.
        rows: the cells, as many in each row as there are columns.
        to_stderr: for tables that are not the result of the command.
    """
    from rich.console import Console

    console = Console(stderr=to_stderr)
    num_labels = next((n for n, (_, align) in enumerate(columns) if align != "left"), len(columns))
    last = len(columns)
    if num_labels == last:  # words alone, which rich wraps
        console.print(_table(title, columns, rows, [None] * last))
        return
    least, most = _bounds(columns, rows, console.width // 2)

    def room(begin: int, end: int, labels: Sequence[int]) -> int:
        """What a table with some of the columns leaves of the terminal."""
        num_columns = num_labels + end - begin
        taken = sum(labels[:num_labels]) + sum(least[begin:end])
        return console.width - _GAP * num_columns + 1 - taken

    begin, is_whole = num_labels, room(num_labels, last, least) >= 0
    while begin < last:
        end = last
        while not is_whole and end > begin + 1 and room(begin, end, most) < 0:
            end -= 1
        spare, widths = room(begin, end, least), list[int | None]()
        shown = [*range(num_labels), *range(begin, end)]
        for number in shown:
            more = max(0, min(spare, most[number] - least[number]))
            is_folded = spare < 0 and number < num_labels
            widths.append(None if is_folded else least[number] + more)
            spare -= more
        console.print(
            _table(
                title if begin == num_labels else "",
                [columns[number] for number in shown],
                [[row[number] for number in shown] for row in rows],
                widths,
            )
        )
        begin = end


def _bounds(
    columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], longest_word: int
) -> tuple[list[int], list[int]]:
    """The least width of each column, with whole numbers and words, and that without a wrap.

    Words of labels that are longer than some length count as much.
    """
    from rich.cells import cell_len

    least, most = list[int](), list[int]()
    for (header, align), *cells in zip(columns, *rows, strict=True):
        texts = [_printable(cell) for cell in (header, *cells)]
        is_label = align == "left"
        words = max(map(cell_len, " ".join(texts if is_label else texts[:1]).split()), default=0)
        numbers = max(map(cell_len, texts[1:]), default=0)
        most.append(max(1, *map(cell_len, texts)))
        least.append(max(1, min(words, longest_word) if is_label else max(words, numbers)))
    return least, most


def _table(
    title: str,
    columns: Sequence[tuple[str, str]],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int | None],
) -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    has_header = any(header for header, _ in columns)
    table = Table(
        title=Text(_printable(title), style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD if has_header else box.SIMPLE,
        show_header=has_header,
        pad_edge=False,
    )
    for (header, align), width in zip(columns, widths, strict=True):
        table.add_column(
            _printable(header),
            justify="right" if align == "right" else "left",
            overflow="fold",
            width=width,
        )
    for row in rows:
        table.add_row(*(Text(_printable(cell)) for cell in row))
    return table
