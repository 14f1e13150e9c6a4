"""Builds the documentation as a site, without a network: `make docs`.

    python docs/site/build_site.py             pages to build/docs, site to build/site
    python docs/site/build_site.py --pages     the pages alone

Warnings are errors.

The pages lie where readers of the repository look for them: in `docs/`, and as READMEs beside the
code. Here each gets its place in the site, and its links lead to pages of the site; what they show
of the code is copied into the site as text.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from generators import (
    api_page,
    citation_page,
    command_reference,
    model_table,
    public_names,
    results_table,
)
from links import file_of, is_outside, replace_targets

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
CONFIG = ROOT / "build" / "mkdocs.yml"
PYTHON = ROOT / "build" / "python"
CODE = "code"
"""Folder of the site with the files of the repository that pages show."""

# Section -> (title, file of the repository, place in the site).
WRITTEN = {
    "Start": [("Overview", "README.md", "index.md"), ("First steps", "docs/start.md", "start.md")],
    "Guides": [
        ("The command line", "docs/cli.md", "guides/cli.md"),
        ("Files of prompts", "docs/batches.md", "guides/batches.md"),
        ("A server", "docs/serving.md", "guides/serving.md"),
        ("Training", "docs/training.md", "guides/training.md"),
        ("Training off memory", "docs/offloaded-training.md", "guides/offloaded-training.md"),
        ("On a GPU", "docs/gpu.md", "guides/gpu.md"),
        ("Several processes", "docs/scaling.md", "guides/scaling.md"),
        ("Placement of experts", "docs/placement.md", "guides/placement.md"),
        ("Benchmarks", "docs/benchmarks.md", "guides/benchmarks.md"),
        ("Benchmarks of this project", "benchmarks/README.md", "guides/project-benchmarks.md"),
        ("Examples", "examples/README.md", "guides/examples.md"),
        ("Deployment", "deploy/README.md", "guides/deployment.md"),
        ("Contributing", "CONTRIBUTING.md", "guides/contributing.md"),
    ],
    "Concepts": [
        ("What lossless means", "docs/concept-lossless.md", "concepts/lossless.md"),
        ("Budgets", "docs/concept-budget.md", "concepts/budget.md"),
        ("Architecture", "docs/architecture.md", "concepts/architecture.md"),
        ("Eviction policies", "docs/policies.md", "concepts/policies.md"),
        ("Prediction and prefetch", "docs/prediction.md", "concepts/prediction.md"),
        ("The engine", "docs/engine.md", "concepts/engine.md"),
        ("Gates", "docs/gates.md", "concepts/gates.md"),
        ("Kernels", "kernels/README.md", "concepts/kernels.md"),
    ],
    "Reference": [
        ("Formats of weights", "docs/formats.md", "reference/formats.md"),
        ("Trace files", "docs/trace-format.md", "reference/trace-format.md"),
        (
            "What a model can do",
            "docs/transformers-features.md",
            "reference/transformers-features.md",
        ),
    ],
    "Models": [
        ("The pocket model", "models/pocket/README.md", "models/pocket.md"),
        ("The desk model", "models/desk/README.md", "models/desk.md"),
    ],
    "Systems": [
        ("What is united here", "docs/systems.md", "systems/index.md"),
        ("Reproductions", "moe_runtime/research/README.md", "systems/reproductions.md"),
        ("A service that grows", "docs/elasticity.md", "systems/elasticity.md"),
        ("Hecate", "moe_runtime/research/hecate/README.md", "systems/hecate.md"),
        (
            "Parallelism switching",
            "moe_runtime/research/parallelism_switching/README.md",
            "systems/parallelism-switching.md",
        ),
        (
            "Placement solvers",
            "moe_runtime/research/placement_solvers/README.md",
            "systems/placement-solvers.md",
        ),
        ("Zeroth order", "moe_runtime/research/zeroth_order/README.md", "systems/zeroth-order.md"),
    ],
    "Comparison": [("Comparison", "docs/comparison.md", "comparison.md")],
    "Troubleshooting": [("Troubleshooting", "docs/troubleshooting.md", "troubleshooting.md")],
    "Changelog": [("Changelog", "CHANGELOG.md", "changelog.md")],
}


def generated() -> dict[str, list[tuple[str, str, Callable[[], str]]]]:
    """Section -> (title, place in the site, what makes the page)."""
    reference: list[tuple[str, str, Callable[[], str]]] = [
        ("Commands and options", "reference/commands.md", command_reference)
    ]
    for package in public_names():
        place = f"reference/api/{package}.md"
        reference.append((package, place, lambda package=package: api_page(package)))
    return {
        "Reference": reference,
        "Models": [("Families", "models/families.md", model_table)],
        "Comparison": [("Measured results", "results.md", results_table)],
        "Changelog": [("How to cite", "cite.md", citation_page)],
    }


def write_pages(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Writes every page below a folder, with the files that pages show.

    Returns:
        Section -> (title, place in the site).

    Raises:
        ValueError: a link leads nowhere.
    """
    shutil.rmtree(folder, ignore_errors=True)
    places = {source: place for rows in WRITTEN.values() for _, source, place in rows}
    contents: dict[str, list[tuple[str, str]]] = {}
    for section, rows in WRITTEN.items():
        contents[section] = [(title, place) for title, _, place in rows]
        for _, source, place in rows:
            text = (ROOT / source).read_text(encoding="utf-8")
            write(folder / place, moved(text, source, place, places, folder))
    for extra in ("extra.css", "extra.js"):
        shutil.copyfile(ROOT / "docs" / "site" / extra, folder / extra)
    for section, made in generated().items():
        for title, place, make in made:
            write(folder / place, make())
            contents[section].append((title, place))
    return contents


