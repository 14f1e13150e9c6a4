"""From text files to batches: documents, token ids, and the windows that each step sees.

Token ids are kept on disk, so that a resumed run does not encode again. Every source is cut into
windows. An epoch visits each once, in an order by the seed. A random offset of the cuts prevents
that a token is always last. Sources take turns by weight.

Shapes: N windows, C tokens of context.
"""

import glob
import hashlib
import io
import itertools
import json
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moe_runtime.checkpoints.opening import read_tokenizer
from moe_runtime.digests import check_digests, digest, write_digests
from moe_runtime.errors import MoERuntimeWarning, blamed_on
from moe_runtime.files import (
    at_home,
    decode_text,
    make_folders,
    open_regular,
    read_bounded,
    replace_folder,
    write_atomically,
)
from moe_runtime.models.lm.tokenizer import train_tokenizer
from moe_runtime.training.examples import Examples, ExampleStream, held_out_rows
from moe_runtime.training.run_config import DataConfig, LoopConfig, SourceConfig, TokenizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# division by names gives no share, or a wrong one, to fewer documents
_MIN_DOCUMENTS_TO_DIVIDE = 20
# a text is in memory as a whole
_MAX_FILE_BYTES = 4 << 30
# files of records: as text, a model would learn their braces, quotes and field names
_RECORDS = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv")


