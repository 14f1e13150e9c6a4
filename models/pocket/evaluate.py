"""Measures a trained pocket model and exports it with its card.

    python -P -m moe_runtime.models.pocket.evaluate --moe models/pocket/runs/moe

Takes the folders of two runs of `moe-runtime train` (train.toml and train-dense.toml) and copies
the checkpoint of the first. `evaluation.json` has the numbers, `README.md` is the card. Weights are
bfloat16; arithmetic is float32. With `--continues` the run started from the model in the output
folder: what that had been trained with is added, and without `--dense` the baseline's numbers stay.
"""

import argparse
import json
import logging
import math
import platform
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from moe_runtime.files import replace_folder, write_text
from moe_runtime.models.pocket.corpus import CONTEXT, KINDS, Document, Kind, gather

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def render_card(evaluation: dict[str, Any], *, checkpoint_bytes: int) -> str:
    parameters = evaluation["parameters"]
    run = evaluation["training"]["moe"]
    dense_run = evaluation["training"]["dense"]
    available = evaluation["training_tokens_available"]
    return filled_card(
        Path(__file__),
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
        losses="\n".join(
            [
                "| held-out text | tokens | unigram | dense | pocket model |",
                "|---|--:|--:|--:|--:|",
                *loss_rows(evaluation, ("unigram", "dense", "moe")),
                *_equal_rows(evaluation),
            ]
        ),
        **usage_and_samples(evaluation),
    )


def filled_card(module: Path, **values: Any) -> str:
    """`card.txt` beside a module with its fields filled in."""
    return module.with_name("card.txt").read_text("utf-8").format(**values)


def loss_rows(evaluation: dict[str, Any], models: Sequence[str]) -> list[str]:
    """Table rows with losses of models on each kind of held-out text and on the mixture."""
    kinds = [(kind, f"{one['tokens']:,} ", one) for kind, one in evaluation["held_out"].items()]
    rows = []
    for name, tokens, scores in [*kinds, (MIXTURE, "", evaluation["held_out_mixture"])]:
        cells = [_loss(scores[model]) for model in models]
        rows.append(f"| {name} | {tokens}| {' | '.join(cells)} |")
    return rows


def _equal_rows(evaluation: dict[str, Any]) -> list[str]:
    """A table row with the losses on the mixture when both models had seen as many tokens."""
    equal = evaluation.get("at_equal_tokens")
    if equal is None:
        return []
    cells = [_loss(equal[model]) for model in ("dense", "moe")]
    millions = f"{equal['tokens'] / 1e6:.1f}"
    return [f"| mixture, after {millions} million tokens each | | | {' | '.join(cells)} |"]


def _loss(scores: dict[str, float]) -> str:
    return f"{scores['nats_per_token']:.3f} ({scores['bits_per_byte']:.3f})"


def usage_and_samples(evaluation: dict[str, Any]) -> dict[str, str]:
    """The fields of a card with the experts' usage, and prompts with sampled continuations."""
    usage = ["| layer | least used | most used | entropy |", "|--:|--:|--:|--:|"]
    for number, layer in enumerate(evaluation["expert_usage"]):
        least, most = 100 * layer["min"], 100 * layer["max"]
        usage.append(f"| {number} | {least:.1f} % | {most:.1f} % | {layer['entropy']:.3f} |")
    samples = []
    for sample in evaluation["samples"]:
        text = (sample["prompt"] + sample["sampled"]).splitlines()
        body = "\n".join(f"    {line}".rstrip() for line in text)
        samples.append(f"**`{sample['prompt'].strip().splitlines()[0]}`**\n\n{body}")
    return {"usage": "\n".join(usage), "samples": "\n\n".join(samples)}


_log = logging.getLogger(__name__)


