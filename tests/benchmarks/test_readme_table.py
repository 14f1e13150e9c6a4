"""The README's table is what its results file says."""

import readme_table


def test_the_readme_is_up_to_date(monkeypatch):
    monkeypatch.setattr("sys.argv", ["readme_table.py", "--check"])
    assert readme_table.main() == 0, "run benchmarks/readme_table.py"


def test_only_the_part_between_the_marks_is_written():
    results = {
        "summary": [
            {
                "cap_bytes": cap,
                "system": system,
                "medians": {
                    "decode_tokens_per_s": rate,
                    "ttft_s": 9.6,
                    "prefill_warm_tokens_per_s": 123.4,
                },
            }
            for cap in (None, 7 << 30)
            for system, rate in (("ours", 12.345), ("other", 0.5))
        ],
        "shape": {"name": "shape", "total_bytes": 2**30},
        "machine": {"cpu": "CPU", "memory_bytes": 2**33},
        "settings": {"prompt_tokens": 8, "num_threads": 2, "repeats": 3},
        "date": "2026-01-02T03:04:05",
        "commit": "0123456789abcdef",
        "command": "python x.py",
    }
    readme = f"before\n{readme_table.BEGIN}\nold\n{readme_table.END}\nafter\n"
    written = readme_table.with_table(readme, results)
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "old" not in written
    assert "| 7 GiB | **12.3** | 0.5 | 10 s | 123 |" in written
    assert "| all of it | **12.3** | 0.5 | 10 s | 123 |" in written
    assert readme_table.with_table(written, results) == written
