"""A folder in which the paths that the pages name are there, on a tiny scale."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from http_server import TEMPLATE
from page_blocks import ROOT
from text_checkpoint import tiny_text_model, tiny_tokenizer
from torch.distributed import HashStore
from training_runs import write_run

from moe_runtime.cli.main import main
from moe_runtime.models.pocket import pocket_path

RESULTS = ROOT / "benchmarks" / "results"
PROMPTS = ["The for statement", "A class has", "Lists are", "Modules and packages"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of eight experts in bf16, a tokenizer and a template for conversations."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = tiny_tokenizer()
    tiny_text_model(len(tokenizer), dim_hidden=64).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def recorded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's trace and what it printed: `trace.npz` and `run.json`."""
    folder = tmp_path_factory.mktemp("recorded")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS) + "\n")
    words = ["run", str(tiny_model), "--prompts", str(prompts), "-n", "8", "--json"]
    with (folder / "run.json").open("w") as file, contextlib.redirect_stdout(file):
        assert main([*words, "--trace", str(folder / "trace.npz")]) == 0
    return folder


@pytest.fixture
def workplace(tiny_model, recorded, tmp_path, monkeypatch) -> Path:
    """The working directory of a page."""
    for folder in ("models", "path/to", "fast/disk/run", "DATA"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "models" / "pocket").symlink_to(pocket_path())
    (tmp_path / "benchmarks").symlink_to(RESULTS.parent)
    for name in ("MODEL", "CHECKPOINT", "FOLDER", "OLMoE-1B-7B", "path/to/checkpoint"):
        (tmp_path / name).symlink_to(tiny_model)
    for name in ("TRACE", "trace.npz", "later.npz", "routing.npz"):
        shutil.copy(recorded / "trace.npz", tmp_path / name)
    shutil.copy(recorded / "run.json", tmp_path)
    shutil.copy(next(RESULTS.glob("bench-policies-*.json")), tmp_path / "results.json")
    config = write_run(tmp_path)
    for name in ("CONFIG.toml", "run.toml"):
        (tmp_path / name).symlink_to(config)
    (tmp_path / "IN.jsonl").write_text('"A list"\n{"prompt": "The for", "max_tokens": 3}\n')
    (tmp_path / "text.txt").write_text(PROMPTS[0])
    (tmp_path / "chats.jsonl").write_text(
        "".join(json.dumps({"prompt": "Why?", "completion": text[:40]}) + "\n" for text in PROMPTS)
    )
    for name in ("book.txt", "DATA/book.txt"):
        (tmp_path / name).symlink_to(tmp_path / "texts" / "rules.txt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()
