"""Prefixes on the disk: what comes back is what was kept, or nothing."""

import errno
import fcntl
import os
import random
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine_events import Answer, ask, drained, greedy, request_of

from moe_runtime.errors import MoERuntimeWarning, UnsupportedModelError
from moe_runtime.files import new_held
from moe_runtime.serving import digest_files
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.prefixes import PrefixDisk, PrefixFiles, identity_of
from moe_runtime.serving.requests import EngineOptions

BLOCK, BYTES, FILE = 4, 4080, 4096
NEW = 6


def block_of(tokens: list[int], index: int) -> torch.Tensor:
    """Bytes that all tokens up to the end of a block decide."""
    seed = hash(tuple(tokens[: (index + 1) * BLOCK])) & 0xFFFFFFFF
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (BYTES,), generator=generator, dtype=torch.uint8)


def files_in(folder: Path, identity: bytes = b"model", num_files: int = 1000) -> PrefixFiles:
    disk = PrefixDisk(folder, num_files * FILE, identity)
    return PrefixFiles(disk, block_tokens=BLOCK, block_bytes=BYTES)


def keep(files: PrefixFiles, tokens: list[int]) -> None:
    files.keep(tokens, lambda index: block_of(tokens, index))


def found(files: PrefixFiles, tokens: list[int], first: int = 0) -> int:
    blocks = list(files.find(tokens, first))
    for index, block in enumerate(blocks, start=first):
        assert torch.equal(block, block_of(tokens, index))
    return len(blocks)


def blocks_in(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if len(file.name) == 64]


def texts_of(chance: random.Random, count: int) -> list[list[int]]:
    """Texts of which many begin as others do."""
    texts: list[list[int]] = [[]]
    while len(texts) < count:
        begun = chance.choice(texts)
        cut = chance.randrange(len(begun) + 1)
        texts.append(begun[:cut] + [chance.randrange(5) for _ in range(chance.randrange(20))])
    return texts


def test_kept_blocks_come_back_to_other_processes_and_to_nobody_else(tmp_path):
    chance = random.Random(0)
    texts = texts_of(chance, 60)
    writers = [files_in(tmp_path), files_in(tmp_path, b"other")]
    for text in texts[:40]:
        keep(writers[0], text)
    known = {tuple(text[:end]) for text in texts[:40] for end in range(0, len(text) + 1, BLOCK)}
    for text in texts:
        first = chance.randrange(3)
        ends = [end for end in range(BLOCK, len(text) + 1, BLOCK) if tuple(text[:end]) in known]
        assert found(files_in(tmp_path), text, first) == max(0, len(ends) - first)
        assert found(writers[1], text) == 0
    assert found(PrefixFiles(
        PrefixDisk(tmp_path, 10**6, b"model"), block_tokens=2 * BLOCK, block_bytes=BYTES
    ), max(texts[:40], key=len)) == 0  # fmt: skip


def test_folder_keeps_within_its_size_and_beginnings_outlive_what_continues_them(
    tmp_path, monkeypatch
):
    """Times are a counter: filesystems' own are too coarse for files that follow one another."""
    now, set_time = 0, os.utime

    def touch(file: Any) -> None:
        nonlocal now
        now += 1
        set_time(file, ns=(now, now))

    monkeypatch.setattr(os, "utime", touch)
    chance = random.Random(1)
    texts = texts_of(chance, 50)
    both = [files_in(tmp_path, num_files=40), files_in(tmp_path, num_files=40)]
    for _ in range(400):
        files, text = chance.choice(both), chance.choice(texts)
        if chance.random() < 0.5:
            keep(files, text)
            assert found(files, text) == len(text) // BLOCK
        else:
            number = found(files, text)
            assert found(files, text, number) == 0
        assert sum(file.stat().st_size for file in blocks_in(tmp_path)) <= 40 * FILE
    # one whose limit is lower makes room with its next block
    keep(files_in(tmp_path, num_files=10), [9] * BLOCK)
    assert len(blocks_in(tmp_path)) <= 10


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[:50],
        lambda data: data[:BYTES],
        lambda data: b"",
        lambda data: data + b"x",
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes(len(data)),
    ],
)
def test_damaged_blocks_are_unknown_and_written_again(tmp_path, damage):
    tokens = list(range(3 * BLOCK))
    files = files_in(tmp_path)
    keep(files, tokens)
    second = list(files._files(tokens, ""))[1]
    second.write_bytes(damage(second.read_bytes()))
    assert found(files, tokens) == 1
    assert found(files, tokens, 2) == 1
    assert not second.exists()
    keep(files, tokens)
    assert found(files, tokens) == 3


