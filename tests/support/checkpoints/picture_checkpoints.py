"""Tiny vision-language checkpoints with a tokenizer and a processor of pictures, made offline."""

import base64
import dataclasses
import inspect
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_checkpoints
import transformers
from moe_families import FAMILIES
from PIL import Image
from text_checkpoint import tiny_tokenizer

TEMPLATE = """\
{%- for message in messages %}{{ message.role }}: {% if message.content is string -%}
{{ message.content }}{% else %}{% for part in message.content -%}
{% if part.type == "image" %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""
MOST_PIXELS = {"shortest_edge": 8 * 8, "longest_edge": 24 * 24}
QWEN_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
TOWER = {"depth": 2, "deepstack_visual_indexes": [0]}
SIZES = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "size": MOST_PIXELS}


@dataclasses.dataclass(frozen=True)
class Seeing:
    """How a family takes pictures.

    ``settings`` are of its image processor, ``extra`` of its processor; ``config`` is merged into
    the family's.
    """

    tokens: Mapping[str, str]
    mark: str
    image_processor: str
    settings: Mapping[str, Any]
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    processor: str = ""


QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"
_TABLE = {
    "Qwen3VLMoeForConditionalGeneration": Seeing(
        QWEN_TOKENS, QWEN_MARK, "Qwen2VLImageProcessorPil", SIZES, {"vision_config": TOWER}
    ),
    "Qwen3_5MoeForConditionalGeneration": Seeing(
        QWEN_TOKENS, QWEN_MARK, "Qwen2VLImageProcessorPil", SIZES
    ),
    "Qwen4ExpForConditionalGeneration": Seeing(
        QWEN_TOKENS, QWEN_MARK, "Qwen2VLImageProcessorPil", SIZES
    ),
    "Glm4vMoeForConditionalGeneration": Seeing(
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>",
            "video_start_token": "<|begin_of_video|>",
            "video_end_token": "<|end_of_video|>",
        },
        "<|begin_of_image|><|image|><|end_of_image|>",
        "Glm4vImageProcessorPil",
        SIZES,
    ),
    "Ernie4_5_VLMoeForConditionalGeneration": Seeing(
        {
            "image_token": "<|IMAGE_PLACEHOLDER|>",
            "image_start_token": "<|IMAGE_START|>",
            "image_end_token": "<|IMAGE_END|>",
            "video_token": "<|VIDEO_PLACEHOLDER|>",
            "video_start_token": "<|VIDEO_START|>",
            "video_end_token": "<|VIDEO_END|>",
        },
        "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
        "Ernie4_5_VLMoeImageProcessorPil",
        SIZES | {"temporal_patch_size": 1},
    ),
    "Gemma4ForConditionalGeneration": Seeing(
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "video_token": "<|video|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        "<|image|>",
        "Gemma4ImageProcessorPil",
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        {
            "text_config": {"use_bidirectional_attention": "vision"},
            "vision_config": {"position_embedding_size": 256, "pooling_kernel_size": 3},
        },
    ),
    "AriaForConditionalGeneration": Seeing(
        {"image_token": "<|img|>", "unk_token": "<|unknown|>"},
        "<|img|>",
        "AriaImageProcessorPil",
        {},
        {
            "vision_config": {"image_size": 980, "patch_size": 196},
            "projector_patch_to_query_dict": {25: 4},
        },
        {"size_conversion": {"980": 4}},
        "AriaProcessor",
    ),
}

_MADE = {str(family) for family in FAMILIES}
TABLE = {name: seeing for name, seeing in _TABLE.items() if name in _MADE}
"""Of the families that the installed `transformers` makes."""


def save_seeing_checkpoint(name: str, folder: Path) -> Path:
    """Writes a family of `TABLE` in Hugging Face's format; its model never ends a text."""
    seeing, family = TABLE[name], next(one for one in FAMILIES if str(one) == name)
    plain = tiny_tokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        extra_special_tokens=dict(seeing.tokens),
        chat_template=TEMPLATE.replace("MARK", seeing.mark),
    )
    ids = {
        f"{key}_id": tokenizer.convert_tokens_to_ids(token) for key, token in seeing.tokens.items()
    }
    known = {field.name for field in dataclasses.fields(_config_class(family))}
    if "image_token_index" in known:
        ids["image_token_index"] = ids["image_token_id"]
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 1024,
        **{"eos_token_id": None, "pad_token_id": 0, "bos_token_id": None},
    }
    config = merged(family.config, seeing.config)
    config = merged(config, {"text_config": text, **{k: v for k, v in ids.items() if k in known}})
    if "vocab_size_per_layer_input" in config["text_config"]:
        config["text_config"]["vocab_size_per_layer_input"] = len(tokenizer)
    model = tiny_checkpoints.tiny_model(dataclasses.replace(family, config=config))
    tiny_checkpoints.save(model, folder, sharded=False)
    tokenizer.save_pretrained(folder)
    getattr(transformers, seeing.image_processor)(**seeing.settings).save_pretrained(folder)
    if seeing.extra:
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": seeing.processor, **seeing.extra})
        )
    return folder


def model_of(folder: Path) -> Any:
    """The model of transformers, in fp32."""
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(
        folder, dtype="float32", experts_implementation="eager"
    )


def known_inputs(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a processor gave that the model takes."""
    known = {"attention_mask", *inspect.signature(model.forward).parameters}
    return {name: value for name, value in given.items() if name in known}


def _config_class(family: Any) -> Any:
    return tiny_checkpoints.model_class_of(family).config_class


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two configurations, nested ones as well."""
    found = dict(one)
    for name, value in other.items():
        is_nested = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = merged(found[name], value) if is_nested else value
    return found


def picture(seed: int, width: int = 24, height: int = 16) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def data_url(image: Image.Image) -> str:
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def content_of(parts: Sequence[str | Image.Image]) -> list[dict[str, Any]]:
    """Texts and pictures as a message of OpenAI's chat."""
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
