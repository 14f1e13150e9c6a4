"""Experts read by byte range are the bytes of the file, and a read that fails says so."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.errors import CapacityError, CheckpointError
from moe_runtime.memory import source as source_module
from moe_runtime.memory.source import (
    BLOCK_BYTES,
    CheckpointFile,
    ExpertSource,
    Slab,
    TensorRange,
    aligned_bytes,
    lay_out,
)
from moe_runtime.memory.store import ExpertStore
from moe_runtime.memory.tiers import TierFetcher
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.types import ExpertKey

FILE_BYTES = 3 * BLOCK_BYTES + 1234  # ends inside a block


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("source") / "experts.bin"
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(0, 256, (FILE_BYTES,), dtype=torch.uint8, generator=generator)
    path.write_bytes(data.numpy().tobytes())
    return path


def half_range(file: Path, offset: int, count: int) -> TensorRange:
    return TensorRange(file, offset, 2 * count, torch.float16, (count,), (1,))


def in_file(file: Path, tensor: TensorRange) -> torch.Tensor:
    raw = bytearray(file.read_bytes()[tensor.offset : tensor.offset + tensor.span_bytes])
    return torch.frombuffer(raw, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride)


def read_all(layouts, *, num_slots: int = 4, direct: bool = True):
    """Every expert's tensors as bytes, through a real source and store."""
    source = ExpertSource(layouts, io_threads=2, direct=direct)
    slab = Slab(num_slots, max(layout.slot_bytes for layout in layouts.values()))
    policy = LayerShares(LRU, even_shares(num_slots, 1))
    store = ExpertStore(
        source, slab, policy, lambda key, slot: layouts[key].views(slot), stream_slots=2
    )
    found = {}
    try:
        with store.lease(list(layouts)) as lease:
            for group in lease:
                for key, views in group:
                    found[key] = [view.clone() for view in views]
        store.check()
    finally:
        store.close()
    return found


@pytest.fixture(scope="module", params=["native", "python"])
def threads(request) -> str:
    """Who reads; threads of the interpreter do where the library was not built."""
    return request.param