@dataclass(frozen=True, slots=True)
class Corpus:
    training: tuple[str, ...]
    held_out: tuple[str, ...]

    @property
    def fingerprint(self) -> str:
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

    The documents of `held_out_files`, if given, are held out, even if `files` of this source or
    another has them too.
    Otherwise a digest of its path decides for each of 20 or more documents, so that more files
    never move an old one to the other side. Of fewer documents, the end of each is held out.
    """
    separator = data.document_separator
    paths = training_files(name, source, data, folder)
    documents = list(_documents(_require_texts(name, paths), folder, separator))
    if not documents:
        raise ValueError(f"source {name!r}: no usable text, all of its files are empty")
    if source.held_out_files:
        held_out_paths = find_files(name, source.held_out_files, folder)
        found = _documents(_require_texts(name, held_out_paths), folder, separator)
        held_out = [text for _, text in found]
        if not held_out:
            raise ValueError(f"source {name!r}: held_out_files hold no text, all are empty")
        return Corpus(tuple(text for _, text in documents), tuple(held_out))
    training, held_out = _divide(documents, data.held_out_share)
    if not training:
        raise ValueError(
            f"source {name!r}: held_out_share {data.held_out_share} holds out all {len(documents)} "
            "documents, which leaves no text to train on; hold out 0, or name files in "
            "held_out_files (for `finetune`: --held-out-share 0, or --held-out FILE)"
        )
    return Corpus(tuple(training), tuple(held_out))


_ADVICE = "make the text first (a configuration file may say how at its head), or name another one"


def data_files(data: DataConfig, folder: Path, advice: str = _ADVICE) -> list[Path]:
    """The files of all sources; `advice` ends the error about a pattern without files."""
    return [
        file
        for name, source in data.sources.items()
        for file in find_files(name, (*source.files, *source.held_out_files), folder, advice)
    ]


def find_files(
    name: str, patterns: Sequence[str], folder: Path, advice: str = _ADVICE
) -> list[Path]:
    found: set[Path] = set()
    for pattern in patterns:
        matches = glob.glob(str(Path(at_home(pattern))), root_dir=folder, recursive=True)
        files = [folder / match for match in matches if (folder / match).is_file()]
        if not files:
            raise ValueError(
                f"source {name!r}: no file matches {str(folder / pattern)!r}; {advice}"
            )
        found.update(files)
    return sorted(found)


def training_files(name: str, source: SourceConfig, data: DataConfig, folder: Path) -> list[Path]:
    """The files of a source without those that are held out, in this source or another."""
    held_out = {
        _identity(file)
        for own, one in {**data.sources, name: source}.items()
        for file in find_files(own, one.held_out_files, folder)
    }
    found = find_files(name, source.files, folder)
    kept = [file for file in found if _identity(file) not in held_out]
    if not kept:
        raise ValueError(
            f"source {name!r}: all of its files are held out, none is left to train on"
        )
    return kept


def _identity(file: Path) -> tuple[int, int]:
    """The same for all names of a file, links included."""
    found = file.stat()
    return found.st_dev, found.st_ino


def _require_texts(name: str, found: list[Path]) -> list[Path]:
    for file in found:
        if file.suffix.lower() in _RECORDS:
            raise _holds_records(f"source {name!r}: {file}")
    return found


def _holds_records(what: str) -> ValueError:
    return ValueError(
        f"{what} holds records, and would be trained on as plain text; `moe-runtime finetune` "
        "takes files of records alone that are named .jsonl, .json or .parquet; for `train`, "
        "write the text of each record to a text file, and give its data.document_separator"
    )


def _is_records(text: str) -> bool:
    """Whether the first two lines of a text are JSON objects."""
    lines = [found[0] for found in itertools.islice(re.finditer(r"\S.*", text), 2)]
    try:
        return bool(lines) and all(isinstance(json.loads(line), dict) for line in lines)
    except (ValueError, RecursionError):
        return False


_SPEAKER = re.compile(
    r"^\W{0,5}(?:im_start\W+|(?=\w+[^\w\n]{0,3}[:>\])]))"
    r"(user|human|instruction|assistant|gpt|bot|response)\b",
    re.IGNORECASE | re.MULTILINE,
)
_ASKS = ("user", "human", "instruction")


def looks_like_chat(text: str) -> bool:
    """Whether lines of a text begin with the names of both speakers, such as `User:`, `<|user|>`
    or after `im_start`."""
    found = {match[1].lower() in _ASKS for match in _SPEAKER.finditer(text[:65536])}
    return len(found) == 2


def chat_warning(what: str) -> str:
    return (
        f"{what} looks like a conversation written as text: all of it is trained on, questions "
        "included; records with messages train `moe-runtime finetune` on the answers alone"
    )


def _documents(
    paths: Iterable[Path], folder: Path, separator: str | None
) -> Iterator[tuple[str, str]]:
    for path in paths:
        try:
            text = decode_text(read_bounded(path, max_bytes=_MAX_FILE_BYTES), "utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path}: not UTF-8 text (byte {error.start}: {error.reason}); convert the file or "
                "leave it out"
            ) from None
        if _is_records(text):
            raise _holds_records(str(path))
        if looks_like_chat(text):
            warnings.warn(chat_warning(str(path)), MoERuntimeWarning, stacklevel=2)
        name = path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)
        parts = [text] if separator is None else text.split(separator)
        for number, part in enumerate(parts):
            if part.strip():
                yield (name if separator is None else f"{name}#{number}"), part


def _divide(documents: list[tuple[str, str]], share: float) -> tuple[list[str], list[str]]:
    if not share:
        return [text for _, text in documents], []
    if len(documents) < _MIN_DOCUMENTS_TO_DIVIDE:
        cuts = [(text, round(len(text) * (1 - share))) for _, text in documents]
        halves = [(text[:cut], text[cut:]) for text, cut in cuts]
        return [head for head, _ in halves if head], [tail for _, tail in halves if tail]
    training: list[str] = []
    held_out: list[str] = []
    for name, text in documents:
        is_apart = place_of(name.encode(errors="surrogateescape")) < share
        (held_out if is_apart else training).append(text)
    return training, held_out


def place_of(name: bytes) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") / 2**64


Ids = npt.NDArray[np.unsignedinteger[Any]]
"""A stream of token ids: uint16 if the vocabulary allows, uint32 otherwise."""

# documents encoded at once: enough for the tokenizer's threads, and small compared with the text
_BATCH = 256
_DIGEST_BYTES = 8
_READ_BYTES = _MOST_READ_BYTES = 1 << 20
"""Longer streams are memory-mapped."""


@dataclass(frozen=True, slots=True)
class TokenStreams:
    """One source as token ids: of text, with the end-of-text token after every document.

    Attributes:
        fingerprint: of the text, its division and the tokenizer.
    """

    training: Ids | Examples
    held_out: Ids | Examples
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
        saved: folder in the run's output for a trained one.
        keeps: save a new one there; otherwise it is for this process only.
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
    with blamed_on(f"{folder}: the tokenizer cannot be written"):
        tokenizer.save_pretrained(folder)


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Loads a Hugging Face tokenizer from a folder, or the one in a GGUF file."""
    is_gguf = folder.suffix == ".gguf" and folder.is_file()
    if not is_gguf and not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: has no tokenizer.json, so it is not a tokenizer's folder")
    tokenizer = read_tokenizer(folder)
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"{folder}: the tokenizer has no end-of-text token (eos_token), which divides documents"
        )
    return tokenizer


