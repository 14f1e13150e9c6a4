"""Every family of `transformers` with routed experts, against `transformers` itself.

For each row of `moe_families` a tiny random checkpoint is written: as one file or sharded, with the
names of published checkpoints or the model's own. What `moe_runtime.load` makes of it under the
smallest budget that works must give the logits and gradients of `transformers`.
"""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import known_rows
import moe_families
import pytest
import tiny_checkpoints
import torch
from gradients import (
    INPUTS,
    all_gradients_of,
    checkpoint_activations,
    dense_linears,
    parameter_errors,
    shared,
    total_error,
    with_adapters,
)
from moe_families import Family
from same_choices import Choices
from torch import Tensor
from transformers import PreTrainedModel

import moe_runtime
from moe_runtime.kernels.native import native_library

# Both sides compute in fp32 and differ only in how sums are ordered. A few hundred products of
# order one leave an error near 1e-6 of the largest logit; a wrong weight anywhere leaves 1e-2.
MAX_RELATIVE_ERROR = 1e-5

# The backward pass is as long again, and a parameter's gradient is a sum over tokens whose terms
# cancel: to a hundredth of their size at worst here. A slot that holds another expert leaves 1e-1.
MAX_GRADIENT_ERROR = 1e-3

ALL = [*moe_families.FAMILIES, *moe_families.ADAPTED]


def one_in(number: int, first: int = 0, also: Sequence[Family] = ()) -> list[Any]:
    """Families of the suite; the others are tested by make test-long."""
    return [
        family
        if place % number == first or family in also
        else pytest.param(family, marks=pytest.mark.long)
        for place, family in enumerate(ALL)
    ]


EIGHTHS = one_in(8)
"""They meet every kind below."""
FIFTHS = one_in(5, 1, moe_families.ADAPTED)
"""Gradients of every family's experts by themselves are in `test_backend.py`; between them lie the
layers of transformers."""
CHECKPOINTING = (None, True, False)
"""No activation checkpointing; reentrant; not."""
SHARING = {"diffusion_gemma", "mistral_large4"}
"""Families without the second of them; the latter as of transformers 5.24."""


LAYOUTS = {
    "one file": {"sharded": False},
    "own names, sharded": {"sharded": True, "own_names": True},
    "sharded": {"sharded": True},
    "own names": {"sharded": False, "own_names": True},
}


@dataclass(frozen=True)
class Sample:
    """A model of transformers, its results, and its checkpoints."""

    family: Family
    folder: Path
    model: PreTrainedModel
    logits: list[torch.Tensor]
    smallest: dict[tuple[Path, str], int] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def layout(self, name: str) -> Path:
        """The checkpoint in one of the layouts, written when it is first asked for."""
        path = self.folder / name
        return path if path.exists() else tiny_checkpoints.save(self.model, path, **LAYOUTS[name])

    def smallest_budget(self, path: Path, dtype: str = "float32") -> int:
        """Asks once."""
        if (path, dtype) not in self.smallest:
            self.smallest[path, dtype] = smallest_budget(path, dtype)
        return self.smallest[path, dtype]

    def expected(self) -> dict[str, Tensor]:
        """The gradients that transformers computes in fp32, where its choices are recorded."""
        if not self.gradients:
            model = copy.deepcopy(self.model)
            with_adapters(model, dense_linears(self.model))
            with self.choices.recorded(model):
                self.gradients.update(all_gradients_of(model, self.family))
        return self.gradients

    def kinds(self) -> tuple[bool | None, ...]:
        """Kinds of activation checkpointing that transformers has for the family.

        Layers that share keys, or angles that are learnt, through more than their inputs have no
        reentrant one there.
        """
        if not self.model.supports_gradient_checkpointing:
            return CHECKPOINTING[:1]
        return (None, False) if self.family.folder in SHARING else CHECKPOINTING

    def turn(self, further: int = 0) -> bool | None:
        """One kind after another, by the family's place in the list."""
        return self.kinds()[(ALL.index(self.family) + further) % len(self.kinds())]


@pytest.fixture(scope="module")
def samples() -> dict[str, Sample]:
    """Those made so far, for tests whose lists of families differ."""
    return {}


@pytest.fixture(scope="module", params=ALL, ids=str)
def sample(
    request: pytest.FixtureRequest,
    samples: dict[str, Sample],
    tmp_path_factory: pytest.TempPathFactory,
) -> Sample:
    name = str(request.param)
    if name not in samples:
        samples[name] = make_sample(request.param, tmp_path_factory.mktemp("sample"))
    return samples[name]


@torch.no_grad()
def make_sample(family: Family, folder: Path) -> Sample:
    """Weights have bf16 values, so that a bf16 model differs from fp32 only by rounding."""
    model = tiny_checkpoints.tiny_model(family)
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.copy_(tensor.bfloat16())
    model.set_experts_implementation("eager")
    return Sample(family, folder, model, tiny_checkpoints.prompt_and_step_logits(model, family))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    assert torch.isfinite(expected).all()
    return ((got - expected).abs().max() / expected.abs().max()).item()


