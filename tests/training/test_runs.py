"""Whole runs through the command line: outputs and refusals."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import CONFIG, error_of, train, training_records, write_run

from moe_runtime.cli.main import main
from moe_runtime.training.metrics import METRICS_FILE


def test_a_run_learns_and_leaves_everything_behind(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = write_run(tmp_path)
    assert train(path, "--json", "--set", "run.steps=12", "--set", "run.tensorboard=true") == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    out = tmp_path / "out"
    assert summary["complete"]
    assert summary["tokens"] == 12 * 256
    assert summary["model"] == str(out / "model")
    for part in ("step 12/12", "tokens/s", "load ", "dropped 0.0%", "held out "):
        assert part in captured.err
    records = training_records(out)
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    held_out = [record for record in records if "held_out" in record]
    assert [record["step"] for record in held_out] == [4, 8, 12]
    assert set(held_out[0]["held_out"]) == {"tales", "rules"}
    mixture = held_out[-1]["held_out"]
    expected = (2 * mixture["tales"] + mixture["rules"]) / 3
    assert held_out[-1]["held_out_mean"] == pytest.approx(expected)
    kept = sorted(file.name for file in (out / "checkpoints").iterdir())
    assert kept == ["step-00000009.pt", "step-00000012.pt"]

    # The exported model has the held-out loss that the run reports.
    model: Any = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer.eos_token_id == model.config.eos_token_id == 0
    (file,) = (out / "data").glob("tales-held-out-*.npy")
    import numpy as np

    ids = torch.from_numpy(np.load(file).astype(np.int64))
    windows = torch.stack([ids[i : i + 33] for i in range(0, len(ids) - 32, 32)])
    with torch.no_grad():
        logits = model.eval()(windows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].reshape(-1))
    assert loss.item() == pytest.approx(mixture["tales"], abs=1e-5)

    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator(str(out / "tensorboard"))
    accumulator.Reload()
    shown = [event.value for event in accumulator.Scalars("train/loss")]
    assert shown == pytest.approx([record["loss"] for record in steps], rel=1e-6)


def test_a_model_that_no_architecture_expresses_says_where_it_is(tmp_path, capsys):
    settings = ("--set", "run.steps=1", "--set", "model.moe.capacity_factor=1.0")
    assert train(write_run(tmp_path), *settings) == 0
    shown = " ".join(capsys.readouterr().err.split())
    assert "in the last checkpoint only: no Hugging Face architecture" in shown
    assert "capacity_factor must be omitted" in shown


def test_one_process_chooses_no_exchange(tmp_path):
    """One process can resume a run that several began with auto."""
    auto = ("overlap", "transport", "experts")
    for name, words in (("own", ()), ("auto", [f"parallel.{key}=auto" for key in auto])):
        (folder := tmp_path / name).mkdir()
        settings = [word for each in ("run.steps=2", *words) for word in ("--set", each)]
        assert train(write_run(folder), *settings) == 0
    own, chosen = (
        [one["loss"] for one in training_records(tmp_path / name / "out") if "loss" in one]
        for name in ("own", "auto")
    )
    assert own == chosen


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_dry_run_says_what_would_happen(words, tmp_path, capsys):
    assert train(write_run(tmp_path), "--dry-run", *words) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert train(write_run(tmp_path), "--dry-run", *words) == 0
    assert capsys.readouterr().out == shown
    assert not list((tmp_path / "out").iterdir())
    if words:
        plan = json.loads(shown)
        assert plan["tokens"] == 8 * 256
        assert plan["export"] == "qwen3_moe"
        assert plan["active_parameters"] < plan["parameters"]
        assert plan["state_bytes"] == 16 * plan["parameters"]
    else:
        assert "leaves as" in shown
        assert "held out tokens" in " ".join(shown.split())


def test_a_caller_s_autocast_changes_nothing(tmp_path):
    """An outer autocast would otherwise cache weights from before an update."""
    alone = {name: losses_of(tmp_path / name, name) for name in ("float32", "bfloat16")}
    for precision, is_on in (("float32", True), ("bfloat16", False), ("bfloat16", True)):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_on):
            found = losses_of(tmp_path / f"{precision} inside {is_on}", precision)
        assert found == alone[precision]
    assert alone["float32"] != alone["bfloat16"]
    # bfloat16 products have relative errors of 2^-9; losses lie near 5
    assert alone["float32"] == pytest.approx(alone["bfloat16"], abs=0.05)


def losses_of(folder: Path, precision: str) -> list[float]:
    """Of every step of a run."""
    words = ("--set", f"run.precision={precision}", "--set", "run.steps=2")
    assert train(write_run(folder), *words) == 0
    return [record["loss"] for record in training_records(folder / "out") if "loss" in record]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_run(folder)
    assert train(path, "--set", "run.steps=1") == 0
    return path


def test_a_finished_run_is_not_overwritten_and_has_nothing_left_to_do(finished, capsys):
    assert "--resume goes on" in error_of(capsys, finished, "--set", "run.steps=1")
    before = training_records(finished.parent / "out")
    assert train(finished, "--set", "run.steps=1", "--resume", "--json") == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 1
    assert training_records(finished.parent / "out") == before


def test_a_resumed_run_must_be_the_same_run(finished, capsys):
    line = error_of(capsys, finished, "--resume", "--set", "run.steps=2")
    assert "run.steps = 1, the configuration now says 2" in line
    rules = finished.parent / "texts" / "rules.txt"
    text = rules.read_text()
    rules.write_text(text + "one more rule\n")
    line = error_of(capsys, finished, "--resume", "--set", "run.steps=1")
    rules.write_text(text)
    assert "text of source 'rules'" in line
    tables = finished.read_text().partition("[data.sources.tales]")
    tales, rest = tables[2].split("[data.sources.rules]")
    rules, tokenizer = rest.split("[tokenizer]")
    other = finished.with_name("other-order.toml")
    other.write_text(
        f"{tables[0]}[data.sources.rules]{rules}[data.sources.tales]{tales}[tokenizer]{tokenizer}"
    )
    line = error_of(capsys, other, "--resume", "--set", "run.steps=1")
    assert "data.sources in the order 'tales', 'rules', now it is 'rules', 'tales'" in line


def test_a_run_starts_from_exported_weights(tmp_path, capsys):
    first = write_run(tmp_path / "first")
    assert train(first) == 0
    reached = training_records(first.parent / "out")[-1]["held_out_mean"]
    second = write_run(tmp_path / "second")
    start = f"run.start_from={first.parent / 'out' / 'model'}"
    # Steps of no length: what is measured at the end are the weights that it began with.
    still = ("--set", "optimizer.peak_rate=1e-20", "--set", "run.steps=1")
    assert train(second, "--set", start, *still) == 0
    kept = training_records(second.parent / "out")[-1]["held_out_mean"]
    assert kept == pytest.approx(reached, abs=1e-6)
    capsys.readouterr()
    third = write_run(tmp_path / "third")
    assert "no config.json" in error_of(capsys, third, "--set", "run.start_from=texts")
    line = error_of(capsys, third, "--set", start, "--set", "model.moe.top_k=1")
    assert "num_experts_per_tok is 2, this model's is 1" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such.toml"], "no-such.toml: No such file"),
        (
            ["CONFIG", "--set", "data.sources.rules.files=['nothing-*']"],
            "nothing-*'; make the text first",
        ),
        (["CONFIG", "--set", "model.moe.gate=softmaxtopk"], "did you mean 'softmax_topk'"),
        (["CONFIG", "--set", "model.moe.top_k=5"], "model.moe: top_k must be at most num_exp"),
        (["CONFIG", "--set", "model.moe.capacity_factor=0"], "capacity_factor must be positive"),
        (["CONFIG", "--set", "model.moe.num_groups=7"], "must divide the 128 tokens of a micro"),
        (
            ["CONFIG", "--set", "model.moe.num_groups=128"],
            "tokens of the last part of the held-out text of",
        ),
        (["CONFIG", "--set", "model.moe.activation=swigul"], "model.moe: unknown activation"),
        (["CONFIG", "--dry-run", "--set", "model.moe.impl=cuda"], "model.moe: impl must be one of"),
        (["CONFIG", "--set", "model.moe.loss_weights={ balance = 1 }"], "unknown loss 'balance'"),
        (["CONFIG", "--set", "run.device=gpu"], "run.device must be auto, cpu, cuda"),
        (
            ["CONFIG", "--set", "data={ context = 32, tokens_per_step = 64, sources = {} }"],
            "sources must name at least one",
        ),
        (["CONFIG", "--set", "tokenizer={ path = 'texts' }"], "has no tokenizer.json"),
        (["CONFIG", "--set", "model.vocab_size=10"], "at least the tokenizer's"),
        (
            ["CONFIG", "--set", "run.patience=1", "--set", "data.held_out_share=0"],
            "patience needs held-out text",
        ),
        (["CONFIG", "--rezume"], "--rezume"),
    ],
)
def test_bad_input_is_one_line(words, message, tmp_path, capsys):
    path = write_run(tmp_path)
    assert main(["train", *(word.replace("CONFIG", str(path)) for word in words)]) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    (line,) = [line for line in shown.splitlines() if "error:" in line]
    assert message in line


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b" \n\n", "no usable text"),
        (b"\xff\xfe\x00x", "odd.txt: not UTF-8 text"),
        (b"short", "source 'odd'"),
    ],
    ids=["blank", "not UTF-8", "short"],
)
def test_text_that_cannot_be_trained_on_is_named(content, message, tmp_path, capsys):
    path = write_run(tmp_path)
    (tmp_path / "texts" / "odd.txt").write_bytes(content)
    files = "data.sources={ odd = { files = ['texts/odd.txt'] } }"
    assert message in error_of(capsys, path, "--set", files)


def test_scores_that_are_not_numbers_end_the_run_and_name_the_layer(tmp_path, capsys):
    path = write_run(tmp_path)
    assert train(path, "--set", "run.steps=1") == 0
    file = tmp_path / "out" / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.gate.weight"][2, 3] = torch.nan
    save_file(tensors, file, {"format": "pt"})
    words = ("--set", "run.start_from=out/model", "--set", "run.output=again")
    line = error_of(capsys, path, *words)
    assert "the gate of layer 1" in line
    assert "not finite" in line
    assert not (tmp_path / "again" / "model").exists()


def test_a_run_that_diverges_ends_with_a_reason(tmp_path, capsys):
    path = write_run(tmp_path)
    line = error_of(capsys, path, "--set", "optimizer.peak_rate=1e30", "--set", "run.steps=30")
    assert "10 steps in a row were not finite" in line
    assert "lower optimizer.peak_rate" in line


DENSE = re.sub(r"\[model.moe\].*?\n\n", "", CONFIG, flags=re.S).replace(
    "max_positions", "intermediate_size = 64\nmax_positions"
)


def test_a_run_that_ends_in_no_numbers_is_no_success_and_keeps_what_was_whole(tmp_path, capsys):
    """Weights of 1e20 after step 6: no gate is there to stop it, and what resumes it fails too."""
    path = write_run(tmp_path, config=DENSE)
    assert train(path, "--set", "run.steps=4", "--set", "run.checkpoint_every=2") == 0
    more = ("--set", "run.checkpoint_every=1", "--resume", "--reschedule")
    huge = ("--set", "optimizer.peak_rate=1e20")
    line = error_of(capsys, path, *more, *huge, "--set", "run.steps=9")
    assert "not a number" in line
    records = training_records(tmp_path / "out")
    assert not any("NaN" in text for text in (tmp_path / "out" / METRICS_FILE).read_text().split())
    assert [record["step"] for record in records if "loss" in record][:4] == [1, 2, 3, 4]
    line = error_of(capsys, path, *more, "--set", "run.steps=9")
    assert "no weight was changed before it" in line


def test_accumulation_takes_the_same_steps(tmp_path):
    """Without gates' losses, which are means of micro-batches, only the order of sums differs."""
    plain = CONFIG.replace("load_balance = 0.01, z = 1e-3", "load_balance = 0.0")
    curves = []
    for number in (1, 8):
        path = write_run(tmp_path / str(number), config=plain)
        words = ("--set", f"data.micro_batches={number}", "--set", "run.steps=4")
        assert train(path, *words) == 0
        records = training_records(tmp_path / str(number) / "out")
        curves.append([record["loss"] for record in records if "loss" in record])
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, capsys, monkeypatch):
    path = write_run(tmp_path)
    save = torch.save

    def save_until_full(content: Any, file: Any) -> None:
        if content["step"] < 6:
            return save(content, file)
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", save_until_full)
    assert "No space left" in error_of(capsys, path)
    folder = tmp_path / "out" / "checkpoints"
    assert [file.name for file in folder.iterdir()] == ["step-00000003.pt"]
    monkeypatch.undo()
    assert train(path, "--resume") == 0
