"""The benchmark of quantised experts runs, and its steps are those of the library."""

import itertools
import os
import sys
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import quantized
import torch
from harness.waiting_process import PeerEndedError, WaitingProcess

from moe_runtime.kernels.native import native_library

SHAPE = quantized.Shape(num_experts=6, top_k=2, dim_model=64, dim_hidden=40)
WHOLE_BLOCKS = quantized.Shape(num_experts=6, top_k=2, dim_model=512, dim_hidden=256)
BITS = {"bf16": 16, "fp8": 8, "mxfp4": 4.25, "int4": 4.5, "q8_0": 8.5, "q4_k": 4.5, "q6_k": 6.5625}


@pytest.mark.skipif(native_library() is None, reason="the native library was not built")
@pytest.mark.parametrize("kind", quantized.FORMATS)
@pytest.mark.parametrize("num_tokens", [1, pytest.param(16, marks=pytest.mark.long)])
def test_rows_say_what_was_moved(kind: str, num_tokens: int) -> None:
    has_blocks = not quantized.has_whole_blocks(SHAPE, quantized.FORMATS[kind])
    shape = WHOLE_BLOCKS if has_blocks else SHAPE
    experts = quantized.make_experts(shape, quantized.FORMATS[kind], memory=1 << 23)
    assert len(experts) == shape.num_experts
    ticks = itertools.count()
    row = quantized.measure(shape, experts, num_tokens, 3, lambda: float(next(ticks)))
    bits = 8 * row["expert_bytes"] / (3 * shape.dim_model * shape.dim_hidden)
    least = BITS[kind.removesuffix("-int8")]
    assert least <= bits < (least + 0.01 if has_blocks else 17)
    assert shape.top_k <= row["visited"] <= shape.num_experts
    assert row["ms"] == {"experts": 1000.0, "read": 1000.0}
    assert row["of_read"] == 1.0


def test_no_more_experts_than_fit() -> None:
    experts = quantized.make_experts(SHAPE, None, memory=4 * 3 * 64 * 40 * 2)
    assert len(experts) == 4
    assert torch.equal(experts[0].up, experts[3].up)  # type: ignore[arg-type]
    assert experts[0].up.data_ptr() != experts[3].up.data_ptr()  # type: ignore[union-attr]


SPINNING = """
import sys, threading
def spin():
    while True: pass
threading.Thread(target=spin, daemon=True).start()
print("a line of its own")
print("= 0.25", flush=True)
for line in sys.stdin:
    if line == "13\\n": sys.exit(3)
    print("=", *[1.5] * int(line), flush=True)
"""


def _processor_seconds(pid: int) -> float:
    """Of all threads of a process."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def test_a_peer_stands_still_while_it_is_not_its_turn() -> None:
    with WaitingProcess([sys.executable, "-P", "-c", SPINNING]) as peer:
        assert float(peer.first_answer) == 0.25
        for _ in range(3):
            before = _processor_seconds(peer.pid)
            states = [
                (task / "stat").read_text().rpartition(")")[2].split()[0]
                for task in Path(f"/proc/{peer.pid}/task").iterdir()
            ]
            assert states == ["T", "T"]
            sum(range(5_000_000))  # our turn: far longer than a tick of the kernel's clock
            assert _processor_seconds(peer.pid) == before
            assert peer.call_ms(2) == [1.5, 1.5]
    assert not psutil.pid_exists(peer.pid)


@pytest.mark.skipif(native_library() is None, reason="the native library was not built")
@pytest.mark.parametrize(("one", "two"), [(1.5, 8.0), (8.0, 1.5)])
def test_the_faster_number_of_threads_of_a_peer_counts(one: float, two: float) -> None:
    programs = [SPINNING.replace("1.5", str(own)) for own in (one, two)]
    experts = quantized.make_experts(SHAPE, None, memory=1 << 20)
    ticks = (0.004 * tick for tick in itertools.count())
    with ExitStack() as stack:
        peers = {
            threads: stack.enter_context(WaitingProcess([sys.executable, "-P", "-c", program]))
            for threads, program in enumerate(programs, start=1)
        }
        row = quantized.measure(SHAPE, experts, 1, 3, lambda: next(ticks), peers)
    assert row["ms"]["kt_kernel_1_thread"] == pytest.approx(one)
    assert row["ms"]["kt_kernel_2_threads"] == pytest.approx(two)
    assert row["over_kt_kernel"] == pytest.approx(1.5 / 4)


def test_a_peer_ends_with_an_error_of_ours_and_says_when_it_ended_itself() -> None:
    command = [sys.executable, "-P", "-c", SPINNING]
    with pytest.raises(ZeroDivisionError), WaitingProcess(command) as peer:
        _ = 1 // 0
    assert not psutil.pid_exists(peer.pid)
    with WaitingProcess(command) as peer, pytest.raises(PeerEndedError, match="ended"):
        peer.call_ms(13)
    with WaitingProcess(command) as peer:
        os.kill(peer.pid, 9)
        with pytest.raises(PeerEndedError, match="ended"):
            peer.call_ms(1)
    with pytest.raises(PeerEndedError, match="ended"):
        WaitingProcess([sys.executable, "-c", "print('no answer')"])


def test_a_format_is_a_system_and_so_is_the_peer_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"shape": "s", "format": "fp8", "tokens": 1, "visited": 2, "expert_bytes": 8}
    rows = [
        row | {"ms": {"experts": 4.0, "read": 2.0, "kt_kernel_1_thread": 6.0}},
        row | {"tokens": 16, "ms": {"experts": 8.0, "read": 3.0}},
    ]
    saved = dict[str, object]()
    monkeypatch.setattr(
        quantized,
        "save_results",
        lambda kind, settings, systems, metrics: saved.update(
            {"kind": kind, "systems": systems, "metrics": metrics}
        ),
    )
    library = SimpleNamespace(isa="it", num_threads=2)
    monkeypatch.setattr(quantized, "require_native", lambda: library)
    quantized.save(rows, Namespace(rounds=3, memory="1GiB", one_thread=False))
    own = {"s_1_s": 0.004, "s_1_read_s": 0.002, "s_1_bytes": 16}
    own |= {"s_16_s": 0.008, "s_16_read_s": 0.003, "s_16_bytes": 16}
    peer = {"s_1_s": 0.006}
    assert saved["systems"] == {"fp8": [own], "kt_kernel_1_thread, fp8": [peer]}
    assert saved["kind"] == "quantized"
    assert saved["metrics"].keys() == own.keys()  # type: ignore[attr-defined]
