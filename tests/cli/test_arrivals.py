"""What each command hands on: every option of it arrives, by a table that must be complete."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_commands import BENCH_CASES, POCKET, Case
from command_lines import COMMANDS
from fixture_types import Capsys, Patch
from given_values import is_given, parts
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.cli.main import main
from moe_runtime.lab.traces import write_trace
from moe_runtime.policies.prediction import Shape

SHOWN_BY_THE_COMMAND = {"as_json", "debug", "config", "help"}
MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]
MACHINE = """
ranks_per_node = 8
flops_per_s = 1e14
[intra]
alpha_s = 1e-6
bytes_per_s = 1e11
[inter]
alpha_s = 1e-6
bytes_per_s = 1e10
"""
MODEL = """
num_layers = 2
model_dim = 64
num_experts = 48
top_k = 2
expert_hidden = 32
dense_parameters = 1e6
kv_bytes_per_token = 100
"""


LOADING = {
    "host_memory": ("--host-memory 7GiB", ("host_memory", "7GiB")),
    "device_memory": ("--device-memory 3GiB", ("device_memory", "3GiB")),
    "policy": ("--policy lru", "lru"),
    "shares": ("--shares adaptive", ("shares", "adaptive")),
    "cache_code": ("--cache-code planes", ("cache_code", "planes")),
    "kv_cache": ("--kv-cache int8", ("kv_cache", "int8")),
    "activations": ("--activations int8", ("activations", "int8")),
    "misses": ("--misses auto", ("misses", "auto")),
    "routing": ("--routing cache-aware:0.1", ("routing", "cache-aware:0.1")),
    "skip_below": ("--skip-below 0.2", ("skip_below", 0.2)),
    "draft": ("--draft lookup", ("draft", "lookup")),
    "prefetch": ("--prefetch enforce", ("prefetch", "enforce")),
    "predictor": ("--predictor running-counts", ("predictor", "running-counts")),
    "dtype": ("--dtype float16", ("dtype", "float16")),
    "teach": ("--no-teach", ("teach", False)),
}
SYSTEM = {
    "model": ("", Path("model.toml")),
    "ranks": ("--ranks 24", ("num_ranks", 24)),
    "machine": ("--machine m.toml", Path("m.toml")),
    "zipf": ("--zipf 0.375", 0.375),
    "algorithm": ("--algorithm eplb", "eplb"),
    "replicas_per_rank": ("--replicas-per-rank 2", ("replicas_per_rank", 2)),
    "straggler": ("--straggler 1.75", 1.75),
    "failure_days": ("--failure-days 2.5", ("mean_s", 216000.0)),
    "restart_seconds": ("--restart-seconds 251", ("restart_s", 251.0)),
}
SEVERAL = dict.fromkeys(("processes", "gpus", "placement"), "tests/cli/test_processes.py")
CASES = {
    "inspect": Case(
        ("moe_runtime.inference.inspection.inspect_checkpoint",),
        ("models/pocket",),
        {
            "model": ("", "models/pocket"),
            "dtype": ("--dtype float16", "float16"),
            "max_tokens": ("--max-tokens 237", 237),
            "cache_code": ("--cache-code planes", "planes"),
            "misses": ("--misses stand-in", "stand-in"),
            "kv_cache": ("--kv-cache int8", "int8"),
            "draft": ("--draft lookup", "lookup"),
            "verify": ("--verify", True),
        },
        dict.fromkeys(("host_memory", "speed"), "tests/cli/test_commands.py"),
    ),
    "serve": Case(
        ("moe_runtime.serving.http.starting.run_server",),
        ("models/pocket",),
        {
            "models": ("", "models/pocket"),
            "name": ("--name mine", ("names", "mine")),
            "on_demand": ("--on-demand", ("on_demand", True)),
            "unload_idle": ("--unload-idle 8.5", ("idle_s", 8.5)),
            "adapters": ("--adapter one=there", ("adapters", "one=there")),
            "allow_adapter_loading": ("--allow-adapter-loading", ("loads_adapters", True)),
            "adapter_memory": ("--adapter-memory 9MiB", ("adapter_bytes", 9 * MIB)),
            "host": ("--host 0.0.0.0", ("host", "0.0.0.0")),
            "port": ("--port 237", ("port", 237)),
            "api_keys": ("--api-keys text.txt", "words"),
            "cors": ("--cors http://page", "http://page"),
            "max_tokens": ("--max-tokens 239", ("max_tokens", 239)),
            "max_running": ("--max-running 3", ("most_running", 3)),
            "max_waiting": ("--max-waiting 5", ("most_waiting", 5)),
            "step_tokens": ("--step-tokens 241", ("prompt_tokens", 241)),
            "max_slowdown": ("--max-slowdown inf", ("max_slowdown", float("inf"))),
            "exact": ("--exact", ("exact", True)),
            "decode_rows": ("--decode-rows 7", ("decode_rows", 7)),
            "prefix_cache": ("--no-prefix-cache", ("reuses_prefixes", False)),
            "prefix_disk": ("--prefix-disk 7MiB", ("prefix_disk_bytes", 7 * MIB)),
            "share_prefixes": ("--share-prefixes", ("shares_prefixes", True)),
            "max_body": ("--max-body 5MiB", 5 * MIB),
            "allow_remote_images": ("--allow-remote-images", ("fetches_pictures", True)),
            "max_seconds": ("--max-seconds 7.5", 7.5),
            "drain_seconds": ("--drain-seconds 2.5", 2.5),
            **LOADING,
            "device": ("--device cuda", ("device", "cuda")),
            "warm_up": ("--warm-up", ("warm_up", True)),
        },
        {
            "dry_run": "tests/serving/test_serve_command.py",
            **dict.fromkeys(("elastic", "join"), "tests/cli/test_processes.py"),
            **SEVERAL,
        },
    ),
    "generate": Case(
        ("moe_runtime.serving.batches.batch_run.run_batch",),
        ("models/pocket", "--prompts", "text.txt", "--output", "there"),
        {
            "model": ("", "models/pocket"),
            "prompts": ("", "words"),
            "output": ("", Path("there")),
            "chat": ("--chat", ("chat", True)),
            "max_new_tokens": ("--max-new-tokens 237", ("max_new_tokens", 237)),
            "temperature": ("--temperature 0.375", 0.375),
            "top_p": ("--top-p 0.17", 0.17),
            "seed": ("--seed 241", ("seed", 241)),
            "max_running": ("--max-running 3", ("most_running", 3)),
            "exact": ("--exact", ("exact", True)),
            "max_tokens": ("--max-tokens 239", ("max_tokens", 239)),
            **LOADING,
            "adapter": ("--adapter there", ("adapter", Path("there"))),
            "device": ("--device cpu", ("device", "cpu")),
        },
        {
            "verbose": "tests/serving/test_generate_command.py",
            **dict.fromkeys(("ray", "ray_engines"), "tests/integrations/test_ray_options.py"),
            **SEVERAL,
        },
    ),
    "pack": Case(
        ("moe_runtime.checkpoints.packing.pack_checkpoint",),
        ("models/pocket", "packed"),
        {
            "model": ("", "models/pocket"),
            "out": ("", Path("packed")),
            "code": ("--code none", "none"),
            "quantize": ("--quantize int4", "int4"),
            "io_threads": ("--io-threads 3", ("io_threads", 3)),
        },
    ),
    "doctor": Case(
        ("moe_runtime.cli.commands.doctor.examine",),
        ("models",),
        {"path": ("", Path("models")), "read_size": ("--read-size 5MiB", 5 * MIB)},
    ),
    "replay": Case(
        (
            "moe_runtime.lab.traces.readers.read_any_trace",
            "moe_runtime.lab.traces.routes.side_by_side",
            "moe_runtime.lab.replay.experiment.Experiment",
        ),
        ("ids-t.npz",),
        {
            "trace": ("", Path("ids-t.npz")),
            "policy": ("--policy lru,sieve", ("policies", ["lru", "sieve"])),
            "predictor": ("--predictor previous-token", "previous-token"),
            "train": ("--train ids-other.npz", Path("ids-other.npz")),
            "capacity": ("--capacity 37.5%", 0.375),
            "scope": ("--scope global", "global"),
            "shares": ("--shares adaptive", ("adaptive", True)),
            "reset": ("--reset", ("reset_per_sequence", True)),
            "side_by_side": ("--side-by-side 1", ("count", 1)),
            "num_experts": ("--num-experts 237", 237),
            "bandwidth": ("--bandwidth 3GB", 3 * 10**9),
            "latency": ("--latency 0.017", 0.017),
            "expert_size": ("--expert-size 5MiB", 5 * MIB),
            "layer_time": ("--layer-time 0.19", 0.19),
            "known_ahead": ("--known-ahead 0.13", 0.13),
            "expert_time": ("--expert-time 0.011", 0.011),
        },
    ),
    "report": Case(
        ("moe_runtime.lab.traces.readers.read_any_trace", "moe_runtime.lab.report.findings.find"),
        ("ids-t.npz",),
        {
            "source": ("", Path("ids-t.npz")),
            "policy": ("--policy lru", "lru"),
            "predictor": ("--predictor combined", ("predictors", ["combined"])),
            "capacity": ("--capacity 37.5%", 0.375),
            "bandwidth": ("--bandwidth 3GB", 3 * 10**9),
            "expert_size": ("--expert-size 5MiB", 5 * MIB),
            "max_accesses": ("--max-accesses 237", 237),
            "num_experts": ("--num-experts 239", 239),
        },
        {"output": "tests/lab/test_report.py", "png": "tests/lab/test_report.py"},
    ),
    "place": Case(
        (
            "moe_runtime.lab.traces.read_trace",
            "moe_runtime.policies.placement.scoring.split_window",
            "moe_runtime.policies.placement.Devices",
            "moe_runtime.research.placement_solvers.place_experts",
        ),
        ("t.npz",),
        {
            "trace": ("", Path("t.npz")),
            "gpus": ("--gpus 4", ("gpus_per_node", 2)),
            "nodes": ("--nodes 2", ("num_nodes", 2)),
            "replicas": ("--replicas 3", ("num_replicas", 3)),
            "algorithm": ("--algorithm moetuner", "moetuner"),
            "fit": ("--fit 0.375", 0.375),
            "load_slack": ("--load-slack 0.23", 0.23),
            "time_limit": ("--time-limit 7.5", 7.5),
        },
        dict.fromkeys(("output", "from_map", "groups", "align"), "tests/cli/test_place.py"),
    ),
    "simulate serve": Case(
        (
            "moe_runtime.lab.simulate.scaling.read_machine",
            "moe_runtime.lab.simulate.system.read_model",
            "moe_runtime.lab.simulate.system.simulate_serving",
        ),
        ("model.toml",),
        {
            **SYSTEM,
            "step_tokens": ("--step-tokens 237", ("step_tokens", 237)),
            "prefill_ranks": ("--prefill-ranks 5", ("prefill_ranks", 5)),
        },
        dict.fromkeys(
            (
                *("arrivals", "rates", "requests", "prompt_tokens", "new_tokens"),
                *("first_token", "between_tokens"),
            ),
            "tests/cli/test_simulate.py",
        ),
    ),
    "simulate train": Case(
        (
            "moe_runtime.lab.simulate.scaling.read_machine",
            "moe_runtime.lab.simulate.system.read_model",
            "moe_runtime.lab.simulate.system.search_layouts",
        ),
        ("model.toml", "--layouts", "2"),
        {
            **SYSTEM,
            "tokens": ("--tokens 237", ("tokens", 237)),
            "micro_batches": ("--micro-batches 3", ("micro_batches", 3)),
            "checkpoint_minutes": ("--checkpoint-minutes 7", ("checkpoint_every_s", 420.0)),
        },
        {"layouts": "tests/cli/test_simulate.py"},
    ),
    "simulate layer": Case(
        (
            "moe_runtime.lab.simulate.scaling.read_machine",
            "moe_runtime.lab.simulate.scaling.sweep_scaling",
        ),
        (),
        {
            "ranks": ("--ranks 8,24", 24),
            "degrees": ("--degrees 1,3", 3),
            "machine": ("--machine m.toml", Path("m.toml")),
            "tokens": ("--tokens 237", 237),
            "model_dim": ("--model-dim 239", 239),
            "expert_hidden": ("--expert-hidden 241", 241),
            "top_k": ("--top-k 5", ("top_k", 5)),
            "experts_per_rank": ("--experts-per-rank 7", ("experts_per_rank", 7)),
            "shared_hidden": ("--shared-hidden 251", 251),
            "zipf": ("--zipf 0.375", 0.375),
            "algorithm": ("--algorithm eplb", "eplb"),
            "replicas_per_rank": ("--replicas-per-rank 2", ("replicas_per_rank", 2)),
            "straggler": ("--straggler 1.75", 1.75),
        },
        {"shortcut": "tests/cli/test_simulate.py", "plot": "tests/cli/test_simulate.py"},
    ),
    "finetune": Case(
        ("moe_runtime.training.finetune.finetune_run.prepare",),
        ("models/pocket", "text.txt"),
        {
            "model": ("", "models/pocket"),
            "data": ("", "text.txt"),
            "output": ("--output there", Path("there")),
            "lora": ("--lora 3", ("rank", 3)),
            "lora_on": ("--lora-on attention", ("places", ("attention",))),
            "lora_alpha": ("--lora-alpha 12", ("scale", 4.0)),
            "lora_dropout": ("--lora-dropout 0.375", ("dropout", 0.375)),
            "rslora": ("--rslora", ("rslora", True)),
            "dora": ("--dora", ("dora", True)),
            "lora_from": ("--lora-from a1", ("start", Path("a1"))),
            "merge": ("--merge", ("merge", True)),
            "steps": ("--steps 237", 237),
            "held_out_share": ("--held-out-share 0.125", 0.125),
            "evaluate_every": ("--evaluate-every 239", 239),
            "rate": ("--rate 0.017", 0.017),
            "warmup": ("--warmup 23", ("warmup_steps", 23)),
            "context": ("--context 19", 19),
            "sequences": ("--sequences 12", 19 * 12),
            "micro_batches": ("--micro-batches 6", ("micro_batches", 6)),
            "host_memory": ("--host-memory 7GiB", "7GiB"),
            "device_memory": ("--device-memory 5GiB", "5GiB"),
            "device": ("--device cuda:1", "cuda:1"),
            "precision": ("--precision bfloat16", ("precision", "bfloat16")),
            "recompute": ("--recompute", ("recompute", True)),
            "checkpoint_every": ("--checkpoint-every 241", 241),
            "export_dtype": ("--export-dtype float16", "float16"),
            "seed": ("--seed 251", 251),
            "trace": ("--trace t2.npz", Path("t2.npz")),
        },
        {
            "zeroth_order": "tests/research/test_zeroth_order_runs.py",
            "eps": "tests/research/test_zeroth_order_runs.py",
            **dict.fromkeys(
                ("storage_dir", "resume", "reschedule", "dry_run"),
                "tests/training/test_finetuning.py",
            ),
            **dict.fromkeys(("epochs", "held_out", "patience"), "tests/training/test_records.py"),
        },
    ),
    "train": Case(
        ("moe_runtime.training.config_tree.read_tree",),
        ("run.toml",),
        {
            "config_file": ("", Path("run.toml")),
            "settings": ("--set run.steps=237", "run.steps=237"),
        },
        {
            "resume": "tests/training/test_resume.py",
            "reschedule": "tests/training/test_resume.py",
            "dry_run": "tests/training/test_runs.py",
        },
    ),
    "predictor evaluate": Case(
        (
            "moe_runtime.lab.traces.readers.read_any_trace",
            "moe_runtime.lab.traces.routes.split_numbers",
            "moe_runtime.lab.replay.evaluation.evaluate",
        ),
        ("t.npz", "other.npz"),
        {
            "traces": ("", Path("other.npz")),
            "predictor": ("--predictor popularity", ("names", ["popularity"])),
            "test_share": ("--test-share 0.375", 0.375),
            "seed": ("--seed 237", 237),
            "distances": ("--distances 1,7", 7),
            "max_tokens": ("--max-tokens 239", 239),
        },
        dict.fromkeys(("model", "text", "host_memory"), "tests/cli/test_predictor.py"),
    ),
    "predictor fit": Case(
        (
            "moe_runtime.lab.traces.readers.read_any_trace",
            "moe_runtime.lab.traces.learned.write_predictor",
        ),
        ("t.npz",),
        {
            "traces": ("", Path("t.npz")),
            "predictor": ("--predictor popularity", ("name", "popularity")),
            "output": ("--output p.npz", Path("p.npz")),
        },
        dict.fromkeys(("model", "text", "host_memory"), "tests/cli/test_predictor.py"),
    ),
    "models list": Case((), (), {}),
    "models remove": Case(
        ("moe_runtime.checkpoints.hub.removal_of",),
        ("maker/tiny",),
        {"names": ("", "maker/tiny")},
        {"yes": "tests/checkpoints/test_hub.py"},
    ),
    "predictor list": Case((), (), {}),
    "predictor teach": Case(
        (), (), {}, dict.fromkeys(("model", "traces"), "tests/cli/test_predictor.py")
    ),
    "bench quality": Case(
        (
            "moe_runtime.benchmarks.commands.quality.systems_of",
            "moe_runtime.benchmarks.cases.quality.cut_text",
        ),
        (POCKET, "--text", "text.txt"),
        {
            "models": ("", POCKET),
            "text": ("", "words"),
            **LOADING,
            "policy": ("--policy reuse", ("policy", "reuse")),
            "vary": ("--vary dtype=float32", "dtype=float32"),
            "context": ("--context 237", 237),
        },
        {
            "device": "tests/cli/test_missing_device.py",
            **dict.fromkeys(
                ("reference", "chunks", "steps", "quick", "output"), "tests/bench/test_quality.py"
            ),
        },
    ),
    **BENCH_CASES,
}
# tests/cli/test_options.py, tests/serving/test_chat_command.py and test_load_command.py
FOLLOWED_ELSEWHERE = {"run", "chat", "bench serve"}


def test_no_option_is_left_out() -> None:
    assert CASES.keys() | FOLLOWED_ELSEWHERE == COMMANDS.keys()
    for name, case in CASES.items():
        options = {param.name for param in COMMANDS[name].params} - SHOWN_BY_THE_COMMAND
        assert case.arrives.keys() | case.elsewhere.keys() == options, name
        assert not case.arrives.keys() & case.elsewhere.keys()
        assert all((ROOT / file).is_file() for file in case.elsewhere.values())


def given_to_callees(
    name: str, words: Sequence[str], files: Path, monkeypatch: Patch
) -> list[tuple[str, Any]]:
    """What the functions of a command are called with, whether it comes to the last one or not."""
    case = CASES[name]
    given: list[tuple[str, Any]] = []
    monkeypatch.chdir(files)
    with monkeypatch.context() as patches:
        patches.setattr(torch.cuda, "device_count", lambda: 2)
        for callee in case.callees:
            module, _, function = callee.rpartition(".")
            real = getattr(importlib.import_module(module), function)
            ends = callee == case.callees[-1]

            def record(*args: Any, real: Any = real, ends: bool = ends, **options: Any) -> Any:
                given.extend(parts([args, options]))
                if ends:
                    raise ValueError("this is where it ends")
                return real(*args, **options)

            patches.setattr(callee, record)
        assert main([*name.split(), *case.words, *words]) == 2
    return given


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.callees])
def test_every_option_arrives(name: str, files: Path, monkeypatch: Patch, capsys: Capsys) -> None:
    """The value of the table, which does not arrive where options are left out."""
    arrives = CASES[name].arrives
    words = [word for words, _ in arrives.values() for word in words.split()]
    given = given_to_callees(name, words, files, monkeypatch)
    assert "this is where it ends" in capsys.readouterr().err
    lost = {option for option, (_, value) in arrives.items() if not is_given(value, given)}
    assert lost == set()
    optional = {option: value for option, (own_words, value) in arrives.items() if own_words}
    assert len(set(map(repr, optional.values()))) == len(optional)
    given = given_to_callees(name, (), files, monkeypatch)
    assert {option for option, value in optional.items() if is_given(value, given)} == set()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the words name; every command ends before it writes."""
    folder = tmp_path_factory.mktemp("arrivals")
    shape = Shape(num_layers=9, num_experts=16, top_k=2)
    for seed, name in enumerate(("t.npz", "other.npz")):
        routes = make_routes(shape, num_sequences=8, length=40, seed=seed)
        write_trace(folder / name, trace_of(routes))
        np.savez(folder / f"ids-{name}", ids=routes.expert_ids)  # says nothing of experts
    (folder / "m.toml").write_text(MACHINE)
    (folder / "model.toml").write_text(MODEL)
    (folder / "text.txt").write_text("words")
    (folder / "models").mkdir()
    return folder
