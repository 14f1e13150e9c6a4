"""Arguments of the scripts in `benchmarks`: what cannot be measured is refused before it begins."""

import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("crashes.py --folder absent", "--folder: there is no folder absent"),
        ("scaling.py --ranks 1", "--ranks: expected a number of at least 2, got '1'"),
        ("serve_soak.py --model absent", "--model: there is no folder absent"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(words: str, complaint: str) -> None:
    name, *rest = words.split()
    found = subprocess.run(
        [warm_python(), BENCHMARKS / name, *rest], capture_output=True, text=True, check=False
    )
    assert found.returncode == 2
    assert found.stderr.endswith(f"{complaint}\n")
