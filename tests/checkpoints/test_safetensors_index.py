"""Checkpoint folders: one file, shards, the hub's cache, and what is wrong with the rest."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from safetensors_files import SOUND, refusal, stored_bytes, write_safetensors

from moe_runtime.checkpoints.safetensors_index import (
    INDEX_FILE_NAME,
    MAX_HEADER_BYTES,
    SINGLE_FILE_NAME,
    TensorEntry,
    read_checkpoint_index,
)
from moe_runtime.errors import CheckpointError


def make_sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"t{i}": torch.full((i + 1, 3), float(i)) for i in range(4)}
    shards = {
        "model-00001-of-00002.safetensors": ("t0", "t2"),
        "model-00002-of-00002.safetensors": ("t1", "t3"),
    }
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, folder / shard)
    write_index(folder, {name: shard for shard, names in shards.items() for name in names})
    return tensors


def write_index(folder: Path, weight_map: object) -> None:
    index = {"metadata": {"total_size": math.pi}, "weight_map": weight_map}
    (folder / INDEX_FILE_NAME).write_text(json.dumps(index), encoding="utf-8")


def read_weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX_FILE_NAME).read_text(encoding="utf-8"))["weight_map"]


def assert_holds(entries: dict[str, TensorEntry], tensors: dict[str, torch.Tensor]) -> None:
    assert set(entries) == set(tensors)
    for name, value in tensors.items():
        assert entries[name].shape == tuple(value.shape)
        assert stored_bytes(entries[name]) == value.numpy().tobytes()


def test_single_file_is_preferred_to_the_index(tmp_path):
    make_sharded(tmp_path)
    single = {"only": torch.ones(3)}
    save_file(single, tmp_path / SINGLE_FILE_NAME)
    assert_holds(read_checkpoint_index(tmp_path), single)


def test_shards_together_hold_every_tensor(tmp_path):
    tensors = make_sharded(tmp_path)
    assert_holds(read_checkpoint_index(tmp_path), tensors)
    # What the index forgets is found all the same; `transformers` loads whole shards, too.
    weight_map = read_weight_map(tmp_path)
    del weight_map["t0"]
    write_index(tmp_path, weight_map)
    assert_holds(read_checkpoint_index(tmp_path), tensors)


def test_shards_in_a_subfolder(tmp_path):
    (tmp_path / "sub").mkdir()
    tensors = make_sharded(tmp_path / "sub")
    weight_map = read_weight_map(tmp_path / "sub")
    write_index(tmp_path, {name: f"./sub/{shard}" for name, shard in weight_map.items()})
    assert_holds(read_checkpoint_index(tmp_path), tensors)


def test_the_hub_cache_of_links_to_blobs(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123abcd"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    tensors = make_sharded(blobs)
    for place, file in enumerate(sorted(blobs.iterdir())):
        blob = file.rename(blobs / f"{place:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    assert_holds(read_checkpoint_index(snapshot), tensors)

    (blobs / f"{0:064x}").unlink()
    with pytest.raises(CheckpointError, match=r"00001-of-00002.*a link that leads nowhere"):
        read_checkpoint_index(snapshot)


def test_missing_shards_are_named(tmp_path):
    make_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    message = refusal(tmp_path)
    assert "its 2 shards" in message
    assert "1 missing: ['model-00002-of-00002.safetensors']" in message


@pytest.mark.parametrize(
    ("shard", "fragment"),
    [
        ("../outside.safetensors", "inside the checkpoint's folder"),
        ("sub/../../outside.safetensors", "inside the checkpoint's folder"),
        ("ABSOLUTE/outside.safetensors", "inside the checkpoint's folder"),
        ("..\\outside.safetensors", "inside the checkpoint's folder"),
        ("C:outside.safetensors", "inside the checkpoint's folder"),
        ("a\0.safetensors", "inside the checkpoint's folder"),
        ("pytorch_model.bin", "shards named *.safetensors"),
        ("", "shards named *.safetensors"),
        (None, "shards named *.safetensors"),
        (["model-00001-of-00002.safetensors"], "shards named *.safetensors"),
        ("x" * 5000 + ".safetensors", "1 missing"),
    ],
)
def test_shards_that_are_none(tmp_path, shard, fragment):
    folder = tmp_path / "model"
    folder.mkdir()
    make_sharded(folder)
    outside = write_safetensors(tmp_path / "outside.safetensors", "{" + SOUND + "}", b"xy")
    if isinstance(shard, str):
        shard = shard.replace("ABSOLUTE/outside.safetensors", str(outside))
    write_index(folder, {**read_weight_map(folder), "a": shard})
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint_index(folder)
    assert fragment in str(caught.value)
    assert str(caught.value).isprintable()


def test_the_index_decides_between_shards_and_need_not_name_the_right_one(tmp_path):
    """A copy in another shard is older, or is the only one."""
    make_sharded(tmp_path)
    weight_map = read_weight_map(tmp_path)
    first, second = sorted(set(weight_map.values()))
    copies = {"t1": torch.ones(2), "t3": torch.ones(2), "t0": torch.ones(2)}
    save_file(copies, tmp_path / second)
    for shard, expected in ((first, first), (second, second)):
        write_index(tmp_path, {**weight_map, "t0": shard})
        assert read_checkpoint_index(tmp_path)["t0"].file.name == expected
    del weight_map["t0"]
    write_index(tmp_path, weight_map)
    assert read_checkpoint_index(tmp_path)["t0"].file.name == second  # as transformers reads them
    write_index(tmp_path, {**weight_map, "t3": first, "t9": first})
    found = read_checkpoint_index(tmp_path)
    assert found["t3"].file.name == second
    assert "t9" not in found


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"\x80", "can't decode"),
        (b"[]", "found []"),
        (b"{}", "found None"),
        (b'{"weight_map":[]}', "found []"),
        (b'{"weight_map":{}}', "found {}"),
        (b'{"weight_map":{"a":"x.safetensors","a":"y.safetensors"}}', "the key 'a' twice"),
        (b'{"weight_map":' + b"[" * 10**5 + b"]" * 10**5 + b"}", "brackets"),
        (b'{"metadata":' + b" " * 3_000_000 + b"[" * 20_000 + b"]" * 20_000 + b"}", "too deeply"),
    ],
)
def test_damaged_index(tmp_path, text, fragment):
    (tmp_path / INDEX_FILE_NAME).write_bytes(text)
    assert fragment in refusal(tmp_path)


def test_index_beyond_the_limit_is_not_read(tmp_path):
    (tmp_path / INDEX_FILE_NAME).touch()
    os.truncate(tmp_path / INDEX_FILE_NAME, MAX_HEADER_BYTES + 1)
    assert "the most that is read" in refusal(tmp_path)


def test_folders_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="nothing of that name"):
        read_checkpoint_index(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="the folder of a checkpoint, found a file"):
        read_checkpoint_index(write_safetensors(tmp_path / "file", "{}"))
    folder = tmp_path / "model"
    folder.mkdir()
    message = refusal(folder)
    assert SINGLE_FILE_NAME in message
    assert INDEX_FILE_NAME in message
    (folder / "pytorch_model.bin").touch()
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "unpickling" in message
    assert "save_pretrained" in message
    (folder / "weights.safetensors").touch()
    assert "['weights.safetensors'] without an index" in refusal(folder)


def test_a_directory_in_the_place_of_the_file(tmp_path):
    (tmp_path / SINGLE_FILE_NAME).mkdir()
    assert "Is a directory" in refusal(tmp_path)


BOUNDARIES = st.sampled_from(
    [-1, 0, 1, 2, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400]
)
ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | BOUNDARIES
    | st.text("aé\0", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("aé\0", max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
SHARD_NAMES = st.sampled_from([*SHARDS, "absent.safetensors", "../outside.safetensors"]) | st.lists(
    st.sampled_from([*SHARDS, "..", ".", "", "model", "outside.safetensors", "\\", "a\0", "pipe"]),
    max_size=4,
).map("/".join)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two shards, beside a file of the same kind that no index may reach."""
    folder = tmp_path_factory.mktemp("shards") / "model"
    folder.mkdir()
    for name, file in zip("abc", [*SHARDS, "../outside.safetensors"], strict=True):
        header = json.dumps({name: {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}})
        write_safetensors(folder / file, header, {"a": b"12", "b": b"34", "c": b"56"}[name])
    return folder


