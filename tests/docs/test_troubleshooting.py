"""Messages on the page of troubles are ones that the program can print."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = [
    re.findall(r"`([^`]+)`", line.split(" | ")[0])[0]
    for line in PAGE.splitlines()
    if line.startswith("| `")
]


@cache
def sources() -> list[str]:
    tops = [ROOT / top for top in ("moe_runtime", "kernels", "policies", "benchmarks")]
    files = {path.resolve() for top in tops for path in top.rglob("*.py")}
    return [path.read_text(encoding="utf-8") for path in sorted(files)]


@cache
def messages(source: str) -> list[str]:
    """Every text in a file of the package; what is filled in stands as an ellipsis."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def is_printed(quoted: str) -> bool:
    """Whether one text has the words of a quotation, in their order."""
    parts = quoted.split("…")
    words = re.findall(r"\w+", quoted)
    having = (source for source in sources() if all(word in source for word in words))
    return any(has_in_order(text, parts) for source in having for text in messages(source))


def has_in_order(text: str, parts: list[str]) -> bool:
    place = 0
    for part in parts:
        place = text.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def test_quoted_messages_are_printed_and_wrong_ones_are_found():
    assert len(QUOTED) > 20
    assert [quoted for quoted in QUOTED if not is_printed(quoted)] == []
    assert not is_printed("a budget of … is too large")