def read_corpora(data: DataConfig, folder: Path) -> dict[str, Corpus]:
    return {name: read_corpus(name, source, data, folder) for name, source in data.sources.items()}


def encode_corpora(
    corpora: Mapping[str, Corpus], tokenizer: "PreTrainedTokenizerBase", *, cache: Path, keeps: bool
) -> dict[str, TokenStreams]:
    return {
        name: encode_corpus(corpus, tokenizer, cache=cache, name=name, keeps=keeps)
        for name, corpus in corpora.items()
    }


def encode_corpus(
    corpus: Corpus,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    cache: Path,
    name: str,
    keeps: bool = True,
) -> TokenStreams:
    """The token streams of a corpus, from the cache if they are there.

    Args:
        keeps: write new streams to the cache; otherwise they stay in memory.
    """
    identity = corpus.fingerprint.encode() + tokenizer_identity(tokenizer)
    fingerprint = hashlib.sha256(identity).hexdigest()[:16]
    streams: list[Ids] = []
    for side, documents in (("training", corpus.training), ("held-out", corpus.held_out)):
        path = cache / f"{name}-{side}-{fingerprint}.npy"
        ids = kept_ids(path)
        if ids is None:
            ids = encode(documents, tokenizer)
            if keeps:
                make_folders(cache)
                keep_ids(path, ids)
                ids = kept_ids(path)
                assert ids is not None, "it was just written"
        streams.append(ids)
    return TokenStreams(streams[0], streams[1], fingerprint)


def keep_ids(path: Path, ids: Ids) -> None:
    """Writes a stream as ``.npy``, and after it the digest of the file's name and content."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(ids))
    parts = (header.getvalue(), ids.view(np.uint8).data)
    found = digest(path.name.encode())
    with write_atomically(path) as file:
        for part in parts:
            found = digest(part, found)
            file.write(part)
        file.write(found.encode())


def kept_ids(path: Path) -> Ids | None:
    """A cached stream; None if it is missing or damaged."""
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

    The tokenizer's own tokens around a text, such as BOS, stay.
    """
    encoder: Any = tokenizer
    added = added_tokens(tokenizer)
    end = [] if added[-1:] == [encoder.eos_token_id] else [encoder.eos_token_id]
    dtype = np.uint16 if len(encoder) <= 1 << 16 else np.uint32
    pieces: list[npt.NDArray[Any]] = []
    remaining = list(documents)
    for start in range(0, len(remaining), _BATCH):
        batch = remaining[start : start + _BATCH]
        # no warning about documents longer than the context, which are cut
        with blamed_on("the tokenizer cannot encode the text", ValueError):
            encoded = encoder(batch, verbose=False)["input_ids"]
        for ids in encoded:
            pieces.append(np.array([*ids, *end], dtype=dtype))
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=dtype)


