"""Every option of every command arrives; what would have no effect is refused."""

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from command_lines import COMMANDS
from fixture_types import Capsys, Patch
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.cli.main import main
from moe_runtime.inference.generation import GenerationResult, generate_text
from moe_runtime.inference.loading import load
from moe_runtime.lab.traces import write_trace
from moe_runtime.policies.placement import PlacementOptions
from moe_runtime.policies.prediction import Shape
from moe_runtime.research.placement_solvers import ALGORITHMS


def plain(name: str) -> Callable[..., None]:
    """The function of a command with all its options, groups of them taken apart."""
    return inspect.unwrap(COMMANDS[name].callback)


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def distinctive(name: str, kind: Any, folder: Path) -> tuple[str, Any]:
    """A value of an option that is not its default: as a word, and as it must arrive."""
    words = {"host_memory": "7GiB", "device_memory": "5GiB", "device": "cpu", "dtype": "float32"}
    words |= {"policy": "slru", "shares": "even", "cache_code": "planes", "misses": "auto"}
    words |= {"routing": "cache-aware:0.375"}
    words |= {"activations": "int8", "draft": "lookup", "kv_cache": "int8"}
    words |= {"prefetch": "observe", "predictor": "running-counts"}
    kinds = set(get_args(kind)) or {kind}
    if int in kinds:
        return "237", 237
    if float in kinds:
        return "0.375", 0.375
    if Path in kinds:
        file = folder / f"{name}.npz"
        return str(file), file
    word = words.get(name, f"an-odd-{name}")
    return word, word


def test_every_option_of_run_arrives_where_its_name_is_a_parameter(
    checkpoint: Path, monkeypatch: Patch, fake_load: Any, tmp_path: Path
) -> None:
    """By the signatures: a new option belongs to `load`, to `generate_text`, or is named here."""
    of_the_command = {"model", "prompt", "prompt_file", "prompts", "as_json", "debug", "config"}
    of_the_command.add("verbose")  # of the table: tests of `run`
    of_the_command.add("image")  # read before the model is loaded: tests of pictures
    of_the_command.add("teach")  # takes no value: tests of arrivals
    of_the_command |= {"processes", "gpus"}  # other processes load: tests of processes
    flags, valued = {"chat"}, {}
    kinds = get_type_hints(plain("run"))
    for param in COMMANDS["run"].params:
        if param.name not in of_the_command | flags | {"help"}:
            value = distinctive(param.name, kinds[param.name], tmp_path)
            valued[param.name] = (param.opts[0], *value)
    nowhere = valued.keys() - parameters(load) - parameters(generate_text)
    assert nowhere == set()

    told: dict[str, Any] = {}

    def record(*_: Any, **options: Any) -> GenerationResult:
        told.update(options)
        return GenerationResult(
            text="x",
            token_ids=(1,),
            prompt_tokens=1,
            new_tokens=1,
            ttft_s=None,
            decode_tokens_per_s=None,
            finish_reason="length",
        )

    monkeypatch.setattr("moe_runtime.inference.generation.generate_text", record)
    monkeypatch.setattr("moe_runtime.inference.generation.encode_prompt", encoded)
    words = [word for option, word, _ in valued.values() for word in (option, word)]
    assert main(["run", str(checkpoint), "--prompt", "Hello", "--chat", *words]) == 0
    arrived = fake_load.options | told
    assert {name: arrived[name] for name in valued} == {n: v[2] for n, v in valued.items()}
    assert told["chat"] is True


def encoded(*_: Any, **__: Any) -> dict[str, Any]:
    """A prompt of no length: whatever room is asked for suffices."""
    import torch

    return {"input_ids": torch.zeros(1, 0, dtype=torch.long)}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    shape = Shape(num_layers=2, num_experts=8, top_k=2)
    write_trace(tmp_path / "t.npz", trace_of(make_routes(shape, num_sequences=4, length=20)))
    return str(tmp_path / "t.npz")


def test_options_without_effect_are_refused(trace: str, tmp_path: Path, capsys: Capsys) -> None:
    stats, times = tmp_path / "run.json", tmp_path / "times.toml"
    stats.write_text("{}")
    times.write_text("latency = 0.5\n")
    run = ["run", "m", "-p", "x", "--prefetch", "off", "--policy", "lru"]
    page = ["-o", str(tmp_path / "r.html")]
    for words, complaint in (
        (["replay", trace, "--config", str(times)], "--latency is about modelled time"),
        (["report", str(stats), *page, "--policy", "lur"], "--policy is about traces"),
        (
            ["predictor", "evaluate", trace, "--host-memory", "1GiB"],
            "--host-memory is for the model",
        ),
        (["finetune", "m", "d", "--lora-on", "bogus"], "--lora-on says where adapters are"),
        (["finetune", "m", "d", "--dora"], "--dora is for adapters; give --lora RANK too"),
        (["finetune", "m", "d", "--lora", "2", "--dora"], "--dora is for adapters on attention"),
        (
            ["finetune", "m", "d", "--lora", "2", "--lora-dropout", "1"],
            "--lora-dropout must lie in [0, 1), got 1.0",
        ),
        (
            ["finetune", "m", "d", "--lora", "2", "--storage-dir", "s"],
            "--storage-dir is for experts that are trained",
        ),
        ([*run, "--predictor", "running-counts"], "--predictor has no effect: give --prefetch"),
        *(
            (
                [command, "m", *rest, "--prefetch", "off", "--predictor", "next-gate"],
                "--predictor has no effect: give --prefetch",
            )
            for command, rest in (
                ("run", ["-p", "x"]),
                ("chat", []),
                ("serve", []),
                ("generate", ["--prompts", "x", "-o", str(tmp_path / "out")]),
            )
        ),
        (["replay", trace, "--train", trace, "--policy", "lru"], "--train has nothing to train"),
    ):
        assert main(words) == 2
        assert complaint in capsys.readouterr().err


