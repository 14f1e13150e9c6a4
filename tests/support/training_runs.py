"""Small training runs for tests: text files, a configuration file, a trained folder."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.cli.main import main
from moe_runtime.training.checkpoint import load_checkpoint

_SENTENCE = "the store reads an expert from disk when a token asks for it and the router sends"

CONFIG = """\
[run]
output = "out"
steps = 8
threads = 1
log_every = 2
checkpoint_every = 3
evaluate_every = 4
export_dtype = "float32"

[model]
hidden_size = 32
num_layers = 2
num_heads = 4
num_kv_heads = 2
head_dim = 8
max_positions = 32

[model.moe]
num_experts = 4
top_k = 2
intermediate_size = 16
loss_weights = { load_balance = 0.01, z = 1e-3 }

[data]
context = 32
tokens_per_step = 256
micro_batches = 2
short_context = 16
short_share = 0.5

[data.sources.tales]
files = ["texts/tales-*.txt"]
weight = 2.0

[data.sources.rules]
files = ["texts/rules.txt"]
weight = 1.0

[tokenizer]
vocab_size = 300

[optimizer]
peak_rate = 1e-2
warmup_steps = 2
"""


def write_run(folder: Path, *, config: str = CONFIG) -> Path:
    """Writes texts and a configuration into the folder; returns the configuration's path."""
    texts = folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    known = _SENTENCE.split()
    for number in range(24):
        words = [known[(number * place + place * place) % len(known)] for place in range(90)]
        (texts / f"tales-{number:02}.txt").write_text(" ".join(words) + "\n")
    rules = [f"rule {number}: expert {number % 4} takes token {number}." for number in range(120)]
    (texts / "rules.txt").write_text("\n".join(rules) + "\n")
    path = folder / "train.toml"
    path.write_text(config)
    return path


def training_records(output: Path) -> list[dict[str, Any]]:
    """The records of a run without what depends on the clock."""
    lines = (output / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        record.pop("step_s", None)
    return records


def train(path: Path, *words: str) -> int:
    return main(["train", str(path), *words])


def error_of(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> str:
    assert train(path, *words) == 2
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    (line,) = [line for line in shown.splitlines() if "error:" in line]
    return line


def states_equal(one: Path, other: Path) -> bool:
    mine, theirs = load_checkpoint(one), load_checkpoint(other)
    same = all(torch.equal(mine.model[name], theirs.model[name]) for name in mine.model)
    moments = mine.optimizer["state"], theirs.optimizer["state"]
    for index, state in moments[0].items():
        same &= all(torch.equal(state[name], moments[1][index][name]) for name in state)
    return same and torch.equal(mine.random["cpu"], theirs.random["cpu"])
