"""Quantised checkpoints, each run from its own files.

A tiny model of each format is written by the format's own packer. What `moe_runtime.load` makes of
it must have the values of that packer's dequantiser to the bit, and the logits and gradients that
`transformers` computes from these values.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import quantized_checkpoints
import tiny_checkpoints
import torch
from gradients import (
    INPUTS,
    all_gradients_of,
    dense_linears,
    parameter_errors,
    shared,
    with_adapters,
)
from low_precision import assert_as_good_as_eager
from quantized_checkpoints import Quantized, Written
from torch import Tensor

import moe_runtime
from moe_runtime.checkpoints.dense_weights import PackedTensor
from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.expert_tensors import matrices_of
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.inference.expert_layer import bind_weights
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.kernels.linear import quantized
from moe_runtime.kernels.native import native_library
from moe_runtime.kernels.quantized import QuantizedMatrix
from moe_runtime.memory.source import ExpertSource, aligned_bytes
from moe_runtime.types import ExpertKey

# Both sides compute in fp32 from the same values and differ only in how sums are ordered, as in
# test_families. A wrong scale anywhere leaves 1e-2.
MAX_RELATIVE_ERROR = 1e-5
# Linear attention carries states over the prompt: transformers' own fp32 is 2.1e-5 from fp64 here.
MAX_ERROR_OF_STATES = 4 * MAX_RELATIVE_ERROR
MAX_GRADIENT_ERROR = 1e-3

SAMPLES = {sample.name: sample for sample in quantized_checkpoints.SAMPLES}
FAMILIES = ("gpt_oss-mxfp4", "qwen3_moe-fp8-ragged", "deepseek_v3-int4")
FAMILIES += ("qwen3_moe-int4-zeros", "qwen3_moe-gptq", "glm4_moe-awq")
"""Of the samples, one for each way in which experts lie in a file."""

BITS = {
    "gpt_oss-mxfp4": 4.25,
    "deepseek_v3-fp8": 8 + 32 / 128**2,
    "deepseek_v3-int4": 4 + 16 / 32,
    "mixtral-nvfp4": 4 + 8 / 16 + 32 / (64 * 96),
    "olmoe-mxfp8": 8.25,
    "olmoe-mxfp4": 4.25,
    "deepseek_v4-fp4": 4.25,
}
"""Bits of a weight, scales included."""


@pytest.fixture(scope="module")
def folders() -> dict[str, Written]:
    return {}


@pytest.fixture(scope="module")
def written(request, folders, tmp_path_factory) -> Written:
    sample: Quantized = SAMPLES[request.param]
    if sample.name not in folders:
        folder = tmp_path_factory.mktemp("quantized")
        folders[sample.name] = quantized_checkpoints.write(sample, folder)
    return folders[sample.name]


@pytest.fixture(scope="module")
def reference(written: Written) -> Any:
    """For tests that leave it as it is."""
    return reference_of(written)


every = pytest.mark.parametrize("written", SAMPLES, indirect=True)
some = pytest.mark.parametrize("written", FAMILIES, indirect=True)
others_long = pytest.mark.parametrize(
    "written",
    [pytest.param(name, marks=[pytest.mark.long] * (name not in FAMILIES)) for name in SAMPLES],
    indirect=True,
)


def load(written: Written, host_memory: int | str = "1GiB", **options: Any) -> Any:
    options = {"device": "cpu", "dtype": "float32", "host_memory": host_memory} | options
    return moe_runtime.load(written.folder, **options)


def smallest_budget(written: Written, dtype: str) -> int:
    return inspect_checkpoint(written.folder, dtype=dtype).smallest_budget_bytes


def reference_of(written: Written) -> Any:
    """The model as transformers has it, with the values that the packer's dequantiser gives."""
    model_class = tiny_checkpoints.model_class_of(written.sample.family)
    return model_class.from_pretrained(
        written.plain, dtype=torch.float32, experts_implementation="eager"
    ).eval()


