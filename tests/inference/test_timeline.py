"""The timeline is a Chrome trace, agrees with the statistics, and changes nothing."""

import contextlib
import itertools
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import moe_runtime
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError
from moe_runtime.files import OutputFile
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.step_times import StepTimes
from moe_runtime.inference.steps import Step
from moe_runtime.lab.traces.timeline import COMPUTE, Timeline
from moe_runtime.models.pocket import pocket_path
from moe_runtime.types import RuntimeStats

ROUNDING_US = 0.002
"""Begin and duration are rounded to a thousandth of a microsecond each."""


def generate(timeline: Path | None) -> tuple[torch.Tensor, RuntimeStats]:
    path = pocket_path()
    tokens = AutoTokenizer.from_pretrained(path)("The for statement", return_tensors="pt")
    summary = inspect_checkpoint(path, max_tokens=64)
    budget = summary.smallest_budget_bytes + 20 * summary.slot_bytes
    model = moe_runtime.load(
        path,
        device="cpu",
        host_memory=budget,
        max_tokens=64,
        prefetch="enforce",
        predictor="next-gate",
        timeline=timeline,
    )
    with model.moe:
        ids = model.generate(**tokens, max_new_tokens=16, do_sample=False)
        model.moe.check()
    return ids, model.moe.stats()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, RuntimeStats]:
    path = tmp_path_factory.mktemp("timeline") / "t.json"
    return path, *generate(path)


@pytest.fixture
def events(run: tuple[Path, torch.Tensor, RuntimeStats]) -> list[dict[str, Any]]:
    return json.loads(run[0].read_text(encoding="utf-8"))


def assert_chrome_trace(events: list[dict[str, Any]]) -> None:
    """The rules of the format for the kinds of events that are used here."""
    assert isinstance(events, list)
    named = set()
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert event["args"]["name"]
            named.add(event["tid"])
            continue
        assert event["ph"] == "X"
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    assert {event["tid"] for event in events} == named
    for track in named:
        slices = [e for e in events if e["ph"] == "X" and e["tid"] == track]
        assert_nested(sorted(slices, key=lambda e: (e["ts"], -e["dur"])))


def assert_nested(slices: list[dict[str, Any]]) -> None:
    """Slices of one track lie apart, or one within the other."""
    open_until: list[float] = []
    for event in slices:
        begin, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1] <= begin + ROUNDING_US:
            open_until.pop()
        assert not open_until or end <= open_until[-1] + ROUNDING_US, event
        open_until.append(end)


def test_it_is_a_chrome_trace(events):
    assert_chrome_trace(events)


def test_it_counts_what_the_statistics_count(run, events):
    stats = run[2]
    layers = [event for event in events if event["name"].startswith("layer ")]
    for name, count in (("hits", stats.hits), ("late", stats.late_hits), ("misses", stats.misses)):
        assert sum(len(layer["args"][name]) for layer in layers) == count
    assert stats.misses
    assert stats.guesses
    reads = [event for event in events if event["tid"] != COMPUTE and event["ph"] == "X"]
    assert sum(read["args"]["bytes"] for read in reads) == stats.bytes_read
    demands = [read for read in reads if read["args"]["began_as"] == "demand"]
    assert len(demands) == stats.misses
    # every miss is a read that bears its expert's name
    missed = [name for layer in layers for name in layer["args"]["misses"]]
    assert sorted(read["name"] for read in demands) == sorted(f"demand {name}" for name in missed)
    waits_us = sum(event["dur"] for event in events if event["name"] == "wait")
    num_waits = sum(event["name"] == "wait" for event in events)
    assert waits_us + num_waits * ROUNDING_US >= 1e6 * stats.stall_s


def test_steps_hold_their_layers(events):
    steps = [event for event in events if event["name"] in ("prefill", "decode")]
    assert [step["name"] for step in steps] == ["prefill"] + ["decode"] * 15
    for step in steps:
        inside = [
            event["name"]
            for event in events
            if event["ph"] == "X" and step["ts"] <= event["ts"] <= step["ts"] + step["dur"]
        ]
        assert [name for name in inside if name.startswith("layer ")] == [
            f"layer {number}" for number in range(6)
        ]


