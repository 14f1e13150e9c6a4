"""Models of the hub: which files are needed, download, the cache, and removal."""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, NoReturn

from moe_runtime.checkpoints.safetensors_index import (
    INDEX_FILE_NAME,
    MAX_HEADER_BYTES,
    PACKED_INDEX_NAME,
    SINGLE_FILE_NAME,
    read_weight_map,
)
from moe_runtime.checkpoints.strict_json import clipped, one_line, parse_object
from moe_runtime.config import CHOSE, format_bytes
from moe_runtime.errors import CapacityError, CheckpointError, MoERuntimeError, blamed_on
from moe_runtime.files import read_bounded, write_text

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, HFCacheInfo

    from moe_runtime.checkpoints.checkpoint import Progress


_NUM_THREADS = 4
_WAIT_S = 0.1
_MOST_FAILURES = 5  # requests in a row that return no byte
_FIRST_BYTES = 1 << 20  # first read of a header; most headers are shorter


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository."""

    name: str  # its path in the repository
    url: str
    num_bytes: int
    digest: str  # SHA-256, or Git's SHA-1 of small files; the name in the cache


class Download:
    """Downloads of several files at once. Ending the block around it ends them."""

    def __init__(self, total_bytes: int, progress: Progress) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._changing = threading.Lock()
        self._done_bytes = 0
        self._running: list[str] = []
        self._num_begun = 0
        self._is_over = threading.Event()

    def count(self, num_bytes: int) -> None:
        if self._is_over.is_set():
            raise InterruptedError("the download was ended")
        with self._changing:
            self._done_bytes += num_bytes

    def run(self, what: str, names: Sequence[str], work: Callable[[str], None]) -> None:
        waiting, failures = deque(names), list[MoERuntimeError | MemoryError]()

        def call() -> None:
            while waiting and not self._is_over.is_set():
                try:
                    name = waiting.popleft()
                except IndexError:  # another thread took it
                    return
                self._running.append(name)
                self._num_begun += 1
                try:
                    with blamed_on(name):
                        work(name)
                except (MoERuntimeError, MemoryError) as error:
                    failures.append(error)
                    self._is_over.set()
                self._running.remove(name)

        threads = [
            threading.Thread(target=call, name="moe-hub", daemon=True)
            for _ in range(min(_NUM_THREADS, len(names)))
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) and not failures:
                shown = next(iter(self._running[:1]), "").rpartition("/")[2]
                count = f" {self._num_begun}/{len(names)}" if len(names) > 1 else ""
                self._progress(f"{what}{count} {shown}", self._done_bytes, self._total_bytes)
                next((t for t in threads if t.is_alive()), threads[0]).join(_WAIT_S)
        finally:
            self._is_over.set()
        if failures:
            raise failures[0]

    def fetch(self, file: HubFile, blobs: Path) -> None:
        """Puts a file into the cache; continues an earlier partial download."""
        from huggingface_hub.utils import WeakFileLock

        blob, part = blobs / file.digest, blobs / f"{file.digest}.incomplete"
        locks = blobs.parent.parent / ".locks" / blobs.parent.name  # as in huggingface_hub
        blobs.mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(locks / f"{file.digest}.lock"):
            if blob.exists():  # another process fetched it
                self.count(file.num_bytes)
                return
            part.touch()
            with part.open("r+b") as stream:
                begin = stream.seek(0, os.SEEK_END)
                if begin > file.num_bytes:
                    begin = stream.truncate(0)
                self.count(begin)
                _read_range(file, stream, begin, file.num_bytes, self.count)
                is_whole = _has_digest(stream, file)
                if begin and not is_whole:  # the earlier part may be damaged
                    self.count(-file.num_bytes)
                    _read_range(file, stream, 0, file.num_bytes, self.count)
                    is_whole = _has_digest(stream, file)
                if not is_whole:
                    stream.truncate(0)
                    raise CheckpointError(
                        f"{file.name}: expected bytes of digest {file.digest}, got others"
                    )
                os.fsync(stream.fileno())
            part.replace(blob)


def _read_range(
    file: HubFile, stream: IO[bytes], begin: int, end: int, count: Callable[[int], None]
) -> None:
    """Writes a range of a file at its offset; asks again if the connection breaks."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    failures = 0
    while begin < end:
        headers = build_hf_headers(
            headers={"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
        )
        limit_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        failures += 1
        try:
            with (
                blamed_on(file.name),
                http_stream_backoff(
                    "GET", file.url, headers=headers, timeout=limit_s, retry_on_exceptions=()
                ) as answer,
            ):
                hf_raise_for_status(answer)
                if answer.status_code != 206:  # the whole file comes
                    count(-begin)
                    begin = 0
                stream.seek(begin)
                for piece in answer.iter_bytes():
                    stream.write(piece[: end - begin])
                    count(len(piece))
                    begin, failures = min(end, begin + len(piece)), 0
                    if begin == end:
                        return
        except CheckpointError as error:
            # These errors come from the disk or the hub, or the last retry failed.
            if failures > _MOST_FAILURES or isinstance(error.__cause__, OSError):
                raise
        if failures > _MOST_FAILURES:
            raise CheckpointError(f"{file.name}: expected {end} bytes, got {begin}")
        time.sleep(failures)


def _has_digest(stream: BinaryIO, file: HubFile) -> bool:
    found = hashlib.sha256()
    if len(file.digest) != 2 * found.digest_size:
        found = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
    stream.seek(0)
    while piece := stream.read(1 << 20):
        found.update(piece)
    return found.hexdigest() == file.digest


class RemoteBeginning:
    """Reads a remote file from its beginning into a local one, with a hole for the rest."""

    def __init__(self, file: HubFile, local: IO[bytes], count: Callable[[int], None]) -> None:
        self._file = file
        self._local = local
        self._count = count
        self._has_bytes = self._place = 0
        local.truncate(file.num_bytes)

    def read(self, size: int) -> bytes:
        """The next bytes; fewer at the end of the file."""
        end = min(self._place + size, self._file.num_bytes)
        if end > self._has_bytes:
            # Twice as many each time, so that a long header takes few requests.
            upto = min(max(end, 2 * self._has_bytes, _FIRST_BYTES), self._file.num_bytes)
            _read_range(self._file, self._local, self._has_bytes, upto, self._count)
            self._has_bytes = upto
        self._local.seek(self._place)
        found = self._local.read(end - self._place)
        self._place = end
        return found


_SITE = re.compile(r"(?:https?://)?(?:huggingface\.co|hf\.co)/|hf://")
_WORD = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"({_WORD}/{_WORD})(?:/([^:@]+))?((?:[:@][^:@\s]+)*)")
_DATA_SET = re.compile(rf"({_WORD}/{_WORD})(?:/([^@*?]+))?(?:@([^@\s]+))?")
_PAGE = re.compile(r"(?:tree|blob|resolve)/([^/]+)(?:/(.+))?")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_QUANTISATION = re.compile(
    r"(?:^|[-_./])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|MXFP4\w*|BF16|F16|F32))$", re.IGNORECASE
)
_USUAL = ("Q4_K_M", "UD-Q4_K_XL", "MXFP4", "MXFP4_MOE", "Q4_0", "Q8_0")
"""Default quantisations; the first one that a repository has is taken."""
_ABOUT_DATA = re.compile(r"(?:^|/)(?:dataset_infos?|state)\.json$")
_PART_OF_DATA = re.compile(
    r"(?i)(?<![a-z])(?:(?:train|test)(?:ing)?|valid(?:ation)?|val|dev|eval(?:uation)?)(?![a-z])"
)  # as in the datasets library; the last such word in a path names the part
_NO_MODELS = re.compile(r"(?:.*/)?mmproj|.*imatrix", re.IGNORECASE)
"""GGUF files without a language model."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A parsed hub name."""

    repository: str  # ``owner/name``
    revision: str = "main"  # a branch, tag or commit
    quantisation: str = ""  # GGUF quantisation, such as ``Q4_K_M``; empty if unnamed
    file: str = ""  # GGUF file in the repository; empty if unnamed
    kind: Literal["model", "dataset"] = "model"

    @property
    def owner(self) -> str:
        return self.repository.partition("/")[0]


