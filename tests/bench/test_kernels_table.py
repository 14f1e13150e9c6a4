"""The measured section of kernels/README.md is what the results files say."""

import pytest

from moe_runtime.benchmarks import kernels_table

MACHINE = {"cpu": "CPU", "cpu_features": ["avx2", "avx512f"], "num_cores": 2, "memory_bytes": 2**34}
HEAD = {"machine": MACHINE, "versions": {"torch": "2", "transformers": "5"}, "commit": "abc"}


def system(name: str, **medians: float) -> dict[str, object]:
    """With a metric for each keyword, of seconds where it ends with a number of tokens."""
    summary = {
        f"{what}_s" if what[-1].isdigit() else what: {"median": median}
        for what, median in medians.items()
    }
    return {"system": name, "summary": summary}


def test_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernels_table.py", "--check"])
    assert kernels_table.main() == 0, "run benchmarks/kernels_table.py"


def test_each_file_is_compared_with_its_best_peer_that_has_numbers() -> None:
    settings = {"model": "s", "dtype": "float32", "tokens": [1, 8]}
    peers = [
        system("eager", forward_1=0.006, backward_8=0.03),
        system("grouped_mm", forward_1=0.005),
        system("gshard"),
    ]
    ours = system("moe_runtime", forward_1=0.002, backward_8=0.01)
    other = {**settings, "model": "t", "tokens": [16]}
    more = [system("eager", forward_16=0.008), system("moe_runtime", forward_16=0.004)]
    lines = kernels_table.layers_table(
        [
            {**HEAD, "case": "layer", "settings": settings, "measurements": [*peers, ours]},
            {**HEAD, "case": "layer", "settings": other, "measurements": more},
        ]
    )
    assert lines[0] == "| layer (`moe-runtime bench layer`) | machine | T = 1 | T = 8 | T = 16 |"
    assert lines[2] == "| s, float32, forward | CPU (avx512f), abc | 2 ms, **2.50×** | – | – |"
    assert lines[3] == "| s, float32, backward | CPU (avx512f), abc | – | 10 ms, **3.00×** | – |"
    assert lines[4] == "| t, float32, forward | CPU (avx512f), abc | – | – | 4 ms, **2.00×** |"
