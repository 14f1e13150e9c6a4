"""The page: sections in order, one HTML file that asks the network for nothing, and its charts.

In a page, ink, grid and surface of charts become CSS variables, for light and dark.
"""

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.errors import named_failure
from moe_runtime.files import make_folders, write_atomically, write_text

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE = "#16191d", "#5b6470", "#d9dde2", "#fefefe"
SERIES = ("#2b7bd6", "#d9701a", "#26976c", "#9460d8", "#d24257", "#7a8794", "#b08a10", "#1497a8")
"""Distinct for most eyes, also in grey, and at least 3:1 against both backgrounds of the page."""
BYTE_COLOURS = (SERIES[0], SERIES[2], SERIES[4])
"""Of demanded bytes, of bytes read ahead and used, and of bytes never used."""
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", SURFACE: "--surface"}
_FONT = re.compile(r"'DejaVu Sans'[^;\"]*")
_TEMPLATE = "page.html"
WIDTH = 9.2
"""Inches of a drawing."""


@dataclass(frozen=True, kw_only=True)
class Table:
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    title: str
    lesson: str
    how: str = ""
    figure: "Figure | None" = None
    alt: str = ""
    table: Table | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    subtitle: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]


def render(page: Page) -> str:
    """The page as HTML. Everything that it shows is inside; it holds no script."""
    from jinja2 import Environment, StrictUndefined

    source = files("moe_runtime.lab.report").joinpath(_TEMPLATE).read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["with_code"] = _with_code
    drawings = {
        section.name: to_svg(section.figure, section.name)
        for section in page.sections
        if section.figure is not None
    }
    return environment.from_string(source).render(page=page, drawings=drawings)


def _with_code(text: str) -> "Markup":
    """Text between backticks becomes code; all other text is escaped."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    is_paired = len(parts) % 2 == 1
    marked = [
        Markup("<code>{}</code>").format(part) if is_paired and number % 2 else part
        for number, part in enumerate(parts)
    ]
    return Markup("" if is_paired else "`").join(marked)


def write_page(page: Page, path: Path) -> None:
    text = render(page)
    with named_failure(path, "report"):
        write_text(path, text)


def write_plots(page: Page, folder: Path) -> list[Path]:
    """Writes every drawing as PNG into a folder, which is made if it is missing."""
    written = []
    with named_failure(folder, "plots"):
        make_folders(folder)
        for section in page.sections:
            if section.figure is not None:
                written.append(folder / f"{section.name}.png")
                with write_atomically(written[-1]) as file:  # on white
                    section.figure.savefig(file, format="png", metadata={"Software": None})
    return written


@contextmanager
def drawing() -> Iterator[Any]:
    """Yields matplotlib's ``Figure`` class with our settings in force, and no global state."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "figure.facecolor": SURFACE,
        "figure.constrained_layout.use": True,
        "grid.color": GRID,
        "grid.linewidth": 0.8,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "savefig.dpi": 160,
        "svg.fonttype": "none",
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
    }
    with mpl.rc_context(settings):
        yield Figure


@contextmanager
def chart(height: float = 3.7) -> "Iterator[tuple[Figure, Axes]]":
    """A drawing as wide as the page, with one pair of axes."""
    with drawing() as new_figure:
        figure = new_figure(figsize=(WIDTH, height))
        yield figure, figure.add_subplot()


def stacked_bars(
    bars: Mapping[str, Sequence[float]],
    kinds: Sequence[str],
    *,
    scale: float,
    unit: str,
    colours: Sequence[str] = SERIES,
) -> "Figure":
    """Horizontal bars, each made of the same kinds of things."""
    with chart(1.5 + 0.55 * len(bars)) as (figure, axes):
        left = np.zeros(len(bars))
        for number, kind in enumerate(kinds):
            width = scale * np.array([values[number] for values in bars.values()])
            axes.barh(list(bars), width, left=left, color=colours[number], height=0.62, label=kind)
            left += width
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(unit)
        axes.set_xlim(0, 1.02 * (float(left.max()) or 1.0))
        figure.legend(loc="outside upper left", ncols=len(kinds))
    return figure


def to_svg(figure: "Figure", name: str) -> str:
    """The drawing as an ``<svg>`` element whose colours follow the page."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = _FONT.sub("system-ui, 'DejaVu Sans', sans-serif", text)
    text = _unique_ids(text, name)
    # The page sets the width; the view box keeps the proportions.
    return re.sub(r'<svg ([^>]*?)height="[^"]*" ([^>]*?)width="[^"]*"', r"<svg \1\2", text, count=1)


def _unique_ids(svg: str, prefix: str) -> str:
    """Keeps one identifier for each referenced element, prefixed with the drawing's name."""
    referred = set(re.findall(r'(?:href="#|url\(#)([\w-]+)', svg))
    seen: set[str] = set()

    def rename(match: re.Match[str]) -> str:
        name = match[1]
        if name not in referred or name in seen:
            return ""
        seen.add(name)
        return f' id="{prefix}-{name}"'

    svg = re.sub(r' id="([^"]+)"', rename, svg)
    return re.sub(r'(href="#|url\(#)([\w-]+)', rf"\1{prefix}-\2", svg)