def expert_values(
    written: Written, experts: ExpertMap
) -> Iterator[tuple[ExpertKey, dict[str, Tensor | QuantizedMatrix]]]:
    """Every expert's matrices and biases as read from the files, by name."""
    bind, source = bind_weights(experts), ExpertSource(experts.layouts)
    slot = aligned_bytes(experts.slot_bytes)
    try:
        for key in experts.layouts:
            source.read({key: slot})
            weights = bind(key, slot)
            named = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
            found = {name: getattr(weights, name) for name in named}
            yield key, {name: value for name, value in found.items() if value is not None}
    finally:
        source.close()


def expected_values(reference: Any, experts: ExpertMap, key: ExpertKey) -> dict[str, Tensor]:
    described = experts.modules[key.layer]
    module = reference.get_submodule(described.name)
    named = {name: module.get_parameter(name)[key.expert] for name in described.parameters}
    return matrices_of(module, {name: tensor.detach() for name, tensor in named.items()})


@every
def test_values_are_those_of_the_packers_dequantiser(written, reference):
    checkpoint = open_checkpoint(written.folder, "auto")
    assert checkpoint.dtype == written.sample.dtype
    experts = map_experts(build_on_meta(checkpoint), checkpoint)
    for key, found in expert_values(written, experts):
        expected = expected_values(reference, experts, key)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert isinstance(value, QuantizedMatrix) == (not name.endswith("_bias"))
            values = value.dequantize() if isinstance(value, QuantizedMatrix) else value.float()
            assert torch.equal(values, expected[name]), (key, name)


@every
def test_logits_equal_those_of_transformers_and_budgets_change_no_bit(written, reference):
    """And dense values are those of the packer's dequantiser."""
    family = written.sample.family
    expected = tiny_checkpoints.prompt_and_step_logits(reference, family)
    starved = load(written, smallest_budget(written, "float32"))
    with starved.moe:
        logits = tiny_checkpoints.prompt_and_step_logits(starved, family)
        starved.moe.check()
        assert starved.moe.stats().expert_slots == 2
    most = MAX_ERROR_OF_STATES if family.folder == "qwen3_5_moe" else MAX_RELATIVE_ERROR
    for found, wanted in zip(logits, expected, strict=True):
        assert (found - wanted).abs().max() < most * wanted.abs().max()
    resident = load(written)
    with resident.moe:
        again = tiny_checkpoints.prompt_and_step_logits(resident, family)
        dense = {n: p for n, p in resident.named_parameters() if ".experts." not in n}
        values = {n: p for n, p in reference.named_parameters() if n in dense}
        assert len(values) > 10
        assert all(torch.equal(dense[name], values[name]) for name in values)
    assert all(map(torch.equal, again, logits))


@pytest.mark.skipif(native_library() is None, reason="torch multiplies by rounded values")
@pytest.mark.parametrize("written", ["qwen3_moe-gptq"], indirect=True)
def test_half_precision_is_multiplied_by_codes(written, monkeypatch):
    """In fp16, which checkpoints of integers are published in: as good as transformers' fp16."""
    family = written.sample.family
    exact = tiny_checkpoints.prompt_and_step_logits(reference_of(written), family)
    eager_model = tiny_checkpoints.model_class_of(family).from_pretrained(
        written.plain, dtype=torch.float16, experts_implementation="eager"
    )
    eager = tiny_checkpoints.prompt_and_step_logits(eager_model.eval(), family)

    def refuse(*_: Any) -> Any:
        raise AssertionError("values of a weight were written out")

    monkeypatch.setattr(quantized, "write_values", refuse)
    model = load(written, dtype="auto")
    with model.moe:
        found = tiny_checkpoints.prompt_and_step_logits(model, family)
    for one, other, wanted in zip(found, eager, exact, strict=True):
        assert_as_good_as_eager(one, other, wanted)


