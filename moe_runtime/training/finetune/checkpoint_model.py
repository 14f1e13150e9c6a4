"""A checkpoint of transformers as a model for the loop, and the files of its adapters.

Adapters are never merged into quantised or packed weights, which would round the weights again.
They are written in PEFT's format, for the unchanged checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from moe_runtime.checkpoints.adapter_files import ADAPTER_FILES, AdapterFolder
from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.dense_weights import load_dense
from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.checkpoints.gguf.architectures import SplitProjection
from moe_runtime.checkpoints.transformers_private import cache_name
from moe_runtime.digests import write_digests
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import replace_folder, write_text
from moe_runtime.inference.adapters import is_turned
from moe_runtime.inference.budget import widest_head
from moe_runtime.inference.routing_replay import experts_of, replay_routing
from moe_runtime.models.lm.model import Losses
from moe_runtime.training.examples import PADDING, TRAINED
from moe_runtime.training.finetune.settings import FinetuneConfig, LoraConfig
from moe_runtime.training.offload.frozen import ExpertAdapters
from moe_runtime.training.offload.memory import SPARE_BYTES, expert_buffer_bytes
from moe_runtime.training.offload.offloaded_training import trained_around_experts
from moe_runtime.training.offload.site import ExpertsSite

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_NO_TARGET = -100
_SHARE_ROWS = frozenset(
    (
        *("aria", "aria_text", "axk1", "beam", "cohere2_moe", "deepseek_ocr2", "deepseek_v2"),
        *("deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "gemma4"),
        *("gemma4_text", "glm4_moe", "glm4_moe_lite", "granitemoe", "granitemoe_swa"),
        *("granitemoeshared", "hunyuan_v1_moe", "hy_v3", "kimi_k25", "kolibri1", "laguna"),
        *("mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl", "minimax_m3_vl_text"),
        *("mistral4", "mixtral", "muse_spark", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe"),
        *("qwen3_omni_moe_thinker", "qwen3_vl_moe", "solar_open"),
    )
)
"""Types of models whose attention ends where positions restart."""
_TAKES_MASKS = frozenset({"afmoe", "gpt_oss"})
"""Types of models that need masks instead."""


def shares_rows(model: PreTrainedModel) -> bool:
    """Whether documents may share a row without seeing each other.

    Recurrent states and compressed attention continue over the ends of documents, and losses of
    routers count padding as tokens without a mask.
    """
    with_router = getattr(model.config.get_text_config(), "output_router_logits", False)
    kind = model.config.model_type
    return kind in _SHARE_ROWS | _TAKES_MASKS and not with_router


def _masks(model: PreTrainedModel, positions_BC: Tensor) -> dict[str, Any]:
    """Masks of attention within documents, by kind of layer."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    config = model.config.get_text_config()
    embedded = torch.empty((*positions_BC.shape, 0), dtype=model.dtype, device=positions_BC.device)
    made = {
        "full_attention": create_causal_mask,
        "sliding_attention": create_sliding_window_causal_mask,
    }
    return {
        kind: make(
            config=config, inputs_embeds=embedded, attention_mask=None, position_ids=positions_BC,
            **dict[str, Any]({cache_name(make): None}),
        )
        for kind, make in made.items() if kind in config.layer_types
    }  # fmt: skip


