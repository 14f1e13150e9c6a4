import json
from pathlib import Path

import pytest
from harness.kept import CIRCUMSTANCES, with_kept
from harness.plan import PlannedRun, Settings, cannot_work, cap_label, planned_runs
from harness.processes import Outcome
from harness.replay import Routes
from harness.report import details_of_ours, io_bound_fraction, ratios, summarize
from harness.session import Findings, RunRecord

from moe_runtime.bench.synthetic.model_shapes import SHAPES

GIB = 1 << 30
SHAPE = SHAPES["olmoe-1b-7b"]


def settings(**changes: object) -> Settings:
    values: dict[str, object] = {
        "shape": SHAPE,
        "systems": ("ours", "transformers"),
        "caps": (None, 7 * GIB),
        "repeats": 3,
        "prompt_tokens": 256,
        "new_tokens": 10,
        "warmup_tokens": 2,
        "max_decode_s": 60.0,
        "timeout_s": 900.0,
        "num_threads": 2,
        "greedy": False,
        "host_memory": "auto",
        "tokenizer": "words",
        "seed": 0,
        "disk_s": 1.0,
        "trace": True,
        "cold": True,
        "data": Path("data"),
    }
    return Settings(**(values | changes))  # pyright: ignore[reportArgumentType]


def record(system: str, cap: int | None, speed: float, misses: int = 0) -> RunRecord:
    numbers = {
        "load_s": 1.0,
        "ttft_s": 2.0,
        "prefill_first_tokens_per_s": 10 * speed,
        "prefill_warm_tokens_per_s": 20 * speed,
        "decode_tokens_per_s": speed,
        "decode_tokens": 10,
        "decode_s": 10 / speed,
        "peak_rss_bytes": 5 * GIB,
        "peak_rss_less_imports_bytes": 4 * GIB,
        "decode_counters": {"misses": misses, "stall_s": 1.0},
        "counters": {"expert_slots": 400, "budget_bytes": 6 * GIB},
    }
    bandwidth = 2e9 if cap is not None else None
    return RunRecord(PlannedRun(system, cap, 0), Outcome(numbers, None, ""), bandwidth)


def test_systems_take_turns() -> None:
    runs = list(planned_runs(settings(repeats=2), (None,)))
    assert [run.system for run in runs] == ["ours", "transformers"] * 2


def test_what_cannot_work_is_not_run_and_says_why() -> None:
    assert cannot_work("accelerate", None, SHAPE) is not None
    assert cannot_work("transformers:eager", 7 * GIB, SHAPE) == "its weights exceed the cap"
    assert cannot_work("transformers", None, SHAPE) is None
    runs = list(planned_runs(settings(), (7 * GIB,)))
    assert {run.system for run in runs} == {"ours"}


def test_medians_and_ratios() -> None:
    findings = Findings(
        records=[record("ours", None, speed) for speed in (8.0, 9.0, 100.0)]
        + [record("transformers", None, speed) for speed in (1.0, 3.0, 4.0)]
    )
    rows = summarize(settings(), (None, 7 * GIB), findings)
    assert [(row.system, row.num_runs) for row in rows] == [
        ("ours", 3),
        ("transformers", 3),
        ("ours", 0),
        ("transformers", 0),
    ]
    assert rows[2].failure == "not run"
    assert rows[3].failure == "its weights exceed the cap"
    (ratio,) = ratios(rows)
    assert ratio["peer"] == "transformers"
    assert ratio["decode_tokens_per_s"] == pytest.approx(3.0)


def test_failed_runs_do_not_count() -> None:
    failed = RunRecord(PlannedRun("ours", None, 1), Outcome({}, "ended with exit code 1", ""), None)
    findings = Findings(records=[record("ours", None, 8.0), failed])
    row = summarize(settings(systems=("ours",)), (None,), findings)[0]
    assert (row.num_runs, row.failure) == (1, None)
    row = summarize(settings(systems=("ours",)), (None,), Findings(records=[failed]))[0]
    assert row.failure == "ended with exit code 1"


def test_share_of_the_io_bound() -> None:
    # 10 tokens in 5 s; 400 missed experts at 2 GB/s need 400 * 12 582 912 / 2e9 = 2.5166 s.
    capped = record("ours", 7 * GIB, 2.0, misses=400)
    assert io_bound_fraction(settings(), capped) == pytest.approx(0.50332, rel=1e-4)
    assert io_bound_fraction(settings(), record("ours", None, 2.0, misses=400)) is None
    assert io_bound_fraction(settings(), record("ours", 7 * GIB, 2.0, misses=0)) is None


def test_details_put_replay_beside_measurement() -> None:
    token = frozenset(range(8))
    layers = tuple((token,) for _ in range(SHAPE.num_layers))
    findings = Findings(records=[record("ours", 7 * GIB, 2.0, misses=400)])
    rows = summarize(settings(systems=("ours",)), (7 * GIB,), findings)
    (details,) = details_of_ours(settings(), rows, findings)
    assert details["slots_per_layer"] == 25
    assert details["measured_misses_per_token"] == 40
    assert details["lru_misses_per_token"] is None
    findings.routes = Routes(prompt=layers, decode=layers)
    (details,) = details_of_ours(settings(), rows, findings)
    assert details["lru_misses_per_token"] == details["belady_misses_per_token"] == 0


def test_cap_labels() -> None:
    assert [cap_label(cap) for cap in (None, 7 * GIB, 3 * GIB // 2)] == ["none", "7 GiB", "1.5 GiB"]


def content(caps: list[int | None], **changes: object) -> dict[str, object]:
    """A results file of some caps; the speed of ours is in its rows."""
    speeds = {None: 3.0, 7 * GIB: 2.0, 5 * GIB: 1.0}
    rows = [{"cap_bytes": cap, "system": "ours", "speed": speeds[cap]} for cap in caps]
    facts = {name: name for name in CIRCUMSTANCES}
    return {
        **facts,
        "command": f"measure {caps}",
        "settings": {"systems": ["ours"], "caps": caps, "trace": True, "repeats": 3},
        "notes": ["slow disk"],
        "disk": [{"bytes_per_s": 1.0}],
        **dict.fromkeys(("summary", "ratios_ours_over_peer", "ours", "runs"), rows),
        **changes,
    }


def test_results_of_other_caps_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = content([None, 5 * GIB])
    assert with_kept(first, path) == first
    stale = {"cap_bytes": 5 * GIB, "system": "ours", "speed": -1.0}
    kept = {"cap_bytes": None, "system": "ours", "speed": 3.0}
    path.write_text(json.dumps(content([None, 5 * GIB], runs=[stale, kept])))
    merged = with_kept(content([7 * GIB, 5 * GIB]), path)
    for section in ("summary", "runs"):
        found = [(row["cap_bytes"], row["speed"]) for row in merged[section]]
        assert found == [(None, 3.0), (7 * GIB, 2.0), (5 * GIB, 1.0)]
    assert merged["settings"]["caps"] == [None, 7 * GIB, 5 * GIB]
    assert merged["notes"] == ["slow disk"]
    assert merged["command"] == f"{first['command']} && measure {[7 * GIB, 5 * GIB]}"


@pytest.mark.parametrize("changes", [{"commit": "b"}, {"settings": {"repeats": 1}}], ids=str)
def test_results_of_other_circumstances_are_not_kept(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content([None], **changes)))
    with pytest.raises(ValueError, match=r"cannot be kept: they have another (commit|repeats);"):
        with_kept(content([7 * GIB]), path)