def test_files_of_a_larger_size_give_way_at_the_start(tmp_path):
    """By the count, and where it was lost."""
    for loses_count in (False, True):
        writer = files_in(tmp_path)
        for first in range(0, 200, 10):
            keep(writer, list(range(first, first + BLOCK)))
        assert len(blocks_in(tmp_path)) == 20
        if loses_count:
            (tmp_path / "bytes").unlink()
        for num_files in (1000, 8, 8):
            files_in(tmp_path, num_files=num_files)
            assert min(20, num_files - 1) <= len(blocks_in(tmp_path)) <= num_files
        assert found(files_in(tmp_path), list(range(190, 190 + BLOCK))) == 1


def test_what_a_kill_left_is_removed_in_its_time_and_other_files_stay(tmp_path):
    files = files_in(tmp_path, num_files=2)
    left = tmp_path / f"{'0' * 64}.12345678.partial"
    left.write_bytes(bytes(FILE))
    os.utime(left, ns=(1, 1))
    other = tmp_path / "notes.txt"
    other.write_bytes(bytes(10 * FILE))
    for first in (0, 10, 20):
        keep(files, list(range(first, first + BLOCK)))
    assert not left.exists()
    assert other.exists()


def test_what_another_process_is_writing_stays(tmp_path):
    files = files_in(tmp_path, num_files=2)
    left = tmp_path / f"{'0' * 64}.12345678.partial"
    with new_held(left, 0o600):
        os.utime(left, ns=(1, 1))
        keep(files, list(range(3 * BLOCK)))
        assert left.exists()


