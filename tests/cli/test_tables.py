"""Tables on narrow terminals: lists of their cells, and no broken word."""

import io
import re
import sys

import pytest

from moe_runtime.cli.commands.train import TrainingDisplay
from moe_runtime.cli.console import print_table
from moe_runtime.training.metrics import StepRecord

NAMES = ["moe_runtime", "transformers:grouped_mm", "moe_runtime:planes", "llama_cpp#2"]
COLUMNS = [("", "left"), *((name, "right") for name in NAMES)]
ROWS = [
    ["between tokens, ms: p50", "1.25", "12.5", "1.5", "100.125"],
    ["between tokens, ms: mean of medians", "1.25 ± 0.25", "12.5 ± 0.1", "1.5 ± 1.0", "100 ± 20"],
]
WORDS = {word.rstrip(":") for row in [NAMES, *ROWS] for cell in row for word in cell.split()}


@pytest.mark.parametrize("width", [58, 64, 80, 100, 120, 300])
def test_no_word_is_broken_and_no_cell_is_lost(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    print_table("latency", COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    words = [word.rstrip(":") for line in lines for word in line.split() if set(word) != {"─"}]
    assert {*words} == WORDS | {"latency"}
    assert words.count("latency") == 1


def test_a_table_that_fits_is_one(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    print_table("latency", COLUMNS, ROWS)
    lines = capsys.readouterr().out.splitlines()
    assert sum("─" in line for line in lines) == 1
    assert [line.split("  ")[0].strip() for line in lines[4:6]] == [row[0] for row in ROWS]


def test_words_alone_are_wrapped(monkeypatch, capsys):
    """A table without numbers stays one, its words below one another."""
    monkeypatch.setenv("COLUMNS", "30")
    print_table("", [("", "left"), ("", "left")], [("disk", "reads " * 10), ("x" * 40, "y")])
    out = capsys.readouterr().out
    assert out.count("reads") == 10
    assert out.count("x") == 40


@pytest.mark.parametrize("width", [40, 60, 78, 79, 80, 99])
def test_no_column_is_cut_off(width, monkeypatch, capsys):
    """Headers of several words wrap, and so does what is long beside them."""
    headers = ["capacity", "hits", "of LRU to optimum", "no load needed", "loads/layer", "read"]
    cells = ["50.0%", "72.65%", "+100%", "57.2%", "0.558", "3.387 MiB"]
    monkeypatch.setenv("COLUMNS", str(width))
    columns = [("policy", "left"), *((header, "right") for header in headers)]
    print_table("replay", columns, [["belady-bypass", *cells]])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    printed = [line.strip() for line in lines]
    for cell in cells:  # numbers stay beside their units
        assert any(cell in line for line in printed)
    words = {word.rstrip(":") for line in lines for word in line.split()}
    assert words >= {word for header in headers for word in header.split()}


@pytest.mark.parametrize("width", [40, 80, 300])
def test_the_line_of_a_training_run_keeps_step_and_loss(width, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    sizes = dict.fromkeys(("memory_bytes", "read_bytes", "written_bytes"), 3 << 28)
    record = StepRecord(
        step=123, loss=4.56789, aux_loss=0.0, rate=1e-3, gradient_norm=1.0, tokens=123 << 12,
        step_s=2.0, stall_s=0.5, **sizes,
    )  # fmt: skip
    with TrainingDisplay(1000, 10, 0) as display:
        display.show(record)
    lines = (
        re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue()).replace("\r", "\n").split("\n")
    )
    last = [line for line in lines if line.strip()][-1]
    assert max(map(len, lines)) <= width
    assert re.match(r"step +123/1000 .*loss 4\.5", last)
    assert ("loss 4.5679" in last and "rate 1.00e-03" in last) or width < 300
    assert "loss 4.5679" in last or width < 80