def test_watching_changes_no_bit(run):
    assert torch.equal(generate(None)[0], run[1])


def test_a_crash_leaves_a_trace_without_its_bracket(tmp_path):
    timeline = Timeline(tmp_path / "t.json")
    timeline.slice("decode", 0.0, 1.0, tokens=1)
    timeline.flush()
    timeline.slice("decode", 1.0, 2.0, tokens=1)
    timeline.flush()
    left = (tmp_path / "t.json.part").read_text(encoding="utf-8")
    assert len(json.loads(left + "]")) == 4
    timeline.close()
    timeline.close()
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8")) == json.loads(left + "]")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--timeline", "{}/none/t.json"], "the timeline cannot be written: there is no folder"),
        (["--timeline", "{}"], "is a folder, expected the name of a file"),
        (["--timeline", "{}/t.npz", "--trace", "{}/t.npz"], "must be different files"),
        (["--timeline", "{}/t.part", "--trace", "{}/t"], "must be different files"),
        (["--timeline", "{}/t", "--trace", "{}/t.part"], "must be different files"),
    ],
)
def test_bad_places_are_refused_before_loading(tmp_path, capsys, words, expected):
    words = [word.replace("{}", str(tmp_path)) for word in words]
    assert main(["run", str(pocket_path()), "--prompt", "x", *words]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(("number", "kept"), [(1, 5), (2, 0), (3, None)])
def test_an_interrupted_flush_neither_damages_nor_loses_nor_repeats(
    tmp_path, monkeypatch, number, kept
):
    path = tmp_path / "t.json"
    path.write_text("old", encoding="utf-8")
    real, calls = OutputFile.write_at, itertools.count(1)

    def write_at(output: OutputFile, offset: int, data: bytes) -> int:
        is_interrupted = next(calls) == number
        end = real(output, offset, data[:kept] if is_interrupted else data)
        if is_interrupted:
            raise KeyboardInterrupt
        return end

    monkeypatch.setattr(OutputFile, "write_at", write_at)
    timeline = Timeline(path)
    for name in ("a", "b", "c"):
        timeline.slice(name, 0.0, 1.0)
        with contextlib.suppress(KeyboardInterrupt):
            timeline.flush()
    timeline.close()
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [event["name"] for event in found if event["ph"] == "X"] == ["a", "b", "c"]
    assert os.listdir(tmp_path) == ["t.json"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_timeline_that_cannot_be_completed_leaves_the_older_one(tmp_path, monkeypatch, number):
    path = tmp_path / "t.json"
    path.write_text("old", encoding="utf-8")
    calls = itertools.count(1)
    real = os.write

    def write(descriptor: int, data: memoryview) -> int:
        if next(calls) >= number:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    timeline = Timeline(path)
    timeline.slice("a", 0.0, 1.0)
    monkeypatch.setattr(os, "write", write)
    with contextlib.suppress(CheckpointError):
        timeline.flush()
    with contextlib.suppress(CheckpointError):
        timeline.close()
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["t.json"]


def test_several_threads_may_flush(tmp_path):
    timeline = Timeline(tmp_path / "t.json")

    def work(number: int) -> None:
        for step in range(200):
            timeline.slice(f"{number} {step}", 0.0, 1.0)
            timeline.flush()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    timeline.close()
    found = json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))
    names = [event["name"] for event in found if event["ph"] == "X"]
    assert sorted(names) == sorted(f"{number} {step}" for number in range(4) for step in range(200))


def test_a_prompt_of_one_token_is_no_decode_step(tmp_path):
    length, path = [0, 1], tmp_path / "t.json"
    cache = SimpleNamespace(get_seq_length=lambda: length.pop(0))  # as it is when it is asked
    with contextlib.closing(Timeline(path)) as timeline:
        times = StepTimes(timeline)
        times.begin(Step({"past_key_values": cache}, (1, 1)))
        length[:] = [1]
        times.end()
    names = [event["name"] for event in json.loads(path.read_text(encoding="utf-8"))]
    assert "prefill" in names
    assert "decode" not in names
