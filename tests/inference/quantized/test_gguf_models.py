"""GGUF files, each run as it lies on the disk.

Experts and dense weights must have the values of the `gguf` package's dequantiser to the bit, and
the model the logits that `transformers` computes from these values.
"""

import contextlib
import itertools
import json
import math
import re
from typing import Any

import gguf
import gguf_checkpoints
import numpy as np
import pytest
import tiny_checkpoints
import torch
from gguf_checkpoints import Written
from gguf_rewriting import rewritten, tensors_of
from moe_families import is_oldest_version
from torch import Tensor

import moe_runtime
from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.expert_tensors import matrices_of
from moe_runtime.checkpoints.gguf.architectures import architecture_of, settings_of
from moe_runtime.checkpoints.gguf.header import GgufHeader, read_header
from moe_runtime.checkpoints.opening import build_on_meta, load_tokenizer, open_checkpoint
from moe_runtime.cli.main import main
from moe_runtime.errors import CheckpointError, UnsupportedModelError
from moe_runtime.inference.expert_layer import bind_weights
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.memory.source import ExpertSource, aligned_bytes

# Both sides compute in fp32 from the same values and differ only in how sums are ordered, as in
# test_families. A wrong scale anywhere leaves 1e-2.
MAX_RELATIVE_ERROR = 1e-5
# Linear attention: sums over states follow those of the products, as in test_recurrent_steps. In
# fp64, transformers is up to 1e-5 away from itself.
MAX_ERROR_OF_STATES = 2e-5
asks_for_a_tokenizer = pytest.mark.skipif(
    is_oldest_version(),
    reason="transformers 5.17 makes tokenizers of few files, and others than 5.18",
)
SAMPLES = {sample.name: sample for sample in gguf_checkpoints.SAMPLES}


@pytest.fixture(scope="module", params=SAMPLES)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return gguf_checkpoints.write(SAMPLES[request.param], tmp_path_factory.mktemp("gguf"))


@pytest.fixture(scope="module")
def reference(written: Written) -> Any:
    return reference_of(written)


def load(written: Written, host_memory: int | str = "1GiB", **options: Any) -> Any:
    options = {"device": "cpu", "dtype": "float32", "host_memory": host_memory} | options
    return moe_runtime.load(written.folder, **options)


def reference_of(written: Written, **settings: Any) -> Any:
    model_class = tiny_checkpoints.model_class_of(written.sample.family)
    return model_class.from_pretrained(
        written.plain, dtype=torch.float32, experts_implementation="eager", **settings
    ).eval()


def test_experts_have_the_values_of_gguf(written, reference):
    checkpoint = open_checkpoint(written.folder, "auto")
    is_f16 = written.sample.name.endswith("-f16")
    assert checkpoint.dtype == (torch.float16 if is_f16 else torch.bfloat16)
    experts = map_experts(build_on_meta(checkpoint), checkpoint)
    bind, source = bind_weights(experts), ExpertSource(experts.layouts)
    slot = aligned_bytes(experts.slot_bytes)
    for key in experts.layouts:
        source.read({key: slot})
        weights, described = bind(key, slot), experts.modules[key.layer]
        module = reference.get_submodule(described.name)
        named = {name: module.get_parameter(name)[key.expert] for name in described.parameters}
        expected = matrices_of(module, {name: tensor.detach() for name, tensor in named.items()})
        assert expected.keys() >= {"gate", "up", "down"}
        assert ("gate_bias" in expected) == (written.sample.architecture == "gpt-oss")
        for name, value in expected.items():
            found: Any = getattr(weights, name)
            values = found.float() if isinstance(found, Tensor) else found.dequantize()
            assert torch.equal(values, value), (key, name)
    source.close()


def test_logits_equal_those_of_transformers_and_budgets_change_no_bit(written, reference):
    family = written.sample.family
    expected = tiny_checkpoints.prompt_and_step_logits(reference, family)
    smallest = inspect_checkpoint(written.folder, dtype="float32").smallest_budget_bytes
    starved = load(written, smallest)
    parameters = dict(reference.named_parameters())
    with starved.moe:
        logits = tiny_checkpoints.prompt_and_step_logits(starved, family)
        starved.moe.check()
        assert starved.moe.stats().expert_slots == 2
        named = starved.named_parameters()
        dense = [(n, p) for n, p in named if n in parameters and ".experts." not in n]
        assert len(dense) > 10
        assert all(torch.equal(value, parameters[name]) for name, value in dense)
    most = MAX_ERROR_OF_STATES if written.sample.architecture == "qwen3next" else MAX_RELATIVE_ERROR
    for found, wanted in zip(logits, expected, strict=True):
        assert (found - wanted).abs().max() < most * wanted.abs().max()
    resident = load(written)
    with resident.moe:
        again = tiny_checkpoints.prompt_and_step_logits(resident, family)
    assert all(map(torch.equal, again, logits))


@asks_for_a_tokenizer
@pytest.mark.parametrize("written", ["qwen3moe-f16"], indirect=True)
def test_the_tokenizer_of_a_file_has_its_vocabulary(written):
    tokenizer = load_tokenizer(written.folder)
    assert len(tokenizer) == len(gguf_checkpoints.VOCABULARY)
    assert tokenizer.eos_token_id == 95
    assert tokenizer("#ab!")["input_ids"] == [2, 89, 0]
    assert tokenizer.decode([2, 89, 0]) == "#ab!"