@others_long
def test_nothing_but_the_speed_depends_on_policy_prefetch_or_threads(written):
    """In the checkpoint's own type; one of the options in turn over the formats."""
    family = written.sample.family
    expected: list[Tensor] = []
    budget = smallest_budget(written, "bfloat16")
    library = native_library()
    before = None if library is None else library.num_threads
    options = [
        {"policy": "slru"},
        {"policy": "reuse", "prefetch": "enforce"},
        {"io_threads": 1},
    ]
    turn = [*SAMPLES].index(written.sample.name) % len(options)
    for number, chosen in enumerate(({}, options[turn])):
        model = load(written, budget + number * 2**18, dtype="auto", **chosen)
        if library is not None:
            library.set_num_threads(1 + number % 2)
        with model.moe:
            logits = tiny_checkpoints.prompt_and_step_logits(model, family)
            model.moe.check()
            stats = model.moe.stats()
        assert stats.bytes_read > 0
        summary = inspect_checkpoint(written.folder)
        assert (stats.expert_bytes, stats.dense_bytes) == (
            summary.expert_bytes,
            summary.dense_bytes,
        )
        expected = expected or logits
        assert all(map(torch.equal, logits, expected)), chosen
    if library is not None and before is not None:
        library.set_num_threads(before)
    assert all(torch.isfinite(tensor).all() for tensor in expected)


@some
def test_gradients_equal_those_of_transformers(written):
    """Gradients of embeddings, of PEFT's adapters and of plain dense parameters, through frozen
    weights."""
    family, reference = written.sample.family, reference_of(written)
    places = dense_linears(reference)
    expected = all_gradients_of(with_adapters(reference, places), family)
    model = load(written, smallest_budget(written, "float32"))
    with model.moe:
        found = all_gradients_of(with_adapters(model, places), family)
        model.moe.check()
        inputs = {name: tensor for name, tensor in expected.items() if name.startswith(INPUTS)}
        errors = parameter_errors(found, shared(model, expected) | inputs)
    assert len(errors) > 10 + 2 * len(places)
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < MAX_GRADIENT_ERROR, (worst, errors[worst])


@every
def test_reported_bytes_equal_those_in_the_files(written):
    summary = inspect_checkpoint(written.folder)
    checkpoint = open_checkpoint(written.folder, "auto")
    parts = [
        entry.num_bytes
        for name, weight in checkpoint.packed.items()
        if ".experts." in name
        for entry in weight.parts.values()
    ]
    biases = [e for n, e in checkpoint.entries.items() if ".experts." in n and n.endswith("_bias")]
    unused = [  # ends of rows that fill no word
        weight.codes.num_bytes - weight.total_rows * weight.format.row_bytes(weight.num_cols)
        for name, weight in checkpoint.packed.items()
        if ".experts." in name
    ]
    in_files = sum(parts) + sum(entry.num_bytes for entry in biases)
    if written.sample.has_stacks:  # gate and up share a global scale, and have it each
        in_files += sum(w.lead[0] * 4 for n, w in checkpoint.packed.items() if "gate_up" in n)
    assert summary.expert_bytes == in_files - sum(unused)
    if written.sample.name in BITS and not biases:
        assert summary.bits_per_weight == pytest.approx(BITS[written.sample.name])
    assert "scales for" in summary.expert_dtype
    assert "float" not in summary.expert_dtype


@some
def test_dense_bytes_equal_those_in_memory(written):
    summary = inspect_checkpoint(written.folder)
    model = load(written, summary.smallest_budget_bytes, dtype="auto")
    saved_bytes = sum(
        p.nbytes - p.matrix.nbytes for p in model.parameters() if isinstance(p, PackedTensor)
    )
    model.moe.close()
    plain = inspect_checkpoint(written.plain, dtype="bfloat16")
    assert summary.dense_bytes == plain.dense_bytes - saved_bytes
