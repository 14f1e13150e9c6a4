"""What the options of `moe-runtime bench` become, and what its outputs must not overwrite."""

import dataclasses
from pathlib import Path
from typing import Any

POCKET = str(Path(__file__).resolve().parents[2] / "models" / "pocket")


@dataclasses.dataclass(frozen=True)
class Case:
    """How a command is called, and what its options become.

    Attributes:
        callees: functions of which one gets each option; the last one ends the command.
        words: arguments of the command.
        arrives: by parameter: its words, and a value that the callees are given only then.
        elsewhere: parameters that the tests of another file follow.
    """

    callees: tuple[str, ...]
    words: tuple[str, ...]
    arrives: dict[str, tuple[str, Any]]
    elsewhere: dict[str, str] = dataclasses.field(default_factory=dict)


BENCH = "moe_runtime.benchmarks"
RULES = {
    "max_s": ("--time 37", ("max_s", 37.0)),
    "precision": ("--precision 0.17", ("precision", 0.17)),
}
TEXTS = {
    "model": ("", ("model", POCKET)),
    "peer": ("--peer transformers:eager", ("variant", "eager")),
    "prompt_tokens": ("--prompt-tokens 23", 23),
    "max_new_tokens": ("-n 7", ("num_new", 7)),
    "host_memory": ("--host-memory 7GiB", ("host_memory", "7GiB")),
    "policy": ("--policy lru", ("policy", "lru")),
    "prefetch": ("--prefetch enforce", ("prefetch", "enforce")),
    "draft": ("--draft lookup", ("draft", "lookup")),
    "threads": ("--threads 3", ("num_threads", 3)),
    "agreement": ("--agreement 0.375", ("agreement", 0.375)),
    **RULES,
}
OF_TEXTS = {
    **dict.fromkeys(("device", "device_memory", "misses"), "tests/bench/test_bench_devices.py"),
    **dict.fromkeys(("shape", "layers"), "tests/bench/test_shape_runs.py"),
    "keep_shape": "tests/bench/test_shape_checkpoint.py",
    "cap": "tests/bench/test_memory_cap.py",
    **dict.fromkeys(("routing", "train", "predictor"), "tests/bench/test_routed.py"),
}
LAYERS = {
    "tokens": ("--tokens 7", ("tokens", [7])),
    "training": ("--training", ("trains", True)),
    "dtype": ("--dtype float16", ("dtype", "float16")),
    "threads": ("--threads 1", ("num_threads", 1)),
    **RULES,
}
BENCH_CASES = {
    "bench latency": Case(
        (f"{BENCH}.suite.peers.find_peer", f"{BENCH}.cases.texts.measure_texts"),
        (POCKET,),
        {**TEXTS},
        dict.fromkeys(("prompts", "quick", "output"), "tests/bench/test_latency.py") | OF_TEXTS,
    ),
    "bench throughput": Case(
        (f"{BENCH}.suite.peers.find_peer", f"{BENCH}.cases.texts.measure_texts"),
        (POCKET,),
        {"batch": ("--batch 5", ("batch", 5)), "batches": ("--batches 3", [23] * 15), **TEXTS},
        dict.fromkeys(("prompts", "quick", "output"), "tests/bench/test_throughput.py") | OF_TEXTS,
    ),
    "bench io": Case(
        (f"{BENCH}.cases.io.measure_reads",),
        (POCKET,),
        {
            "model": ("", ("model", "pocket")),
            "experts": ("--experts 7", ("num_experts", 7)),
            "in_flight": ("--in-flight 3", ("in_flight", 3)),
            **RULES,
        },
        dict.fromkeys(("quick", "output"), "tests/bench/test_disk_reads.py"),
    ),
    "bench experts": Case(
        (
            f"{BENCH}.cases.expert_layers.layer_of_model",
            f"{BENCH}.cases.expert_layers.measure_experts",
        ),
        (POCKET,),
        {
            "model": ("", ("model", "pocket")),
            "peer": ("--peer kt_kernel", ("name", "kt_kernel")),
            **LAYERS,
        },
        dict.fromkeys(("shape", "device", "quick", "output"), "tests/bench/test_expert_backends.py")
        | {"formats": "tests/bench/test_expert_formats.py"},
    ),
    "bench layer": Case(
        (f"{BENCH}.cases.expert_layers.sizes_of_model", f"{BENCH}.cases.layer.measure_layer"),
        (POCKET,),
        {"model": ("", ("model", "pocket")), **LAYERS},
        dict.fromkeys(("shape", "quick", "output"), "tests/bench/test_layer_blocks.py"),
    ),
    "bench ops": Case(
        (f"{BENCH}.cases.ops.measure_ops",),
        (),
        {"shape": ("--shape olmoe-1b-7b", ("model", "olmoe-1b-7b")), **LAYERS},
        dict.fromkeys(("quick", "output"), "tests/bench/test_op_times.py"),
    ),
    "bench training": Case(
        (f"{BENCH}.cases.expert_layers.sizes_of_model", f"{BENCH}.cases.training.measure_training"),
        (POCKET,),
        {
            "model": ("", ("model", "pocket")),
            "peer": ("--peer deepspeed", ("name", "deepspeed")),
            "layers": ("--layers 3", ("layers", 3)),
            "sequences": ("--sequences 7", ("sequences", 7)),
            "context": ("--context 19", ("context", 19)),
            "dtype": ("--dtype bfloat16", ("dtype", "bfloat16")),
            "host_memory": ("--host-memory 3GiB", ("host_memory", 3 << 30)),
            "threads": ("--threads 1", ("num_threads", 1)),
            **RULES,
        },
        dict.fromkeys(("shape", "isa", "quick", "output"), "tests/bench/test_training_steps.py")
        | {"device": "tests/cli/test_missing_device.py"},
    ),
    "bench ablation": Case(
        (f"{BENCH}.cases.ablation.read_variants",),
        ("run.toml",),
        {"config_file": ("", Path("run.toml")), "vary": ("--vary run.seed=237", "run.seed=237")},
        dict.fromkeys(("seeds", "steps", "quick", "output"), "tests/bench/test_ablation.py"),
    ),
    "bench policies": Case(
        (
            "moe_runtime.lab.traces.readers.read_any_trace",
            f"{BENCH}.cases.policies.measure_policies",
        ),
        ("t.npz",),
        {
            "trace": ("", Path("t.npz")),
            "policy": ("--policy lfu,lru", ["lfu", "lru"]),
            "capacity": ("--capacity 75%", ("capacities", [0.75])),
            "scope": ("--scope global", ("scope", "global")),
            "reset": ("--reset", ("reset_per_sequence", True)),
            "side_by_side": ("--side-by-side 2", ("side_by_side", 2)),
            **RULES,
        },
        dict.fromkeys(
            ("num_experts", "train", "predictor", "expert_size", "golden", "quick", "output"),
            "tests/bench/test_policy_replays.py",
        ),
    ),
    "bench predictors": Case(
        (
            "moe_runtime.lab.traces.readers.read_any_trace",
            "moe_runtime.lab.traces.routes.split_numbers",
            "moe_runtime.lab.traces.routes.side_by_side",
            f"{BENCH}.cases.predictors.measure_predictors",
        ),
        ("t.npz", "--bandwidth", "2GB"),
        {
            "traces": ("", Path("t.npz")),
            "predictor": ("--predictor eam --predictor popularity", ["eam", "popularity"]),
            "test_share": ("--test-share 0.375", ("test_share", 0.375)),
            "seed": ("--seed 237", ("seed", 237)),
            "distances": ("--distances 1,7", ("distances", (1, 7))),
            "max_tokens": ("--max-tokens 239", ("max_tokens", 239)),
            "side_by_side": ("--side-by-side 3", ("count", 3)),
            "bandwidth": ("", ("bytes_per_s", 2 * 10**9)),
            "capacity": ("--capacity 75%", ("capacities", [0.75])),
            "latency": ("--latency 0.017", ("latency_s", 0.017)),
            "expert_size": ("--expert-size 5MiB", ("expert_bytes", 5 << 20)),
            "layer_time": ("--layer-time 0.19", ("layer_s", 0.19)),
            "known_ahead": ("--known-ahead 0.0003", ("known_ahead_s", 0.0003)),
            "expert_time": ("--expert-time 0.011", ("expert_s", 0.011)),
            **RULES,
        },
        dict.fromkeys(("train", "quick", "output"), "tests/bench/test_predictor_recall.py"),
    ),
    "bench placements": Case(
        (
            "moe_runtime.lab.traces.readers.read_any_trace",
            "moe_runtime.policies.placement.scoring.split_window",
            f"{BENCH}.cases.placements.measure_placements",
        ),
        ("t.npz",),
        {
            "trace": ("", Path("t.npz")),
            "gpus": ("--gpus 4", ("gpus_per_node", 2)),
            "nodes": ("--nodes 2", ("num_nodes", 2)),
            "replicas": ("--replicas 8", ("num_replicas", 8)),
            "groups": ("--groups 3", ("num_groups", 3)),
            "fit": ("--fit 0.375", 0.375),
            "load_slack": ("--load-slack 0.19", ("load_slack", 0.19)),
            "time_limit": ("--time-limit 17", ("time_limit_s", 17.0)),
            "align": ("--no-align", ("aligned", False)),
            **RULES,
        },
        dict.fromkeys(("num_experts", "quick", "output"), "tests/bench/test_placement_scores.py"),
    ),
    "bench dispatch": Case(
        (f"{BENCH}.cases.dispatch.ranks_here",),
        (),
        {
            "ranks": ("--ranks 4", 4),
            "tokens": ("--tokens 37", ("num_tokens", 37)),
            "dim": ("--dim 19", ("dim", 19)),
            "experts": ("--experts 48", ("num_experts", 48)),
            "top_k": ("--top-k 3", ("top_k", 3)),
        },
        dict.fromkeys(
            ("load", "dtype", "max_s", "precision", "quick", "output"),
            "tests/bench/test_dispatch_rounds.py",
        ),
    ),
    "bench compare": Case(
        (), (), {}, dict.fromkeys(("before", "after", "bound"), "tests/bench/test_judging.py")
    ),
    "bench report": Case(
        *((), (), {}),
        dict.fromkeys(
            ("results", "output", "png", "markdown", "csv"), "tests/bench/test_judging.py"
        ),
    ),
    "bench kernels": Case(
        (),
        (),
        {},
        {"tune": "tests/bench/test_on_a_gpu.py"}
        | dict.fromkeys(("shape", "output"), "tests/bench/test_product_times.py"),
    ),
}

