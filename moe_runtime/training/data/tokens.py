"""Documents as streams of token ids, kept on disk so that a resumed run need not encode again."""

import hashlib
import io
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_runtime.checkpoints.model_files import read_tokenizer
from moe_runtime.digests import check_digests, digest, write_digests
from moe_runtime.errors import MoERuntimeWarning, blamed_on
from moe_runtime.files import make_folders, open_regular, write_atomically
from moe_runtime.folders import replace_folder
from moe_runtime.models.lm.tokenizer import train_tokenizer
from moe_runtime.training.data.text import Corpus
from moe_runtime.training.run_config import TokenizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.unsignedinteger[Any]]
"""A stream of token ids: uint16 where the vocabulary allows, uint32 otherwise."""

# Documents encoded at a time: enough for the tokenizer's threads, little next to the text itself.
_BATCH = 256
_DIGEST_BYTES = 8
_READ_BYTES = _MOST_READ_BYTES = 1 << 20
"""Longer streams stay on the disk and are mapped."""


@dataclass(frozen=True, slots=True)
class TokenStreams:
    """One source as token ids, every document followed by the end-of-text token.

    Attributes:
        training: ids to train on.
        held_out: ids to measure on; may be empty.
        fingerprint: of the text, its division and the tokenizer.
    """

    training: Ids
    held_out: Ids
    fingerprint: str


def obtain_tokenizer(
    config: TokenizerConfig,
    corpora: Mapping[str, Corpus],
    *,
    folder: Path,
    saved: Path,
    keeps: bool = True,
) -> "PreTrainedTokenizerBase":
    """The tokenizer of a run: loaded from its folder, or trained once and saved with the run.

    Args:
        config: where it comes from.
        corpora: the text, to train on.
        folder: what a relative path starts from.
        saved: folder in the run's output where a trained one is kept.
        keeps: a new one is saved there; it is trained for this process alone otherwise.

    Raises:
        CheckpointError: the tokenizer's files are damaged.
        ValueError: the folder is none of a tokenizer, or the tokenizer has no end-of-text token.
    """
    if config.path is not None:
        return load_tokenizer(folder / config.path)
    assert config.vocab_size is not None  # the configuration checks it
    if not (saved / "tokenizer.json").is_file():
        texts = (text for corpus in corpora.values() for text in corpus.training)
        tokenizer = train_tokenizer(texts, vocab_size=config.vocab_size)
        if not keeps:
            with tempfile.TemporaryDirectory(prefix="moe-tokenizer-") as scratch:
                save_tokenizer(tokenizer, Path(scratch))
                return load_tokenizer(Path(scratch))
        with replace_folder(saved, keeps=lambda path: True) as new:
            save_tokenizer(tokenizer, new)
            write_digests(new, [path.name for path in new.iterdir()])
    check_digests(saved)
    return load_tokenizer(saved)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Writes a tokenizer's files into a folder.

    Raises:
        CheckpointError: they cannot be written; the library raises a plain ``Exception`` then.
    """
    with blamed_on(f"{folder}: the tokenizer cannot be written"):
        tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Loads a Hugging Face tokenizer from a folder, or the one in a GGUF file.

    Raises:
        CheckpointError: its files are damaged.
        ValueError: as `obtain_tokenizer`.
    """
    is_gguf = folder.suffix == ".gguf" and folder.is_file()
    if not is_gguf and not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: has no tokenizer.json, so it is not a tokenizer's folder")
    tokenizer = read_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{folder}: the tokenizer has no end-of-text token (eos_token), which divides documents"
        )
    return tokenizer