@asks_for_a_tokenizer
@pytest.mark.parametrize("written", ["qwen3moe-f16"], indirect=True)
def test_the_command_run_takes_a_file(written, capsys):
    words = ["--prompt", "#ab!", "--max-new-tokens", "2", "--host-memory", "64MiB", "--json"]
    assert main(["run", str(written.folder), *words]) == 0
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 3


WITHOUT_EFFECT = (
    *("vocab_size", "feed_forward_length", "expert_feed_forward_length", "expert_shared_count"),
    *("expert_shared_feed_forward_length", "full_attention_interval", "rope.scaling.finetuned"),
    *("rope.dimension_sections", "tensor_data_layout"),
)
"""Sizes that tensors have, and keys that llama.cpp only prints or uses for images."""
OF_YARN = tuple(
    f"rope.scaling.{key}" for key in ("original_context_length", "yarn_beta_fast", "yarn_beta_slow")
)
OF_FULL_ATTENTION = ("attention.key_length", "attention.value_length", "attention.head_count_kv")
KEYS = [
    *(
        key.removeprefix("{arch}.")
        for group in vars(gguf.Keys).values()
        if isinstance(group, type)
        for key in vars(group).values()
        if isinstance(key, str) and key.startswith("{arch}.")
    ),
    *("rope.scale_linear", "attention.indexer.top_k", "attention.value_scale", "never_heard_of"),
]


def test_every_key_of_an_architecture_is_a_setting_or_refused(written):
    def settings(changed: dict[str, Any]) -> dict[str, Any]:
        again = GgufHeader(file, header.metadata | changed, header.tensors)
        return settings_of(again, architecture_of(again))

    file, header = written.folder, read_header(written.folder)
    usual = settings({})
    free = [*WITHOUT_EFFECT]
    is_yarn = usual["rope_parameters"]["rope_type"] == "yarn"
    free += ["rope.scale_linear"] if is_yarn else OF_YARN  # a factor comes before the old key
    if written.sample.architecture == "deepseek2":
        free += OF_FULL_ATTENTION
    silent = []
    for key, value in itertools.product(KEYS, (5, 0.375, "x")):
        name = f"{written.sample.architecture}.{key}"
        if key in free or header.metadata.get(name) == value:
            continue
        with contextlib.suppress(CheckpointError, UnsupportedModelError):
            if settings({name: value}) == usual:
                silent.append(f"{name} = {value}")

    assert not silent, silent


def test_tensors_that_no_part_takes_are_refused_by_name(written, tmp_path):
    """A bias of every matrix and norm of a layer that has none."""
    there = tensors_of(written.folder)
    added = {
        name.replace(".weight", ".bias"): (np.zeros(4, np.float32), gguf.GGMLQuantizationType.F32)
        for name in there
        if re.fullmatch(r"blk\.\d+\.(?!attn_sinks|.*_exps)\w+\.weight", name)
    }
    added = {name: value for name, value in added.items() if name not in there}
    file = rewritten(written.folder, tmp_path / "a.gguf", instead=added)
    checkpoint = open_checkpoint(file, "auto")
    with pytest.raises(UnsupportedModelError, match=r"found tensors, \d+ that .* blk\.\d.*bias"):
        map_experts(build_on_meta(checkpoint), checkpoint)


SCALED = {
    "a factor without a type": ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "the old key": ({"linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    "no scaling": ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
    "YaRN": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 8.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        | {"beta_fast": 8.0},
    ),
    "YaRN with a factor of queries and keys": (
        {"type": "yarn", "factor": 4.0, "original_context_length": 16, "attn_factor": 1.5},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        | {"attention_factor": 1.5 * (1 + 0.1 * math.log(4.0))},
    ),
}
"""Metadata, and their meaning in llama.cpp in the words of transformers."""


@pytest.mark.parametrize("scaled", SCALED)
@pytest.mark.parametrize("written", ["qwen3moe-f16"], indirect=True)
def test_positions_are_extended_as_the_metadata_say(written, tmp_path, scaled):
    metadata, positions = SCALED[scaled]
    keys = {key: f"qwen3moe.rope.scaling.{key}" for key in metadata}
    keys["linear"] = "qwen3moe.rope.scale_linear"
    numbers = {keys[key]: number for key, number in metadata.items()}
    file = rewritten(written.folder, tmp_path / "a.gguf", numbers=numbers)
    reference = reference_of(written, rope_parameters={"rope_theta": 10000.0, **positions})
    family = written.sample.family
    expected = tiny_checkpoints.prompt_and_step_logits(reference, family)
    model = load(Written(written.sample, file, written.plain))
    with model.moe:
        logits = tiny_checkpoints.prompt_and_step_logits(model, family)
    for found, wanted in zip(logits, expected, strict=True):
        assert (found - wanted).abs().max() < MAX_RELATIVE_ERROR * wanted.abs().max()


@pytest.mark.parametrize("written", ["qwen3moe-f16"], indirect=True)
def test_a_model_of_a_file_is_not_saved_in_another_format(written, tmp_path):
    model = load(written)
    with model.moe, pytest.raises(UnsupportedModelError, match="GGUF"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
