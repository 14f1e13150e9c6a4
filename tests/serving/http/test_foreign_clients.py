"""Programs of others against the server, unchanged; `make test-clients` installs and runs them."""

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from http_server import TEMPLATE

from moe_runtime.models.pocket import pocket_path

TEXTS = [
    ("The for statement", " is used to iterate over the elements of a sequence."),
    ("def f(x):", "\n    return naïve"),
    ("Lists are", " 漢字 mutable"),
]
TASK = """\
task: likelihoods
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: context
doc_to_choice: choices
target_delimiter: ""
doc_to_target: gold
metric_list: [{metric: acc}]
"""


def run(folder: Path, name: str, *words: str) -> str:
    """What a program prints that has no network and a home of its own."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HOME": str(folder)}
    ended = subprocess.run(
        [found, *words],
        cwd=folder,
        env={**os.environ, **offline},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    return ended.stdout


def test_lm_eval_finds_the_likelihoods_of_the_model(site, pocket, tokenizer, tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [
        {"context": context, "choices": [text, text[::-1]], "gold": 0} for context, text in TEXTS
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "likelihoods.yaml").write_text(TASK % data)
    model = {
        "model": "pocket",
        "base_url": f"{site.address}/v1/completions",
        "tokenizer": str(pocket_path()),
        "num_concurrent": 3,
    }
    words = ["--model", "local-completions"]
    words += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    words += ["--tasks", "likelihoods", "--include_path", str(tmp_path)]
    run(tmp_path, "lm_eval", *words, "--log_samples", "--output_path", str(tmp_path / "out"))
    (samples,) = (tmp_path / "out").rglob("samples_likelihoods*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(found) == len(TEXTS)
    for sample in found:
        row = sample["doc"]
        for text, ((likelihood, _),) in zip(row["choices"], sample["resps"], strict=True):
            expected = likelihood_of(pocket, tokenizer, row["context"], text)
            assert abs(float(likelihood) - expected) < 1e-4


def likelihood_of(pocket: Any, tokenizer: Any, context: str, text: str) -> float:
    """Of a text behind another one, by the model asked directly."""
    ids = tokenizer(context + text)["input_ids"]
    first = len(tokenizer(context)["input_ids"])
    with torch.inference_mode():
        logprobs = pocket(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(float(logprobs[at - 1, ids[at]]) for at in range(first, len(ids)))


def test_llama_benchy_measures_prompts_and_answers(site, tmp_path):
    result = tmp_path / "found.json"
    words = ["--base-url", f"{site.address}/v1", "--model", "pocket"]
    words += ["--tokenizer", str(pocket_path()), "--book-url", f"{site.address}/"]
    words += ["--pp", "32", "--tg", "8", "--runs", "1", "--concurrency", "2", "--skip-coherence"]
    words += ["--exact-tg", "--format", "json", "--save-result", str(result)]
    run(tmp_path, "llama-benchy", *words, "--exit-on-first-fail")
    measured: Mapping[str, Any] = json.loads(result.read_text())
    assert "error" not in json.dumps(measured).lower()
    (one,) = measured["benchmarks"]
    assert one["tg_throughput"]["mean"] > 0


def test_llm_goes_on_with_a_conversation(speaking, tmp_path):
    def say(prompt: str) -> str:
        return "And twice." if "Once." in prompt else "Once."

    site = speaking(say, TEMPLATE)
    (tmp_path / ".config/io.datasette.llm").mkdir(parents=True)
    about = {"model_id": "pocket", "model_name": "pocket", "api_base": f"{site.address}/v1"}
    models = tmp_path / ".config/io.datasette.llm/extra-openai-models.yaml"
    models.write_text(json.dumps([about]))  # which is YAML too
    words = ("--model", "pocket", "--key", "none")
    assert run(tmp_path, "llm", *words, "--system", "Be brief.", "Hi") == "Once.\n"
    assert run(tmp_path, "llm", *words, "--continue", "Again") == "And twice.\n"