def encode_corpus(
    corpus: Corpus,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache: Path,
    name: str,
    keeps: bool = True,
) -> TokenStreams:
    """The token streams of a corpus, read from the cache where they lie there already.

    Args:
        corpus: the text.
        tokenizer: a fast tokenizer with an end-of-text token.
        cache: folder for encoded streams.
        name: of the source, for file names.
        keeps: what is encoded is written there; it stays in memory otherwise.

    Raises:
        OSError: the cache cannot be written.
    """
    identity = hashlib.sha256()
    identity.update(corpus.fingerprint.encode())
    identity.update(_tokenizer_identity(tokenizer))
    fingerprint = identity.hexdigest()[:16]
    streams: list[Ids] = []
    for side, documents in (("training", corpus.training), ("held-out", corpus.held_out)):
        path = cache / f"{name}-{side}-{fingerprint}.npy"
        ids = _kept_ids(path)
        if ids is None:
            ids = encode(documents, tokenizer)
            if keeps:
                make_folders(cache)
                _keep_ids(path, ids)
                ids = _kept_ids(path)
                assert ids is not None, "it was just written"
        streams.append(ids)
    return TokenStreams(streams[0], streams[1], fingerprint)


def _keep_ids(path: Path, ids: Ids) -> None:
    """Writes a stream as ``.npy``, and behind it the digest of the file's name and content."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(ids))
    parts = (header.getvalue(), ids.view(np.uint8).data)
    found = digest(path.name.encode())
    with write_atomically(path) as file:
        for part in parts:
            found = digest(part, found)
            file.write(part)
        file.write(found.encode())


def _kept_ids(path: Path) -> Ids | None:
    """A cached stream; None if there is none, or it is damaged."""
    if not path.is_file():
        return None
    size = path.stat().st_size - _DIGEST_BYTES
    found = digest(path.name.encode())
    with open_regular(path) as file:
        for begin in range(0, size, _READ_BYTES):
            found = digest(file.read(min(_READ_BYTES, size - begin)), found)
        is_whole = file.read().decode(errors="replace") == found
    if not is_whole:
        warnings.warn(
            f"{path}: is damaged, or of an older version; the text is encoded anew",
            MoERuntimeWarning,
            stacklevel=2,
        )
        return None
    return np.load(path, mmap_mode="r" if size > _MOST_READ_BYTES else None, allow_pickle=False)


def encode(documents: Iterable[str], tokenizer: "PreTrainedTokenizerBase") -> Ids:
    """All documents as one stream, each followed by the end-of-text token.

    A document has the tokens that the tokenizer puts around a text by itself, such as the one that
    begins it (BOS).
    """
    encoder: Any = tokenizer
    added = _added_tokens(tokenizer)
    end = [] if added[-1:] == [encoder.eos_token_id] else [encoder.eos_token_id]
    dtype = np.uint16 if len(encoder) <= 1 << 16 else np.uint32
    pieces: list[npt.NDArray[Any]] = []
    remaining = list(documents)
    for start in range(0, len(remaining), _BATCH):
        batch = remaining[start : start + _BATCH]
        # verbose: a document longer than the context is no reason for a warning, it gets cut.
        with blamed_on("the tokenizer cannot encode the text", ValueError):
            encoded = encoder(batch, verbose=False)["input_ids"]
        for ids in encoded:
            pieces.append(np.array([*ids, *end], dtype=dtype))
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=dtype)


def _added_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int | None]:
    """What a tokenizer puts around a text: the tokens before it, None, the tokens after it."""
    encoder: Any = tokenizer
    found = encoder.backend_tokenizer.encode("a")
    pairs = list(zip(found.ids, found.special_tokens_mask, strict=True))
    own = [number for number, (_, is_added) in enumerate(pairs) if not is_added]
    if not own:
        return [None]
    before, after = pairs[: own[0]], pairs[own[-1] + 1 :]
    return [*(token for token, _ in before), None, *(token for token, _ in after)]


def _tokenizer_identity(tokenizer: "PreTrainedTokenizerBase") -> bytes:
    """What ids depend on; where nothing is put around a text, as before anything could be."""
    backend: Any = tokenizer
    added = _added_tokens(tokenizer)
    around = "" if added == [None] else f"{added}"
    return f"{backend.backend_tokenizer.to_str()}{backend.eos_token_id}{around}".encode()