def parse_hub_name(text: str) -> HubName | None:
    """Parses ``owner/name[:QUANTISATION][/FILE.gguf][@REVISION]``, or the address of a page."""
    site = _SITE.match(text)
    text = text[site.end() :].partition("?")[0].rstrip("/") if site else text
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    repository, path, rest = found[1], found[2] or "", found[3]
    marks = re.findall(r"([:@])([^:@]+)", rest)
    given = dict(marks)
    page = _PAGE.fullmatch(path)
    if page is not None:
        marks.append(("@", page[1]))
        given["@"], path = page[1], page[2] or ""
    is_model = not path or path.endswith(".gguf")
    if len(marks) != len(given) or not is_model or ".." in given.get("@", ""):
        return None
    if path and ":" in given:
        raise CheckpointError(
            f"{text}: expected a file or a quantisation, got both; leave :{given[':']} out"
        )
    return HubName(repository, given.get("@", "main"), given.get(":", ""), path)


def data_set(text: str) -> HubName | None:
    """Parses ``owner/name[/PATH][@REVISION]`` of a data set, or the address of its page; None for
    names of local files and patterns."""
    site = _SITE.match(text)
    text = text[site.end() :].removeprefix("datasets/") if site else text
    found = _DATA_SET.fullmatch(text)
    if found is None or (not site and re.search(r"\.[A-Za-z]+$", text)):
        return None
    return HubName(found[1], found[3] or "main", file=found[2] or "", kind="dataset")


