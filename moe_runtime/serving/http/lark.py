"""Grammars in Lark as regular expressions: a text within JSON can be held to such alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

_TOKEN = re.compile(
    r"""
      (?P<define>^[ \t]*[?!]*(?P<defined>[A-Za-z_][\w-]*)[ \t]*:)
    | (?P<order>^[ \t]*%[^\n]*)
    | (?P<skip>\s*\n|[ \t\r]+|//[^\n]*|\#[^\n]*|->[ \t]*[\w-]+)
    | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
    | (?P<regex>/(?:[^/\\\n]|\\.)+/[a-z]*)
    | (?P<name>[A-Za-z_][\w-]*)
    | (?P<times>[?*+]|\{\d*,?\d*\}|~[ \t]*\d+(?:\.\.\d+)?)
    | (?P<sign>\.\.|[|()\[\]])
    """,
    re.VERBOSE | re.MULTILINE,
)
_IMPORT = re.compile(r"[ \t]*%import[ \t]+common\.(\w+)(?:[ \t]*->[ \t]*(\w+))?[ \t]*")
_COMMON = {
    **{"LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS_INLINE": r"[ \t]+"},
    **{"WS": r"[ \t\f\r\n]+", "DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": "[0-9]+"},
    **{"SIGNED_INT": "[+-]?[0-9]+", "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"},
    **{"LETTER": "[a-zA-Z]", "LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]"},
    **{"WORD": "[a-zA-Z]+", "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*"},
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
}
"""Terminals of Lark's own library."""
_CLOSING = {"(": ")", "[": "]"}
_EXPRESSION_PART = re.compile(r"\\.|\[\^?\]?|\(\?[a-zA-Z-]*x|[\])(]", re.DOTALL)
_MOST_CHARACTERS = 1 << 16


class _Token(NamedTuple):
    kind: str
    text: str


def regex_of(grammar: str) -> str:
    """The regular expression of all texts of a grammar. Raises ValueError: it is no grammar, or no
    regular one."""
    try:
        return _Rules(grammar).of("start", ())
    except (SyntaxError, RecursionError) as error:  # of texts' escapes; of brackets within others
        raise ValueError(f"cannot be read: {error.args[0]}") from None


def balanced(regex: str) -> str:
    """An expression, if it stays one within brackets. Raises ValueError: it closes what it does not
    open, leaves something open, or has comments."""
    depth = num_sets = 0
    for found in _EXPRESSION_PART.finditer(regex):
        part = found[0]
        if part[0] == "[":
            num_sets += 1
        elif num_sets:
            num_sets -= part == "]"
        elif part[0] == "(":
            if part != "(":
                raise ValueError("comments in expressions (flag x) cannot be enforced")
            depth += 1
        elif part == ")":
            depth -= 1
            if depth < 0:
                break
    if depth or num_sets:
        raise ValueError(f"its brackets do not match: {regex[:60]!r}")
    return regex


class _Rules:
    def __init__(self, grammar: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._found: dict[str, str] = {}
        own: list[_Token] | None = None
        for found in _tokens(grammar):
            if found["skip"] is not None:
                continue
            if (name := found["defined"]) is not None:
                if name in self._rules:
                    raise ValueError(f"{name} is defined twice")
                own = self._rules[name] = []
            elif (order := found["order"]) is not None:
                imported = _IMPORT.fullmatch(order)
                if imported is None or imported[1] not in _COMMON:
                    raise ValueError(f"{order.strip()} cannot be enforced")
                self._found[imported[2] or imported[1]] = _COMMON[imported[1]]
            elif own is None:
                raise ValueError("expected NAME: at its beginning")
            else:
                own.append(_Token(str(found.lastgroup), found[0]))
        if both := self._rules.keys() & self._found.keys():
            raise ValueError(f"{min(both)} is defined and imported")

    def of(self, name: str, within: tuple[str, ...]) -> str:
        if name in within:
            raise ValueError(f"{name} is part of itself, which no expression of a text can be")
        if name not in self._found:
            if name not in self._rules:
                raise ValueError(f"has no {name}")
            pending = self._rules[name][::-1]
            self._found[name] = self._choice(pending, (*within, name))
            if pending:
                raise ValueError(f"{name} has a {pending[-1].text} too many")
        return self._found[name]

    def _choice(self, pending: list[_Token], within: tuple[str, ...]) -> str:
        """Alternatives, up to a bracket that closes or the end."""
        found, size = [""], 0
        while pending and pending[-1].text not in (")", "]"):
            if pending[-1].text == "|":
                pending.pop()
                found.append("")
                continue
            item = self._item(pending, within)
            found[-1] += item
            size += len(item)
            if size > _MOST_CHARACTERS:
                raise ValueError("is too large to be enforced")
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _item(self, pending: list[_Token], within: tuple[str, ...]) -> str:
        kind, text = pending.pop()
        if kind == "name":
            found = self.of(text, within)
        elif kind == "string":
            found = _literal(text)
            if pending and pending[-1].text == "..":
                pending.pop()
                last = pending.pop() if pending else _Token("", "")
                if last.kind != "string":
                    raise ValueError(f"expected a text after {text}..")
                for end in (text, last.text):
                    if end.endswith("i") or len(ast.literal_eval(end)) != 1:
                        raise ValueError(f"expected one character at each end, got {end}")
                found = f"[{found}-{_literal(last.text)}]"
        elif kind == "regex":
            body, _, flags = text[1:].rpartition("/")
            if "x" in flags:
                raise ValueError("comments in expressions (flag x) cannot be enforced")
            found = f"(?{flags}:{balanced(body)})"
        elif text in _CLOSING:
            found = self._choice(pending, within)
            if not pending or pending.pop().text != _CLOSING[text]:
                raise ValueError(f"has a {text} that nothing closes")
            if text == "[":
                found = f"(?:{found})?"
        else:
            raise ValueError(f"{text} cannot be enforced")
        while pending and pending[-1].kind == "times":
            found = f"(?:{found}){_times(pending.pop().text)}"
        return found


def _tokens(grammar: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(grammar):
        found = _TOKEN.match(grammar, at)
        if found is None:
            raise ValueError(f"{grammar[at : at + 20]!r} cannot be enforced")
        yield found
        at = found.end()


def _literal(text: str) -> str:
    found = re.escape(ast.literal_eval(text.removesuffix("i"))).replace("\\\n", r"\n")
    return f"(?i:{found})" if text.endswith("i") else found


def _times(text: str) -> str:
    if text[0] not in "{~":
        return text
    least, _, most = text.strip("{~} \t").replace("..", ",").partition(",")
    return f"{{{least or 0},{most}}}" if "," in text or ".." in text else f"{{{least}}}"
