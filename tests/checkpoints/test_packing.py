"""Packed checkpoints: the same bits in fewer bytes, whole or not at all, going on after a kill."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gradients import all_gradients_of, trains_all_but_experts
from hypothesis import given
from hypothesis import strategies as st
from moe_families import Family
from tiny_checkpoints import NEXT_TOKEN, PROMPT, save, tiny_model
from transformers import AutoModelForCausalLM

import moe_runtime
from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.checkpoints.packed_experts import MANIFEST_NAME, read_manifest
from moe_runtime.checkpoints.packing import pack_checkpoint, staging_of, writer
from moe_runtime.checkpoints.safetensors_index import PACKED_INDEX_NAME
from moe_runtime.cli.main import main
from moe_runtime.errors import CapacityError, CheckpointError, UnsupportedModelError
from moe_runtime.inference.expert_layer import bind_weights
from moe_runtime.memory.source import ExpertSource, aligned_bytes
from moe_runtime.types import ExpertKey

# rows that are not a multiple of a block, and of 40, which the code would make longer
SIZES = {"hidden_size": 120, "intermediate_size": 200}
FAMILIES = [
    Family("mixtral", "MixtralForCausalLM", config=SIZES),
    Family("olmoe", "OlmoeForCausalLM", config=SIZES | {"intermediate_size": 40}),
]


def checkpoint_of(family: Family, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    return save(tiny_model(family).to(dtype), folder, sharded=False)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_of(FAMILIES[0], tmp_path_factory.mktemp("source") / "model")


def smallest_budget(folder: Path) -> int:
    with pytest.raises(CapacityError) as refusal:
        moe_runtime.load(folder, device="cpu", host_memory=1)
    assert refusal.value.smallest_bytes is not None
    return refusal.value.smallest_bytes


def logits_of(folder: Path) -> list[torch.Tensor]:
    """Of a prompt and a token after it, with the smallest budget."""
    model: Any = moe_runtime.load(folder, host_memory=smallest_budget(folder), device="cpu")
    with torch.inference_mode():
        first = model(PROMPT, use_cache=True)
        second = model(NEXT_TOKEN, past_key_values=first.past_key_values)
    model.moe.check()
    model.moe.close()
    return [first.logits, second.logits]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in sorted(folder.iterdir()) if path.is_file())
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize(("family", "code"), [*zip(FAMILIES, ("planes", "none"), strict=True)])
def test_a_packed_model_gives_the_same_bits(tmp_path, family, code):
    checkpoint = checkpoint_of(family, tmp_path / "model")
    found = pack_checkpoint(checkpoint, tmp_path / "packed", code)
    assert all(map(torch.equal, logits_of(tmp_path / "packed"), logits_of(checkpoint)))
    assert found.packed_bytes < found.expert_bytes or code == "none"


def test_a_packed_model_gives_the_same_gradients(source, tmp_path):
    """Of inputs and of every dense parameter, to the bit, with the smallest budgets."""
    pack_checkpoint(source, tmp_path / "packed")
    found = []
    for folder in (source, tmp_path / "packed"):
        model: Any = moe_runtime.load(folder, host_memory=smallest_budget(folder), device="cpu")
        with model.moe:
            found.append(all_gradients_of(trains_all_but_experts(model), FAMILIES[0]))
            model.moe.check()
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) > 10
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_experts_that_lie_transposed_have_the_same_values(tmp_path):
    """Stacked, gate and up in turn, biases: kernels take them otherwise once they are packed."""
    checkpoint = checkpoint_of(
        Family("gpt_oss", "GptOssForCausalLM", config=SIZES), tmp_path / "model"
    )
    pack_checkpoint(checkpoint, tmp_path / "packed")
    both = [expert_values(folder) for folder in (checkpoint, tmp_path / "packed")]
    assert both[0].keys() == both[1].keys()
    assert all(torch.equal(both[0][name], both[1][name]) for name in both[0])


def expert_values(folder: Path) -> dict[tuple[ExpertKey, str], torch.Tensor]:
    checkpoint = open_checkpoint(folder, "auto")
    experts = map_experts(build_on_meta(checkpoint), checkpoint)
    bind, values = bind_weights(experts), {}
    slot = aligned_bytes(experts.slot_bytes)
    source = ExpertSource(experts.layouts)
    for key in experts.layouts:
        source.read({key: slot})
        weights = bind(key, slot)
        for name in ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"):
            found = getattr(weights, name)
            is_tensor = isinstance(found, torch.Tensor)
            values[key, name] = (found if is_tensor else found.dequantize(torch.bfloat16)).clone()
    source.close()
    return values


def test_what_is_no_bf16_stays_as_it_is(tmp_path):
    checkpoint = checkpoint_of(FAMILIES[0], tmp_path / "model", torch.float32)
    pack_checkpoint(checkpoint, tmp_path / "packed", "planes")
    layer = read_manifest(tmp_path / "packed").layers[0]
    assert {part.dtype for part in layer.parts(0, "planes")[0]} == {torch.float32}
    assert all(map(torch.equal, logits_of(tmp_path / "packed"), logits_of(checkpoint)))


@pytest.mark.parametrize(
    ("options", "damages", "files"),
    [({}, ("", "byte", "end"), "experts-*"), ({"quantize": "fp8"}, ("byte",), "model-*")],
)
def test_an_interrupted_run_goes_on_with_what_is_whole(
    source, tmp_path, monkeypatch, options, damages, files
):
    monkeypatch.setattr(writer, "SHARD_BYTES", 1 << 15)
    pack_checkpoint(source, tmp_path / "at-once", **options)
    num_files = len(list((tmp_path / "at-once").glob(files)))
    assert num_files > 3
    whole = writer.CheckpointWriter._write_file

    def be_interrupted(self: Any, number: int, *rest: Any) -> Any:
        if number == 2:
            raise KeyboardInterrupt
        return whole(self, number, *rest)

    for damage in damages:
        out = tmp_path / f"packed{damage}"
        with monkeypatch.context() as patch:
            patch.setattr(writer.CheckpointWriter, "_write_file", be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                pack_checkpoint(source, out, **options)
        assert not out.exists()
        assert not list(staging_of(out).glob("*.partial"))
        second = sorted(staging_of(out).glob(files))[1]
        content = second.read_bytes()
        if damage == "byte":
            second.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
        elif damage == "end":
            second.write_bytes(content[:-100])
        assert pack_checkpoint(source, out, **options).kept_files == (1 if damage else 2)
        assert contents(out) == contents(tmp_path / "at-once")
        assert not staging_of(out).exists()


def test_nothing_of_another_checkpoint_is_taken_up(source, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(source, other)
    monkeypatch.setattr(writer.CheckpointWriter, "_write_rest", lambda _: 1 / 0)
    for code in ("planes", "none"):
        with pytest.raises(ZeroDivisionError):
            pack_checkpoint(other, tmp_path / "packed", code)
    monkeypatch.undo()
    assert pack_checkpoint(source, tmp_path / "packed", "none").kept_files == 0


def test_a_write_that_fails_leaves_the_old_one(source, tmp_path, monkeypatch):
    out = tmp_path / "packed"
    pack_checkpoint(source, out)
    before = contents(out)

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "write_at", fail)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)) as caught:
        pack_checkpoint(source, out)
    assert Path(caught.value.filename).parent == staging_of(out)
    assert contents(out) == before
    assert not staging_of(out).exists()


def test_what_is_read_back_is_compared(source, tmp_path, monkeypatch):
    read = writer.CheckpointFile.read

    def change(self: Any, offset: int, into: memoryview, needed: int) -> int:
        done = read(self, offset, into, needed)
        if self.path.parent == Path("/proc/self/fd"):
            into[needed // 2] ^= 1
        return done

    monkeypatch.setattr(writer.CheckpointFile, "read", change)
    with pytest.raises(CheckpointError, match="is not what was written"):
        pack_checkpoint(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_disk_without_room_is_said_before_the_work(source, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CapacityError, match="has 1000 B free"):
        pack_checkpoint(source, tmp_path / "packed")


def test_a_folder_of_something_else_is_not_replaced(source, packed_once, tmp_path):
    home, other, packed, quantised, within, grown, blocked = (
        tmp_path / name
        for name in ("home", "other", "packed", "quantised", "within", "model.packing", "blocked")
    )
    home.mkdir()
    (home / "letter").write_text("keep me")
    shutil.copytree(source, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 1234.0}))
    shutil.copytree(packed_once, packed)
    pack_checkpoint(source, packed)  # once more in the same way
    pack_checkpoint(source, quantised, quantize="fp8")
    shutil.copytree(packed_once, within)
    shutil.copytree(source, within / "original")
    shutil.copytree(source, grown)
    (tmp_path / "blocked.packing").symlink_to(tmp_path / "nowhere")
    kept = [home, packed, quantised, within / "original", grown]
    before = [contents(folder) for folder in kept]
    refusals: list[tuple[Path, Path, dict[str, Any], str]] = [
        (source, home, {}, "holds letter, which is not part"),
        (source, source, {}, "is the checkpoint to be packed"),
        (source, tmp_path / "new", {"code": "zip"}, "code must be planes or none"),
        (other, packed, {}, "another model"),
        (source, packed, {"code": "none"}, "--code planes, and .* with --code none;"),
        (source, packed, {"quantize": "fp8"}, "--code planes, and .* with --quantize fp8;"),
        (source, quantised, {}, "--quantize fp8, and .* with --code planes;"),
        (source, quantised, {"quantize": "int4"}, "--quantize fp8, and .* with --quantize int4;"),
        (within / "original", within, {}, "or holds it"),
        (source, within, {}, "holds original, which is not part"),
        (grown, tmp_path / "model", {}, "where the checkpoint lies"),
        (source, tmp_path / "model", {}, "is in the way"),
        (source, blocked, {}, "is in the way"),
    ]
    for checkpoint, folder, options, words in refusals:
        with pytest.raises(ValueError, match=words):
            pack_checkpoint(checkpoint, folder, **options)
    assert [contents(folder) for folder in kept] == before


_SHARD = '{"origin": 1, "shards": [{"file": %s, "pieces": %s, "notes": []}]}'


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"origin": 1, "shards": [{}]}'),
        *(
            _SHARD % pair
            for pair in [("1", "[[0, 1, 1]]"), ('"a"', "[]"), ('"a"', '[[0, "1", 1]]')]
        ),
    ],
)
def test_damaged_notes_of_an_earlier_run_are_one_line(source, tmp_path, text):
    staging = staging_of(tmp_path / "packed")
    staging.mkdir()
    (staging / "packing_progress.json").write_text(text)
    with pytest.raises(ValueError, match=r"packing_progress\.json cannot be read[^\n]*$"):
        pack_checkpoint(source, tmp_path / "packed")


def test_a_packed_checkpoint_is_for_inference(source, tmp_path):
    out = tmp_path / "packed"
    pack_checkpoint(source, out)
    with pytest.raises(UnsupportedModelError, match="packed from"):
        pack_checkpoint(out, tmp_path / "again")
    # transformers would make up the experts
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(out)


@given(place=st.integers(0, 2**20), text=st.sampled_from(["", "0", "-1", "[", "]", "null", "9e9"]))
def test_a_damaged_manifest_is_one_line(packed_once, place, text):
    original = (packed_once / MANIFEST_NAME).read_text()
    place %= len(original)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / MANIFEST_NAME).write_text(original[:place] + text + original[place + 1 :])
        found = []
        with contextlib.suppress(CheckpointError):
            found.append(read_manifest(Path(folder)))
        if not found:
            with pytest.raises(CheckpointError, match=rf"{MANIFEST_NAME}[^\n]*$"):
                read_manifest(Path(folder))


@pytest.fixture(scope="module")
def packed_once(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "packed"
    pack_checkpoint(source, out)
    return out


@pytest.mark.parametrize("change", ["layers", "shape", "rooms", "module", "missing", "version"])
def test_what_does_not_fit_the_model_is_said(packed_once, tmp_path, change):
    folder = tmp_path / "changed"
    shutil.copytree(packed_once, folder)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    layer = manifest["layers"][0]
    if change == "layers":
        manifest["layers"].pop()
    elif change == "shape":
        layer["matrices"][0][2][0] += 32
    elif change == "rooms":
        layer["rooms"][0][0] += 64
    elif change == "module":
        layer["module"] = "model.elsewhere"
    else:
        manifest["version"] = 2
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    if change == "missing":
        (folder / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match=r"expected|No such file"):
        moe_runtime.load(folder, device="cpu")


def test_a_packed_folder_without_its_index_is_not_told_to_add_another(packed_once, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(packed_once, folder)
    (folder / PACKED_INDEX_NAME).unlink()
    expected = rf"expected {PACKED_INDEX_NAME}, found nothing of that name; pack"
    with pytest.raises(CheckpointError, match=expected):
        moe_runtime.load(folder, device="cpu")


def test_the_command(source, tmp_path, capsys):
    out = tmp_path / "packed"
    assert main(["pack", str(source), str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packed_bytes"] == sum(
        sum(layer.parts(expert, "planes")[1] for expert in range(len(layer.rooms)))
        for layer in read_manifest(out).layers
    )
    assert main(["inspect", str(out), "--json"]) == 0
    assert "lossless" in json.loads(capsys.readouterr().out)["expert_dtype"]
    assert main(["pack", str(source), "-"]) == 2
    capsys.readouterr()
    assert main(["pack", str(source), str(tmp_path), "--json"]) == 2
    assert "not part of a packed checkpoint" in json.loads(capsys.readouterr().out)["error"]