def check_index(text: bytes, folder: Path) -> None:
    (folder / INDEX_FILE_NAME).write_bytes(text)
    try:
        entries = read_checkpoint_index(folder)
    except CheckpointError as error:
        message = str(error)
        assert message.isprintable()
        assert message.startswith(str(folder))
        assert len(message) < 10_000
        return
    # Whatever an accepted index says of the two shards, it can only have named one or both.
    found = {name: entry.file.read_bytes()[entry.offset :] for name, entry in entries.items()}
    assert found
    assert found.items() <= {"a": b"12", "b": b"34"}.items()
    weight_map = json.loads(text)["weight_map"]
    for name in weight_map.keys() & found.keys():
        assert entries[name].file.parent == folder


@settings(max_examples=20)
@given(st.dictionaries(st.sampled_from("abc"), SHARD_NAMES | ANY_JSON, max_size=3), ANY_JSON)
@example({"a": SHARDS[0]}, None)
@example({"a": SHARDS[0], "b": SHARDS[1]}, {"total_size": 4})
@example({"c": "../outside.safetensors"}, None)
def test_any_weight_map_leads_to_the_shards_or_is_refused(checkpoint, weight_map, metadata):
    index = {"metadata": metadata, "weight_map": weight_map}
    check_index(json.dumps(index).encode(), checkpoint)
