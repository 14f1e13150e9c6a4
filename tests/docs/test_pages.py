"""Links of the pages lead somewhere, their command lines are ones, and the reference is whole."""

import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import build_site
import generators
import pytest
from command_lines import COMMANDS, require_sound
from links import anchors_of, file_of, is_outside, targets_of
from page_blocks import command_lines_of

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CHANGELOG.md"))]
    + [ROOT / source for rows in build_site.WRITTEN.values() for _, source, _ in rows]
)


def test_links_lead_to_files_and_headings():
    wrong = []
    for page in PAGES:
        for target in targets_of(page.read_text(encoding="utf-8")):
            if is_outside(target):
                continue
            path, anchor = file_of(page, target)
            if not path.exists() or (anchor and anchor not in anchors(path)):
                wrong.append((page, target))
    assert wrong == []


@cache
def anchors(path: Path) -> set[str]:
    return set(anchors_of(path.read_text(encoding="utf-8")))


def test_columns_have_names_and_pictures_have_words_and_no_merge_left_marks():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        headers = re.findall(r"^\|(.*)\|\n\|(?: *:?-+:? *\|)+$", text, re.M)
        wrong = [header for header in headers if not all(map(str.strip, header.split("|")))]
        wrong += re.findall(r"^(?:<{7}|>{7}).*$|!\[\s*\]", text, re.M)
        assert wrong == [], page


def test_wrong_links_are_found():
    text = "# One `two` three---four\n[a](b.md#c) `[no](code)`\n```\n[no](fenced)\n```\n"
    assert list(targets_of(text)) == ["b.md#c"]
    assert anchors_of(text) == {"one-two-three---four"}


def test_every_page_has_a_place():
    placed = {source for rows in build_site.WRITTEN.values() for _, source, _ in rows}
    assert {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")} <= placed


def test_the_version_is_the_same_everywhere():
    """The newest section of the changelog is that of this version."""
    from moe_runtime import __version__

    found = [
        re.findall(r"^## (\S+),", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)[0],
        re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.M)[
            0
        ],
    ]
    assert found == [__version__] * 2


def test_command_lines_are_ones():
    lines = {line for page in PAGES for line in command_lines_of(page)}
    called = [line.partition("moe-runtime ")[2] for line in lines if "moe-runtime " in line]
    assert len(called) > 100
    for line in called:
        require_sound(line)


@pytest.mark.parametrize("line", ["rum MODEL", "run MODEL --promt x", "run MODEL --prompt"])
def test_wrong_command_lines_are_found(line):
    with pytest.raises(AssertionError):
        require_sound(line)


def test_the_reference_has_every_command_and_option():
    text = generators.command_reference()
    sections: dict[str, str] = dict(
        re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    )
    assert sections.keys() == COMMANDS.keys()
    for name, command in COMMANDS.items():
        for param in command.params:
            if param.param_type_name == "option" and param.name != "help":
                assert all(f"`{word}`" in sections[name] for word in param.opts), (name, param.name)


def test_every_public_name_has_an_entry():
    import moe_runtime
    import moe_runtime.layer

    names = generators.public_names()
    assert set(names["moe_runtime"]) == set(moe_runtime.__all__)
    assert set(names["moe_runtime.layer"]) == set(moe_runtime.layer.__all__)
    page = generators.api_page("moe_runtime")
    assert all(f"::: moe_runtime.{name}\n" in page for name in moe_runtime.__all__)


def test_public_functions_have_docstrings():
    for package, names in generators.public_names().items():
        for name in names:
            value = getattr(importlib.import_module(package), name)
            if inspect.isfunction(value):
                assert inspect.getdoc(value), (package, name)


def test_the_table_of_models_has_every_family():
    from moe_families import ADAPTED, TABLE, UNSUPPORTED

    accepted, _, refused = generators.model_table().partition("## Refused")
    assert all(f"`{family}`" in accepted for family in (*TABLE, *ADAPTED))
    assert all(f"`{family}`" in refused for family in UNSUPPORTED)
    assert all((ROOT / file).is_file() for _, file in generators._PROOFS)


def test_formats_of_the_table_are_those_that_tests_write():
    import gguf_checkpoints
    from gguf_corrected_gates import CORRECTED
    from quantized_checkpoints import SAMPLES

    expected: dict[str, set[str]] = {}
    for sample in SAMPLES:
        formats = expected.setdefault(str(sample.family), set())
        formats.add(sample.name.partition("-")[2])
    for family in (*(one.family for one in gguf_checkpoints.SAMPLES), *CORRECTED.values()):
        expected.setdefault(str(family), set()).add("GGUF")
    assert generators.tested_formats() == {
        model_class: sorted(formats) for model_class, formats in expected.items()
    }


def test_links_hold_in_the_site(tmp_path):
    contents = build_site.write_pages(tmp_path)
    places = [place for rows in contents.values() for _, place in rows]
    assert len(places) == len(set(places))
    for place in places:
        page = tmp_path / place
        for target in targets_of(page.read_text(encoding="utf-8")):
            if not is_outside(target):
                assert file_of(page, target)[0].is_file(), (place, target)
