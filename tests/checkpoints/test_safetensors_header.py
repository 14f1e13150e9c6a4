"""Headers of the official writer, and damage made by hand; the official reader is the judge."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import save_file
from safetensors_files import (
    SOUND,
    official_accepts,
    refusal,
    stored_bytes,
    tensor_fields,
    write_safetensors,
)

from moe_runtime.checkpoints.safetensors_index import MAX_HEADER_BYTES, read_header
from moe_runtime.errors import CheckpointError


def test_entries_are_the_bytes_the_official_writer_wrote(tmp_path):
    tensors = {
        "model.experts.0.up": torch.arange(15, dtype=torch.bfloat16).reshape(3, 5),
        "model.experts.0.scale": torch.tensor(0.25, dtype=torch.float32),
        "empty": torch.zeros(0, 7, dtype=torch.float16),
        "ids": torch.tensor([1, -2, 3]),
        "mask": torch.tensor([True, False, True]),
        "quantised": torch.tensor([1.0, 2.0, -3.0]).to(torch.float8_e4m3fn),
    }
    names = {
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.int64: "I64",
        torch.bool: "BOOL",
        torch.float8_e4m3fn: "F8_E4M3",
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})

    entries = read_header(path)

    assert set(entries) == set(tensors)
    for name, value in tensors.items():
        entry = entries[name]
        assert (entry.name, entry.file) == (name, path)
        assert entry.dtype == names[value.dtype]
        assert entry.shape == tuple(value.shape)
        expected = value.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert entry.num_bytes == len(expected)
        assert stored_bytes(entry) == expected
    assert [e.offset for e in entries.values()] == sorted(e.offset for e in entries.values())


ACCEPTED = {
    "no tensors": ("{}", b""),
    "blanks around the header": ("\n {" + SOUND + "} \t\r\n", b"xy"),
    "no metadata": ('{"__metadata__":null,' + SOUND + "}", b"xy"),
    "no elements": ('{"a":' + tensor_fields(shape=(3, 0), offsets=(0, 0)) + "}", b""),
    "escaped name": ('{"\\ud83d\\ude00\\n\\u0000":' + tensor_fields() + "}", b"xy"),
    "four bits an element": ('{"a":' + tensor_fields("F4", (2, 4), (0, 4)) + "}", b"wxyz"),
}
REFUSED = {
    "not UTF-8": (b'{"\xff":' + tensor_fields().encode() + b"}", b"xy"),
    "deep brackets": ('{"a":' + "[" * 10**6 + "]" * 10**6 + "}", b""),
    "size disagrees": ('{"a":' + tensor_fields("F32") + "}", b"xy"),
    "overlap": ("{" + SOUND + ',"b":' + tensor_fields(offsets=(1, 3)) + "}", b"xyz"),
    "truncated": ("{" + SOUND + "}", b"x"),
    "surplus": ("{" + SOUND + "}", b"xyz"),
}


@pytest.mark.parametrize("case", [*ACCEPTED, *REFUSED])
def test_headers_are_read_or_refused_as_by_the_official_reader(tmp_path, case):
    path = write_safetensors(tmp_path / "x.safetensors", *(ACCEPTED | REFUSED)[case])
    assert official_accepts(path) == (case in ACCEPTED)
    if case in REFUSED:
        assert "truncated or damaged, fetch it again" in refusal(path)
        return
    with safetensors.safe_open(path, framework="np") as file:
        assert set(read_header(path)) == set(file.keys())


STRICTER = {
    "tensor twice": ("{" + SOUND + "," + SOUND + "}", "the key 'a' twice"),
    "tensor as a list": ('{"a":["U8",[2],[0,2]]}', "to be an object"),
    "dtype as an object": ('{"a":' + tensor_fields({"U8": None}) + "}", "with a dtype"),
    "long number": ('{"a":{"x":0.' + "1" * 1000 + "," + tensor_fields()[1:] + "}", "characters"),
    "brackets": ('{"a":{"x":[' + "[]," * 2000 + "0]," + tensor_fields()[1:] + "}", "brackets"),
}


@pytest.mark.parametrize("case", STRICTER)
def test_where_the_index_is_stricter_than_the_official_reader(tmp_path, case):
    header, fragment = STRICTER[case]
    path = write_safetensors(tmp_path / "x.safetensors", header, b"xy")
    assert official_accepts(path)
    assert fragment in refusal(path)


def test_header_length_beyond_file_or_limit(tmp_path):
    path = tmp_path / "x.safetensors"
    for size in (0, 7):
        path.write_bytes(bytes(size))
        refusal(path)
    header = "{" + SOUND + "}"
    for length in (len(header) + 3, MAX_HEADER_BYTES, MAX_HEADER_BYTES + 1, 2**64 - 1):
        refusal(write_safetensors(path, header, b"xy", length=length))


def test_memory_is_bounded_by_the_header_and_weights_stay_unread(tmp_path):
    num_bytes = 2**36
    huge = write_safetensors(
        tmp_path / "huge", '{"a":' + tensor_fields(shape=(num_bytes,), offsets=(0, num_bytes)) + "}"
    )
    os.truncate(huge, huge.stat().st_size + num_bytes)
    lying = write_safetensors(tmp_path / "lying", "{}", length=MAX_HEADER_BYTES)
    tracemalloc.start()
    try:
        assert read_header(huge)["a"].num_bytes == num_bytes
        refusal(lying)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_long_and_unprintable_names_are_cut_and_escaped_in_messages(tmp_path):
    name = "a\n\x1b[31m" + "b" * 10**6
    header = json.dumps({name: ["U8", [2], [0, 2]]})
    assert "\\n\\x1b[31mbbb" in refusal(
        write_safetensors(tmp_path / "x.safetensors", header, b"xy")
    )
    refusal(write_safetensors(tmp_path / "x.safetensors", json.dumps({name: {"dtype": name}})))


def test_unreadable_files(tmp_path, monkeypatch):
    assert "No such file" in refusal(tmp_path / "absent")
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "absent")
    assert "a link that leads nowhere" in refusal(dangling)
    circle = tmp_path / "circle"
    circle.symlink_to(circle)
    assert "symbolic links" in refusal(circle)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert "a pipe, socket or device" in refusal(pipe)
    with pytest.raises(CheckpointError, match="null"):
        read_header(Path("a\0b"))

    def forbid(*_: object, **__: object) -> None:
        # A test that runs as root can open everything, so the refusal is played.
        raise PermissionError(13, "Permission denied")

    locked = write_safetensors(tmp_path / "locked", "{}")
    monkeypatch.setattr("os.open", forbid)
    assert "to read it, found Permission denied" in refusal(locked)
