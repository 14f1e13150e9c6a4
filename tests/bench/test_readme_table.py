"""The README's table is what its results files say."""

from typing import Any

import pytest

from moe_runtime.benchmarks import readme_table


def results(cap: int | None, ended: str = "time", **step_s: float | None) -> dict[str, Any]:
    """A results file of `bench latency`, with the seconds of a token of each system."""
    medians = {"first_token_s": 4.0, "load_s": 5.0, "import_s": 0.6}
    return {
        "date": "2026-01-02T03:04:05",
        "commit": "0123456789abcdef",
        "ended": ended,
        "machine": {"cpu": "CPU", "memory_bytes": 2**33},
        "settings": {"model": "shape", "cap_bytes": cap, "prompt_tokens": [8, 8], "num_threads": 2},
        "measurements": [
            {
                "system": system,
                "repetitions": [] if seconds is None else [{}],
                "summary": {
                    name: {"median": value}
                    for name, value in {**medians, "between_tokens_s": seconds}.items()
                },
            }
            for system, seconds in step_s.items()
        ],
    }


def test_the_readme_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["readme_table.py", "--check"])
    assert readme_table.main() == 0, "run benchmarks/readme_table.py"


def test_most_memory_comes_first_and_who_has_no_numbers_has_a_dash() -> None:
    found = [
        results(5 << 30, moe_runtime=0.5, other=None),
        results(None, moe_runtime=0.08, other=2.0, third=0.1),
        results(7 << 30, moe_runtime=0.1),
    ]
    lines = readme_table.table_of(found).splitlines()
    assert [line for line in lines if line.startswith("|")] == [
        "| memory | moe-runtime | other | third | first token | prompt |",
        "|---|--:|--:|--:|--:|--:|",
        "| all of it | **12.5** | 0.5 | 10 | 10 s | 2 |",
        "| 7 GiB | **10** | – | – | 10 s | 2 |",
        "| 5 GiB | **2** | – | – | 10 s | 2 |",
    ]
    assert "`shape` shape in bf16, 8 prompt tokens" in lines[0]


def test_the_note_says_how_often_and_which_row_was_interrupted() -> None:
    capped = results(7 << 30, "interrupted", moe_runtime=0.1, other=None)
    capped["measurements"][0]["repetitions"] = [{}] * 5
    whole = results(None, moe_runtime=0.1)
    note = "medians of 1 to 5 repetitions; the row of 7 GiB was interrupted after 5 repetitions; 2"
    assert note in readme_table.table_of([whole, capped])
    assert "medians of 1 repetition; 2" in readme_table.table_of([whole])


def test_only_the_part_between_the_marks_is_written() -> None:
    begin, end = readme_table.BEGIN, readme_table.END
    readme = f"before\n{begin}\nold\n{end}\nafter\n"
    written = readme_table.replaced(readme, begin, end, "new")
    assert written == f"before\n{begin}\nnew\n{end}\nafter\n"
    assert readme_table.replaced(written, begin, end, "new") == written
