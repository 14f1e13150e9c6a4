"""Tables of the README and of kernels/README.md are what the results files say."""

from typing import Any

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


def test_the_pages_are_up_to_date(monkeypatch):
    monkeypatch.setattr("sys.argv", ["readme_table.py", "--check"])
    assert readme_table.main() == 0, "run benchmarks/readme_table.py"


def test_most_memory_comes_first_and_who_has_no_numbers_has_a_dash():
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


def test_the_note_says_how_often_and_which_row_was_interrupted():
    capped = results(7 << 30, "interrupted", moe_runtime=0.1, other=None)
    capped["measurements"][0]["repetitions"] = [{}] * 5
    whole = results(None, moe_runtime=0.1)
    note = "medians of 1 to 5 repetitions; the row of 7 GiB was interrupted after 5 repetitions; 2"
    assert note in readme_table.table_of([whole, capped])
    assert "medians of 1 repetitions; 2" in readme_table.table_of([whole])


def test_only_the_part_between_the_marks_is_written():
    begin, end = readme_table.BEGIN, readme_table.END
    written = readme_table.replaced(f"before\n{begin}\nold\n{end}\nafter\n", "new")
    assert written == f"before\n{begin}\nnew\n{end}\nafter\n"
    assert readme_table.replaced(written, "new") == written


MACHINE = {"cpu": "CPU", "cpu_features": ["avx2", "avx512f"], "num_cores": 2, "memory_bytes": 2**34}
HEAD = {"machine": MACHINE, "versions": {"torch": "2", "transformers": "5"}, "commit": "abc"}


def system(name: str, **medians: float) -> dict[str, object]:
    """With a metric for each keyword, of seconds where it ends with a number of tokens."""
    summary = {
        f"{what}_s" if what[-1].isdigit() else what: {"median": median}
        for what, median in medians.items()
    }
    return {"system": name, "summary": summary}


def test_each_file_is_compared_with_its_best_peer_that_has_numbers():
    settings = {"model": "s", "dtype": "float32", "tokens": [1, 8]}
    peers = [
        system("eager", forward_1=0.006, backward_8=0.03),
        system("grouped_mm", forward_1=0.005),
        system("gshard"),
    ]
    ours = system("moe_runtime", forward_1=0.002, backward_8=0.01)
    other = {**settings, "model": "t", "tokens": [16]}
    more = [system("eager", forward_16=0.008), system("moe_runtime", forward_16=0.004)]
    lines = readme_table.layers_table(
        [
            {**HEAD, "case": "layer", "settings": settings, "measurements": [*peers, ours]},
            {**HEAD, "case": "layer", "settings": other, "measurements": more},
        ]
    )
    assert lines[0] == "| layer (`moe-runtime bench layer`) | machine | T = 1 | T = 8 | T = 16 |"
    assert lines[2] == "| s, float32, forward | CPU (avx512f), abc | 2 ms, **2.50×** | – | – |"
    assert lines[3] == "| s, float32, backward | CPU (avx512f), abc | – | 10 ms, **3.00×** | – |"
    assert lines[4] == "| t, float32, forward | CPU (avx512f), abc | – | – | 4 ms, **2.00×** |"
