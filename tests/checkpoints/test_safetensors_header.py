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

from moe_runtime.checkpoints.safetensors_index import DTYPE_BITS, MAX_HEADER_BYTES, read_header
from moe_runtime.errors import CheckpointError


def test_entries_are_the_bytes_the_official_writer_wrote(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_the_size_the_official_reader_gives_it(tmp_path: Path, dtype: str) -> None:
    num_bytes = DTYPE_BITS[dtype]  # of eight elements
    for length in (num_bytes - 1, num_bytes, num_bytes + 1):
        header = '{"a":' + tensor_fields(dtype, (2, 4), (0, length)) + "}"
        path = write_safetensors(tmp_path / "x.safetensors", header, bytes(length))
        assert official_accepts(path) == (length == num_bytes)
        if length == num_bytes:
            assert read_header(path)["a"].num_bytes == num_bytes
        else:
            assert f"take {num_bytes} bytes" in refusal(path)


ACCEPTED = {
    "no tensors": ("{}", b""),
    "blanks around the header": ("\n {" + SOUND + "} \t\r\n", b"xy"),
    "metadata": ('{"__metadata__":{"format":"pt"},' + SOUND + "}", b"xy"),
    "no metadata": ('{"__metadata__":null,' + SOUND + "}", b"xy"),
    "unknown field": ('{"a":{"x":[{"y":null}],' + tensor_fields()[1:] + "}", b"xy"),
    "scalar": ('{"a":' + tensor_fields(shape=(), offsets=(0, 1)) + "}", b"x"),
    "no elements": ('{"a":' + tensor_fields(shape=(3, 0), offsets=(0, 0)) + "}", b""),
    "no elements, huge": ('{"a":' + tensor_fields(shape=(0, 2**64 - 1), offsets=(0, 0)) + "}", b""),
    "out of order": (
        '{"b":' + tensor_fields(offsets=(2, 4)) + ',"a":' + tensor_fields() + "}",
        b"wxyz",
    ),
    "empty name": ('{"":' + tensor_fields() + "}", b"xy"),
    "escaped name": ('{"\\ud83d\\ude00\\n\\u0000":' + tensor_fields() + "}", b"xy"),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_odd_but_sound_headers_are_read(tmp_path: Path, case: str) -> None:
    header, data = ACCEPTED[case]
    path = write_safetensors(tmp_path / "x.safetensors", header, data)
    assert official_accepts(path)
    with safetensors.safe_open(path, framework="np") as file:
        assert set(read_header(path)) == set(file.keys())


REFUSED = {
    "empty header": ("", b"", "Expecting value"),
    "not JSON": ("{" + SOUND, b"xy", "Expecting"),
    "no object": ("[]", b"", "found []"),
    "byte order mark": ("\ufeff{" + SOUND + "}", b"xy", "BOM"),
    "not UTF-8": (b'{"\xff":' + tensor_fields().encode() + b"}", b"xy", "can't decode byte 0xff"),
    "half a pair": ('{"\\ud800":' + tensor_fields() + "}", b"xy", "half a surrogate pair"),
    "half a pair in an unknown field": (
        '{"a":{"x":["\\udc00"],' + tensor_fields()[1:] + "}",
        b"xy",
        "half a surrogate pair",
    ),
    "NaN": ('{"a":{"x":NaN,' + tensor_fields()[1:] + "}", b"xy", "NaN, which JSON does not have"),
    "huge number": (
        '{"a":{"x":1e999,' + tensor_fields()[1:] + "}",
        b"xy",
        "beyond double precision",
    ),
    "brackets": ('{"a":' + "[" * 900 + "]" * 900 + "}", b"", "to be an object"),
    "deep brackets": ('{"a":' + "[" * 10**6 + "]" * 10**6 + "}", b"", "mostly brackets"),
    "deep field": (
        '{"a":{"x":' + "[" * 130 + "]" * 130 + "," + tensor_fields()[1:] + "}",
        b"xy",
        "deep",
    ),
    "metadata of numbers": ('{"__metadata__":{"x":1}}', b"", "__metadata__['x'] to be a string"),
    "metadata list": ('{"__metadata__":[]}', b"", "__metadata__ to be an object"),
    "tensor is null": ('{"a":null}', b"", "tensor 'a' to be an object, found None"),
    "no dtype": ('{"a":{"shape":[2],"data_offsets":[0,2]}}', b"xy", "to have a dtype"),
    "no shape": ('{"a":{"dtype":"U8","data_offsets":[0,2]}}', b"xy", "to have a shape"),
    "no offsets": ('{"a":{"dtype":"U8","shape":[2]}}', b"xy", "to have a data_offsets"),
    "unknown dtype": ('{"a":' + tensor_fields("FLOAT") + "}", b"xy", "found 'FLOAT'"),
    "dtype case": ('{"a":' + tensor_fields("u8") + "}", b"xy", "found 'u8'"),
    "dtype number": ('{"a":' + tensor_fields(8) + "}", b"xy", "dtypes"),
    "negative size": ('{"a":' + tensor_fields(shape=(-2,)) + "}", b"xy", "shape of integers"),
    "negative zero": ('{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}', b"", "[-0.0]"),
    "real size": ('{"a":' + tensor_fields(shape=(2.0,)) + "}", b"xy", "shape of integers"),
    "bool size": ('{"a":' + tensor_fields(shape=(True,), offsets=(0, 1)) + "}", b"x", "[True]"),
    "shape is no list": ('{"a":' + tensor_fields(shape=2) + "}", b"xy", "shape of integers"),
    "size of 65 bits": (
        '{"a":' + tensor_fields(shape=(0, 2**64), offsets=(0, 0)) + "}",
        b"",
        "shape",
    ),
    "product of 65 bits": (
        '{"a":' + tensor_fields(shape=(2**32, 2**32, 0), offsets=(0, 0)) + "}",
        b"",
        "below 2**61",
    ),
    "bits beyond 64": (
        '{"a":' + tensor_fields(shape=(2**61,), offsets=(0, 2**61)) + "}",
        b"",
        "below 2**61",
    ),
    "half a byte": (
        '{"a":' + tensor_fields("F4", (3,), (0, 2)) + "}",
        b"xy",
        "whole number of bytes",
    ),
    "three offsets": ('{"a":' + tensor_fields(offsets=(0, 2, 2)) + "}", b"xy", "[begin, end]"),
    "offsets reversed": ('{"a":' + tensor_fields(offsets=(2, 0)) + "}", b"xy", "[begin, end]"),
    "offsets negative": ('{"a":' + tensor_fields(offsets=(-2, 0)) + "}", b"xy", "[begin, end]"),
    "size disagrees": ('{"a":' + tensor_fields("F32") + "}", b"xy", "take 8 bytes"),
    "gap before": ('{"a":' + tensor_fields(offsets=(1, 3)) + "}", b"xyz", "belong to no tensor"),
    "gap between": (
        "{" + SOUND + ',"b":' + tensor_fields(offsets=(3, 5)) + "}",
        b"vwxyz",
        "tensor 'b' to begin at data byte 2",
    ),
    "overlap": (
        "{" + SOUND + ',"b":' + tensor_fields(offsets=(1, 3)) + "}",
        b"xyz",
        "tensors overlap",
    ),
    "same bytes": ("{" + SOUND + ',"b":' + tensor_fields() + "}", b"xy", "tensors overlap"),
    "nothing inside another": (
        "{" + SOUND + ',"b":' + tensor_fields(shape=(0,), offsets=(1, 1)) + "}",
        b"xy",
        "tensors overlap",
    ),
    "truncated": ("{" + SOUND + "}", b"x", "found 1; the file is truncated"),
    "surplus": ("{" + SOUND + "}", b"xyz", "found 3; the rest is no tensor's"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_headers_are_refused_as_the_official_reader_does(tmp_path: Path, case: str) -> None:
    header, data, fragment = REFUSED[case]
    path = write_safetensors(tmp_path / "x.safetensors", header, data)
    assert not official_accepts(path)
    assert fragment in refusal(path)


STRICTER = {
    "tensor twice": ("{" + SOUND + "," + SOUND + "}", b"xy", "the key 'a' twice"),
    "metadata key twice": ('{"__metadata__":{"x":"1","x":"2"}}', b"", "the key 'x' twice"),
    "tensor as a list": ('{"a":["U8",[2],[0,2]]}', b"xy", "to be an object"),
    "dtype as an object": ('{"a":' + tensor_fields({"U8": None}) + "}", b"xy", "dtypes"),
    "field 110 deep": (
        '{"a":{"x":' + "[" * 110 + "]" * 110 + "," + tensor_fields()[1:] + "}",
        b"xy",
        "deep",
    ),
    "long number": (
        '{"a":{"x":0.' + "1" * 1000 + "," + tensor_fields()[1:] + "}",
        b"xy",
        "characters",
    ),
    "brackets": (
        '{"a":{"x":[' + "[]," * 2000 + "0]," + tensor_fields()[1:] + "}",
        b"xy",
        "brackets",
    ),
}


@pytest.mark.parametrize("case", STRICTER)
def test_where_the_index_is_stricter_than_the_official_reader(tmp_path: Path, case: str) -> None:
    header, data, fragment = STRICTER[case]
    path = write_safetensors(tmp_path / "x.safetensors", header, data)
    assert official_accepts(path)
    assert fragment in refusal(path)


def test_header_length_beyond_file_or_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for size in range(8):
        path.write_bytes(bytes(size))
        assert f"found {size} bytes" in refusal(path)
    header = "{" + SOUND + "}"
    assert "truncated" in refusal(write_safetensors(path, header, b"xy", length=len(header) + 3))
    assert "no safetensors file" in refusal(
        write_safetensors(path, header, b"xy", length=2**64 - 1)
    )
    assert "no safetensors file" in refusal(
        write_safetensors(path, header, b"xy", length=MAX_HEADER_BYTES + 1)
    )
    assert "truncated" in refusal(write_safetensors(path, header, b"xy", length=MAX_HEADER_BYTES))


def test_memory_is_bounded_by_the_header_and_weights_stay_unread(tmp_path: Path) -> None:
    num_bytes = 2**36
    huge = write_safetensors(
        tmp_path / "huge", '{"a":' + tensor_fields(shape=(num_bytes,), offsets=(0, num_bytes)) + "}"
    )
    os.truncate(huge, huge.stat().st_size + num_bytes)
    lying = write_safetensors(tmp_path / "lying", "{}", length=MAX_HEADER_BYTES)
    brackets = write_safetensors(tmp_path / "brackets", '{"a":[' + "[]," * 400_000 + "[]]}")
    tracemalloc.start()
    try:
        assert read_header(huge)["a"].num_bytes == num_bytes
        refusal(lying)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        refusal(brackets)
        # The bytes themselves and little else; as Python lists they would take 26 MB.
        assert tracemalloc.get_traced_memory()[1] < 4 * brackets.stat().st_size
    finally:
        tracemalloc.stop()


def test_long_and_unprintable_names_are_cut_and_escaped_in_messages(tmp_path: Path) -> None:
    header = json.dumps({"a\n\x1b[31m" + "b" * 10**6: {"dtype": "x" * 10**6}})
    assert "\\n\\x1b[31mbbb" in refusal(write_safetensors(tmp_path / "x.safetensors", header))


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(Path, "open", forbid)
    assert "to read it, found Permission denied" in refusal(locked)