def gguf_models(names: Iterable[str], file: str = "") -> dict[str, list[str]]:
    """The files of each GGUF model of a repository, by name without the part number.

    Files that hold no language model are left out, unless one is the ``file``.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and (name == file or not _NO_MODELS.match(name)):
            part = _PART.fullmatch(name)
            models.setdefault(part[1] if part else name.removesuffix(".gguf"), []).append(name)
    return models


def gguf_files(name: HubName, sizes: Mapping[str, int]) -> list[str]:
    """The GGUF file that a name asks for, or its parts; none for a safetensors repository.

    Where the name leaves it open, the usual quantisation is taken, the same on every machine.
    """
    models = gguf_models(sizes, name.file)
    if name.file:
        chosen = [stem for stem, files in models.items() if name.file in files]
    elif name.quantisation:
        wanted = name.quantisation.lower()
        chosen = [stem for stem in models if label_of(stem).lower() == wanted]
        ending = re.compile(rf"(?:.*[-_./])?{re.escape(wanted)}", re.IGNORECASE)
        chosen = chosen or [stem for stem in models if ending.fullmatch(stem)]
    elif "config.json" in sizes and any(file.endswith(".safetensors") for file in sizes):
        return []
    else:
        chosen = [*models]
        for usual in _USUAL if len(models) > 1 else ():
            if found := [stem for stem in models if label_of(stem).upper() == usual]:
                chosen = found
                break
    if not models and not name.file and not name.quantisation:
        return []
    if len(chosen) != 1:
        _refuse_choice(name, models, chosen, sizes)
    files = models[chosen[0]]
    part = _PART.fullmatch(files[0])
    if part is not None and len(files) != int(part[3]):
        found = f"{len(files)} of the {int(part[3])} files"
        raise CheckpointError(f"{name.repository}: expected all of {chosen[0]}, found {found}")
    return files


def label_of(stem: str) -> str:
    found = _QUANTISATION.search(stem)
    return found[1] if found else stem


def _refuse_choice(
    name: HubName,
    models: Mapping[str, Sequence[str]],
    chosen: Sequence[str],
    sizes: Mapping[str, int],
) -> NoReturn:
    labels = [label_of(stem) for stem in models]
    shown = [
        f"{label if labels.count(label) == 1 else files[0]} "
        f"({format_bytes(sum(sizes[file] for file in files))})"
        for label, files in zip(labels, models.values(), strict=True)
    ]
    asked = clipped(name.file or name.quantisation)
    what = "has several models" if len(chosen) > 1 else f"has no {asked}"
    advice = f"name {name.repository} alone for its safetensors"
    if models:
        advice = f"name one: {name.repository}:QUANTISATION, or {name.repository}/FILE.gguf"
    there = ", ".join(shown) or "no GGUF files"
    raise CheckpointError(f"{name.repository} {what}; it has {there}; {advice}")


SMALL_FILES = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
"""Patterns of a checkpoint's files other than weights."""

