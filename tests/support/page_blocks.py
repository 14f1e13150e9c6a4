"""What the pages give to copy: fenced blocks and command lines, in their order."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
_LINE = re.compile(r"^ *(?:torchrun .*--no-python (?:\S+ )*)?(moe-runtime +[a-z].*|printf .*)")
_QUOTED = re.compile(r"`(moe-runtime [a-z]+ [^`]*)`")


def blocks_of(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language; none has the empty name."""
    text = page.read_text(encoding="utf-8")
    return [block for name, block in FENCED.findall(text) if name == language]


def command_lines_of(page: Path) -> list[str]:
    """Shell lines that call the program or write its input, as they stand, each once.

    Those of fenced blocks come first, without comment or explanation, then those within the text,
    which may be a command's name alone.
    """
    text = page.read_text(encoding="utf-8")
    found = []
    for _, block in FENCED.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if match := _LINE.match(line):
                # What comes after two spaces or a hash says what the line does.
                found.append(re.split(r"  +|\s#", match[0].strip())[0])
    found += [" ".join(line.split()) for line in _QUOTED.findall(FENCED.sub("", text))]
    return list(dict.fromkeys(found))
