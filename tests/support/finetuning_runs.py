"""Fine-tuning runs of tiny checkpoints, and the same models in memory."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_families import Family
from text_checkpoint import tiny_tokenizer
from tiny_checkpoints import save, tiny_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, PreTrainedModel

import moe_runtime
from moe_runtime.errors import CapacityError
from moe_runtime.training.config_tree import build_tree
from moe_runtime.training.finetune.finetune_run import FinetunePreparation, finish, prepare, start
from moe_runtime.training.finetune.settings import FinetuneConfig
from moe_runtime.training.loop import Trainer

STEPS, CONTEXT, SEQUENCES, PARTS = 3, 16, 4, 2
EPS = 0.1
SIZES = {"vocab_size": 400, "num_hidden_layers": 2}
MIXTRAL = Family("mixtral", "MixtralForCausalLM", config=SIZES)
# stacked, transposed, gate and up alternate, biases
GPT_OSS = Family("gpt_oss", "GptOssForCausalLM", config=SIZES)
# freezes the bias of its router, a matrix
ERNIE = Family(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", config=SIZES | {"moe_layer_start_index": 0}
)


def checkpoint_of(family: Family, folder: Path, *, sharded: bool = False) -> Path:
    save(tiny_model(family), folder, sharded=sharded)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_text(folder: Path) -> Path:
    words = ["the store", "reads", "an expert", "from disk", "when", "a token", "asks for it"]
    text = " ".join(words[(place * place + place // 7) % len(words)] for place in range(600))
    path = folder / "text.txt"
    path.write_text(text)
    return path


def config_of(
    model: Path, folder: Path, kind: type[FinetuneConfig] = FinetuneConfig, **changes: Any
) -> FinetuneConfig:
    """A run whose numbers can be compared to the bit: nothing is clipped."""
    run = {"output": str(folder / "run"), "steps": STEPS, "host_memory": "1GiB", "threads": 1}
    tree = {
        "model": str(model),
        "run": run | changes.pop("run", {}),
        "data": {
            "sources": {"text": {"files": [str(write_text(folder))]}},
            "context": CONTEXT,
            "tokens_per_step": CONTEXT * SEQUENCES,
            "micro_batches": PARTS,
        },
        "optimizer": {"peak_rate": 1e-2, "warmup_steps": 1, "clip_norm": 0.0},
    }
    return build_tree(kind, tree | changes)


def smallest(config: FinetuneConfig) -> FinetuneConfig:
    """The same run with the smallest budget, which a refused one names."""
    with pytest.raises(CapacityError, match="smallest that works") as refusal:
        prepare(with_run(config, host_memory="1MiB"))
    assert "KV cache" not in str(refusal.value)
    return with_run(config, host_memory=str(refusal.value.smallest_bytes))


def with_run(config: FinetuneConfig, **changes: Any) -> FinetuneConfig:
    return dataclasses.replace(config, run=dataclasses.replace(config.run, **changes))


def train(trainer: Trainer, *, stop_after: int = STEPS) -> list[float]:
    losses: list[float] = []

    def watch(record: Any) -> None:
        if hasattr(record, "loss"):
            losses.append(record.loss)

    trainer.train(should_stop=lambda: trainer.step >= stop_after, on_record=watch)
    return losses


def run_losses(
    config: FinetuneConfig, *, resume: bool = False, stop_after: int = STEPS
) -> list[float]:
    """Of a run that ends with a step, and is closed."""
    trainer = start(prepare(config), resume=resume)
    losses = train(trainer, stop_after=stop_after)
    trainer.close()
    return losses


def finetuned(config: FinetuneConfig) -> tuple[list[float], dict[str, Any]]:
    preparation = prepare(config)
    trainer = start(preparation, resume=False)
    losses = train(trainer)
    trainer.optimizer.check()  # type: ignore[union-attr]
    summary = finish(preparation, trainer, export=True)
    trainer.close()
    return losses, summary


def resident(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A checkpoint in memory; in fp64 with the experts of transformers."""
    moe_runtime.register_with_transformers()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.set_experts_implementation("eager" if dtype == torch.float64 else "moe_runtime")
    with torch.device("meta"):
        declared = type(model)(model.config)
    for name, parameter in declared.named_parameters():  # which from_pretrained forgets
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    return model.train()


class _Delta(nn.Module):
    """`W + scale * B @ A` for every expert, as a parametrization of the stack."""

    def __init__(self, first: Tensor, second: Tensor, scale: float, *, transposed: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())
        self._scale, self._transposed = scale, transposed

    def forward(self, stack: Tensor) -> Tensor:
        delta = self._scale * self.second @ self.first
        return stack + (delta.transpose(1, 2) if self._transposed else delta)


def adapted(
    folder: Path, preparation: FinetunePreparation, first: dict[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    """The model in memory, with PEFT's adapters on attention, and whole stacks of ours."""
    from peft import LoraConfig, inject_adapter_in_model

    model = resident(folder, dtype).requires_grad_(False)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and "attn" in n]
    inject_adapter_in_model(LoraConfig(r=3, lora_alpha=4.5, target_modules=linear), model)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = first[name].to(dtype, copy=True)
    for site in preparation.sites:
        module = model.get_submodule(site.name)
        for stack in ("gate_up_proj", "down_proj"):
            named = (first[f"{site.name}.adapters.{stack}_{part}"] for part in "AB")
            down, up = (tensor.to(dtype) for tensor in named)
            delta = _Delta(down, up, 1.5, transposed=site.is_transposed)
            parametrize.register_parametrization(module, stack, delta)
    return model
