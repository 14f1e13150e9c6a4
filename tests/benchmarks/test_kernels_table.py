"""The measured section of kernels/README.md is what the results files say."""

import kernels_table
import pytest

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


def test_page_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernels_table.py", "--check"])
    assert kernels_table.main() == 0, "run benchmarks/kernels_table.py"


def test_a_case_without_a_measurement_is_left_open() -> None:
    row = {"shape": "s", "dtype": "bf16", "pass": "forward", "commit": "abc"}
    rows = [
        row | {"tokens": 1, "ms": {"moe_runtime": 2.0, "eager": 5.0}, "ratio": 2.5},
        row | {"tokens": 16, "ms": {"moe_runtime": 4.0, "eager": 6.0}, "ratio": 1.5},
        row
        | {
            "tokens": 16,
            "pass": "forward+backward",
            "ms": {"moe_runtime": 9.0, "eager": 9.0},
            "ratio": 1.0,
        },
    ]
    lines = kernels_table.experts_table({**HEAD, "rows": rows})
    assert "`moe-runtime bench experts`" in lines[0]
    assert lines[2] == "| s, bf16, forward | 2 ms, **2.50×** | 4 ms, **1.50×** |"
    assert lines[3] == "| s, bf16, forward+backward | – | 9 ms, **1.00×** |"
    assert "CPU (avx512f), 2 cores, 16 GiB" in lines[-1]


def test_a_file_of_the_suite_is_compared_with_the_best_that_has_numbers() -> None:
    def system(name: str, **medians: float) -> dict[str, object]:
        summary = {f"{what}_s": {"median": median} for what, median in medians.items()}
        return {"system": name, "summary": summary}

    results = {
        **HEAD,
        "case": "layer",
        "settings": {"model": "s", "dtype": "float32"},
        "measurements": [
            system("eager", forward_1=0.006, backward_8=0.03),
            system("moe_runtime", forward_1=0.002, backward_8=0.01),
            system("grouped_mm", forward_1=0.005),
            system("gshard"),
        ],
    }
    lines = kernels_table.case_table(results)
    assert lines[0] == "| layer (`moe-runtime bench layer`) | T = 1 | T = 8 |"
    assert lines[2] == "| s, float32, forward | 2 ms, **2.50×** | – |"
    assert lines[3] == "| s, float32, backward | – | 10 ms, **3.00×** |"


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


def test_what_the_layer_spends_its_time_on() -> None:
    settings = {"tokens": 8, "hidden": 4, "inter": 2, "experts": 3, "top_k": 1, "dtype": "fp32"}
    medians = {"ours": 2.0, "grouped_mm": 3.0, "gshard": 8.0}
    run = {**HEAD, "settings": settings, "medians": medians}
    shares = {"products": 0.85, "activation": 0.06}
    runs = [run | {"shares_of_ours": shares | extra} for extra in ({}, {"optimizer": 0.04})]
    lines = kernels_table.layer_table([*runs, run])
    assert lines[2].endswith("| 2.00 s | **1.50×** | **4.00×** | 85.0% | 6.0% | – | 9.0% |")
    assert lines[3].endswith("| 2.00 s | **1.50×** | **4.00×** | 85.0% | 6.0% | 4.0% | 5.0% |")
    assert lines[4].endswith("| 2.00 s | **1.50×** | **4.00×** | – | – | – | – |")


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
    aim = {"what": "120b", "field": "forward_tflops", "asked": 480, "measured": 500.5}
    ours = {
        "forward_s": 2e-3, "forward_tflops": 500.4, "both_s": 8e-3, "both_tflops": 400.4,
        "graph_forward_s": 1e-3, "graph_read_of_copy": 0.75,
    }  # fmt: skip
    peer = {"forward_s": 3e-3, "both_s": 9e-3, "graph_forward_s": None}
    both = {"moe_runtime": ours, "grouped_mm": peer}
    results = {
        **HEAD,
        "versions": HEAD["versions"] | {"triton": "3"},
        "gpu": "H200",
        "dense_tflops": 700.4,
        "copy_bytes_s": 4e12,
        "aims": [aim | {"holds": True}, aim | {"measured": 1.0, "holds": False}],
        "shapes": {"many": {"T": 4096, "backends": both}, "one": {"T": 1, "backends": both}},
    }
    lines = kernels_table.gpu_table(results)
    assert lines[2] == "| 120b | forward_tflops | 480 | 500.5 | holds |"
    assert lines[3].endswith("| 1 | **missed** |")
    assert lines[7] == (
        "| many | 2 ms, **1.50×**, 500 TFLOP/s | 8 ms, **1.12×**, 400 TFLOP/s | – |"
    )
    peer["graph_forward_s"] = 2.5e-3
    assert kernels_table.gpu_table(results)[8].endswith(
        "| 1 ms, **2.50×**, reads 75% of a copy's bandwidth |"
    )
    assert lines[-1].startswith(
        "H200: dense product 700 TFLOP/s, copy 4,000 GB/s; torch 2, triton 3"
    )
