"""Compiles grammars as far as their first mask: in a program with limits first, then for use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import llguidance

_STACK_BYTES, _STACK_BYTES_A_CHARACTER = 8 << 20, 2 << 10
"""llguidance goes into rules and references of schemas by recursion, and a stack that is too small
ends the process: up to 750 bytes for each character of a grammar were seen."""
_MIB = 1 << 20
_MOST_STATES = 1 << 16
"""Of a grammar's automaton, which grows with the texts that it sees: 1 to 2 KiB each."""


def stack_bytes(lark: str) -> int:
    """Of the stack on which a grammar is compiled."""
    return _STACK_BYTES + len(lark) * _STACK_BYTES_A_CHARACTER


def compile_grammar(
    tokenizer: llguidance.LLTokenizer, lark: str
) -> tuple[llguidance.LLMatcher, llguidance.LLMatcher]:
    """A grammar, and a copy of it whose first mask is computed, both with errors of their own.

    Raises:
        MemoryError: there is no address space for the stack.
    """
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
    limits = llguidance.LLParserLimits(max_lexer_states=_MOST_STATES)
    text = llguidance.LLMatcher.grammar_from_lark(lark)
    matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=limits)
    trial = matcher.deep_copy()
    trial.compute_bitmask()
    return matcher, trial
