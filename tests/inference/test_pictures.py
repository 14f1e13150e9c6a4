"""Vision-language checkpoints with a picture, and in another type than their own.

Their configurations are nested, and each part may name a type of its own.
"""

import dataclasses
import inspect
import json
from typing import Any

import pytest
import tiny_checkpoints
import torch
from moe_families import FAMILIES

import moe_runtime
from moe_runtime.inference.inspection import inspect_checkpoint

# As in test_families: both sides compute in fp32, one in another order of sums. Without the picture
# the logits differ by more than a tenth of the largest; in bf16 by more than a thousandth.
MAX_RELATIVE_ERROR = 1e-5
PICTURE = 90
TOKENS = {"image_token_id": PICTURE, "video_token_id": 91}
_TURNED = {"vision_start_token_id": 92, "vision_end_token_id": 93}
_GLM = {"image_start_token_id": 92, "image_end_token_id": 93} | {
    "video_start_token_id": 94,
    "video_end_token_id": 95,
}


def patches(config: Any) -> tuple[int, dict[str, Any]]:
    """A picture of 4 x 4 patches as Qwen's processors give it, and how many tokens it is."""
    tower = config.vision_config
    size = 3 * getattr(tower, "temporal_patch_size", 2) * tower.patch_size**2
    grid = {"image_grid_thw": torch.tensor([[1, 4, 4]])}
    return 16 // tower.spatial_merge_size**2, {"pixel_values": torch.randn(16, size), **grid}


def placed_patches(config: Any) -> tuple[int, dict[str, Any]]:
    """As Gemma 4's processor gives it: 6 x 6 patches, each with its place."""
    tower = config.vision_config
    places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(1)[None]
    values = torch.rand(1, 36, 3 * tower.patch_size**2)
    return 36 // tower.pooling_kernel_size**2, {
        "pixel_values": values,
        "image_position_ids": places,
    }


def pixels(config: Any) -> tuple[int, dict[str, Any]]:
    """Aria's: 16 x 16 pixels."""
    return 4, {"pixel_values": torch.randn(1, 3, 16, 16)}


FAMILIES_WITH_PICTURES = {
    "Qwen3_5MoeForConditionalGeneration": (TOKENS | _TURNED, patches),
    "Qwen3VLMoeForConditionalGeneration": (TOKENS | _TURNED, patches),
    "Glm4vMoeForConditionalGeneration": (TOKENS | _GLM, patches),
    "Gemma4ForConditionalGeneration": (TOKENS, placed_patches),
    "AriaForConditionalGeneration": ({"image_token_id": PICTURE}, pixels),
}


SEEING = [family for family in FAMILIES if str(family) in FAMILIES_WITH_PICTURES]


@pytest.mark.parametrize("family", SEEING, ids=str)
def test_a_picture_gives_the_logits_of_transformers_in_the_type_asked_for(family, tmp_path):
    tokens, picture = FAMILIES_WITH_PICTURES[str(family)]
    family = dataclasses.replace(family, config=family.config | tokens)
    model = tiny_checkpoints.tiny_model(family).bfloat16()
    folder = tiny_checkpoints.save(model, tmp_path / "model", sharded=False)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    for part in ("text_config", "vision_config"):
        config[part]["dtype"] = "bfloat16"
    file.write_text(json.dumps(config))
    torch.manual_seed(1)
    num_tokens, given = picture(model.config)
    ids = torch.tensor([[5, 7, 11, *[PICTURE] * num_tokens, 13, 17]])
    given |= {"input_ids": ids}
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        given["mm_token_type_ids"] = (ids == PICTURE).int()
    assert inspect_checkpoint(folder, dtype="float32").top_k == 2
    reference = tiny_checkpoints.model_class_of(family).from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    loaded: Any = moe_runtime.load(folder, device="cpu", dtype="float32", host_memory="1GiB")
    with torch.no_grad(), loaded.moe:
        expected, found = reference(**given).logits, loaded(**given).logits
        blind = loaded(input_ids=ids).logits
    assert found.dtype == torch.float32
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    largest = expected.abs().max()
    assert (found - expected).abs().max() < MAX_RELATIVE_ERROR * largest
    assert (blind - expected).abs().max() > 0.1 * largest


def test_weights_of_no_declared_type_keep_their_own_whatever_a_nested_configuration_names(tmp_path):
    family = next(each for each in SEEING if str(each) == "Qwen3VLMoeForConditionalGeneration")
    folder = tiny_checkpoints.save(
        tiny_checkpoints.tiny_model(family), tmp_path / "model", sharded=False
    )
    file = folder / "config.json"
    config = json.loads(file.read_text())
    assert config.pop("dtype") == "float32"
    config["text_config"]["dtype"] = "bfloat16"
    file.write_text(json.dumps(config))
    reference = tiny_checkpoints.model_class_of(family).from_pretrained(folder)
    assert moe_runtime.load(folder, device="cpu", host_memory="1GiB").dtype == reference.dtype
