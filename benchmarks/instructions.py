"""Tune the pocket model on instructions: `python benchmarks/instructions.py --picture P [--save]`.

Writes questions on Python's functions from templates, one wording of each function held out, and
trains every parameter of the pocket model by `moe-runtime finetune`. Counts the held-out questions
that the model answers in the form of the set, and rightly, before and after.
"""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import moe_runtime
from moe_runtime.benchmarks.harness.scripting import ScriptResults, option, script
from moe_runtime.benchmarks.suite import facts
from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.cli.main import main as command
from moe_runtime.models.pocket import pocket_path

DOES = {
    "abs": "drops the sign of a number", "all": "tells whether every item is true",
    "any": "tells whether some item is true", "bin": "writes a number in base two",
    "bool": "tells whether a value counts as true", "bytes": "makes a row of small numbers",
    "callable": "tells whether a value can be called", "chr": "gives the character of a number",
    "dict": "makes a table of keys and values", "dir": "lists the names of an object",
    "divmod": "gives quotient and remainder", "enumerate": "counts items as they come",
    "filter": "keeps items that pass a test", "float": "reads a number with a fraction",
    "format": "writes a value in a given form", "getattr": "reads an attribute by its name",
    "hash": "gives a number for a table", "hex": "writes a number in base sixteen",
    "id": "tells two objects apart", "input": "asks for a line of text",
    "int": "reads a whole number", "iter": "begins to go through items",
    "len": "counts the items of a container", "list": "puts items in a row that may change",
    "map": "applies a function to each item", "max": "finds the largest item",
    "min": "finds the smallest item", "next": "takes one more item",
    "open": "opens a file", "ord": "gives the number of a character",
    "pow": "raises a number to a power", "print": "writes values to the screen",
    "range": "counts from one number to another", "repr": "writes a value as code",
    "reversed": "goes through items from the end", "round": "drops digits of a fraction",
    "set": "keeps each item once", "sorted": "puts items in order",
    "str": "writes a value as text", "sum": "adds numbers",
    "tuple": "puts items in a row that stays", "type": "names the class of a value",
    "vars": "shows the attributes of an object", "zip": "pairs the items of two rows",
}  # fmt: skip
WORDINGS = (
    "What does {0} do?", "Explain {0}.", "What is {0} for?", "When do I need {0}?",
    "Tell me about {0}.", "Describe the function {0}.",
)  # fmt: skip
METRICS = facts("share", "in_form", "right", better="more") | facts("nats", "loss")


def question(name: str, wording: int) -> str:
    return f"Question: {WORDINGS[wording].format(name)}\nAnswer:"


def answer(name: str) -> str:
    return f" `{name}` {DOES[name]}."


def held_out(place: int) -> int:
    return place % len(WORDINGS)


def write_records(path: Path) -> None:
    with path.open("w") as file:
        for place, name in enumerate(DOES):
            for wording in range(len(WORDINGS)):
                if wording != held_out(place):
                    asked = {"prompt": question(name, wording), "completion": answer(name)}
                    file.write(json.dumps(asked) + "\n")


def measure(model: Path) -> tuple[Mapping[str, float], list[str]]:
    """Shares of the held-out questions, and each answer."""
    tokenizer, texts = load_tokenizer(pocket_path()), list[str]()
    loaded: Any = moe_runtime.load(model, device="cpu", host_memory="512MiB", max_tokens=128)
    with loaded.moe:
        for place, name in enumerate(DOES):
            ids = tokenizer(question(name, held_out(place)), return_tensors="pt")
            out = loaded.generate(**ids, max_new_tokens=24, do_sample=False)
            texts.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :]))
    end = tokenizer.eos_token
    forms = [text.startswith(" `") and text.endswith(f".{end}") for text in texts]
    right = [text == answer(name) + end for name, text in zip(DOES, texts, strict=True)]
    return {"in_form": sum(forms) / len(texts), "right": sum(right) / len(texts)}, texts


def draw(losses: Sequence[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 2.6), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    axes.set(xlabel="step", ylabel="loss of the answers", ylim=(0, None))
    figure.savefig(path, metadata={"Date": None})


@script(picture=option(None, "draw the losses here", type=Path), steps=160)
def main(options: Namespace) -> int:
    results = ScriptResults("instructions", options, {"steps": options.steps}, METRICS)
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder, "instructions.jsonl"), Path(folder, "tuned")
        write_records(data)
        before, first = measure(pocket_path())
        words = ["finetune", str(pocket_path()), str(data), "-o", str(run)]
        words += ["--steps", str(options.steps), "--context", "128", "--sequences", "4"]
        words += ["--rate", "5e-4", "--warmup", "20", "--held-out-share", "0"]
        if code := command([*words, "--host-memory", "1GiB"]):
            return code
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if "loss" in line]
        after, last = measure(run / "model")
    results.add("before", [{**before, "loss": losses[0]}])
    results.add("after", [{**after, "loss": losses[-1]}])
    for place, name in enumerate(DOES):
        print(f"{question(name, held_out(place))!r}: {first[place]!r} -> {last[place]!r}")
    if options.picture is not None:
        draw(losses, options.picture)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
