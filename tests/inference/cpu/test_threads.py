"""Torch has its threads back after every forward pass, also one that failed."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fake_tier import FakeTier, make_store

from moe_runtime.inference.cpu import attention
from moe_runtime.inference.cpu.attention import attend, rest_torch_threads
from moe_runtime.inference.steps import OneThread, Steps
from moe_runtime.kernels.linear import UNLIMITED, native_row_limit
from moe_runtime.kernels.native import native_library


class Probe(torch.nn.Module):
    dtype = torch.bfloat16

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def forward(self, fail: bool) -> None:
        self.seen = torch.get_num_threads()
        if fail:
            raise RuntimeError("as asked")


@pytest.fixture
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_two_threads")
def test_a_pass_uses_one_thread_and_restores_the_number():
    library = native_library()
    if library is None:
        pytest.skip("the native library was not built")
    probe = Probe()
    rest_torch_threads(probe)  # type: ignore[arg-type]
    probe(False)
    assert probe.seen == (1 if native_row_limit(library, probe.dtype) == UNLIMITED else 2)
    assert torch.get_num_threads() == 2
    with pytest.raises(RuntimeError, match="as asked"):
        probe(True)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("_two_threads")
def test_torch_keeps_its_threads_if_it_computes_many_rows(monkeypatch):
    for library, limit in ((None, UNLIMITED), (native_library(), 16)):
        monkeypatch.setattr(attention, "native_library", lambda library=library: library)
        monkeypatch.setattr(attention, "native_row_limit", lambda *_, limit=limit, **__: limit)
        probe = Probe()
        rest_torch_threads(probe)  # type: ignore[arg-type]
        probe(False)
        assert probe.seen == 2


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("waits", [True, False])
def test_a_thread_begun_during_a_pass_gets_torchs_threads(waits):
    """Torch gives a thread the number that any thread set last, when it first computes."""
    steps, one_thread = Steps([make_store(FakeTier(), 1)]), OneThread()
    inside, go = threading.Event(), threading.Event()

    def forward() -> None:
        one_thread.begin()
        inside.set()
        assert go.wait(600)
        one_thread.end()

    def call() -> int:
        steps.run(forward)
        return torch.get_num_threads()

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        ends = first.submit(call)
        assert inside.wait(600)
        assert second.submit(torch.get_num_threads).result() == 1
        late = second.submit(call) if waits else None
        go.set()
        assert ends.result() == 2
        assert (late or second.submit(call)).result() == 2
    with ThreadPoolExecutor(1) as later:
        assert later.submit(torch.get_num_threads).result() == 2


@pytest.mark.usefixtures("_two_threads")
def test_a_setting_of_one_thread_stays():
    steps = Steps([make_store(FakeTier(), 1)])
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as other:
        other.submit(steps.run, torch.get_num_threads).result()
        assert other.submit(torch.get_num_threads).result() == 1
    with ThreadPoolExecutor(1) as other:
        other.submit(torch.set_num_threads, 2).result()
    steps.run(torch.get_num_threads)
    assert torch.get_num_threads() == 1


def test_attention_over_a_long_prompt_has_the_threads_of_the_kernels(monkeypatch):
    """Bits of one thread; a short prompt keeps one; also after an exception torch has one again."""
    library = native_library()
    if library is None:
        pytest.skip("the native library was not built")
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, 2, 200, 64, generator=generator).bfloat16() for _ in range(3)]
    seen: list[int] = []

    def sdpa(*args, **options):
        seen.append(torch.get_num_threads())
        if options.get("fail"):
            raise RuntimeError("as asked")
        return real(*args, **options)

    real = attention.private.sdpa_attention_forward
    monkeypatch.setattr(attention.private, "sdpa_attention_forward", sdpa)
    monkeypatch.setattr(attention, "native_row_limit", lambda *_: UNLIMITED)
    before, kernels = torch.get_num_threads(), library.num_threads
    module = torch.nn.Module()
    mask = torch.ones(200, 200, dtype=torch.bool).tril()[None, None]  # for which there is no kernel
    try:
        library.set_num_threads(3)
        torch.set_num_threads(1)
        short = attend(module, *parts, mask)[0]
        monkeypatch.setattr(attention, "LEAST_PRODUCTS", 2 * 200 * 64 * 200)
        assert torch.equal(attend(module, *parts, mask)[0], short)
        with pytest.raises(RuntimeError, match="as asked"):
            attend(module, *parts, mask, fail=True)
        assert torch.get_num_threads() == 1
        torch.set_num_threads(2)  # torch does not rest
        attend(module, *parts, mask)
        assert seen == [1, 3, 3, 2]
    finally:
        library.set_num_threads(kernels)
        torch.set_num_threads(before)
