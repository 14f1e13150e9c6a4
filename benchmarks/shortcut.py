"""ScMoE's shortcut against top-2 routing in a short training run: `python benchmarks/shortcut.py`.

Three language models in which every other layer has experts and a token visits two of equal width:
top-2 routing; a shared expert and one routed; and the same with the routed one reading the first
layer's attention output (ScMoE, position 2). Each is trained with several seeds, on the text that
every Python installation carries; the spread over the seeds is the noise. Writes a results file;
`--docs` writes its table into docs/training.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from harness.machine import commit, describe_machine, machine_name, versions
from harness.short_training import VOCAB, steps_of_training, training_text
from torch import Tensor

from moe_runtime.files import write_text
from moe_runtime.models.lm.config import ExpertsConfig, LanguageModelConfig
from moe_runtime.models.lm.model import LanguageModel

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "training.md"
BEGIN, END = "<!-- benchmarks/shortcut.py: begin -->", "<!-- end -->"
MODELS: dict[str, dict[str, Any]] = {
    "top-2": {"top_k": 2},
    "shared + top-1": {"top_k": 1, "shared_experts": 1},
    "ScMoE: shared + top-1 by the shortcut": {
        "top_k": 1,
        "shared_experts": 1,
        "shortcut": "middle",
    },
}


def main() -> None:
    arguments = _arguments()
    if arguments.docs:
        results = json.loads(arguments.docs.read_text())
        write_text(DOCS, with_table(DOCS.read_text(), results))
        return
    torch.set_num_threads(arguments.threads)
    machine = describe_machine()
    output = arguments.output or ROOT / "benchmarks" / "results" / (
        f"shortcut-{machine_name(machine)}.json"
    )
    settings = {name: getattr(arguments, name) for name in ("steps", "batch", "context")}
    losses: dict[str, list[float]] = {name: [] for name in MODELS}
    if output.exists():  # a run that was cut off goes on
        earlier = json.loads(output.read_text())
        losses = earlier["losses"] if earlier["settings"] == settings else losses
    text = training_text()
    for seed in range(arguments.seeds):
        for name, model in MODELS.items():
            if len(losses[name]) > seed:
                continue
            losses[name].append(final_loss(model, text, seed, arguments))
            print(f"seed {seed}  {name:40} {losses[name][-1]:.4f}", flush=True)
            results = {
                "command": "python benchmarks/shortcut.py",
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "commit": commit(ROOT),
                "machine": machine,
                "versions": versions(),
                "settings": settings,
                "losses": losses,
            }
            write_text(output, json.dumps(results, indent=1) + "\n")


def final_loss(
    settings: dict[str, Any], text: Tensor, seed: int, arguments: argparse.Namespace
) -> float:
    """Cross-entropy in nats, mean of the last fifth of the steps."""
    torch.manual_seed(seed)
    is_paired = "shortcut" in settings  # then every other layer is dense by itself
    config = LanguageModelConfig(
        hidden_size=64,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=arguments.context,
        vocab_size=VOCAB,
        intermediate_size=128,
        dense_layers=() if is_paired else (0, 2),
        moe=ExpertsConfig(num_experts=8, intermediate_size=64, **settings),
    )
    run = steps_of_training(
        LanguageModel(config), text,
        steps=arguments.steps, batch=arguments.batch, context=arguments.context, seed=seed,
    )  # fmt: skip
    values = [losses.cross_entropy.item() for losses in run]
    return statistics.fmean(values[-max(1, arguments.steps // 5) :])


def with_table(text: str, results: dict[str, Any]) -> str:
    """The document with the results in the place of what stands between the marks."""
    rows = ["| routed layers | loss | spread |", "|---|--:|--:|"]
    for name, losses in results["losses"].items():
        rows.append(
            f"| {name} | {statistics.fmean(losses):.3f} | {max(losses) - min(losses):.3f} |"
        )
    settings = results["settings"]
    num_seeds = min(map(len, results["losses"].values()))
    note = (
        f"Cross-entropy after {settings['steps']} steps of {settings['batch']} x "
        f"{settings['context']} bytes, mean and spread over {num_seeds} seeds; a token "
        f"visits two experts. Commit {results['commit'][:12]}, `{results['command']}`."
    )
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n" + "\n".join([*rows, "", note]) + f"\n{END}" + rest.split(END, 1)[1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="results file to write")
    parser.add_argument("--docs", type=Path, help="results file to write into docs/training.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
