"""Headers of GGUF files that are damaged, incomplete, or of something that is not read."""

import random
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import gguf_checkpoints
import numpy as np
import pytest
from gguf_checkpoints import SAMPLES, Written
from gguf_rewriting import rewritten, tensors_of

import moe_runtime
from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.gguf.architectures import architecture_of, settings_of
from moe_runtime.checkpoints.gguf.header import BLOCK_SIZES, GgufHeader, read_header
from moe_runtime.checkpoints.opening import build_on_meta, load_tokenizer, open_checkpoint
from moe_runtime.errors import CheckpointError, UnsupportedModelError

SAMPLE = next(sample for sample in SAMPLES if sample.name == "qwen2moe-q8_0")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """The first sample of a name or an architecture, written once; nothing changes it."""

    @cache
    def written(name: str) -> Written:
        sample = next(sample for sample in SAMPLES if name in (sample.name, sample.architecture))
        return gguf_checkpoints.write(sample, tmp_path_factory.mktemp("gguf"))

    return written


@pytest.fixture(scope="module")
def written(files) -> Written:
    return files(SAMPLE.name)


@pytest.fixture(scope="module")
def latent(files) -> Written:
    return files("deepseek2-softmax")


def data_begin(file: Path) -> int:
    return min(tensor.offset for tensor in read_header(file).tensors)


def read(file: Path) -> None:
    checkpoint = open_checkpoint(file, "auto")
    map_experts(build_on_meta(checkpoint), checkpoint)


def replaced(written: Written, tmp_path: Path, old: bytes, new: bytes) -> Path:
    """A copy of the file with other bytes, once, in the same place."""
    content = written.folder.read_bytes()
    assert old in content
    assert len(old) == len(new)
    file = tmp_path / "model.gguf"
    file.write_bytes(content.replace(old, new, 1))
    return file


def test_headers_say_what_the_package_reads_from_them(written):
    header, expected = read_header(written.folder), gguf.GGUFReader(written.folder)
    assert len(header.tensors) == len(expected.tensors)
    for found, tensor in zip(header.tensors, expected.tensors, strict=True):
        place = (tensor.name, int(tensor.tensor_type), tensor.data_offset, tensor.n_bytes)
        assert (found.name, found.type_id, found.offset, found.num_bytes) == place
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
    sizes = {int(kind): size for kind, size in gguf.GGML_QUANT_SIZES.items()}
    sizes |= {41: (128, 18), 42: (64, 18)}  # newer than some releases of the package
    assert {kind: sizes.get(kind) for kind in BLOCK_SIZES} == BLOCK_SIZES


def test_changed_headers_say_what_the_package_reads_from_them_or_are_refused(written, tmp_path):
    """Nothing is taken for something else: neither a place nor a number of the metadata."""
    content, file, chance = written.folder.read_bytes(), tmp_path / "a.gguf", random.Random(3)
    end, num_read, refusals = data_begin(written.folder), 0, []
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(chance.choice((1, 1, 2, 8))):
            changed[chance.randrange(end)] = chance.choice((0, 1, 9, 127, 255))
        file.write_bytes(changed)
        try:
            header = read_header(file)
        except CheckpointError as error:
            refusals.append(str(error))
            continue
        num_read += 1
        expected = gguf.GGUFReader(file)
        for found, tensor in zip(header.tensors, expected.tensors, strict=True):
            place = (tensor.name, int(tensor.tensor_type), tensor.data_offset, tensor.n_bytes)
            assert (found.name, found.type_id, found.offset, found.num_bytes) == place
            assert found.shape == tuple(reversed(tensor.shape.tolist()))
        for key, value in header.metadata.items():
            field = expected.fields[key]
            is_texts = len(field.types) > 1 and field.types[-1] == gguf.GGUFValueType.STRING
            other = len(field.data) if is_texts else field.contents()
            np.testing.assert_equal(value, other, err_msg=key)  # takes NaN for equal to itself
        try:
            read(file)
        except (CheckpointError, UnsupportedModelError) as error:
            refusals.append(str(error))
    assert num_read > 10
    assert all(refusal.isprintable() for refusal in refusals)


def test_files_that_end_early_are_refused(written, tmp_path):
    content, file, chance = written.folder.read_bytes(), tmp_path / "a.gguf", random.Random(2)
    end = data_begin(written.folder)
    for size in [0, 3, 4, 23, end, len(content) - 1, *(chance.randrange(end) for _ in range(40))]:
        file.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="expected"):
            read(file)


