"""Files whose bytes were damaged are one error, or hold what they held; nothing else escapes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_routes import make_routes
from trace_files import (
    SIGNATURE,
    assert_begins_as,
    megatron_lines,
    record_steps,
    write_lines,
    write_plain,
)

from moe_runtime.errors import CheckpointError
from moe_runtime.lab.traces import Trace, TraceRecorder, read_trace
from moe_runtime.lab.traces.learned import read_predictor, write_predictor
from moe_runtime.lab.traces.readers import read_any_trace
from moe_runtime.policies.prediction import Shape, make_estimator

SHAPE = Shape(num_layers=2, num_experts=8, top_k=2)


def write_trace_file(path: Path) -> None:
    with TraceRecorder(path, SIGNATURE) as recorder:
        record_steps(recorder, 30)


def write_journal(path: Path) -> None:
    """What is left of a recording of 30 steps in blocks of seven that was never closed."""
    target = path.with_name("journalled")
    record_steps(TraceRecorder(target, SIGNATURE, block_tokens=7), 30)
    target.with_name("journalled.part").rename(path)


def write_trained(path: Path) -> None:
    estimator = make_estimator("naive-bayes", SHAPE)
    estimator.fit(make_routes(SHAPE, num_sequences=4, length=20))
    write_predictor(path, estimator, SIGNATURE)


def is_sound(found: Trace, _: Trace) -> None:
    known = found.expert_ids[found.expert_ids != found.absent]
    assert known.max(initial=0) < found.signature.num_experts


def is_a_beginning(found: Trace, whole: Trace) -> None:
    """The checksum of a block covers all of it, so what is read is what was recorded."""
    assert found.num_steps % 7 == 0
    assert_begins_as(found, whole)


def is_the_same(found: Any, whole: Any) -> None:
    for name, array in whole.state().items():
        np.testing.assert_array_equal(found.state()[name], array)


FILES: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any], Callable[..., None]]] = {
    "trace.npz": (write_trace_file, read_trace, is_sound),
    "journal.part": (write_journal, read_trace, is_a_beginning),
    "plain.npz": (write_plain, read_any_trace, is_sound),
    "megatron.jsonl": (lambda path: write_lines(path, megatron_lines()), read_any_trace, is_sound),
    "predictor.npz": (write_trained, read_predictor, is_the_same),
}


@pytest.mark.parametrize("name", FILES)
def test_damage_anywhere_is_one_error_or_harmless(tmp_path, name):
    write, read, check = FILES[name]
    path = tmp_path / name
    write(path)
    good, whole = path.read_bytes(), read(path)
    first = 8 if name == "journal.part" else 0  # behind what says that it is a journal

    @settings(max_examples=80)
    @given(data=st.data())
    def damage(data: st.DataObject) -> None:
        content = bytearray(good)
        for _ in range(data.draw(st.integers(0, 4))):
            content[data.draw(st.integers(first, len(good) - 1))] = data.draw(st.integers(0, 255))
        if data.draw(st.booleans()):
            del content[data.draw(st.integers(0, len(good))) :]
        path.write_bytes(bytes(content))
        try:
            found = read(path)
        except CheckpointError:
            return
        check(found, whole)

    damage()
