"""The corpus, the batches and the training loop of the pocket model, on small inputs."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_runtime.models.pocket.corpus import KINDS, Document, gather, without_repeats
from moe_runtime.models.pocket.data import BatchPlan, Streams, tokenize
from moe_runtime.models.pocket.model import (
    active_parameters,
    build_dense,
    build_moe,
)
from moe_runtime.models.pocket.tokenizer import train_tokenizer
from moe_runtime.models.pocket.train import Budget, Recipe, Trainer, routing_losses


def document(name: str, text: str) -> Document:
    return Document(kind="topic", name=name, text=text)


def held_out_name() -> str:
    return next(
        name
        for name in map(str, range(1000))
        if Document(kind="topic", name=name, text="").held_out
    )


def training_name() -> str:
    return next(
        name
        for name in map(str, range(1000))
        if not Document(kind="topic", name=name, text="").held_out
    )


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A tiny standard library with things that must be left out."""
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(
        '"""A package."""\n\n\ndef join(a, *p, sep="/"):\n    """Join parts."""\n    return sep\n'
    )
    (tmp_path / "plain.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    for folder in ("test", "site-packages", "encodings"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "left_out.py").write_text("unwanted = 1\n")
    return tmp_path


def test_gather_separates_docstrings_from_code(library: Path) -> None:
    documents = [found for found in gather(library) if found.kind != "topic"]
    texts = {(found.kind, found.name): found.text for found in documents}
    assert texts == {
        ("docstring", "module:pkg/__init__.py"): (
            "pkg\n    A package.\n\npkg.join(a, *p, sep='/')\n    Join parts.\n"
        ),
        ("source", "module:pkg/__init__.py"): ('def join(a, *p, sep="/"):\n    return sep\n'),
        ("source", "module:plain.py"): "x = 1\n",
    }


def test_gather_reads_the_language_reference(library: Path) -> None:
    topics = [found for found in gather(library) if found.kind == "topic"]
    assert sum(len(found.text) for found in topics) > 100_000
    assert any(found.held_out for found in topics)
    assert [found.name for found in gather(library)] == [found.name for found in gather(library)]


def test_gather_without_python_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="found none"):
        gather(tmp_path)


def test_held_out_paragraphs_leave_the_training_text() -> None:
    shared = "a paragraph that is long enough to count as a repeated one " * 3
    training = document(training_name(), f"first\n\n{shared}\n\nlast")
    held_out = document(held_out_name(), shared)
    kept = {found.name: found.text for found in without_repeats([training, held_out])}
    assert kept[held_out.name].strip() == shared.strip()
    assert kept[training.name] == "first\n\nlast\n"


def test_batches_depend_on_the_step_alone() -> None:
    streams: Streams = {
        "topic": np.arange(1000, dtype=np.uint16),
        "docstring": np.arange(1000, 2000, dtype=np.uint16),
        "source": np.arange(2000, 3000, dtype=np.uint16),
    }
    plan = BatchPlan(tokens_per_step=256)
    batch = plan.draw(streams, step=3, window=64)
    assert batch.shape == (4, 65)
    assert (np.diff(batch, axis=1) == 1).all()
    assert np.array_equal(batch, plan.draw(streams, step=3, window=64))
    assert not np.array_equal(batch, plan.draw(streams, step=4, window=64))


def test_routing_losses_know_even_from_collapsed() -> None:
    even = torch.eye(16).repeat(4, 1) * 8 + torch.eye(16).roll(1, dims=1).repeat(4, 1) * 8
    collapsed = torch.zeros(64, 16)
    collapsed[:, :2] = 8.0
    balance_even, _ = routing_losses((even,))
    balance_collapsed, z_loss = routing_losses((collapsed, collapsed))
    assert float(balance_even) == pytest.approx(1.0, abs=1e-5)
    # Half the rows and nearly half the probability on each of two experts of sixteen.
    share = math.exp(8) / (2 * math.exp(8) + 14)
    assert float(balance_collapsed) == pytest.approx(16 * share, rel=1e-5)
    assert float(z_loss) == pytest.approx(math.log(2 * math.exp(8) + 14) ** 2, rel=1e-5)


def test_dense_baseline_is_as_large_as_the_active_part() -> None:
    moe, dense = build_moe(0, 1), build_dense(0, 1)
    routers = sum(p.numel() for name, p in moe.named_parameters() if name.endswith("gate.weight"))
    assert active_parameters(moe) - routers == dense.num_parameters()


def test_budget_and_recipe_follow_their_schedule() -> None:
    budget = Budget(steps=100, seconds=50.0)
    assert budget.progress(step=10, elapsed_s=20.0) == pytest.approx(0.4)
    assert budget.progress(step=200, elapsed_s=0.0) == 1.0
    with pytest.raises(ValueError, match="neither"):
        Budget()
    recipe = Recipe(peak_rate=1.0, warmup_steps=10)
    assert recipe.rate(step=0, progress=0.0) == pytest.approx(0.1)
    assert recipe.rate(step=10, progress=0.0) == pytest.approx(1.0)
    assert recipe.rate(step=99, progress=1.0) == pytest.approx(0.05)
    assert recipe.window(0.1) < recipe.window(0.9)


class InterruptedPlan(BatchPlan):
    """A plan under which the run is cut before its third step."""

    def draw(self, streams: Streams, *, step: int, window: int) -> Any:
        if step == 2:
            raise KeyboardInterrupt
        return super().draw(streams, step=step, window=window)


@pytest.mark.parametrize("build", [build_moe, build_dense])
def test_an_interrupted_run_ends_like_a_whole_one(build: Any, tmp_path: Path) -> None:
    text = "The for statement is used to iterate over the elements of a sequence.\n" * 40
    documents = [Document(kind=kind, name="text", text=text) for kind in KINDS]
    streams = tokenize(documents, train_tokenizer(documents))
    # Zero seconds between checkpoints: one after every step.
    recipe = Recipe(warmup_steps=2, short_window=32, long_window_after=1.0, checkpoint_every_s=0.0)

    def train(folder: Path, plan: BatchPlan) -> dict[str, torch.Tensor]:
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        model = build(0, 1)
        trainer = Trainer(model, folder=folder, recipe=recipe, budget=Budget(steps=4))
        trainer.resume()
        trainer.run(streams, plan)
        return model.state_dict()

    whole = train(tmp_path / "whole", BatchPlan(tokens_per_step=64))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", InterruptedPlan(tokens_per_step=64))
    resumed = train(tmp_path / "cut", BatchPlan(tokens_per_step=64))
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name
