"""How each gate balances its experts in a short training run: `python benchmarks/gates.py`.

Trains the same small language model once for each gate, on the text that every Python installation
carries, and writes loss and load of the last steps to a results file. `--docs` writes the numbers
of a results file into the table of docs/gates.md, `--check` only says whether they are up to date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
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
from moe_runtime.routing import GATES

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "gates.md"
EXPERTS = 8
OPTIONS: dict[str, dict[str, Any]] = {
    "sigmoid_topk": {"bias_update_rate": 1e-2},
    "group_limited_topk": {
        "num_expert_groups": 4,
        "num_limited_groups": 2,
        "bias_update_rate": 1e-2,
    },
    "cosine_topk": {"projection_size": 32},
    "sam": {"num_expert_groups": 4},
}
TOP_1 = {"switch", "base", "hash", "dense_to_sparse", "rl_r"}


def main() -> None:
    arguments = _arguments()
    if arguments.docs or arguments.check:
        _update_docs(json.loads(arguments.results.read_text()), only_check=arguments.check)
        return
    torch.set_num_threads(arguments.threads)
    text = training_text()
    rows = []
    for name in arguments.gates:
        row = train(name, text, arguments)
        rows.append(row)
        print(
            f"{name:20} loss {row['loss']:.3f}  max load {row['max_load']:.2f}  "
            f"variation {row['load_variation']:.2f}  experts {row['experts_per_token']:.2f}  "
            f"{row['seconds']:.1f} s",
            flush=True,
        )
    machine = describe_machine()
    results = {
        "command": f"python benchmarks/gates.py --steps {arguments.steps}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(ROOT),
        "machine": machine,
        "versions": versions(),
        "settings": {
            "steps": arguments.steps,
            "batch": arguments.batch,
            "context": arguments.context,
        }
        | {"experts": EXPERTS, "averaged_steps": arguments.steps // 5},
        "rows": rows,
    }
    output = arguments.results or ROOT / "benchmarks" / "results" / (
        f"gates-{machine_name(machine)}.json"
    )
    write_text(output, json.dumps(results, indent=1) + "\n")
    print(f"wrote {output.relative_to(ROOT) if output.is_relative_to(ROOT) else output}")


def train(name: str, text: Tensor, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run; means over the last fifth of the steps and over the layers."""
    torch.manual_seed(0)
    options = dict(OPTIONS.get(name, {}))
    if name == "hash":
        counts = text.bincount(minlength=VOCAB).tolist()
        options |= {"vocab_size": VOCAB, "frequencies": counts}
    if name == "base":  # assignments are solved in parts of some hundred tokens
        options["num_groups"] = arguments.batch * arguments.context // 256
    if name == "dense_to_sparse":
        options["anneal_steps"] = arguments.steps
    experts = ExpertsConfig(
        num_experts=EXPERTS,
        top_k=1 if name in TOP_1 else 2,
        intermediate_size=64,
        gate=name,
        gate_options=options,
    )
    model = LanguageModel(
        LanguageModelConfig(
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_positions=arguments.context,
            vocab_size=VOCAB,
            moe=experts,
        )
    )
    seen: list[list[float]] = []
    start = time.perf_counter()
    run = steps_of_training(
        model, text,
        steps=arguments.steps, batch=arguments.batch, context=arguments.context, seed=0,
    )  # fmt: skip
    for step, losses in enumerate(run):
        if step >= arguments.steps - arguments.steps // 5:
            layers = model.layer_aux()
            loads = [
                (aux.max_load.item(), aux.load_variation.item(), aux.counts_E.sum().item())
                for aux in layers
            ]
            seen.append(
                [
                    losses.cross_entropy.item(),
                    *(sum(v) / len(layers) for v in zip(*loads, strict=True)),
                ]
            )
    loss, max_load, variation, dispatched = (sum(v) / len(seen) for v in zip(*seen, strict=True))
    return {
        "gate": name,
        "options": {k: v for k, v in options.items() if k != "frequencies"},
        "top_k": experts.top_k,
        "loss": loss,
        "max_load": max_load,
        "load_variation": variation,
        "experts_per_token": dispatched / (arguments.batch * arguments.context),
        "seconds": time.perf_counter() - start,
    }


def with_numbers(text: str, results: dict[str, Any]) -> str:
    """The document with the last two cells of each gate's row taken from the results."""
    for row in results["rows"]:
        pattern = re.compile(rf"^(\| `{row['gate']}` \|.*\|)[^|]*\|[^|]*\|$", re.MULTILINE)
        cells = f" {row['max_load']:.2f} | {row['loss']:.2f} |"
        text, found = pattern.subn(lambda match, cells=cells: match[1] + cells, text)
        if found != 1:
            raise SystemExit(f"docs/gates.md has {found} rows for `{row['gate']}`, expected one")
    settings, machine = results["settings"], results["machine"]
    note = (
        f"{settings['steps']} steps of {settings['batch']} x {settings['context']} bytes, "
        f"{settings['experts']} experts; means of the last {settings['averaged_steps']} steps and "
        f"two layers; {machine['cpu']}, {results['date'][:10]}, commit {results['commit'][:12]}; "
        f"made by `{results['command']}`."
    )
    begin, end = "<!-- benchmarks/gates.py: begin -->", "<!-- end -->"
    head, rest = text.split(begin)
    return head + f"{begin}\n{note}\n{end}" + rest.split(end, 1)[1]


def _update_docs(results: dict[str, Any], *, only_check: bool) -> None:
    text = DOCS.read_text()
    wanted = with_numbers(text, results)
    if only_check and text != wanted:
        sys.exit("docs/gates.md is not what its results file says: run with --docs")
    if not only_check:
        write_text(DOCS, wanted)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gates", nargs="*", default=list(GATES), choices=list(GATES))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, help="results file to write, or to read")
    parser.add_argument("--docs", action="store_true", help="write its numbers into docs/gates.md")
    parser.add_argument("--check", action="store_true", help="say whether they are up to date")
    return parser.parse_args()


if __name__ == "__main__":
    main()
