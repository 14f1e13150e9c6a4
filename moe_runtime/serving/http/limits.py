"""Limits on time and memory for templates and grammars, which a request could make endless.

Neither can be ended within a process, so `LimitedProcess` starts this module as a program, which
the system's limits end.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.config import format_bytes
from moe_runtime.errors import MoERuntimeError, blamed_on

if TYPE_CHECKING:
    import llguidance

_HEAD_BYTES = 8
_TIMES_LENGTH = 64
"""Memory that is taken for each byte of what is asked, its JSON and its values."""
_MOST_ANSWER, _TIMES_ANSWER = 4 << 20, 8
"""Bytes of an answer that are read, and more for each byte of what is asked."""
_STACK_BYTES, _STACK_BYTES_A_CHARACTER = 8 << 20, 2 << 10
"""llguidance goes into rules and references of schemas by recursion, and a stack that is too small
ends the process: up to 750 bytes for each character of a grammar were seen."""
_MIB = 1 << 20
_MOST_STATES = 1 << 16
"""Of a grammar's automaton, which grows with the texts that it sees: 1 to 2 KiB each."""


class LimitError(MoERuntimeError):
    """Work took more time or memory than it may."""


class LimitedProcess:
    """Work of one kind in a process of its own, which is started again where a limit ended it."""

    def __init__(self, kind: str, python: str = sys.executable) -> None:
        self._words = [python, "-P", "-m", "moe_runtime.serving.http.limits", kind]
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
        """Has some work of JSON done, after all that was asked before.

        ``memory_bytes`` are beyond what the program has already and what is asked takes.

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


def stack_bytes(lark: str) -> int:
    return _STACK_BYTES + len(lark) * _STACK_BYTES_A_CHARACTER


def compile_grammar(
    tokenizer: llguidance.LLTokenizer, lark: str
) -> tuple[llguidance.LLMatcher, llguidance.LLMatcher]:
    """A grammar, and a copy of it whose first mask is computed; MemoryError without room for the
    stack."""
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
        signal.signal(number, signal.SIG_IGN)  # it ends with the server, not before
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    do = _templates() if sys.argv[1] == "templates" else _grammars()
    page_bytes = resource.getpagesize()
    while head := sys.stdin.buffer.read(_HEAD_BYTES):
        text = sys.stdin.buffer.read(int.from_bytes(head, "little"))
        cpu_s, memory_bytes, work = json.loads(text)
        used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * page_bytes
        _limit_memory(used + memory_bytes)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer = json.dumps(do(work)).encode()
        except MemoryError:
            return
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(resource.RLIM_INFINITY)
        sys.stdout.buffer.write(len(answer).to_bytes(_HEAD_BYTES, "little") + answer)
        sys.stdout.buffer.flush()


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
    """Compiles grammars, to see whether that can be done; vocabularies come before."""
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
