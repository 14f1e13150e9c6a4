"""A program with limits on time and memory, for work that a request could make endless.

Chat templates are programs, and grammars can take minutes and gigabytes to compile; neither can be
ended within a process. `limited_program` does both kinds of work.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from typing import Any

from moe_runtime.config import format_bytes
from moe_runtime.errors import MoERuntimeError

_HEAD_BYTES = 8
_TIMES_LENGTH = 64
"""Memory that is taken for each byte of what is asked, its JSON and its values."""
_MOST_ANSWER, _TIMES_ANSWER = 4 << 20, 8
"""Bytes of an answer that are read, and more for each byte of what is asked."""


class LimitError(MoERuntimeError):
    """Work took more time or memory than it may."""


class LimitedProcess:
    """Work of one kind in a process of its own, which is started again where a limit ended it.

    Args:
        kind: ``"templates"`` or ``"grammars"``: what the program prepares for.
        python: the interpreter.
    """

    def __init__(self, kind: str, python: str = sys.executable) -> None:
        self._words = [python, "-P", "-m", "moe_runtime.serving.http.limited_program", kind]
        self._process: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()

    def start(self) -> None:
        """Starts the program, without waiting until it is ready."""
        if self._process is not None and self._process.poll() is not None:
            self._end()  # others killed it
        if self._process is None:
            # away from the terminal, whose Ctrl-C is for the server
            self._process = subprocess.Popen(
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def ask(self, work: dict[str, Any], *, cpu_s: float, memory_bytes: int) -> dict[str, Any]:
        """Has some work done, behind all that was asked before.

        Args:
            work: what to do; values of JSON.
            cpu_s: seconds of a processor that it may take.
            memory_bytes: beyond what the program has already and what is asked takes.

        Returns:
            What came of it.

        Raises:
            LimitError: it took more.
        """
        size = _TIMES_LENGTH * len(body := json.dumps(work))
        text = f"[{cpu_s}, {memory_bytes + size}, {body}]".encode()
        with self._asking:
            answer = self._exchange(text)
            if answer is None:
                self._end()
                self.start()  # ready again before somebody asks
        if answer is None:
            raise LimitError(
                f"takes more than {cpu_s:g} seconds of a processor or {format_bytes(memory_bytes)}"
            )
        return json.loads(answer)

    def close(self) -> None:
        """Ends the program; the next work starts it again."""
        with self._asking:
            self._end()

    def _exchange(self, text: bytes) -> bytes | None:
        """The answer to a text; None where the program ended over it, or says too much."""
        for _ in range(2):  # it may be killed just now
            self.start()
            process = self._process
            assert process is not None
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(len(text).to_bytes(_HEAD_BYTES, "little") + text)
                process.stdin.flush()
            except BrokenPipeError:
                self._end()
                continue
            head = process.stdout.read(_HEAD_BYTES)
            size = int.from_bytes(head, "little")
            if not 0 < size <= _MOST_ANSWER + _TIMES_ANSWER * len(text):
                return None
            answer = process.stdout.read(size)
            return answer if len(answer) == size else None
        return None

    def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            with contextlib.suppress(BrokenPipeError):
                process.communicate()
