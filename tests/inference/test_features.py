"""The table of supported features (`transformers_features`), row by row."""

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_rows import EQUAL, assert_same
from moe_families import FAMILIES
from tiny_checkpoints import save, tiny_model
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers_features import FEATURES, PAGE, page

import moe_runtime


class Both(PreTrainedModel, GenerationMixin):
    """The base classes of models that generate."""


PUBLIC = {name for name in dir(Both) if name[0] != "_"} - set(dir(torch.nn.Module))
HERE = [
    feature for feature in FEATURES if not feature.methods or PUBLIC.intersection(feature.methods)
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            family = next(family for family in FAMILIES if family.folder == name)
            made[name] = save(tiny_model(family), tmp_path_factory.mktemp(name), sharded=False)
        return made[name]

    return folder_of


def stock_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    return model.eval().requires_grad_(False)


def loaded_model(folder: Path) -> Any:
    return moe_runtime.load(folder, device="cpu", host_memory="1GiB")


@pytest.fixture(scope="module")
def lasting(folder_of: Callable[[str], Path]) -> Callable[[str], tuple[Any, Any]]:
    """Both models of a family, for rows that leave them as they are."""

    @functools.cache
    def lasting(name: str) -> tuple[Any, Any]:
        return stock_model(folder_of(name)), loaded_model(folder_of(name))

    return lasting


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "feature",
    [pytest.param(row, id=str(row), marks=[pytest.mark.long] * row.is_long) for row in HERE],
)
def test_as_transformers_or_refused(feature, folder_of, lasting, tmp_path):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    if feature.answer != EQUAL:
        # a refusal leaves the model as it was, but for adapters that were added before
        is_adapted, name = "PEFT" in str(feature), feature.family
        loaded = loaded_model(folder_of(name)) if is_adapted else lasting(name)[1]
        with pytest.raises(moe_runtime.UnsupportedUseError) as caught:
            feature.trial(loaded, tmp_path / "ours")
        assert feature.answer in str(caught.value)
        assert "\n" not in str(caught.value)
        assert not list(tmp_path.rglob("model*.safetensors"))
        return
    if feature.leaves_model:
        stock, loaded = lasting(feature.family)
    else:
        stock = copy.deepcopy(lasting(feature.family)[0])
        loaded = loaded_model(folder_of(feature.family))
    expected = feature.trial(stock, tmp_path / "theirs")
    assert_same(feature.trial(loaded, tmp_path / "ours"), expected)
    loaded.moe.check()
    if not feature.leaves_model:
        loaded.moe.close()


def test_every_public_method_is_in_the_table():
    listed = {method for feature in FEATURES for method in feature.methods}
    assert listed >= PUBLIC


def test_the_page_is_that_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "run transformers_features.py"