class CheckpointModel(nn.Module):
    """A causal language model of transformers for the loop; its state is the trained part."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        config = model.config.get_text_config()
        self._with_router = bool(getattr(config, "output_router_logits", False))
        self._router_scale = float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)

    def losses(self, ids_BC: Tensor, targets_BC: Tensor) -> Losses:
        """Mean over the targets of ids `[B, C]` or rows `[B, C, 3]` (`training/examples.py`), which
        more columns follow for a routing to replay."""
        given: dict[str, Any] = {"input_ids": ids_BC}
        replays = contextlib.nullcontext()
        if ids_BC.ndim == 3:
            given = self._of_documents(ids_BC[..., :3])
            if ids_BC.shape[-1] > 3:
                layers = len(experts_of(self.model))
                replays = replay_routing(self.model, ids_BC[..., 3:].unflatten(-1, (layers, -1)))
            targets_BC = targets_BC[..., 0].where(targets_BC[..., 2] == TRAINED, _NO_TARGET)
        with replays:
            out: Any = self.model(**given, use_cache=False)
        logits = out.logits.float().flatten(0, 1)
        loss = cross_entropy(logits, targets_BC.flatten(), ignore_index=_NO_TARGET)
        auxiliary = loss.new_zeros(())
        if self._with_router and getattr(out, "aux_loss", None) is not None:
            auxiliary = self._router_scale * out.aux_loss
        return Losses(loss, auxiliary)

    def _of_documents(self, rows_BC3: Tensor) -> dict[str, Any]:
        """Inputs that separate the documents of a row, or mask the padding."""
        ids, positions, roles = rows_BC3.unbind(-1)
        if not shares_rows(self.model):
            return {"input_ids": ids, "attention_mask": (roles != PADDING).long()}
        given: dict[str, Any] = {"input_ids": ids, "position_ids": positions}
        if self.model.config.model_type in _TAKES_MASKS:
            given["attention_mask"] = _masks(self.model, positions)
        return given

    def after_step(self, *, skipped: bool = False) -> None: ...

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {name: p.detach() for name, p in trained_around_experts(self.model).items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        for name, tensor in self.state_dict().items():
            tensor.copy_(state_dict[name])


def load_around_experts(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    experts: ExpertMap,
    device: torch.device,
    progress: Progress | None = None,
) -> None:
    """As `load_dense`, but the experts modules stay on the meta device.

    Parameters that the model's class freezes, such as a router's bias, stay frozen.
    """
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    for module in experts.modules:
        model.set_submodule(module.name, nn.Identity())
    try:
        load_dense(model, checkpoint, experts, device, progress)
    finally:
        for module in experts.modules:
            model.set_submodule(module.name, module.module)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)


def add_attention_adapters(model: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Puts PEFT's adapters on the linear layers of attention; layers that only we have are left
    out. Returns the names."""
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ValueError(
            "adapters on attention need the package peft: pip install 'moe-runtime[finetune]', "
            "or give adapters to the experts alone"
        ) from None
    modules = dict(model.named_modules())
    split = tuple(name for name, module in modules.items() if isinstance(module, SplitProjection))
    names = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.Linear) and re.search(r"att(n|ention)", name)
        if not name.startswith(split)
    ]
    if not names:
        raise ValueError(
            f"{model.config.model_type} has no linear layers in its attention; give adapters to "
            "the experts alone"
        )
    alpha: Any = lora.alpha
    settings = PeftConfig(
        r=lora.rank, lora_alpha=alpha, target_modules=names, use_rslora=lora.rslora,
        lora_dropout=lora.dropout, use_dora=lora.dora,
    )  # fmt: skip
    inject_adapter_in_model(settings, model)
    for path, module in model.named_modules():
        if ".lora_" in path:
            # adapters of a base in half precision are trained in full precision
            for name, parameter in [*module.named_parameters(recurse=False)]:
                setattr(module, name, nn.Parameter(parameter.detach().float()))
    return names


@contextlib.contextmanager
def merged_adapters(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Merges attention's adapters into the weights in the block.

    Yields the model's state by names without adapters.
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "get_base_layer")]
    before = [layer.get_base_layer().weight.detach().clone() for layer in layers]
    for layer in layers:
        layer.merge()
    try:
        yield {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in model.state_dict().items()
            if ".lora_" not in name and ".adapters." not in name
        }
    finally:
        for layer, weight in zip(layers, before, strict=True):
            layer.unmerge()
            layer.get_base_layer().weight.data.copy_(weight)  # unmerging rounds