_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_FOLDERS = ("", "additional_chat_templates")
_INDICES = (INDEX_FILE_NAME, PACKED_INDEX_NAME)
# A live hub answers within a second; without a limit a dead one would be awaited silently.
_HUB_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Repository:
    """A repository as listed by the hub, or the part of it in the cache."""

    name: HubName
    commit: str
    folder: Path  # its folder in the cache
    files: dict[str, HubFile]  # existing files by name
    offline: str  # why the hub was not asked; empty after an answer

    def chosen(self) -> list[str]:
        """The GGUF files, or the files of a safetensors repository other than weights."""
        sizes = {name: file.num_bytes for name, file in self.files.items()}
        if found := gguf_files(self.name, sizes):
            return found
        small = [
            name
            for name in sorted(self.files)
            if name.rpartition("/")[0] in _FOLDERS
            and any(fnmatch.fnmatchcase(name, pattern) for pattern in SMALL_FILES)
        ]
        if "config.json" not in small:
            there = clipped(sorted(self.files)) + (f"; {self.offline}" if self.offline else "")
            raise CheckpointError(
                f"{self.name.repository} has neither config.json nor GGUF files; found {there}"
            )
        return small

    def report_choice(self, files: Sequence[str], progress: Progress | None) -> None:
        """Reports which of several GGUF models was chosen by default."""
        models = gguf_models(self.files)
        is_open = not self.name.file and not self.name.quantisation
        if progress is not None and is_open and len(models) > 1 and files[0].endswith(".gguf"):
            label = next(label_of(stem) for stem, own in models.items() if files[0] in own)
            which = f"{CHOSE} {label} of {len(models)} GGUF models"
            progress(f"{which}; {self.name.repository}:QUANTISATION takes another", 0, 0)

    def shards(self) -> list[str]:
        if SINGLE_FILE_NAME in self.files:
            return [SINGLE_FILE_NAME]
        for index in _INDICES:
            if index in self.files:
                return sorted({str(file) for file in read_weight_map(self.folder / index).values()})
        raise CheckpointError(
            f"{self.name.repository}: expected {SINGLE_FILE_NAME} or {INDEX_FILE_NAME}, found "
            f"{clipped(sorted(self.files))}"
        )

    def missing(self, names: Sequence[str]) -> list[HubFile]:
        """The files that are not in the cache."""
        absent = [name for name in names if not (self.folder / name).exists()]
        unknown = [name for name in absent if name not in self.files]
        if unknown:
            why = f"; {self.offline}" if self.offline else ""
            raise CheckpointError(
                f"{self.name.repository}: expected {len(names)} files, but there is no "
                f"{clipped(unknown)}{why}"
            )
        return [self.files[name] for name in absent]


def download(name: HubName, *, weights: bool, progress: Progress | None = None) -> Path:
    """Downloads missing files into the hub's cache; returns the folder or first GGUF file."""
    found = _list_repository(name)
    chosen = found.chosen()
    found.report_choice(chosen, progress)
    _fetch(found, chosen, progress)
    is_gguf = chosen[0].endswith(".gguf")
    if weights and not is_gguf:
        _fetch(found, found.shards(), progress)
    _record_revision(found)
    return found.folder / chosen[0] if is_gguf else found.folder


def download_files(
    name: HubName, kinds: tuple[str, ...], progress: Progress | None = None
) -> list[Path]:
    """Downloads a data set's files of some kinds, the training part only. Raises CheckpointError if
    it has none, or several folders have some and none is named."""
    found = _list_repository(name)
    below = name.file.rstrip("/")
    own = [
        file
        for file in sorted(found.files)
        if file.lower().endswith(kinds) and not _ABOUT_DATA.search(file)
        if not below or file == below or file.startswith(f"{below}/")
    ]
    parts = {one: "".join(_PART_OF_DATA.findall(one[len(below) :])[-1:]).lower() for one in own}
    chosen = [file for file in own if parts[file].startswith("train")]
    chosen = chosen or [file for file in own if not parts[file]]
    tops = {re.sub("/+[^/]*$|^/+", "", _PART_OF_DATA.sub("", f"/{file}")): file for file in chosen}
    if not below and len(tops) > 1:
        there = sorted(file.rpartition("/")[0] or file for file in tops.values())
        advice = f"name one or several, such as {name.repository}/{there[0]}"
        raise CheckpointError(f"{name.repository} has several sets, {clipped(there)}: {advice}")
    if not chosen:
        raise CheckpointError(
            f"{name.repository} has no files of {', '.join(kinds)}{' below ' * bool(below)}{below} "
            f"to train on; found {clipped(sorted(found.files))}"
        )
    _fetch(found, chosen, progress)
    _record_revision(found)
    return [found.folder / file for file in chosen]


