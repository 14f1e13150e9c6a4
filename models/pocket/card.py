"""The model card of the pocket model, written from `evaluation.json`."""

import textwrap
from typing import Any

_TEMPLATE = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# The pocket model

A Mixture-of-Experts language model of {total_millions:.1f} million parameters, of which a token
passes through {active_millions:.1f} million. It is small enough to ship with the code
({megabytes:.1f} MB) and real where it matters for a runtime: a trained router, a trained tokenizer,
text that a reader recognises. Tests, traces, benchmarks and `make demo` use it. It writes something
like Python's documentation; it does not know Python, and nothing it says should be relied on.

`transformers` reads it as it is: `AutoModelForCausalLM.from_pretrained("models/pocket")`.

## Architecture

`Qwen3MoeForCausalLM`: 6 layers, every one a mixture of 16 experts with top-2 (weights
renormalised), hidden size 256, expert hidden size 128, 4 query and 2 key-value heads of 64,
context 512, tied embeddings, byte-level BPE with 4096 tokens. Weights in bfloat16, one tensor per
expert matrix; one expert is 192 KiB. `<|endoftext|>` ends a document and begins one.

## Data and licence

Text that comes with every Python installation, gathered by `corpus.py` from Python {python}: the
language reference in `pydoc_data.topics` ({topic_tokens:,} tokens), the docstrings of the standard
library ({docstring_tokens:,}) and its source without docstrings ({source_tokens:,}), drawn with
the weights 15 : 50 : 35. Tests, generated tables and third-party packages are left out. Whole
topics and files, one name in twenty, are held out; a paragraph of 80 characters or more that
occurs in held-out text is removed from the training text.

The training text is under the PSF License Agreement. The model and its tokenizer are under
Apache-2.0.

## Training

{tokens_millions:.1f} million tokens ({steps:,} steps of 2,048), AdamW, one thread,
{minutes:.0f} minutes on a busy machine of two cores. A load-balance loss per layer and a router z
loss keep the experts in use. The dense baseline was trained for {dense_steps:,} steps, on
{dense_tokens} of the same mixture.

{note}

```
python -P -m moe_runtime.models.pocket.texts --output models/pocket/texts
moe-runtime train models/pocket/train.toml
moe-runtime train models/pocket/train-dense.toml
python -P -m moe_runtime.models.pocket.evaluate --moe models/pocket/runs/moe \\
    --dense models/pocket/runs/dense --output models/pocket
moe-runtime train models/pocket/train.toml --set run.start_from=. --set run.output=runs/longer \\
    --set run.steps=600 --set run.seed=1 --set run.precision=float32 --set data.short_share=0.6 \\
    --set optimizer.peak_rate=1e-3 --set optimizer.warmup_steps=20
python -P -m moe_runtime.models.pocket.evaluate --moe models/pocket/runs/longer --continues \\
    --output models/pocket
```

Another Python version has other text and gives a slightly different model.

## Held-out loss

Nats per token (bits per byte). The unigram model has the token frequencies of the training mixture.
The dense baseline is the same network with one MLP as large as two experts: {dense_millions:.2f}
million parameters; a token uses {active_exact_millions:.2f} million here, the routers included.

{losses}

{comparison}

## Expert usage

Share of the routed rows that each expert receives on the held-out text; even would be 6.25 %.
Entropy is relative to that of even use.

{usage}

## Samples

Prompts in bold; 80 new tokens, greedy and at temperature 0.8 (seed 0, not selected).