def load(path: Path, host_memory: int | str, dtype: str = "float32") -> Any:
    return moe_runtime.load(path, device="cpu", dtype=dtype, host_memory=host_memory)


def smallest_budget(path: Path, dtype: str = "float32") -> int:
    with pytest.raises(moe_runtime.CapacityError) as caught:
        load(path, host_memory=1, dtype=dtype)
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes


def assert_same_logits(path: Path, sample: Sample, host_memory: str | None = None) -> list[Tensor]:
    """Under the smallest budget, or another one; the logits."""
    family = sample.family
    model = load(path, host_memory or sample.smallest_budget(path))
    with model.moe:
        logits = tiny_checkpoints.prompt_and_step_logits(model, family)
        model.moe.check()
        assert_same_experts(model, sample.model)
    errors = [relative_error(*pair) for pair in zip(logits, sample.logits, strict=True)]
    assert max(errors) < MAX_RELATIVE_ERROR, (path.name, errors)
    return logits


@torch.no_grad()
def assert_same_experts(model: PreTrainedModel, reference: PreTrainedModel) -> None:
    """Call every experts module by itself: a text prompt does not reach those of other towers."""
    for name, expected_module in tiny_checkpoints.experts_modules(reference).items():
        module = model.get_submodule(name)
        num_experts, hidden_size = experts_shape(expected_module)
        hidden = torch.randn(5, hidden_size)
        weights, ids = torch.rand(5, num_experts).topk(2)
        error = relative_error(module(hidden, ids, weights), expected_module(hidden, ids, weights))
        assert error < MAX_RELATIVE_ERROR, f"{name}: {error}"


def experts_shape(module: torch.nn.Module) -> tuple[int, int]:
    """Number of experts and width of their input, from the stacked weight of the way in."""
    stacked = module.gate_up_proj if module.has_gate else module.up_proj
    return stacked.shape[0], stacked.shape[1 if module.is_transposed else 2]


def test_logits_equal_transformers(sample):
    """Under the smallest budget, in one of the layouts in turn over the families."""
    assert_same_logits(sample.layout([*LAYOUTS][ALL.index(sample.family) % 4]), sample)


@torch.no_grad()
def test_classes_compute_their_known_formulas(sample):
    """Norms, routers, attention, residuals and gates; other rows are proven by the logits."""
    torch.manual_seed(0)
    for check in known_rows.checks_of(sample.model).values():
        check()


@pytest.mark.parametrize("sample", EIGHTHS, ids=str, indirect=True)
def test_layout_and_budget_change_no_bit(sample):
    """Where experts lie and how many of them fit changes the speed alone."""
    # two layouts with nothing in common
    first = ALL.index(sample.family) // 8 % 2 * 2
    starved, resident = map(sample.layout, [*LAYOUTS][first : first + 2])
    if native_library() is None:
        # torch's product of one row depends on where in a page weights begin, and that on the file
        resident = starved
    one = assert_same_logits(starved, sample)
    other = assert_same_logits(resident, sample, "1GiB")
    assert all(map(torch.equal, one, other))