def _record_revision(found: _Repository) -> None:
    """Records the commit of a revision; last, so that offline use finds a complete one."""
    name = found.name
    reference = found.folder.parent.parent / "refs" / name.revision
    is_noted = reference.is_file() and reference.read_text() == found.commit
    if not found.offline and name.revision != found.commit and not is_noted:
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_text(reference, found.commit)


def quantisations(name: HubName) -> dict[str, int]:
    """The GGUF models of a repository and their bytes; empty if there is no choice."""
    files = {file: about.num_bytes for file, about in _list_repository(name).files.items()}
    models = gguf_models(files)
    if name.file or len(models) < 2:
        return {}
    return {label_of(stem): sum(files[file] for file in own) for stem, own in models.items()}


@contextmanager
def headers_of(name: HubName, progress: Progress | None) -> Iterator[Path]:
    """Reads only the headers of a model's files, unless all files are in the cache.

    Yields a folder or GGUF file whose weights have their sizes, and holes for the values.
    """
    found = _list_repository(name)
    chosen = found.chosen()
    found.report_choice(chosen, progress)
    is_gguf = chosen[0].endswith(".gguf")
    if not is_gguf:
        _fetch(found, chosen, progress)
    files = chosen if is_gguf else found.shards()
    missing = {file.name: file for file in found.missing(files)}
    if not missing or found.offline:
        yield download(name, weights=True, progress=progress)
        return
    with tempfile.TemporaryDirectory(prefix="moe-runtime-") as place:
        folder = Path(place) / name.repository
        for file in [*chosen, *files]:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            if file not in missing and not (folder / file).exists():
                (folder / file).symlink_to(found.folder / file)

        def read(file: str) -> None:
            local = folder / file
            with local.open("w+b") as stream:
                beginning: Any = RemoteBeginning(missing[file], stream, transfer.count)
                if is_gguf:
                    from moe_runtime.checkpoints.gguf.header import read_header

                    read_header(local, beginning)
                else:
                    length = int.from_bytes(beginning.read(8), "little")
                    beginning.read(min(length, MAX_HEADER_BYTES))

        with _hub_errors(name, f"{name.repository}: "), _progress_bar(progress) as show:
            transfer = Download(0, show)
            transfer.run("headers", [*missing], read)
        yield folder / chosen[0] if is_gguf else folder


def _fetch(found: _Repository, names: Sequence[str], progress: Progress | None) -> None:
    from huggingface_hub import constants, hf_hub_download

    files = {file.name: file for file in found.missing(names)}
    if not files:
        return
    num_bytes = sum(file.num_bytes for file in files.values())
    blobs = found.folder.parent.parent / "blobs"
    parts = [blobs / f"{file.digest}.incomplete" for file in files.values() if file.digest]
    here_bytes = sum(part.stat().st_size for part in parts if part.exists())
    blobs.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(blobs).free
    if num_bytes - here_bytes > free_bytes:
        raise CapacityError(
            f"{found.name.repository}: {format_bytes(num_bytes - here_bytes, up=True)} are to be "
            f"downloaded, and {format_bytes(free_bytes)} are free in {constants.HF_HUB_CACHE}; "
            "make room, or name another folder in HF_HOME"
        )

    name = found.name
    with _hub_errors(name, f"{name.repository}: "), _progress_bar(progress) as show:
        transfer = Download(num_bytes, show)

        def fetch(file: str) -> None:
            # Larger files need the hub's own protocol, which huggingface_hub has.
            if files[file].digest and files[file].num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                transfer.fetch(files[file], blobs)
            hf_hub_download(name.repository, file, revision=found.commit, repo_type=name.kind)

        transfer.run("downloading", [*files], fetch)


