"""Writes the pocket model's training text and tokenizer as files.

    python -P -m moe_runtime.models.pocket.texts --output models/pocket/texts

`train.toml` reads them: `training/KIND/*.txt` and `held-out/KIND/*.txt`, one file a document, and
`tokenizer/`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from moe_runtime.files import replace_folder
from moe_runtime.models.lm.tokenizer import train_tokenizer
from moe_runtime.models.pocket.corpus import CONTEXT, KINDS, Document, gather

_VOCAB_SIZE = 4096
_REPEATS = {"topic": 6, "docstring": 3, "source": 1}
"""Repetitions of documents in the tokenizer's training; code is ten times as much as prose, and its
identifiers would take most merges."""


def write_texts(documents: Sequence[Document], folder: Path) -> None:
    """Writes each document into a file, and the tokenizer trained on them."""
    with replace_folder(folder, keeps=lambda path: True) as new:
        for side in ("training", "held-out"):
            for kind in KINDS:
                (new / side / kind).mkdir(parents=True)
        for number, document in enumerate(documents):
            side = "held-out" if document.held_out else "training"
            # the number separates names that filesystems take as equal
            stem = document.name.partition(":")[2].replace("/", ".")[-80:]
            path = new / side / document.kind / f"{number:05}-{stem}.txt"
            # docstrings may contain lone surrogates
            path.write_text(document.text, encoding="utf-8", errors="replace")
        training = (
            document.text
            for document in documents
            if not document.held_out
            for _ in range(_REPEATS[document.kind])
        )
        made = train_tokenizer(training, vocab_size=_VOCAB_SIZE, max_length=CONTEXT)
        made.save_pretrained(new / "tokenizer")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the pocket model's training text.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    write_texts(gather(), parser.parse_args(arguments).output)


if __name__ == "__main__":
    main()
