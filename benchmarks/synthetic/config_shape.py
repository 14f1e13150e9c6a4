"""Random weights in the shape of any configuration that transformers knows."""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_runtime.benchmarks.synthetic.texts import write_tokenizer
from moe_runtime.checkpoints.expert_map import find_experts
from moe_runtime.checkpoints.families import give_experts_interface
from moe_runtime.checkpoints.strict_json import check_config, parse_object
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, blamed_on
from moe_runtime.files import read_bounded

_MAX_BYTES = 1 << 20
_LEAST_VOCABULARY = 257
_STEM_LENGTH = 40


@dataclass(frozen=True, kw_only=True)
class ConfigShape:
    name: str
    content: str
    num_layers: int
    vocab_size: int
    total_bytes: int

    def write(self, folder: Path, progress: Any = None) -> None:
        """Draw the weights and write a checkpoint."""
        del progress
        import torch

        from moe_runtime.inference.budget import available_host_bytes

        if self.total_bytes > (free := available_host_bytes()):
            raise CapacityError(
                f"{self.name} is made in memory: its weights take {format_bytes(self.total_bytes)},"
                f" and {format_bytes(free)} are free; give it fewer layers"
            )
        with torch.random.fork_rng(devices=()), torch.no_grad():
            torch.manual_seed(0)
            model = model_of(json.loads(self.content))
            model.get_input_embeddings().weight.normal_(std=1.0)
            model.save_pretrained(folder)
        write_tokenizer(folder, self.vocab_size)
        (folder / "generation_config.json").write_text('{"do_sample": false}\n')

    def write_settings(self, folder: Path) -> None:
        write_tokenizer(folder, self.vocab_size)
        (folder / "config.json").write_text(self.content)


def read_config_shape(path: Path) -> ConfigShape:
    """The shape in a ``config.json``."""
    import torch

    raw = read_bounded(path, max_bytes=_MAX_BYTES)
    with blamed_on(f"{path}: no model can be made of it"):
        content = parse_object(raw)
        if "quantization_config" in content:
            raise ValueError("it has quantization_config; leave it out, random weights are bf16")
    check_config(content, path)
    with blamed_on(f"{path}: no model can be made of it"):
        with torch.device("meta"):
            model = model_of(content)
        give_experts_interface(model)
        find_experts(model)
        for name, part in model.named_parameters():
            if not part.numel():
                raise ValueError(f"{name} would be {list(part.shape)}: some size is 0")
        found = model.config.get_text_config()
        num_layers, vocab_size = found.num_hidden_layers, found.vocab_size
    if vocab_size < _LEAST_VOCABULARY:
        raise ValueError(
            f"{path}: expected a vocab_size of at least {_LEAST_VOCABULARY}, for all bytes "
            f"and the end of a text, got {vocab_size}"
        )
    text = json.dumps(content, indent=2) + "\n"
    stem = os.fsencode(path.stem).decode(errors="replace")[:_STEM_LENGTH]
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return ConfigShape(
        name=f"{stem}-{digest}",
        content=text,
        num_layers=num_layers,
        vocab_size=vocab_size,
        total_bytes=sum(2 * part.numel() for part in model.parameters()),
    )


def model_of(content: dict[str, Any]) -> Any:
    """A transformers model with bf16 weights, initialised as transformers does."""
    import torch
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    config: Any = CONFIG_MAPPING[content["model_type"]].from_dict(content)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"transformers has no AutoModelForCausalLM of {config.model_type}")
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.to(torch.bfloat16)
