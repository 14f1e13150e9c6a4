"""What a decode step costs in counts, held against a committed results file by `bench compare`.

Counts are the same on a busy machine and on a quiet one: calls of this project's Python functions
and of its C kernels, torch's operators and the bytes that they allocate, and experts and bytes
read. After a change that is meant to need more (or fewer) of them:
`python tests/bench/test_regression_guard.py` writes the file anew.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import moe_runtime
from moe_runtime.benchmarks.suite import (
    MeasuredSystem,
    Metric,
    describe_system,
    make_results,
    read_results,
)
from moe_runtime.benchmarks.suite import write_results as write
from moe_runtime.cli.main import main
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError
from moe_runtime.kernels.linear import native_row_limit
from moe_runtime.kernels.native import native_library

COMMITTED = Path(__file__).with_name("step_counts.json")
ROOT = Path(__file__).resolve().parents[2]
# An installed package lies in one folder, a checkout's in four.
FOLDERS = (
    Path(moe_runtime.__file__).parent,
    *(ROOT / one for one in ("kernels", "policies", "models")),
)
ROOMS = tuple(map(str, FOLDERS))
BOUND = "0.03"
STEPS = 24
MORE_SLOTS = 6
METRICS = {
    **dict.fromkeys(("python_calls", "kernel_calls", "operators"), Metric("count")),
    "allocated_bytes": Metric("bytes"),
    "experts_read": Metric("count"),
    "bytes_read": Metric("bytes"),
}
# Python 3.12 no longer makes functions of them.
INLINED = ("<listcomp>", "<setcomp>", "<dictcomp>")


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many functions of this project this thread called within the block."""
    found = [0]

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name not in INLINED:
            found[0] += code.co_filename.startswith(ROOMS)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


@contextmanager
def counted_kernels() -> Iterator[list[int]]:
    """How often functions of the native library are called within the block."""
    found, library = [0], native_library()
    assert library is not None
    own = {name: value for name, value in vars(library).items() if hasattr(value, "argtypes")}

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found[0] += 1
            return function(*arguments)

        return call

    try:
        vars(library).update({name: counting(function) for name, function in own.items()})
        yield found
    finally:
        vars(library).update(own)


