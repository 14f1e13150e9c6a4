"""Checkpoints of weights that fine-tuning leaves as they are: quantised, or coded losslessly."""

import dataclasses
from pathlib import Path

import quantized_checkpoints
from finetuning_runs import SIZES
from moe_families import Family
from text_checkpoint import tiny_tokenizer
from tiny_checkpoints import save, tiny_model

from moe_runtime.checkpoints.packing import pack_checkpoint

SAMPLES = {sample.name: sample for sample in quantized_checkpoints.SAMPLES}
PLANES = Family("mixtral", "MixtralForCausalLM", SIZES | {"hidden_size": 64})


def bases(kind: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint of frozen weights, and a plain one with the same values."""
    if kind == "planes":
        plain = folder / "plain"
        save(tiny_model(PLANES).bfloat16(), plain, sharded=False)
        tiny_tokenizer().save_pretrained(plain)
        pack_checkpoint(plain, folder / "packed", "planes")
        return folder / "packed", plain
    if kind.endswith(".gguf"):
        import gguf_checkpoints  # which asks for a package that writes them

        named = {f"{sample.name}.gguf": sample for sample in gguf_checkpoints.SAMPLES}
        found = gguf_checkpoints.write(named[kind], folder)
        return found.folder, found.plain
    sample = SAMPLES[kind]
    family = dataclasses.replace(sample.family, config=sample.family.config | SIZES)
    written = quantized_checkpoints.write(dataclasses.replace(sample, family=family), folder)
    tiny_tokenizer().save_pretrained(written.folder)
    return written.folder, written.plain
