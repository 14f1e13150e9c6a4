"""Limits on time and memory for templates and grammars, which a hostile request could make endless.

Only the system can end such work. `LimitedProcess` starts this module as a program with the
system's limits.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.config import format_bytes
from moe_runtime.errors import MoERuntimeError, blamed_on

if TYPE_CHECKING:
    import llguidance

_TIMES_LENGTH = 64
"""Memory for each byte of a request, for its JSON and its values."""
_MOST_ANSWER, _TIMES_ANSWER = 4 << 20, 8
"""Limit of an answer: bytes, and more for each byte of the request."""
_STACK_BYTES, _STACK_BYTES_A_CHARACTER = 8 << 20, 2 << 10
"""llguidance is recursive, and too small a stack ends the process. The most that was measured is
750 bytes for each character of a grammar."""
_MIB = 1 << 20
_MOST_STATES = 1 << 16
"""States of a grammar's automaton, which grows with the texts that it sees: 1 to 2 KiB each."""


class LimitError(MoERuntimeError):
    """Work exceeded its limits."""


class LimitedProcess:
    """Work of one kind in a process, which starts again after a limit has ended it."""

    def __init__(self, kind: str, python: str = sys.executable) -> None:
        self._words = [python, "-P", "-m", "moe_runtime.serving.http.limits", kind]
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._asking = threading.Lock()

    def start(self) -> None:
        """Starts the program unless it runs; does not wait until it is ready."""
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        self._pipe, theirs = Pipe()
        with theirs:
            # In a session of its own: Ctrl-C is for the server.
            self._process = subprocess.Popen(
                self._words,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def ask(self, work: dict[str, Any], *, cpu_s: float, memory_bytes: int) -> dict[str, Any]:
        """Does work given as JSON, after all earlier work.

        ``memory_bytes`` are beyond what the program has already and what the request takes.

        Raises:
            LimitError: it took more.
        """
        size = _TIMES_LENGTH * len(body := json.dumps(work))
        text = f"[{cpu_s}, {memory_bytes + size}, {body}]".encode()
        with self._asking:
            answer = self._exchange(text)
            if answer is None:
                self._end()
                self.start()  # ready before the next request
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
        """The answer to a request; None if a limit ended the program, or the answer is too long."""
        for _ in range(2):  # others may have killed it
            self.start()
            try:
                self._pipe.send_bytes(text)
            except OSError:
                self._end()
                continue
            with contextlib.suppress(EOFError, OSError):
                return self._pipe.recv_bytes(_MOST_ANSWER + _TIMES_ANSWER * len(text))
            break
        return None

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._pipe.close()
            self._process = None


def stack_bytes(lark: str) -> int:
    return _STACK_BYTES + len(lark) * _STACK_BYTES_A_CHARACTER


def compile_grammar(
    tokenizer: llguidance.LLTokenizer, lark: str
) -> tuple[llguidance.LLMatcher, llguidance.LLMatcher]:
    """A grammar, and a copy after its first mask. Raises MemoryError without room for the stack."""
    with ThreadPoolExecutor(1) as thread:
        before = threading.stack_size(-(-stack_bytes(lark) // _MIB) * _MIB)
        try:
            result = thread.submit(_compile, tokenizer, lark)
        except RuntimeError:
            raise MemoryError("no memory is left to read a grammar") from None
        finally:
            threading.stack_size(before)
        return result.result()


def _compile(
    tokenizer: llguidance.LLTokenizer, lark: str
) -> tuple[llguidance.LLMatcher, llguidance.LLMatcher]:
    import llguidance

    limits = llguidance.LLParserLimits(max_lexer_states=_MOST_STATES)
    text = llguidance.LLMatcher.grammar_from_lark(lark)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    trial = matcher.deep_copy()
    trial.compute_bitmask()
    return matcher, trial


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with the server
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    do = _templates() if sys.argv[1] == "templates" else _grammars()
    page_bytes = resource.getpagesize()
    pipe = Connection(sys.stdin.fileno())
    with contextlib.suppress(EOFError, MemoryError):
        while True:
            cpu_s, memory_bytes, work = json.loads(pipe.recv_bytes())
            used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * page_bytes
            _limit_memory(used + memory_bytes)
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            answer = json.dumps(do(work)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            _limit_memory(resource.RLIM_INFINITY)
            pipe.send_bytes(answer)


def _limit_memory(num_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        num_bytes = hard if num_bytes == resource.RLIM_INFINITY else min(num_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard))


def _templates() -> Callable[[dict[str, Any]], dict[str, Any]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(work: dict[str, Any]) -> dict[str, Any]:
        try:
            with blamed_on("messages: this model's chat template refuses them"):
                return {"text": render_jinja_template(**work)[0][0]}
        except MoERuntimeError as error:
            return {"problem": str(error)}

    return render


def _grammars() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Compiles grammars as a trial; a vocabulary is sent once, before its first grammar."""
    import llguidance

    vocabularies: dict[str, llguidance.LLTokenizer] = {}

    def work_on(work: dict[str, Any]) -> dict[str, Any]:
        name = work["vocabulary"]
        if "tokenizer" in work:
            vocabularies[name] = llguidance.LLTokenizer(
                work["tokenizer"], n_vocab=work["size"], eos_token=work["ends"]
            )
        is_known = name in vocabularies
        if is_known and "lark" in work:
            compile_grammar(vocabularies[name], work["lark"])
        return {"is_known": is_known}

    return work_on


if __name__ == "__main__":
    main()