def test_full_disk_is_said_once_and_nothing_half_stays(tmp_path, monkeypatch):
    def full(descriptor: int, data: memoryview) -> None:
        os.write(descriptor, data[:7])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    files, tokens = files_in(tmp_path), list(range(2 * BLOCK))
    with monkeypatch.context() as patch:
        patch.setattr(digest_files, "_write_all", full)
        with pytest.warns(MoERuntimeWarning, match=f"{tmp_path}: No space left"):
            keep(files, tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            keep(files, tokens)
    assert files.num_failures == 2
    assert [file.name for file in tmp_path.iterdir()] == ["bytes"]
    keep(files, tokens)
    assert found(files, tokens) == 2


def test_a_block_under_another_name_is_unknown(tmp_path):
    files = files_in(tmp_path)
    texts = [[first] * BLOCK for first in range(2)]
    for text in texts:
        keep(files, text)
    one, other = (next(files._files(text, "")) for text in texts)
    one.rename(tmp_path / "aside")
    other.rename(one)
    (tmp_path / "aside").rename(other)
    assert [found(files, text) for text in texts] == [0, 0]


def test_what_cannot_be_read_or_removed_is_unknown(tmp_path, monkeypatch):
    """A pipe is not waited for; a damaged file of a read-only disk stays and disturbs nobody."""
    files, tokens = files_in(tmp_path), list(range(2 * BLOCK))
    first, second = files._files(tokens, "")
    os.mkfifo(first)
    assert found(files, tokens) == 0
    keep(files, tokens)
    assert found(files, tokens) == 2
    second.write_bytes(bytes(FILE))

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        patch.setattr(os, "utime", fail)
        assert found(files, tokens) == 1
    assert second.exists()
    keep(files, tokens)
    with monkeypatch.context() as patch:
        for error in (MemoryError(), RuntimeError("can't allocate memory")):
            patch.setattr(torch, "empty", Mock(side_effect=error))
            assert found(files, tokens) == 0
    assert found(files, tokens) == 1


def test_a_count_that_is_a_pipe_or_is_locked_for_ever_is_not_waited_for(tmp_path):
    files, tokens, count = files_in(tmp_path), list(range(BLOCK)), tmp_path / "bytes"
    count.unlink()
    os.mkfifo(count)
    with pytest.warns(MoERuntimeWarning, match="expected a regular file"):
        keep(files, tokens)
    count.unlink()
    with open(count, "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        keep(files, tokens)
    assert (files.num_failures, found(files, tokens)) == (2, 0)
    keep(files, tokens)
    assert found(files, tokens) == 1


def test_a_folder_in_place_of_a_block_disturbs_nothing(tmp_path):
    files = files_in(tmp_path, num_files=2)
    (tmp_path / ("0" * 64)).mkdir()
    for first in (0, 10, 20, 30):
        keep(files, tokens := list(range(first, first + BLOCK)))
        assert found(files, tokens) == 1
    assert files.num_failures == 0


def test_an_emptied_cache_is_filled_again(tmp_path):
    folder = tmp_path / "prefixes"
    files, tokens = files_in(folder), list(range(2 * BLOCK))
    keep(files, tokens)
    shutil.rmtree(folder)
    assert found(files, tokens) == 0
    keep(files, tokens)
    assert found(files, tokens) == 2
    assert files.num_failures == 0


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(ValueError, match=r"--prefix-disk: .*taken"):
        files_in(tmp_path / "taken")


def test_only_its_user_may_read_it(tmp_path):
    folder = tmp_path / "cache" / "prefixes"
    keep(files_in(folder), list(range(BLOCK)))
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}


def test_room_for_no_block_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--prefix-disk must be at least 4 KiB, which 4 tokens"):
        PrefixFiles(PrefixDisk(tmp_path, FILE - 1, b""), block_tokens=BLOCK, block_bytes=BYTES)


def test_identity_is_of_the_files_and_the_settings(tmp_path):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1234")
    assert identity_of(tmp_path) == identity_of(weights)
    seen = {identity_of(tmp_path), identity_of(tmp_path, "float32")}
    os.utime(weights, ns=(5, 5))
    seen.add(identity_of(tmp_path))
    weights.write_bytes(b"12345")
    os.utime(weights, ns=(5, 5))
    seen.add(identity_of(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    seen.add(identity_of(tmp_path))
    (tmp_path / "README.md").write_text("nothing that computes")
    seen.add(identity_of(tmp_path))
    assert len(seen) == 5


@pytest.mark.parametrize(
    "options",
    [EngineOptions(), EngineOptions(exact=True, prompt_tokens=16)],
    ids=["default", "exact"],
)
def test_another_engine_goes_on_from_the_disk(pocket, prompts, tmp_path, options):
    disk = PrefixDisk(tmp_path, 1 << 24, b"pocket")
    told: list[list[Answer]] = []
    for some in (None, disk, disk):
        with Engine(pocket, options, prefix_disk=some) as engine:
            first = ask(engine, request_of(prompts[4], NEW, num_logprobs=0))[0].wait()
            turn = (*prompts[4], *first.ids, *prompts[3])
            second = ask(engine, request_of(turn, NEW, num_logprobs=0))[0].wait()
            drained(engine)
            statistics = engine.statistics()
        told.append([first, second])
    for answers in told[1:]:
        for one, other in zip(told[0], answers, strict=True):
            assert one.ids == other.ids
            if options.exact:
                assert [token.logprob for token in one.tokens] == [
                    token.logprob for token in other.tokens
                ]
    assert told[1][0].read.cached_tokens == 0
    assert told[2][0].read.cached_tokens == (len(prompts[4]) - 1) // 16 * 16 == 32
    assert told[2][1].read.cached_tokens >= told[1][1].read.cached_tokens > 0
    assert statistics.prefix_disk_hit_tokens >= 32
    assert statistics.prefix_disk_failures == 0


def test_what_memory_had_no_room_for_is_on_the_disk(pocket, prompts, tmp_path):
    disk = PrefixDisk(tmp_path, 1 << 24, b"pocket")
    other = tuple(reversed(prompts[4]))
    with Engine(pocket, max_tokens=64, prefix_disk=disk) as engine:
        for prompt in (prompts[4], other):
            ask(engine, request_of(prompt, NEW))[0].wait()
        again = ask(engine, request_of(prompts[4], NEW))[0].wait()
        drained(engine)
        found = engine.statistics()
    assert again.ids == greedy(pocket, prompts[4], NEW)
    assert again.read.cached_tokens == 32
    assert found.prefix_disk_hit_tokens > 0


def test_a_model_that_keeps_no_prefixes_has_none_for_a_disk(pocket, tmp_path):
    disk = PrefixDisk(tmp_path, 1 << 24, b"pocket")
    with pytest.raises(UnsupportedModelError, match="no prefixes are kept"):
        Engine(pocket, EngineOptions(reuses_prefixes=False), prefix_disk=disk)