@contextmanager
def _progress_bar(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    from huggingface_hub.utils import tqdm

    with tqdm(unit="B", unit_scale=True, disable=None) as bar:

        def show(stage: str, done: int, total: int) -> None:
            bar.total = total
            bar.set_description(stage, refresh=False)
            bar.update(done - bar.n)

        yield show


def _list_repository(name: HubName) -> _Repository:
    """Lists a repository; without a connection, the part that was downloaded before."""
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE)
    place = cache / repo_folder_name(repo_id=name.repository, repo_type=name.kind)
    try:
        with _hub_errors(name, ""):
            info: Any = HfApi().repo_info(
                name.repository,
                repo_type=name.kind,
                revision=name.revision,
                timeout=_HUB_LIMIT_S,  # the library's own download would ask six times
                files_metadata=True,
            )
    except MoERuntimeError as error:
        commit = name.revision
        reference = place / "refs" / name.revision
        if reference.is_file():
            commit = reference.read_text().strip()
        folder = place / "snapshots" / commit
        if not folder.is_dir():
            raise CheckpointError(
                f"{one_line(name.repository)} is neither a directory nor a repository to "
                f"download: {error}{suggestion(Path(name.repository))}"
            ) from None
        here = [path for path in folder.rglob("*") if path.is_file()]
        files = {
            (relative := path.relative_to(folder).as_posix()): HubFile(
                relative, "", path.stat().st_size, ""
            )
            for path in here
        }
        return _Repository(name, commit, folder, files, str(error))
    commit = info.sha or ""
    if not _DIGEST.fullmatch(commit):
        raise CheckpointError(f"{constants.ENDPOINT}: expected a commit, got {clipped(commit)}")
    files = {}
    for sibling in info.siblings or ():
        file = sibling.rfilename
        digest = (sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or ""
        if not PurePosixPath(file).is_absolute() and ".." not in PurePosixPath(file).parts:
            url = hf_hub_url(name.repository, file, revision=commit, repo_type=name.kind)
            known = digest if _DIGEST.fullmatch(digest) else ""
            files[file] = HubFile(file, url, sibling.size or 0, known)
    return _Repository(name, commit, place / "snapshots" / commit, files, "")


@contextmanager
def _hub_errors(name: HubName, lead: str) -> Iterator[None]:
    """Explains an error of the hub in our words, after ``lead``."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repository, site = name.repository, constants.ENDPOINT
    try:
        with blamed_on(f"{site} (HF_ENDPOINT) cannot be reached"):
            yield
    except CheckpointError as error:
        cause = error.__cause__
        status = cause.response.status_code if isinstance(cause, HfHubHTTPError) else 0
        token = "the token in HF_TOKEN may not read it" if get_token() else "HF_TOKEN is not set"
        why = str(error)
        if isinstance(cause, OfflineModeIsEnabled):
            why = f"HF_HUB_OFFLINE is set, and {constants.HF_HUB_CACHE} (HF_HOME) lacks it"
        elif isinstance(cause, GatedRepoError):
            why = (
                f"it is gated, and {token}: accept its terms at {site}/{repository}, and set "
                "HF_TOKEN to a token of that account"
            )
        elif isinstance(cause, RevisionNotFoundError):
            why = f"{site} has no revision {clipped(name.revision)} of it"
        elif isinstance(cause, RepositoryNotFoundError):
            why = f"{site} has none of that name, or it is private and {token}"
        elif status in (401, 403):
            why = f"{site} refused it ({status}): {token}"
        raise CheckpointError(lead + why) from cause


def suggestion(folder: Path) -> str:
    """The folder with the most similar name, for the end of a message."""
    try:
        names = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        return ""
    nearest = difflib.get_close_matches(folder.name, names, n=1)
    return f"; did you mean {folder.parent / nearest[0]}?" if nearest else ""


_MAX_CONFIG_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A repository in the cache.

    Attributes:
        name: ``owner/name``.
        revisions: commits, the latest last, with their branches and tags.
        num_bytes: of its files on the disk, and of those that are not whole yet.
        family: ``model_type`` of its configuration; empty where it has none.
        formats: of its weights, such as ``bfloat16``, ``mxfp4`` or ``Q4_K_M``.
        used_s: when a file was last read but its configuration, which lists read; since the epoch.
        folder: where it lies.
    """

    name: str
    revisions: dict[str, list[str]]
    num_bytes: int
    unfinished_bytes: int
    family: str
    formats: list[str]
    used_s: float
    folder: Path


def cached_models() -> list[CachedModel]:
    return [_described(one) for _, one in sorted(_models_of(_scan()).items())]


def damage() -> list[str]:
    """Parts of the cache that cannot be read, a line each; the hub's library leaves them out."""
    cache = _scan()
    return [" ".join(str(one).split()) for one in (() if cache is None else cache.warnings)]


def removal_of(names: list[str]) -> tuple[int, Any]:
    """The bytes freed by removing models or revisions, and the strategy that removes them.

    Args:
        names: ``owner/name``, or ``owner/name@REVISION`` for one of several revisions.

    Raises:
        CheckpointError: one of them is not in the cache.
    """
    cache = _scan()
    repos = _models_of(cache)
    commits: set[str] = set()
    for text in names:
        name = parse_hub_name(text)
        if name is None or name.file or name.quantisation:
            raise CheckpointError(f"{text}: expected OWNER/NAME or OWNER/NAME@REVISION")
        if name.repository not in repos:
            there = ", ".join(sorted(repos)) or "no model"
            unread = "; what is damaged is removed by hand: ".join(["", *damage()][:2])
            raise CheckpointError(
                f"{text}: is not in the cache of the hub; there is {there}{unread}"
            )
        revisions = repos[name.repository].revisions
        own = {
            one.commit_hash
            for one in revisions
            if "@" not in text or name.revision in (one.commit_hash, *one.refs)
        }
        if not own:
            known = sorted(ref for one in revisions for ref in (*one.refs, one.commit_hash))
            raise CheckpointError(f"{text}: has no such revision in the cache; there is {known}")
        commits |= own
    assert cache is not None  # it has the names
    strategy = cache.delete_revisions(*commits)
    whole = [repo for repo in repos.values() if repo.repo_path in strategy.repos]
    unfinished_bytes = sum(_described(repo).unfinished_bytes for repo in whole)
    return strategy.expected_freed_size + unfinished_bytes, strategy


def _scan() -> HFCacheInfo | None:
    """The content of the cache; None before the first download."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)  # its own default is that of its import
    except CacheNotFound:
        return None


def _models_of(cache: HFCacheInfo | None) -> dict[str, CachedRepoInfo]:
    repos = () if cache is None else cache.repos
    return {one.repo_id: one for one in repos if one.repo_type == "model"}


def _described(repo: CachedRepoInfo) -> CachedModel:
    revisions = sorted(repo.revisions, key=lambda one: one.last_modified)
    files = {file.file_name: file for one in revisions for file in one.files}
    config: dict[str, Any] = {}
    if "config.json" in files:
        with blamed_on(f"{repo.repo_id}: config.json cannot be read"):
            raw = read_bounded(files["config.json"].file_path, max_bytes=_MAX_CONFIG_BYTES)
            config = parse_object(raw)
    parts = repo.repo_path.glob("blobs/*.incomplete")
    read = [file.blob_last_accessed for name, file in files.items() if name != "config.json"]
    return CachedModel(
        name=repo.repo_id,
        revisions={one.commit_hash: sorted(one.refs) for one in revisions},
        num_bytes=repo.size_on_disk,
        unfinished_bytes=sum(part.stat().st_size for part in parts),
        family=str(config.get("model_type") or ""),
        formats=_formats(config, files),
        used_s=max(read, default=repo.last_accessed),
        folder=repo.repo_path,
    )


def _formats(config: dict[str, Any], files: dict[str, Any]) -> list[str]:
    if labels := [label_of(stem) for stem in gguf_models(files)]:
        return labels
    quantised = config.get("quantization_config")
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    inner = config.get("text_config")
    places = [config, inner] if isinstance(inner, dict) else [config]
    types = [one.get(key) for one in places for key in ("dtype", "torch_dtype")]
    return [one for one in (method, *types) if isinstance(one, str) and one][:1]