@pytest.mark.parametrize("place", [8, 16])
def test_counts_beyond_the_file_take_no_memory(written, tmp_path, place):
    content = bytearray(written.folder.read_bytes())
    content[place : place + 8] = struct.pack("<Q", 2**62)
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"has room for, found {2**62}"):
        read_header(file)


def key_bytes(key: str) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode()


def test_what_is_not_read_is_named_in_one_line(written, tmp_path):
    for old, new, kind, words in (
        (b"GGUF", b"GGML", CheckpointError, "begins with GGUF, found"),
        (struct.pack("<I", 3), struct.pack("<I", 9), CheckpointError, "version 2 or 3, found 9"),
        (b"qwen2moe", b"qwen9moe", UnsupportedModelError, "architecture 'qwen9moe'"),
        (b"qwen2moe.block_count", b"qwen2moe.blockcount_", CheckpointError, "block_count among"),
        (b"blk.2.attn_q.weight", b"blk.2.attn_z.weight", UnsupportedModelError, "attn_z.weight"),
        (b"blk.2.attn_q.weight", b"blk.1.attn_q.weight", CheckpointError, "once, found it twice"),
    ):
        file = replaced(written, tmp_path, old, new)
        with pytest.raises(kind, match=words):
            read(file)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("attention.key_length", 8, "key_length and value_length beyond"),
        ("attention.kv_lora_rank", None, "kv_lora_rank among its metadata"),
        ("expert_gating_func", 3, "or a sigmoid, found expert_gating_func 3"),
        ("expert_weights_norm", True, "not normalised"),
        ("attention.temperature_scale", 0.5, "no attention.temperature_scale, found 0.5"),
    ],
)
def test_latent_attention_that_a_model_has_not_is_refused(latent, key, value, words):
    header = read_header(latent.folder)
    metadata = header.metadata | {f"deepseek2.{key}": value}
    if value is None:
        del metadata[f"deepseek2.{key}"]
    changed = GgufHeader(latent.folder, metadata, header.tensors)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        settings_of(changed, architecture_of(changed))


def test_keys_and_values_are_together_or_apart(latent, tmp_path):
    file = replaced(latent, tmp_path, b"blk.1.attn_kv_b.weight", b"blk.1.attn_v_bb.weight")
    with pytest.raises(UnsupportedModelError, match="attn_v_bb"):
        read(file)
    header = read_header(latent.folder)
    both = replace(header.tensors[0], name="blk.1.attn_k_b.weight")
    changed = replace(header, tensors=[*header.tensors, both])
    with pytest.raises(CheckpointError, match="either attn_kv_b, or"):
        architecture_of(changed)


def tensor_record(written: Written, name: str) -> tuple[bytes, int, bytes]:
    """The header's record of a matrix up to its type, its type, and its place."""
    content = written.folder.read_bytes()
    begin = content.index(key_bytes(name))
    start = begin + 8 + len(name)
    dims = struct.unpack_from("<I", content, start)[0]
    end = start + 4 + 8 * dims
    return content[begin:end], *struct.unpack_from("<I", content, end), content[end + 4 : end + 12]


def test_types_and_places_of_tensors_are_judged(written, tmp_path):
    record, kind, place = tensor_record(written, "blk.1.ffn_gate_exps.weight")
    assert kind == gguf.GGMLQuantizationType.Q4_0
    whole = record + struct.pack("<I", kind) + place
    for number, beside, words in (
        (19, place, "rows of whole blocks of 256"),
        (77, place, "one of ggml's types, found number 77"),
        (8, place, "overlapping|in the file"),
        (kind, struct.pack("<Q", 2**40), "in the file"),
        (kind, struct.pack("<Q", 7), "in the file"),
    ):
        new = record + struct.pack("<I", number) + beside
        with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
            read(replaced(written, tmp_path, whole, new))


@pytest.mark.parametrize(("number", "name"), [(40, "NVFP4"), (41, "Q1_0"), (42, "Q2_0")])
def test_types_without_a_decoder_are_named(written, tmp_path, number, name):
    record, kind, place = tensor_record(written, "blk.0.attn_output.weight")
    wide = record[:-16] + struct.pack("<QQ", 128, 2)
    file = replaced(
        written,
        tmp_path,
        *(r + struct.pack("<I", k) + place for r, k in ((record, kind), (wide, number))),
    )
    with pytest.raises(
        UnsupportedModelError, match=rf"attn_output.* type {number} \({name}\); exp"
    ):
        read(file)


