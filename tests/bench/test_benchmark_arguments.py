"""Arguments of the scripts in `benchmarks`: what cannot be measured is refused before it begins."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from moe_runtime.benchmarks.harness.scripting import at_least, new_file, present_folder


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    assert at_least(2)("2") == 2
    for text in ("1", "x", ""):
        with pytest.raises(ArgumentTypeError, match="expected a number of at least 2, got"):
            at_least(2)(text)
    assert present_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ArgumentTypeError, match="there is no folder absent"):
        present_folder("absent")
    assert new_file(str(tmp_path / "r.json")) == tmp_path / "r.json"
    with pytest.raises(ArgumentTypeError, match="there is no folder"):
        new_file(str(tmp_path / "absent" / "r.json"))
