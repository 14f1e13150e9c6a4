"""Every family of `transformers` with routed experts, against `transformers` itself.

For each row of `moe_families` a tiny random checkpoint is written: as one file and sharded, with
the names of published checkpoints and with the model's own. What `moe_runtime.load` makes of it
under the smallest budget that works must give the logits that `transformers` gives with all experts
in memory, and the gradients.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import moe_families
import pytest
import tiny_checkpoints
import torch
from gradients import gradients_of, parameter_errors, shared, trains_all_but_experts
from moe_families import Family
from transformers import PreTrainedModel

import moe_runtime

# Both sides compute in fp32 and differ only in how sums are ordered. A few hundred products of
# order one leave an error near 1e-6 of the largest logit; a wrong weight anywhere leaves 1e-2.
MAX_RELATIVE_ERROR = 1e-5

# The backward pass is as long again, and a parameter's gradient is a sum over tokens whose terms
# cancel: of a tenth of their size at worst here. A slot that holds another expert leaves 1e-1.
MAX_GRADIENT_ERROR = 1e-4

ALL = [*moe_families.FAMILIES, *moe_families.ADAPTED]


@dataclass(frozen=True)
class Sample:
    """A checkpoint in every layout, and what transformers computes from it."""

    family: Family
    layouts: dict[str, Path]
    model: PreTrainedModel
    logits: list[torch.Tensor]
    smallest: dict[str, int] = field(default_factory=dict)

    def smallest_budget(self, layout: str) -> int:
        """Asks once."""
        if layout not in self.smallest:
            self.smallest[layout] = smallest_budget(self.layouts[layout])
        return self.smallest[layout]


@pytest.fixture(scope="module", params=ALL, ids=str)
def sample(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Sample:
    return make_sample(request.param, tmp_path_factory.mktemp("sample"))


def make_sample(family: Family, folder: Path) -> Sample:
    made = tiny_checkpoints.tiny_model(family)
    save = tiny_checkpoints.save
    layouts = {
        "one file": save(made, folder / "single", sharded=False),
        "sharded": save(made, folder / "sharded", sharded=True),
        "own names": save(made, folder / "own", sharded=False, own_names=True),
    }
    model = tiny_checkpoints.model_class_of(family).from_pretrained(
        layouts["one file"], dtype=torch.float32, experts_implementation="eager"
    )
    logits = tiny_checkpoints.prompt_and_step_logits(model.eval(), family)
    return Sample(family, layouts, model, logits)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    assert torch.isfinite(expected).all()
    return ((got - expected).abs().max() / expected.abs().max()).item()


def load(path: Path, host_memory: int | str) -> Any:
    return moe_runtime.load(path, device="cpu", dtype="float32", host_memory=host_memory)


def smallest_budget(path: Path) -> int:
    with pytest.raises(moe_runtime.CapacityError) as caught:
        load(path, host_memory=1)
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes


def assert_same_logits(layout: str, sample: Sample) -> None:
    path, family = sample.layouts[layout], sample.family
    starved = load(path, host_memory=sample.smallest_budget(layout))
    with starved.moe:
        logits = tiny_checkpoints.prompt_and_step_logits(starved, family)
        starved.moe.check()
        assert_same_experts(starved, sample.model)
    errors = [relative_error(*pair) for pair in zip(logits, sample.logits, strict=True)]
    assert max(errors) < MAX_RELATIVE_ERROR, (layout, errors)

    resident = load(path, host_memory="1GiB")
    with resident.moe:
        again = tiny_checkpoints.prompt_and_step_logits(resident, family)
    # How many experts fit changes the speed, never a bit.
    assert all(map(torch.equal, again, logits)), layout


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


def test_logits_equal_transformers(sample: Sample) -> None:
    for layout in sample.layouts:
        assert_same_logits(layout, sample)


def test_gradients_equal_transformers(sample: Sample) -> None:
    """Of every parameter but the experts', through experts that are evicted before the backward
    pass: of the embedding, so of what goes in, of attention, norms and routers."""
    path = sample.layouts["one file"]
    model = load(path, host_memory=sample.smallest_budget("one file"))
    expected = gradients_of(sample.model.requires_grad_(True), sample.family)
    with model.moe:
        found = gradients_of(trains_all_but_experts(model), sample.family)
        assert model.moe.stats().expert_slots == 2
        model.moe.check()
    errors = parameter_errors(found, shared(model, expected))
    worst = max(errors, key=lambda name: errors[name])
    assert errors[worst] < MAX_GRADIENT_ERROR, (worst, errors[worst])


@pytest.mark.parametrize("family", ALL, ids=str)
def test_sample_can_tell_a_wrong_expert(family: Family) -> None:
    """Swapping two experts moves the logits by far more than the tolerance."""
    model = tiny_checkpoints.tiny_model(family)
    before = tiny_checkpoints.prompt_and_step_logits(model, family)
    modules = tiny_checkpoints.stacked_experts(model)
    assert modules
    for module in modules:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.roll(1, dims=0)
    after = tiny_checkpoints.prompt_and_step_logits(model, family)
    assert relative_error(after[0], before[0]) > 1000 * MAX_RELATIVE_ERROR


@pytest.mark.parametrize("family", moe_families.UNSUPPORTED, ids=str)
def test_other_experts_are_refused(family: Family, tmp_path: Path) -> None:
    """A family without the experts interface is refused in one line that names it."""
    model = tiny_checkpoints.tiny_model(family)
    tiny_checkpoints.save(model, tmp_path, sharded=True)
    with pytest.raises(moe_runtime.UnsupportedModelError) as caught:
        load(tmp_path, host_memory="1GiB")
    message = str(caught.value)
    assert "\n" not in message
    assert model.config.model_type in message


def test_table_is_complete() -> None:
    """The table has every family that transformers decorates, and only families that it has."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    sources = {path.parent.name: path.read_text("utf-8") for path in models.glob("*/modeling_*.py")}
    decorated = {name for name, text in sources.items() if "\n@use_experts_implementation" in text}
    listed = {family.folder for family in moe_families.FAMILIES}
    assert decorated <= listed
    assert {family.folder for family in moe_families.UNSUPPORTED} <= set(sources) - decorated