def moved(text: str, source: str, place: str, places: dict[str, str], folder: Path) -> str:
    """A page's text with links that hold at its place in the site."""

    def new(target: str) -> str:
        if is_outside(target) or target.startswith("#"):
            return target
        path, anchor = file_of(ROOT / source, target)
        relative = path.relative_to(ROOT).as_posix()
        if relative in places:
            return up(place) + places[relative] + (f"#{anchor}" if anchor else "")
        if not path.is_file():
            raise ValueError(f"{source}: the link {target} leads to no file; name one, no folder")
        is_picture = path.suffix in {".png", ".svg"}
        copy = f"pictures/{path.name}" if is_picture else f"{CODE}/{relative}.txt"
        (folder / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / copy)
        return up(place) + copy

    return replace_targets(text, new)


def up(place: str) -> str:
    """The way from a page to the root of the site."""
    return "../" * place.count("/")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def copy_package() -> None:
    """Copies the package for the reader of docstrings, who follows no links to folders."""
    shutil.rmtree(PYTHON, ignore_errors=True)
    copy = PYTHON / "moe_runtime"
    shutil.copytree(
        ROOT / "moe_runtime", copy, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    for name in ("benchmarks", "kernels", "policies", "models"):
        (copy / name / "__init__.py").touch()


def navigation(contents: dict[str, list[tuple[str, str]]]) -> str:
    """The configuration of MkDocs: the common part, and where each page stands."""
    lines = [
        f"INHERIT: {ROOT / 'docs' / 'site' / 'mkdocs.yml'}",
        f"docs_dir: {PAGES}",
        f"site_dir: {SITE}",
        "nav:",
    ]
    for section, rows in contents.items():
        lines.append(f"  - {section}:")
        lines += [f"      - {title}: {place}" for title, place in rows]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Writes the pages, and the site unless they alone are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pages", action="store_true", help="write the pages alone")
    options = parser.parse_args()
    contents = write_pages(PAGES)
    write(CONFIG, navigation(contents))
    if options.pages:
        return 0
    copy_package()
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-f", str(CONFIG)]
    # Away from the root, where the folder `kernels` would be taken for a package of that name.
    # Material prints a notice about its successor otherwise, which is no warning of ours.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=CONFIG.parent, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
