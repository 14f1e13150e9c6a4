"""What a fine-tuning run leaves: a checkpoint like the first one, or adapters beside a frozen one.

Adapters are never merged into weights that are quantised or packed: merging would round the weights
once more. They are written as PEFT reads them, for the checkpoint as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe_runtime.checkpoints.checkpoint import Checkpoint
from moe_runtime.checkpoints.export import LikeCheckpoint
from moe_runtime.digests import write_digests
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import write_text
from moe_runtime.folders import replace_folder
from moe_runtime.training.finetune.settings import FinetuneConfig, LoraConfig
from moe_runtime.training.offload.execution.frozen import ExpertAdapters
from moe_runtime.training.offload.site import ExpertsModuleSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moe_runtime.checkpoints.expert_map import ExpertMap


def require_exportable(checkpoint: Checkpoint, config: FinetuneConfig) -> None:
    """Refuses to train, or to merge into, weights that have to stay as they are.

    Raises:
        UnsupportedModelError: every parameter of a quantised or packed checkpoint is to be trained.
        ValueError: its adapters are to be merged.
    """
    if checkpoint.is_plain:
        return
    if config.lora is None:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: quantised and packed weights, and those of GGUF files, stay as "
            "they are, so adapters alone can be trained beside them: give --lora RANK, or take a "
            "plain checkpoint in bf16, fp16 or fp32"
        )
    if config.export_dtype != "auto":
        raise ValueError(
            f"{checkpoint.folder}: adapters are not merged into quantised or packed weights; "
            f"leave the export dtype {config.export_dtype} out, and they are written by themselves"
        )


def exporter_for(
    model: PreTrainedModel, checkpoint: Checkpoint, experts: ExpertMap
) -> LikeCheckpoint | None:
    """What writes checkpoints like the first one; None where only adapters are written.

    Raises:
        UnsupportedModelError: the family cannot be written again.
    """
    return LikeCheckpoint(model, checkpoint, experts) if checkpoint.is_plain else None


def write_adapters(
    folder: Path,
    model: PreTrainedModel,
    sites: Sequence[ExpertsModuleSpec],
    lora: LoraConfig,
    base: str,
) -> None:
    """Writes trained adapters, in fp32, as `PeftModel.from_pretrained` reads them.

    Args:
        folder: replaced once the new one is whole.
        model: with the adapters.
        sites: its experts, as they were.
        lora: what adapters there are.
        base: what the model was loaded from.

    Raises:
        OSError: it cannot be written; an older one stays as it was.
    """
    tensors = {
        name.replace(".default.weight", ".weight"): parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        if ".lora_" in name
    }
    modules = sorted({name.partition(".lora_")[0] for name in tensors})
    parameters: list[str] = []
    if "experts" in lora.places:
        for site in sites:
            adapters = model.get_submodule(f"{site.name}.adapters")
            assert isinstance(adapters, ExpertAdapters)
            parameters += [f"{site.name}.{name}" for name in adapters.names]
            tensors |= _of_experts(site, adapters)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": modules,
        "target_parameters": parameters,
    }
    with replace_folder(folder) as new:
        named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
        try:
            save_file(named, new / "adapter_model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{folder}: the adapters cannot be written: {error}") from error
        write_text(new / "adapter_config.json", json.dumps(config, indent=2) + "\n")
        write_digests(new, ["adapter_config.json", "adapter_model.safetensors"])


def _of_experts(site: ExpertsModuleSpec, adapters: ExpertAdapters) -> dict[str, Tensor]:
    """Adapters of stacked parameters, under the names that PEFT has for them.

    PEFT wraps a module once for each of its adapted parameters, the first one innermost. Its `A` is
    `[E * rank, in]`; the columns of its `B`, `[out, rank * E]`, alternate between experts.
    """
    found: dict[str, Tensor] = {}
    for depth, name in enumerate(_in_order(site, adapters)):
        first, second = (adapters.get_parameter(f"{name}_{part}").detach().cpu() for part in "AB")
        place = site.name + ".base_layer" * (len(adapters.names) - 1 - depth)
        found[f"{place}.lora_A.weight"] = first.flatten(0, 1)
        found[f"{place}.lora_B.weight"] = second.permute(1, 2, 0).flatten(1).contiguous()
    return found


def _in_order(site: ExpertsModuleSpec, adapters: ExpertAdapters) -> Iterator[str]:
    """Adapted parameters in the order in which the module has them."""
    for name, _ in site.module.named_parameters(recurse=False):
        if name in adapters.names:
            yield name
