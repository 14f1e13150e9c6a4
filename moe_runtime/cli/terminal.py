"""A conversation in a terminal: an editor for messages, and answers as markdown."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import platformdirs
from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from moe_runtime.cli.stopping import without_control

_REDRAW_S = 0.1


def typed_messages(commands: Sequence[str], status: Callable[[], str]) -> Iterator[str]:
    """Messages that are typed or pasted, until Ctrl-D.

    Enter sends, Alt-Enter begins a line, and pasted text keeps its lines. Ctrl-R searches the
    history, also of earlier conversations. ``status`` is a line below.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()
    is_warned = False

    @keys.add("enter", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    @keys.add("c-j")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c", filter=~is_searching)
    def _(event: KeyPressEvent) -> None:
        nonlocal is_warned
        if event.current_buffer.text:
            event.current_buffer.reset()
        elif is_warned:
            event.app.exit(exception=KeyboardInterrupt)
        is_warned = not is_warned

    def below() -> str:
        nonlocal is_warned
        is_warned = is_warned and not session.default_buffer.text
        return "Ctrl-C once more leaves" if is_warned else status()

    session: PromptSession[str] = PromptSession(
        "> ",
        multiline=True,
        key_bindings=keys,
        history=_history(),
        completer=WordCompleter(list(commands), sentence=True),
        complete_while_typing=False,
        bottom_toolbar=below,
        # without a terminal on stdout, the editor would not redraw
        output=None if sys.stdout.isatty() else create_output(always_prefer_tty=True),
    )
    # no warning if a terminal does not report the cursor's position
    session.app.renderer.cpr_not_supported_callback = lambda: None
    with contextlib.suppress(EOFError):
        while True:
            yield session.prompt()


def _history() -> Any:
    """The user's history in a file; in memory if the file cannot be written."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    path = Path(platformdirs.user_state_dir("moe-runtime")) / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError:
        return InMemoryHistory()
    return FileHistory(path)


class MarkdownOutput:
    """Draws an answer as markdown while it comes, above a status line.

    Finished blocks are drawn once; the last block is redrawn.
    """

    def __init__(self, terminal: Console, status: Callable[[], str]) -> None:
        self._status = status
        self._text = self._note = ""
        self._is_first = True
        self._drawn_s = 0.0
        self._console = terminal
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            transient=True,
            get_renderable=self._unfinished,
        )
        self._live.start(refresh=True)

    @classmethod
    def of_stdout(cls, status: Callable[[], str]) -> "MarkdownOutput | None":
        """Output on stdout; None if stdout is not a terminal, or cannot redraw."""
        terminal = Console(highlight=False)
        if not terminal.is_terminal or terminal.is_dumb_terminal:
            return None
        return cls(terminal, status)

    def write(self, piece: str) -> None:
        self._text += without_control(piece)
        if "\n" in piece:
            self._draw(self._text[: _num_finished(self._text)])
        self.redraw()

    def redraw(self) -> None:
        """Redraws the last block, at most ten times a second."""
        now_s = time.monotonic()
        if now_s - self._drawn_s >= _REDRAW_S:
            self._drawn_s = now_s
            self._live.refresh()

    def say(self, text: str) -> None:
        """Shows a message instead of the status."""
        self._note = text

    def end_line(self) -> None:
        self._draw(self._text)
        self._live.stop()

    def _draw(self, text: str) -> None:
        self._text = self._text[len(text) :]
        for line in self._lines(text):
            self._console.print(Segments(line), end="")
            self._is_first = False

    def _lines(self, text: str) -> list[Any]:
        """The lines of a text, each a list of segments, after an empty line."""
        lines = self._console.render_lines(_markdown(text), pad=False, new_lines=True)
        is_full = [any(part.text.strip() for part in line) for line in lines]
        if not any(is_full):
            return []
        end = len(lines) - is_full[::-1].index(True)
        gap = [] if self._is_first else [[Segment.line()]]
        return [*gap, *lines[is_full.index(True) : end]]

    def _unfinished(self) -> Any:
        """The end of the last block, and the status."""
        status = Text(self._note or self._status(), style="dim", no_wrap=True, overflow="ellipsis")
        lines = self._lines(self._text)[-max(self._console.height - 3, 1) :]
        return Group(*(Segments(line) for line in lines), status)


def _parser() -> Any:
    from markdown_it import MarkdownIt

    # rich would leave HTML out: it is text here
    return MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])


def _markdown(text: str) -> Any:
    from rich.markdown import Markdown

    found = Markdown("", hyperlinks=False)
    found.parsed = _parser().parse(text)
    for token in found.parsed:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"  # lines of the model stay lines
    return found


def _num_finished(text: str) -> int:
    """Characters of the finished blocks: all but the last one."""
    begins = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.map]
    return sum(len(line) + 1 for line in text.split("\n")[: begins[-1]]) if begins else 0
