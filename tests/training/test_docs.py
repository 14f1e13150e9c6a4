"""The examples of docs/training.md are configurations, and its table is that of its results."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from moe_runtime.training.config_tree import read_tree
from moe_runtime.training.run_config import TrainConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)


def test_the_configuration_is_one(tmp_path):
    text, parallel = blocks("toml")
    path = tmp_path / "train.toml"
    path.write_text(text + parallel)
    config = read_tree(TrainConfig, path)
    assert config.data.sequences_per_step == 32
    assert (config.parallel.ep, config.parallel.etp) == (2, 2)
    assert config.data.context_at(1499, config.run.steps) == 256
    assert config.data.context_at(1500, config.run.steps) == 512


def test_the_table_of_shortcuts_is_that_of_its_results_file():
    name = "ablation-shortcut-amd-epyc-2c-24g.json"
    measured = json.loads((PAGE.parents[1] / "benchmarks" / "results" / name).read_text())
    rows = {"as configured": "top-2", "ScMoE": "ScMoE: shared + top-1 by the shortcut"}
    text = PAGE.read_text()
    assert len(measured["measurements"]) == 3
    for one in measured["measurements"]:
        row = rows.get(one["system"], one["system"])
        losses = [
            fmean(seed[metric] for seed in one["repetitions"])
            for metric in ("loss", "held_out_loss")
        ]
        assert f"| {row} | {losses[0]:.3f} | {losses[1]:.3f} |" in text


@pytest.mark.parametrize("name", ["slimfit", "memory", "dynamoe"])
def test_tables_of_reproductions_are_those_of_their_results(name):
    file = PAGE.parents[1] / "benchmarks" / "results" / f"ablation-{name}-intel-xeon-2c-24g.json"
    text = (PAGE.parents[1] / "moe_runtime" / "research" / "README.md").read_text()
    for one in json.loads(file.read_text())["measurements"]:
        means = {key: fmean(run[key] for run in one["repetitions"]) for key in one["summary"]}
        row = "none" if one["system"] == "as configured" else one["system"]
        cells = [row, *(f"{means[key]:.3f}" for key in ("loss", "held_out_loss"))]
        cells.append(f"{means['activation_bytes'] / 1e6:.2f} MB")
        if name == "memory":
            moved = [f"{means.get(f'{way}_bytes', 0) / 1e3:.0f}" for way in ("read", "written")]
            cells.append("–" if row == "none" else f"{' + '.join(moved)} kB")
        assert f"| {' | '.join(cells)} |" in text