def active_parameters(model: "PreTrainedModel") -> int:
    """Parameters that one token passes through, embeddings counted once."""
    total = sum(parameter.numel() for parameter in model.parameters())
    routed = sum(
        parameter.numel() for name, parameter in model.named_parameters() if ".experts." in name
    )
    config: Any = model.config
    return total - routed + routed * config.num_experts_per_tok // config.num_experts


# shares of the training windows, as in train.toml
SHARES: dict[Kind, float] = {"topic": 0.15, "docstring": 0.50, "source": 0.35}
MIXTURE = "mixture, 15 : 50 : 35"

Streams = dict[Kind, npt.NDArray[np.uint16]]


def tokenize(documents: list[Document], tokenizer: "PreTrainedTokenizerBase") -> Streams:
    """One stream of token ids per kind, each document followed by the end-of-text token."""
    end: Any = tokenizer.eos_token_id
    streams: Streams = {}
    for kind in KINDS:
        ids: list[int] = []
        for document in documents:
            if document.kind == kind:
                ids.extend(tokenizer(document.text, verbose=False)["input_ids"])
                ids.append(end)
        streams[kind] = np.array(ids, dtype=np.uint16)
    return streams


CHECKPOINT_FILES = (
    *("config.json", "generation_config.json", "model.safetensors"),
    *("tokenizer.json", "tokenizer_config.json"),
)
EVALUATION_FILE = "evaluation.json"
PROMPTS = (
    "The for statement",
    "A class definition",
    "Return the absolute value of",
    "string.Template.substitute(self, mapping)\n    ",
    'def read_lines(path):\n    """',
)
SAMPLE_TOKENS = 80
MAX_TOKENS_PER_KIND = 16_384
SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """A kind of held-out text: its token stream and its length in bytes."""

    ids: npt.NDArray[np.uint16]
    num_bytes: int

    def scores(self, nats: float) -> dict[str, float]:
        """A total log loss as nats per token and as bits per byte."""
        bits_per_byte = nats / math.log(2) / self.num_bytes
        return {"nats_per_token": nats / len(self.ids), "bits_per_byte": bits_per_byte}


def copy_model(run: Path, folder: Path) -> dict[str, float]:
    """Copies the checkpoint of a run; returns the run's costs."""
    with replace_folder(folder, keeps=lambda path: True) as new:
        for name in CHECKPOINT_FILES:
            shutil.copyfile(run / "model" / name, new / name)
    return spent_by(run)


def spent_by(run: Path) -> dict[str, float]:
    """`steps`, `tokens` and `elapsed_s` of a complete run of `moe-runtime train`."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    spent = {name: summary[name] for name in ("steps", "tokens")}
    return spent | {"elapsed_s": round(summary["elapsed_s"])}


def held_out_texts(
    documents: list[Document], tokenizer: "PreTrainedTokenizerBase"
) -> dict[Kind, HeldOut]:
    """The held-out documents of each kind as one stream of limited length."""
    streams = tokenize([document for document in documents if document.held_out], tokenizer)
    texts: dict[Kind, HeldOut] = {}
    for kind, stream in streams.items():
        ids = stream[:MAX_TOKENS_PER_KIND]
        text = str(tokenizer.decode(ids.tolist(), skip_special_tokens=True))
        texts[kind] = HeldOut(ids=ids, num_bytes=len(text.encode()))
    return texts


def unigram_nats(training: Streams, text: HeldOut, *, vocab_size: int) -> float:
    """Log loss of a unigram model of the training mixture, add-one smoothed."""
    frequencies = np.zeros(vocab_size)
    for kind, stream in training.items():
        counts = np.bincount(stream, minlength=vocab_size) + 1.0
        frequencies += SHARES[kind] * counts / counts.sum()
    return float(-np.log(frequencies[text.ids]).sum())


@torch.inference_mode()
def model_nats(
    model: "PreTrainedModel", ids: npt.NDArray[np.uint16], *, usage: torch.Tensor | None = None
) -> float:
    """Log loss of a model over a stream cut into whole contexts; every token is predicted once."""
    stream = torch.from_numpy(np.concatenate([[model.config.eos_token_id], ids]).astype(np.int64))
    nats = 0.0
    for start in range(0, len(ids), CONTEXT):
        inputs = stream[start : min(start + CONTEXT, len(ids))]
        targets = stream[start + 1 : start + 1 + len(inputs)]
        options = {} if usage is None else {"output_router_logits": True}
        outputs: Any = model(inputs[None], use_cache=False, **options)
        nats += float(F.cross_entropy(outputs.logits[0].double(), targets, reduction="sum"))
        if usage is not None:
            for layer, logits in enumerate(outputs.router_logits):
                chosen = logits.topk(model.config.num_experts_per_tok, dim=-1).indices.reshape(-1)
                usage[layer] += torch.bincount(chosen, minlength=usage.shape[1])
    return nats


def summarise_usage(usage: torch.Tensor) -> list[dict[str, Any]]:
    """Shares, extremes and normalised entropy of each layer's experts."""
    layers: list[dict[str, Any]] = []
    for counts in usage:
        shares = counts / counts.sum()
        entropy = float(-(shares * shares.clamp_min(1e-12).log()).sum()) / math.log(len(counts))
        layers.append(
            {
                "shares": [round(float(share), 4) for share in shares],
                "min": round(float(shares.min()), 4),
                "max": round(float(shares.max()), 4),
                "entropy": round(entropy, 4),
            }
        )
    return layers


