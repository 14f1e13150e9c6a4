"""The native library itself: loading, threads, processes, memory limits, and life without it."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from guarded_memory import assert_runs

from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.kernels import native as library_module
from moe_runtime.kernels.expert_mlp import ExpertWeights, expert_ffn
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.native import (
    NativeLibrary,
    NativeUnavailableError,
    describe,
    native_library,
    require_native,
)

ROOT = Path(__file__).parents[2]


def test_vectors_are_shuffled_by_what_every_compiler_has():
    sources = [*(ROOT / "kernels/native").rglob("*.[ch]")]
    assert len(sources) > 20
    assert not [path for path in sources if "__builtin_shuffle(" in path.read_text()]  # gcc alone


def test_describe(library):
    found = describe()
    assert found.problem is None
    assert found.isa in found.isas
    assert found.isas[-1] == "portable"
    assert found.num_threads == library.num_threads
    assert found.path.exists()


def test_isas_and_threads_are_checked(library):
    with pytest.raises(ValueError, match="isa must be one of"):
        library.select_isa("mmx")
    with pytest.raises(ValueError, match="at least 1"):
        library.set_num_threads(0)


def test_calls_run_on_torch_threads_while_it_has_as_many(library):
    before = torch.get_num_threads()
    try:
        for torch_threads, shares in ((1, False), (2, True), (3, False)):
            torch.set_num_threads(torch_threads)
            library.set_num_threads(2)
            assert library.shares_threads() is shares
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("torch_threads", [1, 3], ids=["own threads", "torch's threads"])
def test_both_kinds_of_threads_give_the_same_bits(library, torch_threads, generator):
    x = torch.randn(7, 300, generator=generator)
    weight = torch.randn(500, 300, generator=generator)
    library.set_num_threads(1)
    expected = linear(x, weight, impl="native")
    library.set_num_threads(3)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(torch_threads)
        for _ in range(50):
            assert torch.equal(linear(x, weight, impl="native"), expected)
    finally:
        torch.set_num_threads(before)


def test_many_python_threads_call_at_once(library):
    library.set_num_threads(2)
    weights = [torch.full((200, 64), float(i)) for i in range(4)]
    wrong: list[int] = []

    def work(i: int) -> None:
        for rows in range(1, 60):
            y = linear(torch.ones(rows, 64), weights[i], impl="native")
            if not torch.equal(y, torch.full((rows, 200), 64.0 * i)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_workers_start_again_after_resizing(library):
    x, weight = torch.ones(1, 64), torch.ones(500, 64)
    for num_threads in (1, 4, 2, 3, 1, 2):
        library.set_num_threads(num_threads)
        assert torch.equal(linear(x, weight, impl="native"), torch.full((1, 500), 64.0))


def test_sleeping_workers_wake(library):
    library.set_num_threads(2)
    library.set_spin_s(0.0)
    x, weight = torch.ones(1, 64), torch.ones(500, 64)
    try:
        for _ in range(300):
            assert torch.equal(linear(x, weight, impl="native"), torch.full((1, 500), 64.0))
    finally:
        library.set_spin_s(library_module.SPIN_S)


def test_a_forked_child_computes(library):
    """In a process of its own, because a fork of pytest would carry all its state along."""
    assert_runs("""
import os, torch
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.native import native_library
native_library().set_num_threads(2)
x, weight = torch.ones(3, 64), torch.ones(500, 64)
for torch_threads in (1, 2):
    torch.set_num_threads(torch_threads)
    expected = linear(x, weight, impl="native")
    child = os.fork()
    if child == 0:
        same = all(torch.equal(linear(x, weight, impl="native"), expected) for _ in range(20))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(linear(x, weight, impl="native"), expected)
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="protects memory in the Unix way")
def test_nothing_is_read_beyond_a_tensor(library):
    """Weights, rows and biases end where unreadable memory begins."""
    assert_runs("""
import itertools, torch
from guarded_memory import at_the_end
from moe_runtime.kernels.linear import linear
from moe_runtime.kernels.native import native_library

library = native_library()
for isa, dtype in itertools.product(library.isas(), (torch.float32, torch.bfloat16, torch.float16)):
    library.select_isa(isa)
    for n, k, rows in ((1, 1, 1), (5, 31, 1), (7, 33, 7), (33, 65, 13), (6, 100, 20)):
        values = [torch.randn(*shape).to(dtype) for shape in ((rows, k), (n, k), (n,))]
        expected = linear(*values, impl="native")
        found = linear(*[at_the_end(v) for v in values], impl="native")
        assert torch.equal(found, expected), (isa, dtype, n, k, rows)
""")


@pytest.fixture
def _no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(library_module, "_load", lambda: (None, "there is none; do this"))
        patched.setattr(library_module, "LIBRARY_PATH", Path(__file__))
        native_library.cache_clear()
        yield
    native_library.cache_clear()


@pytest.mark.usefixtures("_no_library")
def test_without_the_library():
    with pytest.warns(MoERuntimeWarning, match="there is none; do this; until then torch"):
        assert native_library() is None
    assert native_library() is None  # said once
    found = describe()
    assert (found.problem, found.isa, found.isas) == ("there is none; do this", None, ())
    x, weight = torch.randn(2, 30), torch.randn(8, 30)
    assert torch.equal(linear(x, weight), linear(x, weight, impl="torch"))
    out = torch.full((2, 8), torch.nan)
    expert = ExpertWeights(None, weight, torch.randn(8, 8))
    expert_ffn(x, [expert], [2], [0, 1], [1, 0], out, activation="relu")
    assert torch.isfinite(out).all()
    with pytest.raises(NativeUnavailableError, match="there is none; do this"):
        linear(x, weight, impl="native")
    with pytest.raises(NativeUnavailableError):
        expert_ffn(x, [expert], [2], [0, 1], [1, 0], out, activation="relu", impl="native")
    with pytest.raises(NativeUnavailableError):
        require_native()


def test_a_file_that_is_no_library(tmp_path):
    path = tmp_path / "moe_kernels.so"
    with pytest.raises(OSError, match="moe_kernels"):
        NativeLibrary(path)
    path.write_bytes(b"not a library")
    with pytest.raises(OSError, match="moe_kernels"):
        NativeLibrary(path)


def test_bandwidth_probe_reads_everything(isa, library):
    assert library.read(torch.ones(3 << 18)) > 0
    assert library.read(torch.zeros(3 << 18)) == 0
