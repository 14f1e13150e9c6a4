"""`bench ablation`: its numbers are those of `moe-runtime train`, for every variant and seed."""

import json
import signal
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from training_runs import CONFIG, train, training_records, write_run

from moe_runtime.benchmarks.cases.ablation import BASE, measure_ablation, read_variants
from moe_runtime.benchmarks.commands import machine
from moe_runtime.benchmarks.suite import Number, Rules, read_results
from moe_runtime.benchmarks.suite.comparing import heading_words
from moe_runtime.cli.main import main
from moe_runtime.routing import GATES

ABLATIONS = Path(__file__).parents[2] / "benchmarks" / "ablations"
SPARSE = """
[variants.sparse.model.moe]
top_k = 1
gate = "switch"
capacity_factor = 0.5
loss_weights = { z = 0.0 }
"""


def measured(
    capsys: pytest.CaptureFixture[str], path: Path, *words: str
) -> dict[str, dict[str, Any]]:
    """Systems by name, of a run of the command."""
    assert main(["bench", "ablation", str(path), *words, "--json"]) == 0
    return {one["system"]: one for one in json.loads(capsys.readouterr().out)["measurements"]}


def trained(folder: Path, number: int, *settings: str) -> dict[str, Number]:
    """What the command should find: from the records that `moe-runtime train` writes."""
    words = [f"run.output=own-{number}", "run.steps=11", f"run.seed={number}", *settings]
    assert train(folder / "train.toml", *(part for one in words for part in ("--set", one))) == 0
    records = training_records(folder / f"own-{number}")
    last = [one for one in records if "loss" in one][-2:]
    (held_out,) = [one for one in records if "held_out" in one and one["step"] == 11]
    means = {name: fmean(one[name] for one in last) for name in ("loss", "max_load")}
    means["dropped_share"] = fmean(one["dropped_share"] for one in last)
    return {**means, "held_out_loss": held_out["held_out_mean"]}