@pytest.mark.parametrize("direct", [True, False])
@given(
    starts=st.lists(
        st.tuples(st.integers(0, FILE_BYTES // 2 - 200), st.integers(1, 200)),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=15)
def test_any_ranges_are_read_as_they_lie(file, threads, direct, starts):
    tensors = [half_range(file, 2 * start, count) for start, count in starts]
    layout = lay_out(tensors)
    with pytest.MonkeyPatch.context() as patch:
        if threads == "python":
            patch.setattr(source_module, "native_library", lambda: None)
        found = read_all({ExpertKey(0, 0): layout}, direct=direct)[ExpertKey(0, 0)]
    for tensor, view in zip(tensors, found, strict=True):
        assert torch.equal(view.view(torch.int16), in_file(file, tensor).view(torch.int16))


def test_strided_views_are_not_copied(file):
    rows = TensorRange(file, 128, 2 * (9 * 32 + 16), torch.float16, (10, 16), (32, 1))
    found = read_all({ExpertKey(0, 0): lay_out([rows])})[ExpertKey(0, 0)][0]
    assert torch.equal(found.view(torch.int16), in_file(file, rows).contiguous().view(torch.int16))


def test_neighbours_share_a_read_and_strangers_do_not(file):
    near = lay_out([half_range(file, 0, 100), half_range(file, 1000, 100)])
    assert len(near.extents) == 1
    far = lay_out([half_range(file, 0, 100), half_range(file, 2**20, 100)])
    assert len(far.extents) == 2
    assert far.extents[1].slot_offset == far.extents[0].num_bytes
    assert all(extent.offset % BLOCK_BYTES == 0 for extent in far.extents)


def test_an_expert_larger_than_one_read_arrives_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "READ_BYTES", BLOCK_BYTES)
    path = tmp_path / "large.bin"
    path.write_bytes(os.urandom(50 * BLOCK_BYTES + 17))
    tensor = half_range(path, 4098, 80_000)
    found = read_all({ExpertKey(0, 0): lay_out([tensor])})[ExpertKey(0, 0)][0]
    assert torch.equal(found.view(torch.int16), in_file(path, tensor).view(torch.int16))


def test_a_file_that_ends_too_early_names_file_and_expert(file, tmp_path):
    short = tmp_path / "short.bin"
    short.write_bytes(file.read_bytes()[:5000])
    layout = lay_out([half_range(short, 4900, 200)])
    told = r"expert 3 of MoE layer 0 from .*short\.bin: the file ends before byte 5000"
    with pytest.raises(CheckpointError, match=told):
        read_all({ExpertKey(0, 3): layout})


@pytest.mark.parametrize("is_native", [True, False])
def test_a_disk_error_names_file_and_expert(tmp_path, monkeypatch, is_native):
    """The file is opened for writing only, so that the system refuses every read."""
    if not is_native:
        monkeypatch.setattr(source_module, "native_library", lambda: None)
    path = tmp_path / "experts.bin"
    path.write_bytes(bytes(BLOCK_BYTES))
    monkeypatch.setattr(CheckpointFile, "_open", lambda self: os.open(self.path, os.O_WRONLY))
    layout = lay_out([half_range(path, 0, 100)])
    with pytest.raises(CheckpointError, match=r"expert 0 .*experts\.bin: Bad file descriptor"):
        read_all({ExpertKey(0, 0): layout})


def test_short_reads_are_continued(file, monkeypatch):
    monkeypatch.setattr(source_module, "native_library", lambda: None)
    whole = source_module.os.preadv

    def one_block(fd, buffers, offset):
        return whole(fd, [buffers[0][:BLOCK_BYTES]], offset)

    monkeypatch.setattr(source_module.os, "preadv", one_block)
    tensor = half_range(file, 0, FILE_BYTES // 2)
    found = read_all({ExpertKey(0, 0): lay_out([tensor])})[ExpertKey(0, 0)][0]
    assert torch.equal(found.view(torch.int16), in_file(file, tensor).view(torch.int16))


def test_file_systems_without_direct_reads_are_read_through_the_cache(file, monkeypatch):
    real_open = os.open

    def refuse_direct(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(source_module.os, "open", refuse_direct)
    opened = CheckpointFile(file)
    opened.close()
    assert not opened.direct


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot open .*gone\.bin: No such file"):
        CheckpointFile(tmp_path / "gone.bin")


def test_memory_that_cannot_be_had_is_said_so():
    with pytest.raises(CapacityError, match="cannot allocate"):
        aligned_bytes(2**62)


def test_an_upper_tier_is_filled_from_the_lower_one(file):
    layouts = {ExpertKey(0, e): lay_out([half_range(file, 800 * e, 300)]) for e in range(8)}
    slot_bytes = max(layout.slot_bytes for layout in layouts.values())
    source = ExpertSource(layouts, io_threads=2)
    below = ExpertStore(
        source,
        Slab(5, slot_bytes),
        LayerShares(LRU, even_shares(5, 1)),
        lambda _, slot: slot,
        stream_slots=2,
    )
    above = ExpertStore(
        TierFetcher(below),
        Slab(2, slot_bytes),
        LayerShares(LRU, even_shares(2, 1)),
        lambda key, slot: layouts[key].views(slot)[0],
        stream_slots=1,
    )
    for experts in ([0, 1, 2, 3], [7, 6, 5], [0, 4, 7]):
        with above.lease([ExpertKey(0, e) for e in experts]) as lease:
            for group in lease:
                for key, view in group:
                    expected = in_file(file, layouts[key].tensors[0])
                    assert torch.equal(view.view(torch.int16), expected.view(torch.int16))
        above.check()
        below.check()
    assert above.stats().misses >= 8
    assert below.stats().bytes_read >= 8 * BLOCK_BYTES
    above.close()
