"""Text files as documents, and which of them are kept from training."""

import glob
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.files import at_home, decode_text, read_bounded
from moe_runtime.training.run_config import DataConfig, SourceConfig

# Fewer documents than this cannot be divided by their names: the share would be none or far off.
_MIN_DOCUMENTS_TO_DIVIDE = 20
# Texts are held in memory whole.
_MAX_FILE_BYTES = 4 << 30
# Of files of records: as text, a model would learn their braces, quotes and field names.
_RECORDS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text of one source, divided.

    Attributes:
        training: documents to train on, in a fixed order.
        held_out: documents to measure on.
    """

    training: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
        """A digest of all text, its division and its order."""
        digest = hashlib.sha256()
        for side, documents in (("training", self.training), ("held out", self.held_out)):
            digest.update(f"{side} {len(documents)}\n".encode())
            for document in documents:
                encoded = document.encode()
                digest.update(f"{len(encoded)}\n".encode())
                digest.update(encoded)
        return digest.hexdigest()[:16]


def read_corpus(name: str, source: SourceConfig, data: DataConfig, folder: Path) -> Corpus:
    """Reads and divides the text of a source.

    Held out are the documents of `held_out_files`, where given. Otherwise, of 20 documents or
    more, those whose path's digest falls into `held_out_share`, so that more files never move an
    old one to the other side; of fewer, the end of each.

    Args:
        name: of the source, for messages.
        source: its files.
        data: the share and the separator.
        folder: what relative paths start from.

    Raises:
        ValueError: a pattern matches nothing or files of records, a file is not UTF-8 text, or
            there is no text.
        OSError: a file cannot be read.
    """
    separator = data.document_separator
    documents = list(_documents(_find(name, source.files, folder), folder, separator))
    if not documents:
        raise ValueError(f"source {name!r}: no usable text, all of its files are empty")
    if source.held_out_files:
        held_out_paths = _find(name, source.held_out_files, folder)
        held_out = [text for _, text in _documents(held_out_paths, folder, separator)]
        if not held_out:
            raise ValueError(f"source {name!r}: held_out_files hold no text, all are empty")
        return Corpus(tuple(text for _, text in documents), tuple(held_out))
    training, held_out = _divide(documents, data.held_out_share)
    if not training:
        raise ValueError(
            f"source {name!r}: held_out_share {data.held_out_share} leaves no text to train on"
        )
    return Corpus(tuple(training), tuple(held_out))


def text_files(data: DataConfig, folder: Path) -> list[Path]:
    """All files of all sources, `folder` being what relative paths start from.

    Raises:
        ValueError: a pattern matches nothing, or files of records.
    """
    return [
        file
        for name, source in data.sources.items()
        for file in _find(name, (*source.files, *source.held_out_files), folder)
    ]


def _find(name: str, patterns: Sequence[str], folder: Path) -> list[Path]:
    """The files of all patterns, each once, in the order of their paths.

    Raises:
        ValueError: a pattern matches nothing, or files of records.
    """
    found: set[Path] = set()
    for pattern in patterns:
        matches = glob.glob(str(Path(at_home(pattern))), root_dir=folder, recursive=True)
        files = [folder / match for match in matches if (folder / match).is_file()]
        if not files:
            raise ValueError(
                f"source {name!r}: no file matches {str(folder / pattern)!r}; make the text first "
                "(a configuration file may say how at its head), or name another one"
            )
        for file in files:
            if file.suffix.lower() in _RECORDS:
                raise ValueError(
                    f"source {name!r}: {file} holds records, and files are trained on as plain "
                    "text; write the text of each record to a text file, and give its "
                    "data.document_separator"
                )
        found.update(files)
    return sorted(found)


def _documents(
    paths: Iterable[Path], folder: Path, separator: str | None
) -> Iterator[tuple[str, str]]:
    """Name and text of every document that is not blank."""
    for path in paths:
        try:
            text = decode_text(read_bounded(path, max_bytes=_MAX_FILE_BYTES), "utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: not UTF-8 text (byte {error.start}: {error.reason}); convert the file or "
                "leave it out"
            ) from None
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
        parts = [text] if separator is None else text.split(separator)
        for number, part in enumerate(parts):
            if part.strip():
                yield (name if separator is None else f"{name}#{number}"), part


def _divide(documents: list[tuple[str, str]], share: float) -> tuple[list[str], list[str]]:
    """Training and held-out texts."""
    if not share:
        return [text for _, text in documents], []
    if len(documents) < _MIN_DOCUMENTS_TO_DIVIDE:
        cuts = [(text, round(len(text) * (1 - share))) for _, text in documents]
        halves = [(text[:cut], text[cut:]) for text, cut in cuts]
        return [head for head, _ in halves if head], [tail for _, tail in halves if tail]
    training: list[str] = []
    held_out: list[str] = []
    for name, text in documents:
        (held_out if _place(name) < share else training).append(text)
    return training, held_out


def _place(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