def activation_bytes(
    config: PreTrainedConfig, tokens: int, num_parts: int, *, top_k: int, recompute: bool
) -> int:
    """Bytes of a step's forward and backward pass, from the model's shape.

    All micro-batches of a step are in memory at once, as they meet at the experts; only one of them
    has logits at a time.
    """
    text = config.get_text_config()
    hidden, layers = text.hidden_size, text.num_hidden_layers
    heads, head_dim = text.num_attention_heads, widest_head(config)
    widths = [getattr(text, n, None) for n in ("moe_intermediate_size", "intermediate_size")]
    width = next((int(w) for w in widths if isinstance(w, int)), 4 * hidden)
    routed = 2 * width * top_k
    # a norm keeps three copies in fp32, projections one, rotation and attention four of the heads
    layer = 4 * (12 * hidden + 8 * heads * head_dim + routed + 2 * width)
    kept = layers * (4 * hidden if recompute else layer)
    experts = expert_buffer_bytes(tokens, hidden, width) + (layer * tokens if recompute else 0)
    # logits, their copy in fp32 and the gradients of both
    logits = 4 * 4 * text.vocab_size * -(-tokens // num_parts)
    temporary = 4 * 6 * hidden
    return int(1.25 * (tokens * (kept + temporary) + max(experts, logits))) + SPARE_BYTES


def require_exportable(checkpoint: Checkpoint, config: FinetuneConfig) -> None:
    """Refuses to train quantised or packed weights, or to merge adapters into them."""
    is_merged = config.lora is None or config.merge
    if config.export_dtype != "auto" and not is_merged:
        raise ValueError(
            f"adapters are not merged into weights that could be {config.export_dtype}: "
            "give merge too, or leave the export dtype out"
        )
    if checkpoint.is_plain:
        return
    if config.lora is None:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: quantised and packed weights, and those of GGUF files, stay as "
            "they are, so adapters alone can be trained beside them: give --lora RANK, or take a "
            "plain checkpoint in bf16, fp16 or fp32"
        )
    if config.merge:
        raise ValueError(
            f"{checkpoint.folder}: adapters are not merged into quantised or packed weights; "
            "leave merge out, and they are written by themselves"
        )
    if config.lora.dora:
        raise UnsupportedModelError(
            f"{checkpoint.folder}: DoRA takes the lengths of plain weights, and these are "
            "quantised or packed; leave it out"
        )


def write_adapters(
    folder: Path,
    model: PreTrainedModel,
    sites: Sequence[ExpertsSite],
    lora: LoraConfig,
    base: str,
) -> None:
    """Writes trained adapters in fp32, for `PeftModel.from_pretrained`.

    Raises:
        OSError: they cannot be written; an older folder stays unchanged.
    """
    own = _of_layers(model)
    tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in own.items()}
    modules = sorted({name.partition(".lora_")[0] for name in tensors})
    parameters: list[str] = []
    for site, adapters in _adapted(model, sites, lora):
        parameters += [f"{site.name}.{name}" for name in adapters.names]
        tensors |= _of_experts(site, adapters)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
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
        write_digests(new, ADAPTER_FILES)


