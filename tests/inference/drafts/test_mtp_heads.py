"""A checkpoint's multi-token head drafts like transformers' module."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import moe_families
import pytest
import torch
from engine_events import ask_all, drained, request_of
from quantized_checkpoints import EXPERTS, SHARED, WIDE
from safetensors.torch import load_file, save_file
from scripted_drafts import EveryDraft
from tiny_checkpoints import PROMPT, randomise, save, tiny_model
from weight_packers import fp8_block

import moe_runtime
from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.mtp_heads import HeadPlan
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine

modeling_layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(modeling_layers, "MtpModel"):
    pytest.skip("this version of transformers has no such heads", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:.*are not used, as in transformers")
NEW = 12
SETTINGS = {"device": "cpu", "dtype": "float32", "host_memory": "64MiB", "max_tokens": 256}


QWEN_WITH_PICTURES = "Qwen3_5MoeForConditionalGeneration"
QWEN_NAMES = {
    **{"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden"},
    "post_norm": "norm",
}
MIMO = "MiMoV2FlashForCausalLM"
MIMO_NAMES = {
    **{"post_norm": "final_layernorm", "post_attention_layernorm": "pre_mlp_layernorm"},
    "self_attn.sinks": "self_attn.attention_sink_bias",
}


def with_head(name: str, folder: Path, **sizes: Any) -> tuple[Any, Any, Path]:
    """A tiny model of transformers, its head, and the checkpoint of both."""
    (family,) = [each for each in moe_families.FAMILIES if str(each) == name]
    model = tiny_model(dataclasses.replace(family, config={**family.config, **sizes}))
    save(model, folder, sharded=False)
    torch.manual_seed(6)
    text = model.config.get_text_config()
    place, renamed = f"model.layers.{text.num_hidden_layers}.", {"post_norm": "shared_head.norm"}
    if is_qwen := name.startswith("Qwen"):
        text.num_mtp_layers, text.mtp_layer_types = 1, ["full_attention"]
        place, renamed = "mtp.", QWEN_NAMES
    if name == MIMO:
        text.num_mtp_layers, text.mtp_layer_types = 1, ["sliding_attention"]
        text.mtp_mlp_layer_types = ["dense"]
        place, renamed = "model.mtp.layers.0.", MIMO_NAMES
    head = modeling_layers.MtpModel(model, 1).float().eval()
    for key, vector in head.layers.named_parameters():
        if key.endswith("sinks"):  # which a head of transformers leaves as memory was
            vector.data.zero_()
    randomise(head.layers)
    tensors = load_file(folder / "model.safetensors")
    for key, value in head.layers[0].state_dict().items():
        name = key.replace("mtp_block.", "layers.0." if is_qwen else "")
        for own, published in renamed.items():
            name = re.sub(rf"^{re.escape(own)}\b", published, name)
        stem = place + name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, pair in enumerate(value):
                for part, matrix in zip(("gate", "up"), pair.chunk(2), strict=True):
                    tensors[f"{stem}.{expert}.{part}_proj.weight"] = matrix.clone()
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(value):
                tensors[f"{stem}.{expert}.down_proj.weight"] = matrix.clone()
        else:
            tensors[place + name] = value.clone()
            if "layers.0" in place:  # a second one, which is for a later token
                tensors[place.replace("0", "1") + name] = -value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return model, head, folder


@torch.no_grad()
def expected(model: Any, head: Any, tokens: list[int], count: int) -> list[int]:
    """The head's draft, computed from the whole text for each token. After the first token the head
    continues from its own last state."""
    ids = torch.tensor([tokens])
    states, text = model.model(ids[:, :-1]).last_hidden_state, ids[:, 1:]
    drafted = []
    for _ in range(count):
        places = torch.arange(1, 1 + text.shape[1])[None]
        found = head.forward_layer(0, states, places, None, input_ids=text)[:, -1:]
        token = head.shared_head(found).argmax(-1)
        drafted.append(int(token))
        states, text = torch.cat([states, found], 1), torch.cat([text, token[0][None]], 1)
    return drafted


class Noted(EveryDraft):
    """Records the drafts for a model's texts."""

    def __init__(self, model: Any, most_rows: int) -> None:
        super().__init__(most_rows)
        self.drafts: list[tuple[list[int], list[int]]] = []
        source, draft = model._drafts.source, model._drafts.source.draft

        def noted(drafters: Any, counts: Any) -> Any:
            found = draft(drafters, counts)
            for text, own in zip(drafters, found, strict=True):
                self.drafts.append(([*text.tokens], own))
            return found

        source.draft = noted


