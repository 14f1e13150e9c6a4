"""Lost stages that can be replaced by the stages next to them."""

import pytest

from moe_runtime.training.sharded import LostStage

NAMES = [f"model.blocks.{layer}.{part}" for layer in range(3) for part in ("a", "b")]


@pytest.mark.parametrize("layer", [0, 2])
def test_a_part_of_an_end_is_an_end(layer):
    with pytest.raises(ValueError, match="the first or last stage is lost"):
        LostStage([f"model.blocks.{layer}.a"], NAMES)


def test_layers_that_differ_are_named():
    with pytest.raises(ValueError, match=r"there is no model\.blocks\.2\.b"):
        LostStage(["model.blocks.1.b"], NAMES[:-1])