def test_numbers_are_those_of_train(tmp_path, capsys):
    path = write_run(tmp_path)
    sparse = ["model.moe.top_k=1", "model.moe.gate=switch", "model.moe.capacity_factor=0.5"]
    settings = {
        BASE: [],
        "sparse": [*sparse, "model.moe.loss_weights.z=0.0"],
        "model.moe.num_experts=8": ["model.moe.num_experts=8"],
    }
    expected = {
        name: trained(tmp_path, number, *words, "run.seed=1")
        for number, (name, words) in enumerate(settings.items())
    }
    path.write_text(CONFIG + SPARSE)
    before = sorted(tmp_path.iterdir())
    capsys.readouterr()
    output = tmp_path / "results.json"
    words = ["--vary", "model.moe.num_experts=8", "--seeds", "2", "--steps", "11"]
    found = measured(capsys, path, *words, "-o", str(output))
    assert list(found) == list(settings)
    for name, wanted in expected.items():
        _, own = found[name]["repetitions"]
        assert min(own.pop(name) for name in ("tokens_per_s", "activation_bytes")) > 0
        assert own == wanted
    assert expected["sparse"]["dropped_share"] != 0
    assert found[BASE]["quality"] is None
    assert found["sparse"]["quality"] == {"compared": 22, "equal": 0}
    assert sorted(tmp_path.iterdir()) == sorted([*before, output])
    results = read_results(output)
    assert results["ended"] == "most"
    assert results["settings"]["seeds"] == [0, 1]
    assert results["settings"]["variants"]["sparse"]["model.moe.gate"] == "switch"
    assert "steps 11, sequences 8, context 32" in heading_words(results)
    # The same numbers twice are no change; the page and the table have every variant.
    assert main(["bench", "compare", str(output), str(output), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert {one["system"] for one in verdicts} == settings.keys()
    assert {one["word"] for one in verdicts} == {"noise"}
    page = tmp_path / "page.html"
    assert main(["bench", "report", str(output), "-o", str(page)]) == 0
    assert all(name in page.read_text() for name in settings)


@pytest.mark.long
def test_a_budget_changes_no_bit_and_narrow_moments_do(tmp_path, monkeypatch, capsys):
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write_run(
        tmp_path,
        config=CONFIG.replace("threads = 1", 'host_memory = "1GiB"').replace("= 16", "= 128", 1)
        + """
[variants.disk.run]
host_memory = "37MiB"
storage_dir = "~/disk"

[variants.bf16.run.offload]
moments = "bf16"
""",
    )
    found = measured(capsys, path, "--seeds", "2")
    assert found["disk"]["quality"] == {"compared": 16, "equal": 16}
    losses = {
        name: [
            {name: one[name] for name in ("loss", "held_out_loss", "max_load", "dropped_share")}
            for one in system["repetitions"]
        ]
        for name, system in found.items()
    }
    assert losses["disk"] == losses[BASE]
    assert losses["bf16"] != losses[BASE]
    moved = {name: system["summary"]["written_bytes"]["median"] for name, system in found.items()}
    assert moved["disk"] > moved[BASE] == 0
    assert found["bf16"]["quality"]["equal"] < 16
    for name, num_bytes in ((BASE, 12), ("bf16", 8)):
        assert found[name]["summary"]["state_bytes_per_parameter"]["median"] == num_bytes
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "added", "complaint"),
    [
        ([], "", "train.toml: nothing to compare with; give --vary KEY=VALUE,VALUE or tables"),
        (["run.steps"], "", "expected KEY=VALUE such as run.steps=100, got 'run.steps'"),
        (["run.step=1"], "", "train.toml: variant 'run.step=1': unknown key 'run.step'"),
        (["model.moe.top_k=1,5"], "", "variant 'model.moe.top_k=5': model.moe: top_k"),
        (["run.host_memory=1MiB"], "", "variant 'run.host_memory=1MiB': a budget of 1 MiB is"),
        ([], '[variants.one.run]\nhost_memory = "1GiB"\nstorage_dir = "none"', "variant 'one': "),
        (["run.tensorboard=true"], "", "run.tensorboard changes nothing here: nothing is kept"),
        (
            [],
            "[variants.one.parallel]",
            "variant 'one': parallel changes nothing here: one process",
        ),
        (["run.steps=9,9"], "", "variant 'run.steps=9' is asked for twice"),
        ([], "[variants]\none = 1", "variants.one must be a table, got 1"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is(
    words, added, complaint, tmp_path, capsys
):
    path = write_run(tmp_path, config=f"{CONFIG}\n{added}\n")
    asked = [part for one in words for part in ("--vary", one)]
    assert main(["bench", "ablation", str(path), *asked]) == 2
    shown = capsys.readouterr()
    assert complaint in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_what_was_trained_before_a_stop_is_kept(tmp_path, monkeypatch, capsys):
    path, output = write_run(tmp_path), tmp_path / "results.json"

    def interrupt(name: str, number: int) -> None:
        assert (name, number) == (BASE, 1)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(machine, "say_repetition", interrupt)
    words = ["--vary", "model.moe.top_k=1", "--steps", "3", "-o", str(output)]
    assert main(["bench", "ablation", str(path), *words]) == 130
    assert BASE in " ".join(capsys.readouterr().out.split())
    results = read_results(output)
    assert results["ended"] == "interrupted"
    assert [len(one["repetitions"]) for one in results["measurements"]] == [1, 0]


def test_a_training_that_is_stopped_within_has_no_numbers(tmp_path):
    """Both have a seed; the second one of the next round ends after the third of its 8 steps."""
    variants = read_variants(write_run(tmp_path), ["model.moe.top_k=1"])
    asked: list[int] = []
    done: list[str] = []

    def is_stopping() -> bool:
        asked.append(len(done))
        return asked.count(3) > 3

    results = measure_ablation(
        variants,
        tmp_path,
        Rules(
            judged=(),
            most=5,
            on_repetition=lambda name, number: done.append(name),
            is_stopping=is_stopping,
        ),
        {"model": "m"},
    )
    assert results["ended"] == "interrupted"
    # Who begins changes from round to round.
    assert done == [BASE, "model.moe.top_k=1", "model.moe.top_k=1"]
    assert [len(one["repetitions"]) for one in results["measurements"]] == [1, 2]


def test_threads_of_one_variant_are_not_those_of_the_next(tmp_path):
    path = write_run(tmp_path, config=CONFIG.replace("threads = 1\n", ""))
    variants = read_variants(path, ["run.threads=2,0"], steps_of=lambda steps: 1)
    seen: list[tuple[str, int]] = []

    def note(name: str, number: int) -> None:
        seen.append((name, torch.get_num_threads()))

    torch.set_num_threads(3)
    results = measure_ablation(
        variants, tmp_path, Rules(judged=(), most=2, on_repetition=note), {"model": "m"}
    )
    assert sorted(set(seen)) == [(BASE, 3), ("run.threads=0", 3), ("run.threads=2", 2)]
    assert torch.get_num_threads() == results["settings"]["num_threads"] == 3


def test_steps_of_a_variant_and_of_the_command_are_refused(tmp_path, capsys):
    path = write_run(tmp_path)
    assert main(["bench", "ablation", str(path), "--vary", "run.steps=4", "--steps", "3"]) == 2
    err = capsys.readouterr().err
    assert "run.steps varies: leave out --steps and --quick" in err
    assert err.count("\n") == 1


def test_a_stop_while_variants_are_prepared_is_asked_about(tmp_path):
    variants = read_variants(write_run(tmp_path), ["run.seed=1,2"])
    rules = Rules(judged=(), most=1, is_stopping=lambda: True)
    results = measure_ablation(variants, tmp_path, rules, {"model": "m"})
    assert [one["system"] for one in results["measurements"]] == [BASE]
    assert results["ended"] == "interrupted"


@pytest.mark.long
def test_a_variant_that_fails_says_so_and_the_others_go_on(tmp_path, capsys):
    path, change = write_run(tmp_path), "optimizer.peak_rate=1e+30"
    words = ["--vary", change, "--seeds", "1", "--steps", "30", "--json"]
    assert main(["bench", "ablation", str(path), *words]) == 1
    shown = capsys.readouterr()
    base, other = json.loads(shown.out)["measurements"]
    assert len(base["repetitions"]) == 1
    assert other["repetitions"] == []
    assert f"{change}: {other['failure']}" in shown.err


def test_quick_trains_once_and_briefly(tmp_path, capsys):
    path = write_run(tmp_path, config=CONFIG.replace("steps = 8", "steps = 30"))
    found = measured(capsys, path, "--quick", "--vary", "model.moe.gate=sigmoid_topk,round_robin")
    assert list(found) == [BASE, "model.moe.gate=sigmoid_topk", "model.moe.gate=round_robin"]
    for one in found.values():
        assert len(one["repetitions"]) == 1
        assert one["quality"] in (None, {"compared": 3, "equal": 1}, {"compared": 3, "equal": 0})


@pytest.mark.parametrize("path", sorted(ABLATIONS.glob("*.toml")), ids=lambda path: path.stem)
def test_the_configurations_of_the_documentation_are_whole(path):
    variants = read_variants(path)
    assert len(variants) > 2
    if path.stem == "gates":
        gates = [one.config.model.moe.gate for one in variants if one.config.model.moe]
        assert sorted(gates) == sorted(GATES)
        assert [one.name for one in variants[1:]] == gates[1:]