@pytest.mark.parametrize(
    "name",
    [
        *("DeepseekV3ForCausalLM", QWEN_WITH_PICTURES, MIMO),
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("Glm4MoeForCausalLM", "Qwen3NextForCausalLM")
        ),
    ],
)
def test_a_head_drafts_like_transformers_module(name, tmp_path):
    reference, head, folder = with_head(name, tmp_path)
    plain: Any = moe_runtime.load(folder, **SETTINGS)
    model: Any = moe_runtime.load(folder, draft="mtp", **SETTINGS)
    with plain.moe, model.moe:
        options: dict[str, Any] = {"max_new_tokens": NEW, "min_new_tokens": NEW}
        whole = plain.generate(PROMPT, do_sample=False, **options)[0].tolist()
        control = model._drafts.control = Noted(model, 6)
        assert model.generate(PROMPT, do_sample=False, **options)[0].tolist() == whole
        found = [draft for _, draft in control.drafts if draft]
        assert len(found) > NEW // 5
        for tokens, draft in control.drafts:
            if draft:
                text = [whole[0], *tokens]
                assert draft == expected(reference, head, text, len(draft))
        assert model.moe.stats().draft_bytes > 0
        prompts = [(5, 7, 11, 13), (40, 3, 9, 3, 9, 3), (17, 2)]
        with Engine(plain) as engine:
            answers = [ask_all(engine, [request_of(one, NEW)])[0].ids for one in prompts]
        control.drafts.clear()
        with Engine(model) as engine:
            together = ask_all(engine, [request_of(one, NEW) for one in prompts])
            assert [one.ids for one in together] == answers
            drained(engine)
        texts = [[*prompt, *ids] for prompt, ids in zip(prompts, answers, strict=True)]
        kept = [(tokens, draft) for tokens, draft in control.drafts if draft]
        assert len(kept) > len(prompts) * NEW // 6
        for tokens, draft in kept[::4]:
            (first,) = {text[0] for text in texts if text[1 : 1 + len(tokens)] == tokens}
            assert draft == expected(reference, head, [first, *tokens], len(draft))
        model.moe.check()


@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", MIMO])
def test_a_quantised_head_drafts_like_its_dequantised_values(name, tmp_path):
    """In blocks of FP8, as it is published, and as plain weights of the same values."""
    _, _, folder = with_head(name, tmp_path / "packed", **WIDE)
    plain = shutil.copytree(folder, tmp_path / "plain")
    tensors, pack = load_file(folder / "model.safetensors"), fp8_block(torch.float32)
    values = dict(tensors)
    for key, tensor in [*tensors.items()]:
        if tensor.ndim == 2 and re.search(EXPERTS + "|" + SHARED, key):
            parts, values[key] = pack(key, tensor)
            tensors |= parts
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    found = []
    for each in (plain, folder):
        model: Any = moe_runtime.load(each, draft="mtp", **SETTINGS)
        with model.moe:
            control = model._drafts.control = Noted(model, 6)
            ids = model.generate(PROMPT, do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW)
            found.append((ids.tolist(), [draft for _, draft in control.drafts]))
            assert model.moe.stats().draft_bytes > 0
    assert any(found[0][1])
    assert found[0] == found[1]


def test_a_head_is_part_of_the_memory_plan_or_refused(tmp_path):
    _, _, folder = with_head("Glm4MoeForCausalLM", tmp_path)
    without = inspect_checkpoint(folder, max_tokens=128)
    found = inspect_checkpoint(folder, max_tokens=128, draft="mtp")
    assert found.draft_bytes == found.reserve_bytes - without.reserve_bytes > 0
    with pytest.raises(UnsupportedModelError, match="found none in") as caught:
        moe_runtime.load(pocket_path(), draft="mtp", **SETTINGS)
    assert "\n" not in str(caught.value)
    checkpoint, runs = open_checkpoint(folder, "auto"), Mock()
    file = dataclasses.replace(checkpoint, folder=next(folder.glob("*.safetensors")))
    for other, came in (
        (dataclasses.replace(checkpoint, runs=runs), "a packed one"),
        (file, "a GGUF file"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"got {came}, "):
            HeadPlan(other, build_on_meta(checkpoint))
