"""The program of `LimitedProcess`: work that comes over stdin, each piece within its limits.

It ends by limits of the system, whatever becomes of the server that started it.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_runtime.errors import blamed_on

_HEAD_BYTES = 8


class _RefusedError(Exception):
    """A template refuses a conversation."""


def main() -> None:
    """Works until stdin ends, or a limit ends it."""
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
    """Renders conversations; work is the arguments of ``render_jinja_template``."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(work: dict[str, Any]) -> dict[str, Any]:
        try:
            with blamed_on("messages: this model's chat template refuses them", _RefusedError):
                return {"text": render_jinja_template(**work)[0][0]}
        except _RefusedError as error:
            return {"problem": str(error)}

    return render


def _grammars() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Compiles grammars, to see whether that can be done; vocabularies come before."""
    import llguidance

    from moe_runtime.serving.http.grammar_trial import compile_grammar

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