def generate_samples(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str] = PROMPTS,
) -> list[dict[str, str]]:
    generate: Any = model.generate
    samples: list[dict[str, str]] = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        sample = {"prompt": prompt}
        for name, options in (
            ("greedy", {"do_sample": False}),
            ("sampled", {"do_sample": True, "temperature": SAMPLE_TEMPERATURE}),
        ):
            torch.manual_seed(0)
            ids = generate(**inputs, max_new_tokens=SAMPLE_TOKENS, **options)[0]
            new_ids = ids[inputs["input_ids"].shape[1] :]
            sample[name] = str(tokenizer.decode(new_ids, skip_special_tokens=True))
        samples.append(sample)
    return samples


def measure(
    moe_folder: Path,
    prompts: Sequence[str] = PROMPTS,
    *,
    dense_folder: Path | None = None,
    earlier: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All numbers of a card: of the exported checkpoint, its dense baseline if any, and the corpus.

    The baseline is measured from its folder, or taken from an earlier evaluation of the same text.
    """
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(moe_folder)
    moe: Any = AutoModelForCausalLM.from_pretrained(moe_folder, dtype=torch.float32).eval()
    dense: Any = None
    parameters = {"total": moe.num_parameters(), "active": active_parameters(moe)}
    if dense_folder is not None:
        dense = AutoModelForCausalLM.from_pretrained(dense_folder, dtype=torch.float32).eval()
        parameters["dense"] = dense.num_parameters()
    elif earlier is not None:
        parameters["dense"] = earlier["parameters"]["dense"]
    documents = gather()
    training = tokenize([document for document in documents if not document.held_out], tokenizer)
    shape = (moe.config.num_hidden_layers, moe.config.num_experts)
    usage = torch.zeros(shape, dtype=torch.float64)
    held_out: dict[str, Any] = {}
    for kind, text in held_out_texts(documents, tokenizer).items():
        _log.info("measuring %d held-out tokens of kind %s", len(text.ids), kind)
        unigram = unigram_nats(training, text, vocab_size=moe.config.vocab_size)
        held_out[kind] = {
            "tokens": len(text.ids),
            "bytes": text.num_bytes,
            "unigram": text.scores(unigram),
            "moe": text.scores(model_nats(moe, text.ids, usage=usage)),
        }
        if dense is not None:
            held_out[kind]["dense"] = text.scores(model_nats(dense, text.ids))
        elif earlier is not None:
            held_out[kind]["dense"] = kept_scores(earlier["held_out"][kind], kind, text)
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "parameters": parameters,
        "training_tokens_available": {kind: len(stream) for kind, stream in training.items()},
        "held_out": held_out,
        "held_out_mixture": _mixture(held_out),
        "expert_usage": summarise_usage(usage),
        "samples": generate_samples(moe, tokenizer, prompts),
    }


def kept_scores(known: dict[str, Any], kind: Kind, text: HeldOut) -> dict[str, float]:
    """The dense baseline's scores from an earlier evaluation, for the same text only."""
    if (known["tokens"], known["bytes"]) != (len(text.ids), text.num_bytes):
        raise ValueError(
            f"the held-out text of kind {kind!r} differs from the earlier evaluation's; train and "
            "give the dense baseline (--dense)"
        )
    return known["dense"]


def at_equal_tokens(earlier: dict[str, Any]) -> dict[str, Any] | None:
    """Scores on the mixture from when both models had seen as many tokens, if that was measured."""
    spent = earlier["training"]
    if spent["moe"]["tokens"] != spent["dense"]["tokens"]:
        return earlier.get("at_equal_tokens")
    scores = {model: earlier["held_out_mixture"][model] for model in ("dense", "moe")}
    return {"tokens": spent["moe"]["tokens"], **scores}


def _mixture(held_out: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Scores averaged over the kinds with the weights of training."""
    return {
        model: {
            unit: sum(SHARES[kind] * held_out[kind][model][unit] for kind in KINDS)
            for unit in ("nats_per_token", "bits_per_byte")
        }
        for model in ("unigram", "dense", "moe")
        if model in held_out[KINDS[0]]
    }


def rounded(value: Any) -> Any:
    """Rounds numbers to four decimals."""
    return json.loads(json.dumps(value), parse_float=lambda text: round(float(text), 4))


def write_evaluation(
    folder: Path, evaluation: dict[str, Any], card_of: Callable[[Path], str]
) -> None:
    """Writes the numbers, and the card."""
    text = json.dumps(evaluation, indent=1, ensure_ascii=False) + "\n"
    write_text(folder / EVALUATION_FILE, text)
    write_text(folder / "README.md", card_of(folder))


def card_of(folder: Path) -> str:
    """The model card of a folder, from its `evaluation.json` and file sizes."""
    evaluation = json.loads((folder / EVALUATION_FILE).read_text(encoding="utf-8"))
    checkpoint_bytes = sum((folder / name).stat().st_size for name in CHECKPOINT_FILES)
    return render_card(evaluation, checkpoint_bytes=checkpoint_bytes)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Export and measure the pocket model.")
    parser.add_argument("--moe", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--dense", type=Path, help="folder of the dense run")
    parser.add_argument(
        "--continues", action="store_true", help="the run started from the model in --output"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to export to")
    parser.add_argument("--note", default="", help="a remark on the run for the model card")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    # a second thread gains little at this size
    torch.set_num_threads(1)
    if options.dense is None and not options.continues:
        parser.error("--dense is needed, unless --continues takes the baseline's numbers over")
    before: dict[str, Any] = {}
    if options.continues:
        before = json.loads((options.output / EVALUATION_FILE).read_text(encoding="utf-8"))
    spent = copy_model(options.moe, options.output)
    if options.continues:
        spent = {name: before["training"]["moe"][name] + spent[name] for name in spent}
    dense_folder = None if options.dense is None else options.dense / "model"
    dense = spent_by(options.dense) if options.dense else before["training"]["dense"]
    evaluation = {
        "training": {"moe": spent, "dense": dense, "note": options.note},
        **measure(options.output, dense_folder=dense_folder, earlier=before),
    }
    if options.continues and not options.dense:
        evaluation["at_equal_tokens"] = at_equal_tokens(before)
    evaluation = rounded(evaluation)
    write_evaluation(options.output, evaluation, card_of)


if __name__ == "__main__":
    main()