def take_adapters(
    folder: Path, model: PreTrainedModel, sites: Sequence[ExpertsSite], lora: LoraConfig
) -> None:
    """Loads adapters from a folder in PEFT's format.

    Raises:
        CheckpointError: a file is missing or damaged.
        UnsupportedModelError: the adapter has more than pairs of matrices.
        ValueError: its layers, rank, scale or kind differ.
    """
    found = AdapterFolder(folder)
    if found.settings.has_magnitudes != lora.dora:
        raise ValueError(
            f"{folder}: its use_dora is {found.settings.has_magnitudes}, that of this run "
            f"{lora.dora}; give the options that it was trained with"
        )
    parts = ("A.weight", "B.weight", "magnitude_vector")
    read = {
        f"{place}.lora_{part}": tensor.float()
        for place, own in found.tensors().items()
        for part, tensor in zip(parts, own, strict=False)
    }
    places: dict[str, Tensor] = dict(_of_layers(model))
    for site, adapters in _adapted(model, sites, lora):
        places |= _of_experts(site, adapters)
    shapes, others = ({n: [*t.shape] for n, t in each.items()} for each in (places, read))
    if shapes != others:
        odd = next(n for n in sorted(shapes | others) if shapes.get(n) != others.get(n))
        raise ValueError(
            f"{folder}: {odd} is {others.get(odd, 'missing')}, expected "
            f"{shapes.get(odd, 'no such adapter')}; give --lora-on and the rank that it has"
        )
    for name, tensor in read.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{folder}: {name} has values that are not finite numbers")
    scales = {place: found.scale(place) for place in found.widths}
    for site, adapters in _adapted(model, sites, lora):
        for own in (f"{site.name}.{name}" for name in adapters.names):
            is_used = found.settings.targets_parameter(own)
            scales[own] = found.settings.scale(own, lora.rank) if is_used else 0.0
    for name, scale in scales.items():
        if not math.isclose(scale, lora.factor, rel_tol=1e-9):
            raise ValueError(
                f"{folder}: its factor of {name} is {scale:g}, by lora_alpha, rank and use_rslora, "
                f"that of this run {lora.factor:g}; give the options that it was trained with"
            )
    with torch.no_grad():
        for name, parameter in _of_layers(model).items():
            parameter.copy_(read[name])
        for site, adapters in _adapted(model, sites, lora):
            for place, name in _places(site, adapters):
                first, second = (read[f"{place}.lora_{part}.weight"] for part in "AB")
                first = first.unflatten(0, (site.num_experts, -1))
                second = second.unflatten(1, (-1, site.num_experts)).permute(2, 0, 1)
                if is_turned(site.module):
                    first, second = second.mT, first.mT
                adapters.get_parameter(f"{name}_A").copy_(first)
                adapters.get_parameter(f"{name}_B").copy_(second)


def _of_layers(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """PEFT's own adapters, by their names in its files."""
    found = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    return {
        name.replace("vector.default.weight", "vector").replace(".default.weight", ".weight"): own
        for name, own in found.items()
    }


def _adapted(
    model: PreTrainedModel, sites: Sequence[ExpertsSite], lora: LoraConfig
) -> Iterator[tuple[ExpertsSite, ExpertAdapters]]:
    for site in sites if "experts" in lora.places else ():
        adapters = model.get_submodule(f"{site.name}.adapters")
        assert isinstance(adapters, ExpertAdapters)
        yield site, adapters


def _of_experts(site: ExpertsSite, adapters: ExpertAdapters) -> dict[str, Tensor]:
    """Adapters of stacked parameters, by their names in PEFT's files.

    PEFT wraps a module once for each of its adapted parameters, the first one innermost. Its `A` is
    `[E * rank, in]`; the columns of its `B`, `[out, rank * E]`, alternate between experts. It swaps
    inputs and outputs of Llama 4's experts.
    """
    found: dict[str, Tensor] = {}
    for place, name in _places(site, adapters):
        first, second = (adapters.get_parameter(f"{name}_{part}").detach().cpu() for part in "AB")
        if is_turned(site.module):
            first, second = second.mT.contiguous(), first.mT
        found[f"{place}.lora_A.weight"] = first.flatten(0, 1)
        found[f"{place}.lora_B.weight"] = second.permute(1, 2, 0).flatten(1).contiguous()
    return found


def _places(site: ExpertsSite, adapters: ExpertAdapters) -> Iterator[tuple[str, str]]:
    """Path in files, and name, of each adapted parameter, in the module's order."""
    own = [name for name, _ in site.module.named_parameters(recurse=False)]
    for depth, name in enumerate(name for name in own if name in adapters.names):
        yield site.name + ".base_layer" * (len(adapters.names) - 1 - depth), name