@pytest.fixture(scope="module")
def gpt_oss(files) -> Written:
    return files("gpt-oss")


@pytest.mark.parametrize(("part", "end"), [("gate", "weight"), ("up", "bias"), ("down", "weight")])
def test_an_expert_part_that_is_missing_is_named(gpt_oss, tmp_path, part, end):
    name, file = f"blk.1.ffn_{part}_exps.{end}", tmp_path / "a.gguf"
    rewritten(gpt_oss.folder, file, without=[name])
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\."):
        read(file)
    stack, kind = tensors_of(gpt_oss.folder)[name]
    rewritten(gpt_oss.folder, file, instead={name: (stack[:5], kind)})
    words = rf"layers\.1\.mlp\.experts\.5\.{part}_proj\.{end}: expected experts 0 to 5"
    with pytest.raises(CheckpointError, match=words):
        read(file)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("blk.1.attn_sinks.weight", "layers.1.self_attn.sinks"),
        ("blk.1.ffn_gate_inp.bias", "layers.1.mlp.router.bias"),
        ("blk.1.attn_k.bias", "layers.1.self_attn.k_proj.bias"),
    ],
)
def test_a_dense_part_of_gpt_oss_that_is_missing_is_one_line(gpt_oss, tmp_path, name, words):
    file = rewritten(gpt_oss.folder, tmp_path / "a.gguf", without=[name])
    with pytest.raises(CheckpointError, match=re.escape(words)) as refused:
        moe_runtime.load(file, device="cpu", host_memory="64MiB", max_tokens=32)
    assert "\n" not in str(refused.value)


def test_layers_that_predict_further_tokens_are_left_out(files, tmp_path):
    """As in the files of GLM-4.5, whose number of blocks counts them."""
    written = files("glm4moe")
    plain = open_checkpoint(written.folder, "auto")
    more = {
        name.replace("blk.2.", "blk.3."): stored
        for name, stored in tensors_of(written.folder).items()
        if name.startswith("blk.2.")
    }
    more["blk.3.nextn.eh_proj.weight"] = more["blk.3.attn_q.weight"]
    numbers = {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    file = rewritten(written.folder, tmp_path / "more.gguf", instead=more, numbers=numbers)
    found = open_checkpoint(file, "auto")
    assert found.config.num_hidden_layers == plain.config.num_hidden_layers == 3
    assert found.entries.keys() == plain.entries.keys()


@pytest.mark.parametrize(
    ("architecture", "numbers", "words"),
    [
        ("glm4moe", {"expert_gating_func": 1}, "expert_gating_func 2, a sigmoid, found 1"),
        ("glm4moe", {"expert_weights_norm": 1}, "expert_weights_norm to be true or false, found 1"),
        ("deepseek2", {"rope.scaling.attn_factor": 1.5}, "attn_factor 1, found 1.5"),
        ("deepseek2", {"rope.scaling.yarn_log_multiplier": 0.0}, "a real number, found 0.0"),
        ("qwen3moe", {"rope.scaling.type": "longrope"}, "none, linear, or yarn .*'longrope'"),
        ("qwen3moe", {"expert_weights_scale": 2.5}, "expert_weights_scale to be 0, found 2.5"),
        ("qwen2moe", {"rope.dimension_count": 8}, "rope.dimension_count to be 16, found 8"),
        ("glm4moe", {"rope.dimension_count": 99}, "rope.dimension_count of 1 to 16, found 99"),
        ("minimax-m2", {"attention.head_count": 7}, "as many rows for each head, found 7"),
        ("ernie4_5-moe", {"rope.dimension_count": 8}, "turn all values of a head"),
        ("qwen35moe", {"ssm.time_step_rank": 5}, r"whole heads.*found \[192, 5, 2\]"),
        ("qwen35moe", {"rope.dimension_count": 99}, "even rope.dimension_count up to 32, found 99"),
        ("qwen35moe", {"block_count": 2**31}, "as many layers as it has tensors"),
        ("qwen35moe", {"nextn_predict_layers": 4}, "nextn_predict_layers below block_count"),
        ("qwen35moe", {"nextn_predict_layers": 1}, "full attention in one of 3 layers"),
        ("qwen35moe", {"ssm.conv_kernel": 0}, "conv_kernel to be a whole number of at least 1"),
        ("deepseek2", {"expert_shared_count": "x"}, "count to be a whole number of at least 0, fo"),
        ("olmoe", {"rope.freq_base": 1}, "rope.freq_base to be a real number above 0, found 1"),
    ],
)
def test_what_a_family_does_not_compute_is_refused(files, tmp_path, architecture, numbers, words):
    named = {f"{architecture}.{key}": number for key, number in numbers.items()}
    file = rewritten(files(architecture).folder, tmp_path / "a.gguf", numbers=named)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=words):
        read(file)


