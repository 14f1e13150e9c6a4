"""The page: sections in order, one HTML file that asks the network for nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from moe_runtime.errors import named_failure
from moe_runtime.files import make_folders, write_text
from moe_runtime.lab.report.style import to_svg, write_png

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

_TEMPLATE = "page.html"


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers behind a drawing.

    Attributes:
        header: names of the columns.
        rows: cells; the first of a row names it.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One subject of the page.

    Attributes:
        name: short name in links and file names.
        title: heading.
        lesson: what one learns from it, with its most important numbers.
        how: how it was measured, and what it leaves out.
        figure: the drawing; None where there is nothing to draw.
        alt: the drawing in words.
        table: the drawing's numbers.
    """

    name: str
    title: str
    lesson: str
    how: str = ""
    figure: "Figure | None" = None
    alt: str = ""
    table: Table | None = None


@dataclass(frozen=True, kw_only=True)
class Page:
    """A report.

    Attributes:
        title: heading of the page.
        subtitle: what was looked at, in one line.
        facts: ``(value, what it is)`` of the numbers that one wants first.
        sections: the subjects in order.
    """

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
    """Sets what stands between backticks as code; everything else is text and nothing more."""
    from markupsafe import Markup, escape

    parts = [escape(part) for part in text.split("`")]
    is_paired = len(parts) % 2 == 1
    marked = [
        Markup("<code>{}</code>").format(part) if is_paired and number % 2 else part
        for number, part in enumerate(parts)
    ]
    return Markup("" if is_paired else "`").join(marked)


def write_page(page: Page, path: Path) -> None:
    """Writes the page.

    Raises:
        CheckpointError: it cannot be written there.
    """
    text = render(page)
    with named_failure(path, "report"):
        write_text(path, text)


def write_plots(page: Page, folder: Path) -> list[Path]:
    """Writes every drawing as PNG into a folder, which is made if it is missing.

    Returns:
        The files.

    Raises:
        CheckpointError: they cannot be written there.
    """
    written = []
    with named_failure(folder, "plots"):
        make_folders(folder)
        for section in page.sections:
            if section.figure is not None:
                written.append(folder / f"{section.name}.png")
                write_png(section.figure, written[-1])
    return written
