"""Links of Markdown pages: where they lead, and how they read in another folder."""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

# Code is passed over: brackets mean other things there.
_TOKEN = re.compile(r"^ *```.*?^ *```|`[^`\n]+`|\]\(([^()\s]+)\)", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)
_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def targets_of(text: str) -> Iterator[str]:
    """The targets of all links of a page, as they are written."""
    for match in _TOKEN.finditer(text):
        if match[1]:
            yield match[1]


def replace_targets(text: str, new: Callable[[str], str]) -> str:
    """The page with every target replaced."""
    return _TOKEN.sub(lambda match: f"]({new(match[1])})" if match[1] else match[0], text)


def is_outside(target: str) -> bool:
    """Whether a target is an address on the web."""
    return re.match(r"[a-z]+:", target) is not None


def file_of(page: Path, target: str) -> tuple[Path, str]:
    """The file that a link of a page leads to, and the anchor in it, empty without one."""
    path, _, anchor = target.partition("#")
    found = page if not path else Path(os.path.normpath(page.parent / path))
    return found, anchor


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings, as the repository's viewers and the site make them."""
    found: set[str] = set()
    for heading in _HEADING.findall(_FENCED.sub("", text)):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
        found.add(re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-"))
    return found
