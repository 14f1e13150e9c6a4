"""Draws the pictures of the pages: boxes in rows with arrows, and a terminal with a run.

    python docs/site/pictures.py            write docs/pictures/*.svg
    python docs/site/pictures.py --check    only say whether they are up to date

Plain SVG with its own background, so that it reads the same on light and dark pages, without a
network or a script.
"""

import argparse
import sys
from itertools import pairwise
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
_WIDTH, _HEIGHT, _GAP, _MARGIN = 150, 60, 34, 16

# Name -> what the picture shows, and its rows; a box is a title and a line below it.
PICTURES = {
    "token": (
        "A token through one layer",
        [
            [
                ("hidden state", "of the token"),
                ("attention", "over the KV cache"),
                ("gate", "the model's own"),
                ("choices", "K experts, weights"),
            ],
            [
                ("lease", "pins its experts"),
                ("residents", "computed at once"),
                ("arrivals", "as reads end"),
                ("sum", "in order of choice"),
            ],
        ],
    ),
    "expert": (
        "The bytes of an expert",
        [
            [
                ("checkpoint", "byte ranges"),
                ("read queue", "demand before guess"),
                ("slot in RAM", "packed as published"),
                ("copy", "with a GPU alone"),
            ],
            [
                ("product", "from the slot"),
                ("end of lease", "may be evicted"),
                ("policy", "names a victim"),
                ("slot is free", "nothing to write"),
            ],
        ],
    ),
    "gradient": (
        "A gradient with experts off memory",
        [
            [
                ("loss", "of a micro-batch"),
                ("layers in reverse", "next read is known"),
                ("expert's record", "weights, moments"),
                ("gradient", "summed in the record"),
            ],
            [
                ("all rows seen", "the sum is whole"),
                ("AdamW", "inside the pass"),
                ("write", "a new version"),
                ("checkpoint", "names versions"),
            ],
        ],
    ),
    "prediction": (
        "Caching and prediction",
        [
            [
                ("routing", "ids and weights"),
                ("policy", "orders residents"),
                ("predictor", "later layers"),
                ("admission", "while the disk idles"),
            ],
            [
                ("guess is read", "never over demand"),
                ("layer arrives", "asks for experts"),
                ("useful or wasted", "both are counted"),
                ("controller", "off if no faster"),
            ],
        ],
    ),
    "budget": (
        "What a budget of memory holds",
        [
            [
                ("dense weights", "always"),
                ("KV cache", "of max_tokens"),
                ("working space", "activations, buffers"),
                ("expert slots", "all of the rest"),
            ]
        ],
    ),
    "lossless": (
        "What may change the bits of a result",
        [
            [
                ("never", "budget, policy, tier"),
                ("never", "prefetch, I/O threads"),
                ("kernel's order", "another processor"),
                ("asked for", "int8, quantising"),
            ]
        ],
    ),
}


def picture(title: str, rows: list[list[tuple[str, str]]], arrows: bool) -> str:
    """An SVG of boxes, row by row."""
    width = 2 * _MARGIN + len(rows[0]) * (_WIDTH + _GAP) - _GAP
    height = 2 * _MARGIN + len(rows) * (_HEIGHT + _GAP) - _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}" font-family="sans-serif">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#333"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>',
    ]
    places = [
        (_MARGIN + column * (_WIDTH + _GAP), _MARGIN + row * (_HEIGHT + _GAP), box)
        for row, boxes in enumerate(rows)
        for column, box in enumerate(boxes)
    ]
    for left, top, (name, below) in places:
        middle = left + _WIDTH // 2
        parts += [
            f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" '
            'fill="#e8eaf6" stroke="#3f51b5"/>',
            f'<text x="{middle}" y="{top + 26}" text-anchor="middle" font-size="15" '
            f'font-weight="bold" fill="#111">{escape(name)}</text>',
            f'<text x="{middle}" y="{top + 45}" text-anchor="middle" font-size="13" '
            f'fill="#333">{escape(below)}</text>',
        ]
    for (left, top, _), (next_left, next_top, _) in pairwise(places):
        if not arrows:
            break
        if next_top == top:
            way = f"M{left + _WIDTH} {top + _HEIGHT // 2}H{next_left}"
        else:
            x, other, between = left + _WIDTH // 2, next_left + _WIDTH // 2, next_top - _GAP // 2
            way = f"M{x} {top + _HEIGHT}V{between}H{other}V{next_top}"
        parts.append(f'<path d="{way}" fill="none" stroke="#333" marker-end="url(#tip)"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def terminal(title: str, text: str) -> str:
    """An SVG of a terminal that shows a text."""
    lines = text.splitlines()
    width, height = 2 * _MARGIN + 8 * max(map(len, lines)), 2 * _MARGIN + 18 * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}" font-family="monospace" font-size="13" fill="#ddd">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1e1e1e"/>',
    ]
    for number, line in enumerate(lines, 1):
        parts.append(
            f'<text x="{_MARGIN}" y="{_MARGIN + 18 * number - 5}" xml:space="preserve">'
            f"{escape(line)}</text>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def drawn() -> dict[str, str]:
    """Every picture by the name of its file."""
    run = (FOLDER / "run.txt").read_text(encoding="utf-8")
    return {"run.svg": terminal("A run with a budget smaller than the model", run)} | {
        f"{name}.svg": picture(title, rows, arrows=len(rows) > 1)
        for name, (title, rows) in PICTURES.items()
    }


def main() -> int:
    """Writes the pictures, or says whether they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    wrong = [
        name
        for name, text in drawn().items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    for name in wrong if not options.check else []:
        (FOLDER / name).write_text(drawn()[name], encoding="utf-8")
    return 1 if wrong and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
