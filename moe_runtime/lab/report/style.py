"""How charts look: one set of colours for paper, and names for them where a page sets its own.

Charts are drawn once. As PNG they stand on white; in a page their ink, grid and surface become CSS
variables, so that the same drawing is readable on light and dark.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE = "#16191d", "#5b6470", "#d9dde2", "#fefefe"
SERIES = ("#2b7bd6", "#d9701a", "#26976c", "#9460d8", "#d24257", "#7a8794", "#b08a10", "#1497a8")
"""Distinct for most eyes, also in grey, and at least 3:1 against both backgrounds of the page."""
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", SURFACE: "--surface"}
_FONT = re.compile(r"'DejaVu Sans'[^;\"]*")


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


def to_svg(figure: "Figure", name: str) -> str:
    """The drawing as an ``<svg>`` element whose colours follow the page.

    Args:
        figure: what to write.
        name: makes the identifiers inside unique on a page.
    """
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
    """Keeps one identifier for each thing that is referred to, under a name of this drawing.

    Identifiers such as axes_1 repeat from drawing to drawing, and shared marks within one.
    """
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


def write_png(figure: "Figure", path: Path) -> None:
    """Writes the drawing on white."""
    with write_atomically(path) as file:
        figure.savefig(file, format="png", metadata={"Software": None})
