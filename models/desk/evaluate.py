"""Measures a trained desk model and writes its card.

    python -P -m moe_runtime.models.desk.evaluate --run models/desk/runs/moe --output models/desk

Takes the folder of a complete run of train.toml, whose checkpoint stays where it is.
`evaluation.json` has the numbers, `README.md` is the card.
"""

import argparse
import hashlib
import json
import platform
import textwrap
from pathlib import Path
from typing import Any

import torch

from moe_runtime.files import write_text
from moe_runtime.models.pocket.evaluate import EVALUATION_FILE, measure, rounded, spent_by

_TEMPLATE = """\
# The desk model

A trained Mixture-of-Experts language model for measuring caches, prediction and lossy routing.
An expert has {expert_mib:.2f} MiB; those of the [pocket model](../pocket/README.md) are too small
for that, and random weights have no trained routing. The weights are not part of the project. This
recipe makes them from text that every Python installation carries:

```
python -P -m moe_runtime.models.pocket.texts --output models/desk/texts
moe-runtime train models/desk/train.toml
moe-runtime run models/desk/runs/moe/model --prompt "The for statement" --host-memory 192MiB
python -P -m moe_runtime.models.desk.evaluate --run models/desk/runs/moe --output models/desk
```

Ctrl-C stops the training and `--resume` goes on. It takes 3 GB of memory, and two hours of a core
with AVX-512 that has nothing else to do.

## Architecture

`Qwen3MoeForCausalLM`: {layers} layers, every one a mixture of {experts} experts with top-{top_k}
(weights renormalised), hidden size {hidden}, expert hidden size {intermediate}, {heads} query and
{kv_heads} key-value heads of {head_dim}, tied embeddings, the pocket model's tokenizer (4096
tokens). {total_millions:.0f} million parameters, {active_millions:.1f} million of them active; the
checkpoint has {megabytes:.0f} MB in bf16, {expert_share:.0%} of it experts.

## Training

The model measured here saw {tokens_millions:.2f} million tokens ({steps} steps of 2,048) of the
pocket model's [mixture](../pocket/README.md#data-and-licence), in float32 with AdamW and one
thread. It took {minutes:.0f} minutes at the lowest priority of a machine of two busy cores.{note}

SHA-256 of `model.safetensors`: `{digest}`.
Other versions of Python or torch give other weights.

## Held-out loss

Nats per token (bits per byte). The unigram model has the token frequencies of the training mixture.

{losses}

Perplexity {perplexity:.0f}; {unigram_perplexity:.0f} of the unigram model. The model exercises a
runtime, and is no evidence for what experts gain.

## Expert usage

Share of the routed rows on the held-out text; even would be {even:.2f} %. Entropy is relative to
that of even use. [Policies](../../docs/policies.md#teach-it) were compared on this routing.

{usage}

## Samples

New tokens at temperature 0.8 (seed 0, not selected), the prompts in bold.

{samples}
"""

PROMPTS = ("The for statement", "string.Template.substitute(self, mapping)\n    ")


def render_card(evaluation: dict[str, Any]) -> str:
    shape, scores = evaluation["shape"], evaluation["held_out_mixture"]
    spent, files = evaluation["training"], evaluation["checkpoint"]
    parameters = evaluation["parameters"]
    matrices = 3 * shape["hidden"] * shape["intermediate"]
    of_experts = matrices * shape["layers"] * shape["experts"]
    losses = ["| held-out text | tokens | unigram | desk model |", "|---|--:|--:|--:|"]
    for kind, found in evaluation["held_out"].items():
        losses.append(f"| {kind} | {found['tokens']:,} | {_cells(found)} |")
    losses.append(f"| mixture, 15 : 50 : 35 | | {_cells(scores)} |")
    usage = ["| layer | least used | most used | entropy |", "|--:|--:|--:|--:|"]
    for number, layer in enumerate(evaluation["expert_usage"]):
        least, most = 100 * layer["min"], 100 * layer["max"]
        usage.append(f"| {number} | {least:.1f} % | {most:.1f} % | {layer['entropy']:.3f} |")
    return _TEMPLATE.format(
        **shape,
        expert_mib=2 * matrices / 2**20,
        total_millions=parameters["total"] / 1e6,
        active_millions=parameters["active"] / 1e6,
        expert_share=of_experts / parameters["total"],
        megabytes=files["bytes"] / 1e6,
        digest=files["sha256"],
        tokens_millions=spent["tokens"] / 1e6,
        steps=f"{spent['steps']:,}",
        minutes=spent["elapsed_s"] / 60,
        note="\n" + textwrap.fill(spent["note"], width=100),
        losses="\n".join(losses),
        perplexity=torch.tensor(scores["moe"]["nats_per_token"]).exp(),
        unigram_perplexity=torch.tensor(scores["unigram"]["nats_per_token"]).exp(),
        even=100 / shape["experts"],
        usage="\n".join(usage),
        samples="\n\n".join(map(_sample, evaluation["samples"])),
    )


def _cells(scores: dict[str, Any]) -> str:
    return " | ".join(
        f"{scores[model]['nats_per_token']:.3f} ({scores[model]['bits_per_byte']:.3f})"
        for model in ("unigram", "moe")
    )


def _sample(sample: dict[str, str]) -> str:
    lines = (sample["prompt"] + sample["sampled"]).splitlines()
    body = "\n".join(f"    {line}".rstrip() for line in lines)
    return f"**`{sample['prompt'].strip()}`**\n\n{body}"


def evaluate(run: Path, note: str) -> dict[str, Any]:
    """All numbers of the card of a complete run."""
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(run / "model")
    weights = run / "model" / "model.safetensors"
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    found = {
        "shape": {
            "layers": config.num_hidden_layers,
            "experts": config.num_experts,
            "top_k": config.num_experts_per_tok,
            "hidden": config.hidden_size,
            "intermediate": config.moe_intermediate_size,
            "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim,
        },
        "checkpoint": {"bytes": weights.stat().st_size, "sha256": digest},
        "training": {**spent_by(run), "note": note},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        **measure(run / "model", prompts=PROMPTS),
    }
    return rounded(found)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure the desk model, and write its card.")
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--output", type=Path, required=True, help="folder of the card")
    parser.add_argument("--note", default="", help="a remark on the run for the model card")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    evaluation = evaluate(options.run, options.note)
    text = json.dumps(evaluation, indent=1, ensure_ascii=False) + "\n"
    write_text(options.output / EVALUATION_FILE, text)
    write_text(options.output / "README.md", render_card(evaluation))


if __name__ == "__main__":
    main()