def test_a_correction_says_that_gates_are_a_sigmoid(files):
    """As in files of GLM-4.7-Flash that say nothing of gates."""
    header = read_header(files("deepseek2-sigmoid").folder)
    del header.metadata["deepseek2.expert_gating_func"]
    assert architecture_of(header).model_type == "deepseek_v3"


def test_half_of_the_positions_is_refused_for_solar_open(files, tmp_path):
    """As llama.cpp's converter writes; transformers turns all values of a head."""
    half = {"glm4moe.rope.dimension_count": 8}
    file = rewritten(files("solar-open-q8_0").folder, tmp_path / "a.gguf", numbers=half)
    with pytest.raises(UnsupportedModelError, match=r"dimension_count 16 without biases.* 0.5 of"):
        read(file)


def test_convolutions_are_no_quantised_weights(files, tmp_path):
    codes = np.zeros((320, 34), np.uint8)
    stored = {"blk.0.ssm_conv1d.weight": (codes, gguf.GGMLQuantizationType.Q8_0)}
    file = rewritten(files("qwen35moe").folder, tmp_path / "a.gguf", instead=stored)
    with pytest.raises(UnsupportedModelError, match=r"conv1d\.weight is quantised; expected F32"):
        read(file)


@pytest.mark.parametrize(
    ("name", "values", "kind", "found"),
    [
        ("blk.0.ssm_a", np.ones(5, np.float32), "F32", r"A_log: expected .6,?., .* has .5"),
        ("blk.0.ssm_conv1d.weight", np.ones((321, 4), np.float32), "F32", r"has .321, 1, 4[])]"),
        ("blk.0.attn_qkv.weight", np.zeros((321, 68), np.uint8), "Q8_0", r"has .321, 64[])]"),
    ],
)
def test_rows_of_no_whole_heads_are_refused(files, tmp_path, name, values, kind, found):
    stored = {name: (values, gguf.GGMLQuantizationType[kind])}
    file = rewritten(files("qwen35moe").folder, tmp_path / "a.gguf", instead=stored)
    with pytest.raises(CheckpointError, match=found):
        moe_runtime.load(file, device="cpu", max_tokens=32)


def test_a_model_in_several_files_is_read_from_the_first(written, tmp_path):
    split = gguf_checkpoints.write(SAMPLE, tmp_path, most_tensors=12)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2
    whole, parts = open_checkpoint(written.folder, "auto"), open_checkpoint(split.folder, "auto")
    assert {entry.file for entry in parts.entries.values()} == set(files)
    assert parts.entries.keys() == whole.entries.keys()
    for name, entry in parts.entries.items():
        other = whole.entries[name]
        content = entry.file.read_bytes()[entry.offset :][: entry.num_bytes]
        assert content == other.file.read_bytes()[other.offset :][: other.num_bytes]
    with pytest.raises(CheckpointError, match="the first of"):
        open_checkpoint(files[1], "auto")
    files[-1].unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        open_checkpoint(files[0], "auto")


def test_a_file_without_a_vocabulary_has_no_tokenizer(written, tmp_path):
    file = replaced(
        written, tmp_path, key_bytes("tokenizer.ggml.tokens"), key_bytes("tokenizer.ggml.tokenz")
    )
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.ggml\.tokens, .* found none"):
        load_tokenizer(file)


def test_only_gguf_files_stand_for_a_folder(written, tmp_path):
    file = shutil.copy(written.folder, tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match=r"is a file; expected a checkpoint's folder"):
        open_checkpoint(file, "auto")
