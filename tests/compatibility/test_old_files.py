"""Files that an earlier version wrote are read by this one, and mean the same.

`data/` was written by commit d304132: a trace of the pocket model with a predictor and a placement
made from it, and two runs of `moe-runtime train` that stopped after three of six steps, one in
memory and one with its experts on the disk. The numbers beside them are what that commit made of
them afterwards.
"""

import json
import shutil
from pathlib import Path

import pytest
from training_runs import train, training_records, write_run

import moe_runtime.models.pocket
from moe_runtime.cli.main import main

DATA = Path(__file__).parent / "data"
EXPECTED = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
POCKET = str(Path(moe_runtime.models.pocket.__file__).parent)
TRACE = str(DATA / "trace.npz")


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_trace_replays_to_the_same_hits(capsys):
    shown = printed(capsys, "replay", TRACE, "--policy", "lru,lfu,reuse", "--capacity", "25%")
    rates = {row["policy"]: row["hit_rate"] for row in shown["rows"]}
    assert rates == EXPECTED["hit_rates"]


def test_a_trained_predictor_drives_a_run(capsys):
    words = ("--prefetch", "enforce", "--predictor", str(DATA / "predictor.npz"))
    words += ("--prompt", EXPECTED["prompt"], "--max-new-tokens", "2", "--host-memory", "64MiB")
    shown = printed(capsys, "run", POCKET, *words)
    assert shown["prefetch"] == "enforce"
    assert EXPECTED["text"].startswith(shown["text"])


def test_a_placement_map_is_rearranged(capsys):
    words = ("place", TRACE, "--gpus", "2", "--from", str(DATA / "map.json"))
    assert "transfers" in json.dumps(printed(capsys, *words))


@pytest.mark.parametrize(
    ("name", "words"),
    [("resident", ()), ("offloaded", ("--set", 'run.host_memory="64MiB"'))],
    ids=["resident", "offloaded"],
)
def test_a_training_run_goes_on(name, words, tmp_path):
    path = write_run(tmp_path, config=(DATA / name / "train.toml").read_text(encoding="utf-8"))
    shutil.copytree(DATA / name / "out", tmp_path / "out")
    assert train(path, "--resume", "--reschedule", "--set", "run.steps=6", *words) == 0
    losses = [record["loss"] for record in training_records(tmp_path / "out") if "loss" in record]
    expected = json.loads((DATA / name / "expected.json").read_text(encoding="utf-8"))
    assert losses[:3] == expected[:3]
    # fp32 on another processor: three steps of rounding errors, each some eps of the loss, grown
    # by Adam where gradients are near zero
    assert losses == pytest.approx(expected, rel=1e-3)
