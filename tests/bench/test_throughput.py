"""`bench throughput` with real processes: ours and transformers on a tiny checkpoint, and toys."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_python import warm_python

from moe_runtime.benchmarks.cases.texts import TextPlan, measure_texts
from moe_runtime.benchmarks.suite import Rules
from moe_runtime.benchmarks.suite.peers import find_peer, started

COUNTING = """
INSTALL = "pip install nothing"
PACKAGES = ("numpy",)
VARIANTS = ("odd", "alone")
class Peer:
    def __init__(self, settings):
        self.is_odd = settings["variant"] == "odd"
        if settings["variant"] == "alone":
            del Peer.prefill_batch
    def load(self):
        pass
    def prefill_batch(self, prompts):
        self.totals = [sum(ids) for ids in prompts]
        return [total % 97 for total in self.totals]
    def step_batch(self, tokens):
        self.totals = [a + b for a, b in zip(self.totals, tokens)]
        return [(total + self.is_odd) % 97 for total in self.totals]
    def close(self):
        pass
"""


def test_the_numbers_are_of_all_sequences(tmp_path):
    (tmp_path / "counting.py").write_text(COUNTING)
    peers = [
        find_peer(f"{tmp_path / 'counting.py'}{variant}", {"num_threads": 1})
        for variant in ("", ":odd", ":alone")
    ]
    plan = TextPlan(
        case="throughput", batches=[[[3, 5], [60, 70, 1]], [[9]]], num_new=4, timeout_s=600
    )
    rules = Rules(judged=("new_tokens_per_s",), least=1, most=1)
    results = measure_texts(peers[0], peers[1:], plan, rules, settings={})
    ours, odd, alone = results["measurements"]
    assert ours["quality"] == {"compared": 12, "equal": 12}
    (found,) = ours["repetitions"]
    # A number for each step of each batch: 3 and 3. In all, 12 new tokens and 6 of prompts.
    steps = found["step_tokens_per_s"]
    assert len(steps) == 6
    steps_s = sum(2 / speed for speed in steps[:3]) + sum(1 / speed for speed in steps[3:])
    prompts_s = 6 / found["prompt_tokens_per_s"]
    assert found["new_tokens_per_s"] == pytest.approx(12 / (steps_s + prompts_s))
    # Its steps are one off, its three first tokens right.
    assert (odd["quality"], odd["repetitions"]) == ({"compared": 12, "equal": 3}, [])
    assert alone["failure"].startswith("NotImplementedError: this peer reads one sequence at a")


def ask_both_ways(model: Path, prompts: list[list[int]], name: str) -> list[list[list[int]]]:
    """Likeliest tokens of prompts side by side, and of each by itself, given the same tokens."""
    common: dict[str, Any] = {"model": str(model), "num_threads": 1, "max_tokens": 64}
    program = replace(find_peer(name, common), python=Path(warm_python()))
    with started(program, 120.0) as process:
        process.ask("start", settings=program.settings)
        process.ask("load")
        batch = process.ask("measure", prompts=prompts, num_new=5, given=None)["ids"]
        alone = [
            process.ask("measure", prompts=[ids], num_new=5, given=[given])["ids"][0]
            for ids, given in zip(prompts, batch, strict=True)
        ]
    return [batch, alone]


def test_sequences_of_a_batch_are_those_of_each_alone(tmp_path):
    """Shorter prompts are filled up, which must change nothing; fp32, so no two logits are near."""
    from text_checkpoint import save_text_checkpoint

    save_text_checkpoint(tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 40, (n,), generator=generator).tolist() for n in (7, 2, 5)]
    ours, our_alone = ask_both_ways(tmp_path / "model", prompts, "moe_runtime")
    theirs, _ = ask_both_ways(tmp_path / "model", prompts, "transformers")
    assert ours == our_alone == theirs
    assert len({tuple(ids) for ids in ours}) > 1
