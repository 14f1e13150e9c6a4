"""The measured section of kernels/README.md is what the results files say."""

import pytest

from moe_runtime.benchmarks import kernels_table

MACHINE = {
    "cpu": "CPU",
    "cpu_features": ["avx2", "avx512f"],
    "num_cores": 2,
    "memory_bytes": 2**34,
}
HEAD = {
    "machine": MACHINE,
    "versions": {"torch": "2", "transformers": "5"},
    "commit": "abc",
}


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


def test_systems_that_trained_are_named_with_their_speeds() -> None:
    sizes = {"layers": 2, "sequences": 4, "context": 8, "dtype": "float32"}
    speeds = {"moe_runtime": 1234.5, "eager": 99.6}
    measured = [
        {"system": name, "summary": {"tokens_per_s": {"median": speed}}}
        for name, speed in speeds.items()
    ]
    measured.append({"system": "deepspeed", "summary": {}})
    results = {**HEAD, "settings": {"model": "s", **sizes}, "measurements": measured}
    assert kernels_table.training_table([results])[2] == (
        "| `s`, 2 layers, 4 x 8 tokens a step, float32 | `moe_runtime` 1,234, `eager` 100 | "
        "CPU (avx512f), abc |"
    )


def test_ops_and_their_backward_passes() -> None:
    sizes = {"num_experts": 4, "top_k": 2, "dim_model": 8, "dim_hidden": 6}
    medians = {"forward_16_s": 0.00025, "forward_256_s": 0.002, "backward_256_s": 0.1234}
    summary = {metric: {"median": median} for metric, median in medians.items()}
    results = {
        **HEAD,
        "settings": {**sizes, "dtype": "bfloat16", "tokens": [16, 256]},
        "measurements": [{"system": "combine", "summary": summary}],
    }
    lines = kernels_table.ops_table(results)
    assert lines[0] == (
        "| op, E=4, K=2, D=8, F=6, bfloat16 (`moe-runtime bench ops`) | T = 16 | "
        "T = 16, with backward | T = 256 | T = 256, with backward |"
    )
    assert lines[2] == "| `combine` | 0.25 ms | – | 2 ms | 123 ms |"
    assert "CPU (avx512f), 2 cores, 16 GiB" in lines[-1]


def test_what_a_gpu_was_asked_for() -> None:
    aim = {"sign": ">=", "asked": 480, "measured": 500.5, "holds": True}
    ours = {
        "forward_s": 2e-3, "forward_tflops": 500.4, "both_s": 8e-3, "both_tflops": 400.4,
        "graph_forward_s": 1e-3, "graph_read_of_copy": 0.75,
    }  # fmt: skip
    peer = {"forward_s": 3e-3, "both_s": 9e-3}
    settings = {
        "gpu": "H200",
        "dense_tflops": 700.4,
        "copy_bytes_s": 4e12,
        "aims": {
            "120b: forward_tflops": aim,
            "skewed, beside a copy: ratio": aim | {"measured": 1.0, "holds": False},
        },
        "shapes": {"many": {"T": 4096}, "one": {"T": 1}},
    }

    def results(**more: float) -> dict[str, object]:
        both = {"moe_runtime": ours, "grouped_mm": peer | more}
        measured = [
            system(f"{name}, {backend}", **found)
            for name in ("many", "one")
            for backend, found in both.items()
        ]
        versions = HEAD["versions"] | {"triton": "3"}
        return {**HEAD, "versions": versions, "settings": settings, "measurements": measured}

    lines = kernels_table.gpu_table(results())
    assert lines[2] == "| 120b | forward_tflops | 480 | 500.5 | holds |"
    assert lines[3] == "| skewed, beside a copy | ratio | 480 | 1 | **missed** |"
    assert lines[7] == (
        "| many | 2 ms, **1.50×**, 500 TFLOP/s | 8 ms, **1.12×**, 400 TFLOP/s | – |"
    )
    assert kernels_table.gpu_table(results(graph_forward_s=2.5e-3))[8].endswith(
        "| 1 ms, **2.50×**, reads 75% of a copy's bandwidth |"
    )
    assert lines[-1].startswith(
        "H200: dense product 700 TFLOP/s, copy 4,000 GB/s; torch 2, triton 3"
    )
