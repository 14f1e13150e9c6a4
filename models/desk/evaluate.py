"""Measures a trained desk model and writes its card.

    python -P -m moe_runtime.models.desk.evaluate --run models/desk/runs/moe --output models/desk

Takes the folder of a complete run of train.toml, whose checkpoint stays where it is.
`evaluation.json` has the numbers, `README.md` is the card.
"""

import argparse
import hashlib
import textwrap
from pathlib import Path
from typing import Any

import torch

from moe_runtime.models.pocket.evaluate import (
    filled_card,
    loss_rows,
    measure,
    rounded,
    spent_by,
    usage_and_samples,
    write_evaluation,
)

PROMPTS = ("The for statement", "string.Template.substitute(self, mapping)\n    ")


def render_card(evaluation: dict[str, Any]) -> str:
    shape, scores = evaluation["shape"], evaluation["held_out_mixture"]
    spent, files = evaluation["training"], evaluation["checkpoint"]
    parameters = evaluation["parameters"]
    matrices = 3 * shape["hidden"] * shape["intermediate"]
    of_experts = matrices * shape["layers"] * shape["experts"]
    losses = ["| held-out text | tokens | unigram | desk model |", "|---|--:|--:|--:|"]
    losses += loss_rows(evaluation, ("unigram", "moe"))
    return filled_card(
        Path(__file__),
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
        **usage_and_samples(evaluation),
    )


def evaluate(run: Path, note: str) -> dict[str, Any]:
    """All numbers for the card of a complete run."""
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
    write_evaluation(options.output, evaluation, lambda _: render_card(evaluation))


if __name__ == "__main__":
    main()
