"""Sound files of every kind that a command reads, for bad ones to be made from."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from text_checkpoint import MAX_POSITIONS, save_text_checkpoint

from moe_runtime.benchmarks.suite import (
    MeasuredSystem,
    Metric,
    describe_system,
    make_results,
    write_results,
)

TEXT = "The store reads an expert from the disk when it is asked for one. " * 40

TRAIN_TOML = """\
[run]
output = "trained"
steps = 1
threads = 1

[model]
hidden_size = 16
num_layers = 1
num_heads = 2
num_kv_heads = 1
head_dim = 8
max_positions = 32

[model.moe]
num_experts = 4
top_k = 2
intermediate_size = 16

[data]
context = 16
tokens_per_step = 32

[data.sources.tales]
files = ["text.txt"]
weight = 1.0

[tokenizer]
vocab_size = 300

[optimizer]
peak_rate = 1e-3
"""

SIZES_TOML = """num_layers = 2
model_dim = 64
num_experts = 48
top_k = 2
expert_hidden = 32
dense_parameters = 1e6
kv_bytes_per_token = 100
"""
MACHINE_TOML = """\
ranks_per_node = 8
flops_per_s = 5e14

[intra]
alpha_s = 2e-6
bytes_per_s = 4e11

[inter]
alpha_s = 5e-6
bytes_per_s = 5e10
"""


def make_material(folder: Path) -> None:
    """Fills a folder with what needs no command of ours."""
    save_text_checkpoint(folder / "model")
    tokenizer_config = folder / "model" / "tokenizer_config.json"
    settings = json.loads(tokenizer_config.read_text())
    settings["chat_template"] = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    tokenizer_config.write_text(json.dumps(settings))
    (folder / "text.txt").write_text(TEXT)
    (folder / "prompts.jsonl").write_text('{"prompt": "The"}\n"A"\n')
    (folder / "train.toml").write_text(TRAIN_TOML)
    (folder / "machine.toml").write_text(MACHINE_TOML)
    (folder / "sizes.toml").write_text(SIZES_TOML)
    (folder / "options.toml").write_text('policy = "lru"\nhost-memory = "1GiB"\n')
    measured = MeasuredSystem(repetitions=[{"t_s": [1.0, 2.0]}, {"t_s": 3.0}])
    one = describe_system("one", measured, {"t_s": Metric("s")}, system_versions={}, quality=None)
    write_results(folder / "results.json", make_results("latency", {}, "time", [one]))
    ids = np.random.default_rng(0).integers(0, 8, (60, 3, 2)).astype(np.uint8)
    np.savez(folder / "plain.npz", ids=ids, offsets=np.array([0, 20, 40, 60]))
    lines = [
        {"step": step, "layer": layer, "topk": 2, "num_tokens": 2, "top_indices": [[0, 1], [2, 3]]}
        for step in range(4)
        for layer in range(2)
    ]
    (folder / "router.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_recorded(folder: Path, main: Callable[[Sequence[str]], int]) -> None:
    """Adds what commands of ours write: a trace, predictors, a placement map.

    Raises:
        RuntimeError: a command refused its sound input.
    """
    model, trace = str(folder / "model"), str(folder / "trace.npz")
    run = ["run", model, "-p", TEXT[:200], "-n", "24", "--host-memory", "1GiB"]
    run += ["--max-tokens", str(MAX_POSITIONS), "--trace", trace, "--json"]
    fit = ["predictor", "fit", str(folder / "plain.npz"), "-o", str(folder / "plain_predictor.npz")]
    learn = ["predictor", "fit", trace, "-o", str(folder / "predictor.npz")]
    learn += ["--predictor", "popularity"]
    fit += ["--predictor", "popularity"]
    place = ["place", trace, "--gpus", "2", "-o", str(folder / "map.json")]
    for words in (run, fit, learn, place):
        if main(words):
            raise RuntimeError(f"sound input was refused: {words}")
