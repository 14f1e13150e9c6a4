"""Messages on the page of troubles are ones that the program can print."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [
    re.findall(r"`([^`]+)`", line.split(" | ")[0])[0]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]


@cache
def messages() -> list[str]:
    """Every text in the sources of the package; what is filled in stands as an ellipsis."""
    found = []
    for top in ("moe_runtime", "kernels", "policies", "benchmarks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [
                        str(part.value) if isinstance(part, ast.Constant) else "…"
                        for part in node.values
                    ]
                    found.append("".join(parts))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def is_printed(quoted: str) -> bool:
    """Whether one text has the words of a quotation, in their order."""
    parts = quoted.split("…")
    return any(has_in_order(text, parts) for text in messages())


def has_in_order(text: str, parts: list[str]) -> bool:
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_printed(quoted):
    assert is_printed(quoted)


def test_the_page_quotes_messages_and_wrong_ones_are_found():
    assert len(QUOTED) > 20
    assert not is_printed("a budget of … is too large")
