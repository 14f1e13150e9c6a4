"""The corpus and the training runs of the pocket model, on small inputs."""

import json
from pathlib import Path

import numpy as np
import pytest

from moe_runtime.models.pocket import pocket_path
from moe_runtime.models.pocket.corpus import Document, gather, without_repeats
from moe_runtime.models.pocket.evaluate import HeldOut, at_equal_tokens, kept_scores, render_card


def document(name: str, text: str) -> Document:
    return Document(kind="topic", name=name, text=text)


def name_of(*, is_held_out: bool) -> str:
    names = map(str, range(1000))
    return next(name for name in names if document(name, "").held_out == is_held_out)


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


def test_gather_separates_docstrings_from_code(library):
    documents = [found for found in gather(library) if found.kind != "topic"]
    texts = {(found.kind, found.name): found.text for found in documents}
    assert texts == {
        ("docstring", "module:pkg/__init__.py"): (
            "pkg\n    A package.\n\npkg.join(a, *p, sep='/')\n    Join parts.\n"
        ),
        ("source", "module:pkg/__init__.py"): ('def join(a, *p, sep="/"):\n    return sep\n'),
        ("source", "module:plain.py"): "x = 1\n",
    }


def test_gather_reads_the_language_reference(library):
    topics = [found for found in gather(library) if found.kind == "topic"]
    assert sum(len(found.text) for found in topics) > 100_000
    assert any(found.held_out for found in topics)
    assert [found.name for found in gather(library)] == [found.name for found in gather(library)]


def test_gather_without_python_files_says_so(tmp_path):
    with pytest.raises(ValueError, match="found none"):
        gather(tmp_path)


def test_held_out_paragraphs_leave_the_training_text():
    shared = "a paragraph that is long enough to count as a repeated one " * 3
    training = document(name_of(is_held_out=False), f"first\n\n{shared}\n\nlast")
    held_out = document(name_of(is_held_out=True), shared)
    kept = {found.name: found.text for found in without_repeats([training, held_out])}
    assert kept[held_out.name].strip() == shared.strip()
    assert kept[training.name] == "first\n\nlast\n"


def test_the_baseline_of_an_earlier_evaluation_is_kept_for_the_same_text_only():
    evaluation = json.loads((pocket_path() / "evaluation.json").read_text())
    known = evaluation["held_out"]["source"]
    same = HeldOut(ids=np.zeros(known["tokens"], np.uint16), num_bytes=known["bytes"])
    assert kept_scores(known, "source", same) == known["dense"]
    other = HeldOut(ids=same.ids, num_bytes=known["bytes"] + 1)
    with pytest.raises(ValueError, match="text of kind 'source' differs"):
        kept_scores(known, "source", other)


def test_scores_at_equal_tokens_outlive_longer_training():
    evaluation = json.loads((pocket_path() / "evaluation.json").read_text())
    kept = evaluation["at_equal_tokens"]
    assert at_equal_tokens(evaluation) == kept, "a continued run keeps them"
    assert "after 3.1 million tokens each" in render_card(evaluation, checkpoint_bytes=1)
    spent = evaluation["training"]
    assert kept["tokens"] == spent["dense"]["tokens"] < spent["moe"]["tokens"]
    spent["moe"]["tokens"] = spent["dense"]["tokens"] = 17
    now = at_equal_tokens(evaluation)
    assert now == {"tokens": 17} | {m: evaluation["held_out_mixture"][m] for m in ("dense", "moe")}