@torch.inference_mode()
def decode(model: Any) -> None:
    """Given tokens, one at a time."""
    tokens = torch.randint(3, 40, (1, STEPS), generator=torch.Generator().manual_seed(5))
    cache = None
    for number in range(STEPS):
        output = model(tokens[:, number : number + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values


def counts(folder: Path, host_memory: int | str) -> dict[str, float]:
    """Of a second run, when everything is prepared that is prepared once."""
    options: dict[str, Any] = {"policy": "lru", "prefetch": "off", "max_tokens": 2 * STEPS}
    model: Any = moe_runtime.load(folder, device="cpu", host_memory=host_memory, **options)
    with model.moe:
        decode(model)
        before = model.moe.stats()
        with counted() as calls:
            decode(model)
        after = model.moe.stats()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            decode(model)
        with counted_kernels() as kernel_calls:
            decode(model)
    events = profiled.events()
    assert events is not None
    operators = [event for event in events if event.name.startswith("aten::")]
    return {
        "python_calls": calls[0] / STEPS,
        "kernel_calls": kernel_calls[0] / STEPS,
        "operators": len(operators) / STEPS,
        "allocated_bytes": sum(max(0, one.self_cpu_memory_usage) for one in operators) / STEPS,
        "experts_read": after.misses - before.misses,
        "bytes_read": after.bytes_read - before.bytes_read,
    }


def make_counts(folder: Path) -> dict[str, Any]:
    """Results of two scenarios: all experts resident, and few of them."""
    with pytest.raises(CapacityError) as refused:
        counts(folder, 1000)
    least = refused.value.smallest_bytes
    assert least is not None
    found = {
        "resident": counts(folder, "1GiB"),
        "few slots": counts(folder, least + MORE_SLOTS * 40960),
    }
    # who waits for a read may wake up more than once
    found["few slots"] = {name: found["few slots"][name] for name in ("experts_read", "bytes_read")}
    systems = [
        describe_system(
            name,
            MeasuredSystem(repetitions=[one] * 3),  # the rank test asks for three
            METRICS,
        )
        for name, one in found.items()
    ]
    return make_results("counts", {"steps": STEPS}, "most", systems)


@pytest.fixture(scope="module")
def current(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    from text_checkpoint import save_text_checkpoint

    library = native_library()
    if library is None or not native_row_limit(library, torch.float32):
        pytest.skip("torch computes here, by other calls than those counted")
    folder = tmp_path_factory.mktemp("model")
    save_text_checkpoint(folder)
    return make_counts(folder)


def compared(results: dict[str, Any], folder: Path, capsys: Any) -> tuple[int, list[str]]:
    """Exit code of `bench compare`, and what became worse."""
    write(folder / "now.json", results)
    capsys.readouterr()
    words = ["bench", "compare", str(COMMITTED), str(folder / "now.json"), "--bound", BOUND]
    code = main([*words, "--json"])
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    return code, [f"{v['system']}: {v['metric']}" for v in verdicts if v["word"] == "worse"]


def test_a_step_costs_no_more_than_was_committed(current, tmp_path, capsys):
    assert compared(current, tmp_path, capsys) == (0, [])
    resident, few = (one["summary"] for one in current["measurements"])
    assert resident["python_calls"]["median"] > 40
    assert resident["kernel_calls"]["median"] > 10
    assert resident["operators"]["median"] > 40
    assert resident["allocated_bytes"]["median"] > 1000
    assert resident["experts_read"]["median"] == 0 < few["experts_read"]["median"]


def slower(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ten calls more for each call."""

    def call(*words: Any, **named: Any) -> Any:
        for _ in range(10):
            format_bytes(1)
        return function(*words, **named)

    return call


def test_injected_slowness_is_found(current, tmp_path, capsys, monkeypatch):
    """Calls that are made once more for every layer, and experts that are read again."""
    from text_checkpoint import save_text_checkpoint

    from moe_runtime.inference.expert_layer import OffloadedExperts

    monkeypatch.setattr(OffloadedExperts, "forward", slower(OffloadedExperts.forward))
    monkeypatch.setattr(f"{__name__}.MORE_SLOTS", MORE_SLOTS - 3)
    save_text_checkpoint(tmp_path / "model")
    code, worse = compared(make_counts(tmp_path / "model"), tmp_path, capsys)
    assert code == 1
    assert worse == [
        *("resident: python_calls", "few slots: experts_read", "few slots: bytes_read")
    ]


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (1.03, 0), (3.0, 1)])
def test_committed_times_with_injected_slowness(factor, code, tmp_path, capsys):
    """The metric that became slower is named, of the system that became slower, and no other.

    (One of the committed repetitions is slow: 1.5 times its times is noise beside it.)
    """
    (path,) = (ROOT / "benchmarks" / "results").glob("latency-pocket-amd-*.json")
    changed = read_results(path)
    for repetition in changed["measurements"][0]["repetitions"]:
        repetition["between_tokens_s"] = [factor * s for s in repetition["between_tokens_s"]]
    write(tmp_path / "slower.json", changed)
    assert main(["bench", "compare", str(path), str(tmp_path / "slower.json"), "--json"]) == code
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    worse = [(one["system"], one["metric"]) for one in verdicts if one["word"] == "worse"]
    assert worse == [("moe_runtime", "between_tokens_s")] * code


if __name__ == "__main__":
    import tempfile

    sys.path += [str(ROOT / "tests" / "support"), str(ROOT / "tests" / "support" / "checkpoints")]
    from text_checkpoint import save_text_checkpoint

    with tempfile.TemporaryDirectory() as place:
        save_text_checkpoint(Path(place))
        found = make_counts(Path(place))
    write(COMMITTED, found | {"command": "python tests/bench/test_regression_guard.py"})