BENCH_INPUTS = {
    "bench latency": [
        (["bench", "latency", "MODEL", "--prompts", "FILE", "--output"], "FILE"),
        (["bench", "latency", "MODEL", "--output"], "MODEL/config.json"),
    ],
    "bench throughput": [
        (["bench", "throughput", "MODEL", "--prompts", "FILE", "--output"], "FILE"),
        (["bench", "throughput", "MODEL", "--output"], "MODEL/config.json"),
    ],
    "bench quality": [
        (["bench", "quality", "MODEL", "--text", "FILE", "--output"], "FILE"),
        (["bench", "quality", "MODEL", "--text", "FILE", "--output"], "MODEL/config.json"),
    ],
    "bench io": [(["bench", "io", "MODEL", "--output"], "MODEL/config.json")],
    "bench experts": [(["bench", "experts", "MODEL", "--output"], "MODEL/config.json")],
    "bench ablation": [(["bench", "ablation", "FILE", "--output"], "FILE")],
    "bench policies": [
        (["bench", "policies", "TRACE", "--output"], "TRACE"),
        (["bench", "policies", "TRACE", "--golden", "FILE", "--output"], "FILE"),
    ],
    "bench predictors": [(["bench", "predictors", "TRACE", "--output"], "TRACE")],
    "bench placements": [(["bench", "placements", "TRACE", "--gpus", "2", "--output"], "TRACE")],
    "bench layer": [(["bench", "layer", "MODEL", "--output"], "MODEL/config.json")],
    "bench ops": [],
    "bench training": [(["bench", "training", "MODEL", "--output"], "MODEL/config.json")],
    "bench serve": [
        (["bench", "serve", "--prompts", "FILE", "--output"], "FILE"),
        (["bench", "serve", "--routing", "FILE", "--output"], "FILE"),
    ],
    "bench report": [(["bench", "report", "FILE", "--output"], "FILE")],
    "bench dispatch": [],  # reads nothing
    "bench kernels": [],
}
"""By command: words that would overwrite an input, and which one."""