{samples}
"""

_SHORT_RUN = (
    "A likely reason: in so short a run each expert is trained on an eighth of the tokens, a dense "
    "layer on all of them."
)
_PURPOSE = "This model is for exercising a runtime, not evidence for what experts gain."


def render_card(evaluation: dict[str, Any], *, checkpoint_bytes: int) -> str:
    """The card's Markdown for the numbers that `evaluate.py` measured."""
    parameters = evaluation["parameters"]
    run = evaluation["training"]["moe"]
    dense_run = evaluation["training"]["dense"]
    available = evaluation["training_tokens_available"]
    return _TEMPLATE.format(
        total_millions=parameters["total"] / 1e6,
        active_millions=parameters["active"] / 1e6,
        active_exact_millions=parameters["active"] / 1e6,
        dense_millions=parameters["dense"] / 1e6,
        megabytes=checkpoint_bytes / 1e6,
        python=evaluation["versions"]["python"],
        topic_tokens=available["topic"],
        docstring_tokens=available["docstring"],
        source_tokens=available["source"],
        tokens_millions=run["tokens"] / 1e6,
        steps=run["steps"],
        dense_steps=dense_run["steps"],
        dense_tokens=(
            "the same number of tokens"
            if dense_run["tokens"] == run["tokens"]
            else f"{dense_run['tokens'] / 1e6:.1f} million tokens"
        ),
        minutes=run["elapsed_s"] / 60,
        note=textwrap.fill(evaluation["training"]["note"], width=100),
        losses=_loss_table(evaluation),
        comparison=_comparison(evaluation),
        usage=_usage_table(evaluation["expert_usage"]),
        samples="\n\n".join(_sample(sample) for sample in evaluation["samples"]),
    )


def _loss_table(evaluation: dict[str, Any]) -> str:
    lines = ["| held-out text | tokens | unigram | dense | pocket model |", "|---|--:|--:|--:|--:|"]
    for kind, scores in evaluation["held_out"].items():
        lines.append(f"| {kind} | {scores['tokens']:,} | {_cells(scores)} |")
    lines.append(f"| mixture, 15 : 50 : 35 | | {_cells(evaluation['held_out_mixture'])} |")
    return "\n".join(lines)


def _comparison(evaluation: dict[str, Any]) -> str:
    """A sentence or two on the mixture of experts against the dense baseline."""
    run, dense_run = evaluation["training"]["moe"], evaluation["training"]["dense"]
    scores = evaluation["held_out_mixture"]
    gap = scores["moe"]["nats_per_token"] - scores["dense"]["nats_per_token"]
    if run["tokens"] == dense_run["tokens"] and gap < 0:
        return f"The experts lower the loss by {-gap:.3f} nats per token."
    if run["tokens"] == dense_run["tokens"]:
        return textwrap.fill(
            f"The dense baseline is ahead by {gap:.3f} nats per token. {_SHORT_RUN} {_PURPOSE}",
            width=100,
        )
    more = (
        f"The two differ by {abs(gap):.3f} nats per token here, but the pocket model has seen "
        f"{run['tokens'] / dense_run['tokens']:.2f} times as many tokens: this compares no "
        "architectures."
    )
    equal = evaluation.get("at_equal_tokens")
    if equal is not None:
        more += (
            f" When both had seen {equal['tokens'] / 1e6:.1f} million, dense stood at "
            f"{equal['dense']['nats_per_token']:.3f} and the pocket model at "
            f"{equal['moe']['nats_per_token']:.3f}."
        )
        if equal["moe"]["nats_per_token"] > equal["dense"]["nats_per_token"]:
            more += f" {_SHORT_RUN}"
    return textwrap.fill(f"{more} {_PURPOSE}", width=100)


def _cells(scores: dict[str, Any]) -> str:
    return " | ".join(
        f"{scores[model]['nats_per_token']:.3f} ({scores[model]['bits_per_byte']:.3f})"
        for model in ("unigram", "dense", "moe")
    )


def _usage_table(layers: list[dict[str, Any]]) -> str:
    lines = ["| layer | least used | most used | entropy | all 16 (%) |", "|--:|--:|--:|--:|---|"]
    for number, layer in enumerate(layers):
        shares = " ".join(f"{100 * share:.1f}" for share in layer["shares"])
        lines.append(
            f"| {number} | {100 * layer['min']:.1f} % | {100 * layer['max']:.1f} % "
            f"| {layer['entropy']:.3f} | {shares} |"
        )
    return "\n".join(lines)


def _sample(sample: dict[str, str]) -> str:
    """One prompt with its continuations, as indented code so that any text stays literal."""
    parts = [f"**`{sample['prompt'].strip().splitlines()[0]}`**"]
    for name in ("greedy", "sampled"):
        text = sample["prompt"] + sample[name]
        body = "\n".join(f"    {line}".rstrip() for line in text.splitlines())
        parts.append(f"{name}:\n\n{body}")
    return "\n\n".join(parts)