def test_an_algorithm_s_options_are_refused_beside_another_one(trace: str, capsys: Capsys) -> None:
    """By the algorithms themselves: what none of their parts can tell apart has no effect."""
    values: dict[str, Any] = {
        "--groups": ("num_groups", 2),
        "--load-slack": ("load_slack", 0.3),
        "--time-limit": ("time_limit_s", 2.0),
    }
    for algorithm, make in ALGORITHMS.items():
        plain = make(PlacementOptions())
        for option, (name, value) in values.items():
            told = make(PlacementOptions(**{name: value}))
            words = ["place", trace, "--gpus", "2", "--algorithm", algorithm, option, str(value)]
            code = main([*words, "--fit", "2"])
            refusal = f"{option} has no effect on {algorithm}" in capsys.readouterr().err
            assert (code, refusal) == (2, vars_of(told) == vars_of(plain)), (algorithm, option)
    for algorithm in ("round-robin", "exflow", "moetuner"):
        words = ["place", trace, "--gpus", "2", "--algorithm", algorithm, "--no-align"]
        assert main(words) == 2
        assert "--align has no effect" in capsys.readouterr().err


def vars_of(policy: object) -> dict[str, object]:
    """The settings of a placement policy."""
    held = {name: getattr(policy, name) for name in dir(policy) if not name.startswith("__")}
    return {name: value for name, value in held.items() if not callable(value)}


def test_a_rate_of_zero_is_not_the_default(capsys: Capsys) -> None:
    assert main(["finetune", "m", "d", "--rate", "0"]) == 2
    assert "--rate must be positive" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--json", "--polcy", "lru"],
        ["run", "m", "--json", "--max-new-tokens", "many"],
        ["inspect", "--json"],
        ["inspect", "m", "--json", "--dtype", "a", "--dtype", "b"],
        ["predictor", "evaluate", "--json", "--seed", "-1"],
        ["rnu", "--json"],
    ],
)
def test_a_wrong_option_beside_json_gets_an_object(words: list[str], capsys: Capsys) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err == f"moe-runtime: error: {json.loads(out)['error']}\n"


def _texts(name: str) -> list[str]:
    """The options of a command that take a text."""
    hints = get_type_hints(plain(name))
    options = (p for p in COMMANDS[name].params if p.param_type_name == "option")
    return [p.opts[0] for p in options if hints[p.name] in (str, str | None, list[str])]


@pytest.mark.parametrize("name", [name for name in COMMANDS if _texts(name)])
def test_a_text_that_is_not_utf8_is_refused_before_anything_is_read(
    name: str, capsys: Capsys
) -> None:
    r"""As `-p $'\xff\xfe'` reaches Python: every byte that is not UTF-8 as a lone surrogate."""
    params = COMMANDS[name].params
    needed = ["none" for p in params if p.param_type_name == "argument"]
    for option in _texts(name):
        others = [p.opts[0] for p in params if p.required and p.opts[0].startswith("-")]
        given = [word for other in others if other != option for word in (other, "1")]
        assert main([*name.split(), *needed, *given, option, "a\udcff\udcfe"]) == 2
        error = capsys.readouterr().err
        assert option in error
        assert "UTF-8" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "serve"])  # all load with the same group of options
@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("policy", "unknown policy 'bogus'"),
        ("shares", "unknown shares 'bogus'"),
        ("cache-code", "unknown cache_code 'bogus'"),
        ("kv-cache", "unknown kv_cache 'bogus'"),
        ("draft", "unknown draft 'bogus': known: lookup, mtp, none; or a model: its folder, its"),
        ("activations", "unknown activations 'bogus'"),
        ("misses", "unknown misses 'bogus'"),
        ("prefetch", "unknown prefetch mode 'bogus'"),
        ("predictor", "unknown predictor 'bogus'"),
        ("device", "--device must be auto, cpu, cuda or cuda:N, got 'bogus'"),
        ("dtype", "--dtype must be auto, float32, bfloat16 or float16, got 'bogus'"),
    ],
)
def test_names_that_nothing_has_are_refused_before_a_library_is_imported(
    monkeypatch: Patch, capsys: Capsys, command: str, option: str, complaint: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # importing it fails
    needed = ["-p", "a"] if command == "run" else []
    assert main([command, "none", *needed, f"--{option}", "bogus"]) == 2
    assert complaint in capsys.readouterr().err