def found_gradients(
    sample: Sample, dtype: str, kinds: Iterable[bool | None]
) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Ours, through experts that are evicted before the backward pass, and those expected.

    Of what the embedding gives, of adapters on dense layers, and of every parameter in memory;
    with each of some kinds of activation checkpointing.
    """
    expected = sample.expected()
    path = sample.layout("one file")
    budget = sample.smallest_budget(path, dtype)
    model = load(path, budget, dtype)
    with model.moe:
        inputs = {name: tensor for name, tensor in expected.items() if name.startswith(INPUTS)}
        with_adapters(model, dense_linears(sample.model))
        for reentrant in kinds:
            checkpoint_activations(model, reentrant)
            is_half = dtype == "bfloat16"
            with sample.choices.repeated(model) if is_half else contextlib.nullcontext():
                found = all_gradients_of(model, sample.family)
            model.moe.check()
            yield found, shared(model, expected) | inputs
        assert model.moe.stats().expert_slots == 2


def assert_gradients_in_fp32(sample: Sample, kinds: Iterable[bool | None]) -> None:
    for found, expected in found_gradients(sample, "float32", kinds):
        errors = parameter_errors(found, expected)
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < MAX_GRADIENT_ERROR, (worst, errors[worst])


def assert_gradients_in_bf16(sample: Sample, kinds: Iterable[bool | None]) -> None:
    """Our error is at most four times that of transformers in bf16, against its gradients in fp32.

    Both round every product, norm and sum to bf16, at nearly the same places: errors are sums of
    as many roundings of one size, so their norms are alike. How alike depends on the model: where
    one direction takes most of the error, a norm is that of a single number, which may be small by
    chance. Hence the factor; and the measure is the largest error among transformers' own ways of
    computing the model, which differ in the order of their roundings only, where the first way does
    not suffice. One rounding more is ours. A wrong expert leaves an error of order one; in the few
    families that lose as much to bf16, fp32 tells.
    """
    unit = torch.finfo(torch.bfloat16).eps
    halves, tried = half_gradients(sample), []
    for found, expected in found_gradients(sample, "bfloat16", kinds):
        ours = errors_by_kind(found, expected)

        def is_as_near(ours: dict[str, float] = ours) -> bool:
            limits = {kind: 4 * max((errors[kind] for errors in tried), default=0) for kind in ours}
            return all(ours[kind] <= limits[kind] + unit for kind in ours)

        while not is_as_near():
            theirs = next(halves, None)
            assert theirs is not None, f"errors of {ours}, those of transformers {tried}"
            tried.append(errors_by_kind(theirs, expected))


def half_gradients(sample: Sample) -> Iterator[dict[str, Tensor]]:
    """Those of transformers in bf16, in one of its ways after another."""
    model_class = tiny_checkpoints.model_class_of(sample.family)
    for experts in ("eager", "batched_mm"):
        for attention in (None, "eager"):
            model = model_class.from_pretrained(
                sample.layout("one file"),
                dtype=torch.bfloat16,
                experts_implementation=experts,
                attn_implementation=attention,
            ).eval()
            with_adapters(model, dense_linears(sample.model))
            with sample.choices.repeated(model):
                yield all_gradients_of(model, sample.family)


def errors_by_kind(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative errors of the gradients of inputs, of adapters, and of the model's parameters."""
    kinds = {"inputs": [], "adapters": [], "parameters": []}
    for name in expected:
        is_adapter = "lora_" in name
        kind = "inputs" if name.startswith(INPUTS) else "adapters" if is_adapter else "parameters"
        kinds[kind].append(name)
    return {
        kind: total_error({n: found[n] for n in names}, {n: expected[n] for n in names})
        for kind, names in kinds.items()
    }


@pytest.mark.parametrize("sample", FIFTHS, ids=str, indirect=True)
def test_gradients_equal_transformers(sample):
    """In fp32; with one of the kinds of checkpointing, in turn over the families."""
    assert_gradients_in_fp32(sample, [sample.turn(1)])


@pytest.mark.parametrize("sample", one_in(16), ids=str, indirect=True)
def test_gradients_in_bf16_are_as_near_the_truth_as_those_of_transformers(sample):
    """With another kind."""
    if not sample.family.computes_in_bf16:
        with pytest.raises(RuntimeError, match="same dtype"):
            next(half_gradients(sample))
        pytest.skip("this version of transformers cannot compute the family in bf16")
    assert_gradients_in_bf16(sample, [sample.turn()])


@pytest.mark.long
def test_gradients_with_every_kind_of_checkpointing(sample):
    assert_gradients_in_fp32(sample, sample.kinds())
    if sample.family.computes_in_bf16:
        assert_gradients_in_bf16(sample, sample.kinds())


@pytest.mark.parametrize("sample", EIGHTHS, ids=str, indirect=True)
def test_sample_can_tell_a_wrong_expert(sample):
    """Swapping two experts moves the logits by far more than the tolerance."""
    model = copy.deepcopy(sample.model)
    modules = tiny_checkpoints.stacked_experts(model)
    assert modules
    for module in modules:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.roll(1, dims=0)
    after = tiny_checkpoints.prompt_and_step_logits(model, sample.family)
    assert relative_error(after[0], sample.logits[0]) > 1000 * MAX_RELATIVE_ERROR


@pytest.mark.parametrize("family", moe_families.UNSUPPORTED, ids=str)
def test_other_experts_are_refused(family, tmp_path):
    """A family without the experts interface is refused in one line that names it."""
    model = tiny_checkpoints.tiny_model(family)
    tiny_checkpoints.save(model, tmp_path, sharded=True)
    with pytest.raises(moe_runtime.UnsupportedModelError) as caught:
        load(tmp_path, host_memory="1GiB")
    message = str(caught.value)
    assert "\n" not in message
    assert model.config.model_type in message


def test_table_is_complete():
    """The table has every family that transformers decorates, and only families that it has."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    sources = {path.parent.name: path.read_text("utf-8") for path in models.glob("*/modeling_*.py")}
    decorated = {name for name, text in sources.items() if "\n@use_experts_implementation" in text}
    listed = {family.folder for family in moe_families.TABLE}
    assert decorated <= listed
    assert {family.folder for family in moe_families.UNSUPPORTED} <= set(sources) - decorated