def added_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int | None]:
    """The tokens that a tokenizer adds before a text, None, and those after the text."""
    encoder: Any = tokenizer
    found = encoder.backend_tokenizer.encode("a")
    pairs = list(zip(found.ids, found.special_tokens_mask, strict=True))
    own = [number for number, (_, is_added) in enumerate(pairs) if not is_added]
    if not own:
        return [None]
    before, after = pairs[: own[0]], pairs[own[-1] + 1 :]
    return [*(token for token, _ in before), None, *(token for token, _ in after)]


def tokenizer_identity(tokenizer: "PreTrainedTokenizerBase") -> bytes:
    """Everything in a tokenizer that ids depend on."""
    backend: Any = tokenizer
    added = added_tokens(tokenizer)
    around = "" if added == [None] else f"{added}"
    return f"{backend.backend_tokenizer.to_str()}{backend.eos_token_id}{around}".encode()


class WindowStream:
    """The windows of one source, epoch after epoch.

    Args:
        context: C; a window is C + 1 tokens, inputs and targets overlap.
        seed: of the orders; different for each source.

    Attributes:
        is_shifted: the windows of an epoch begin at a random token.
    """

    is_shifted = True

    def __init__(self, ids: Ids, *, context: int, seed: Sequence[int]) -> None:
        if len(ids) < context + 1:
            raise ValueError(
                f"expected at least {context + 1} tokens (context and the token after it), "
                f"got {len(ids)}"
            )
        self._ids = ids
        self._context = context
        self._seed = tuple(seed)
        # the last window is whole with any offset below C
        self.windows_per_epoch = max(1, (len(ids) - context) // context)
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._offset = 0

    def window(self, number: int) -> npt.NDArray[np.int64]:
        """The window of this number, counted over all epochs: `[C + 1]` ids."""
        epoch, place = divmod(number, self.windows_per_epoch)
        self._begin(epoch)
        start = self._offset + int(self._order[place]) * self._context
        return self._ids[start : start + self._context + 1].astype(np.int64)

    def _begin(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        random = np.random.default_rng([*self._seed, epoch])
        spare = len(self._ids) - self.windows_per_epoch * self._context - 1
        offset = int(random.integers(min(spare, self._context - 1) + 1))
        self._offset = offset if self.is_shifted else 0
        self._order = random.permutation(self.windows_per_epoch)
        self._epoch = epoch


class Batches:
    """Windows of all sources, mixed by weight.

    The next window is of the source that is furthest behind its share. This uses no random
    numbers, so the mixture is exact after every step.

    Args:
        weights: share of each source, by name; 0 for all sources mixes them by size.
    """

    def __init__(
        self,
        streams: Mapping[str, Ids | Examples],
        weights: Mapping[str, float],
        *,
        context: int,
        seed: int,
    ) -> None:
        weighted = [name for name in streams if weights.get(name, 0) > 0]
        if weighted and len(weighted) < len(streams):
            missing = next(name for name in streams if name not in weighted)
            raise ValueError(
                f"source {missing!r} has no weight while {weighted[0]!r} has one; give every "
                "source a weight, or none to mix them by size"
            )
        self._windows: list[WindowStream | ExampleStream] = []
        for number, (name, ids) in enumerate(streams.items()):
            own = (seed, number)
            try:
                if isinstance(ids, Examples):
                    self._windows.append(ExampleStream(ids, context=context, seed=own))
                else:
                    self._windows.append(WindowStream(ids, context=context, seed=own))
            except ValueError as error:
                raise ValueError(f"source {name!r} is too short: {error}") from None
        shares = [weights[name] if weighted else len(ids) for name, ids in streams.items()]
        self._shares = [share / sum(shares) for share in shares]
        self._taken = [0] * len(self._windows)
        self.windows_per_epoch = sum(stream.windows_per_epoch for stream in self._windows)

    @property
    def taken(self) -> tuple[int, ...]:
        return tuple(self._taken)

    def seek(self, taken: Sequence[int]) -> None:
        if len(taken) != len(self._windows):
            raise ValueError(
                f"expected the position of {len(self._windows)} sources, got {len(taken)}"
            )
        self._taken = list(taken)

    def repeat_windows(self) -> None:
        """Gives every epoch the same windows, in another order; call it before the first."""
        for stream in self._windows:
            if isinstance(stream, WindowStream):
                stream.is_shifted = False

    def draw(self, num_windows: int) -> npt.NDArray[np.int64]:
        """The next windows, `[N, C + 1]` ids, or `[N, C + 1, 3]` with positions and roles."""
        return np.stack([self._next() for _ in range(num_windows)])

    def _next(self) -> npt.NDArray[np.int64]:
        total = sum(self._taken) + 1
        behind = [
            share * total - taken for share, taken in zip(self._shares, self._taken, strict=True)
        ]
        source = behind.index(max(behind))
        window = self._windows[source].window(self._taken[source])
        self._taken[source] += 1
        return window


def shorten(windows: npt.NDArray[np.int64], context: int) -> npt.NDArray[np.int64]:
    """Cuts windows `[N, C + 1]` into `[N * C / c, c + 1]` that predict the same tokens."""
    full = windows.shape[1] - 1
    starts = np.arange(0, full, context)
    columns = starts[:, None] + np.arange(context + 1)
    return windows[:, columns].reshape(-1, context + 1)


def held_out_windows(
    ids: Ids | Examples, *, context: int, most_tokens: int
) -> npt.NDArray[np.int64]:
    """Consecutive windows of held-out text that predict each token at most once, shaped as by
    `Batches.draw`."""
    if isinstance(ids, Examples):
        return held_out_rows(ids, context=context, most_tokens=most_tokens)
    num_windows = min(max(0, len(ids) - 1) // context, max(1, most_tokens // context))
    starts = np.arange(num_windows) * context
    columns = starts[:, None] + np.arange(context + 1)
    return ids[columns.reshape(-1)].astype(np.int64).reshape(num_windows, context + 1)


def windows_of(
    streams: Mapping[str, TokenStreams], config: LoopConfig
) -> tuple[Batches, dict[str, npt.NDArray[np.int64]]]:
    is_packed = any(isinstance(stream.training, Examples) for stream in streams.values())
    if config.data.short_context and is_packed:
        raise ValueError("short_context divides text, and records stay whole: leave it out")
    batches = Batches(
        {name: stream.training for name, stream in streams.items()},
        {name: source.weight for name, source in config.data.sources.items()},
        context=config.data.context,
        seed=config.run.seed,
    )
    context, most_tokens = config.data.context, config.run.evaluate_tokens
    held_out = {
        name: held_out_windows(stream.held_out, context=context, most_tokens=most_tokens)
        for name, stream in streams.items()
    }
    held_out = {name: windows for name, windows in held_out.items() if len(windows)}
    if config.run.patience and not held_out:
        raise ValueError("patience needs held-out text: name a file of it, or a share")
    return batches, held_out


def check_groups(
    num_groups: int, data: DataConfig, held_out: Mapping[str, npt.NDArray[np.int64]]
) -> None:
    """Refuses groups of tokens (GShard) that do not divide every batch of the run.

    Held-out windows are measured in batches of the same size and a smaller last one.
    """
    rows = data.windows_per_micro_batch
    batches = {"a micro-batch": rows}
    for name, windows in held_out.items():
        batches[f"the last part of the held-out text of {name!r}"] = len(windows) % rows
    for what, num_windows in batches.items():
        num_tokens = num_windows * data.context
        if num_tokens % num_groups:
            raise ValueError(
                f"num_groups ({num_groups}) must divide the {num_tokens} tokens of {what}; "
                f"a divisor of data.context ({data.context}) always does"
            )
