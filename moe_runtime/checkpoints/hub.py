"""Models of the hub: which of their files are needed, and where they lie in its cache."""

from __future__ import annotations

import difflib
import fnmatch
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from moe_runtime.checkpoints.hub_names import HubName, gguf_files
from moe_runtime.checkpoints.hub_transfer import HubFile, RemoteBeginning, Transfer
from moe_runtime.checkpoints.safetensors_index import (
    INDEX_FILE_NAME,
    MAX_HEADER_BYTES,
    PACKED_INDEX_NAME,
    SINGLE_FILE_NAME,
    read_weight_map,
)
from moe_runtime.checkpoints.strict_json import clipped, one_line
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, CheckpointError, MoERuntimeError, blamed_on
from moe_runtime.files import write_text

if TYPE_CHECKING:
    from moe_runtime.checkpoints.dense_weights import Progress

SMALL_FILES = ("*.json", "tokenizer*", "*.model", "*.txt", "*.jinja")
"""Patterns of the files that a checkpoint has beside its weights."""

_DIGEST = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
_FOLDERS = ("", "additional_chat_templates")
_INDICES = (INDEX_FILE_NAME, PACKED_INDEX_NAME)
# A hub that is there answers within a second; without a limit a dead one is waited for in silence.
_HUB_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class _Repository:
    """A repository as the hub lists it, or as far as it is in the cache.

    Attributes:
        name: how it was asked for.
        commit: of the revision.
        folder: its files in the cache.
        files: those that there are, by their names.
        offline: why the hub was not asked; empty where it answered.
    """

    name: HubName
    commit: str
    folder: Path
    files: dict[str, HubFile]
    offline: str

    def chosen(self) -> list[str]:
        """The files that are needed beside those of safetensors weights, or the GGUF files.

        Raises:
            CheckpointError: the repository has no model that can be read, or several.
        """
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

    def shards(self) -> list[str]:
        """The safetensors files that hold the weights.

        Raises:
            CheckpointError: there are none, or the index is damaged.
        """
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
        """Those files that are not in the cache yet.

        Raises:
            CheckpointError: they cannot be had.
        """
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
    """Downloads what is needed of a repository, as far as it is not in the hub's cache.

    Args:
        name: of the model.
        weights: also download safetensors files; GGUF files are downloaded in any case.
        progress: called with what is being done, the bytes done and the bytes in all; without it a
            bar of huggingface_hub shows them.

    Returns:
        The folder of its files, or its first GGUF file.

    Raises:
        CheckpointError: there is no such model, or it cannot be reached.
        CapacityError: the disk has no room for it.
    """
    found = _ask(name)
    chosen = found.chosen()
    _fetch(found, chosen, progress)
    is_gguf = chosen[0].endswith(".gguf")
    if weights and not is_gguf:
        _fetch(found, found.shards(), progress)
    reference = found.folder.parent.parent / "refs" / name.revision
    is_noted = reference.is_file() and reference.read_text() == found.commit
    if not found.offline and name.revision != found.commit and not is_noted:
        # Written last: without a connection the last whole commit is found.
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_text(reference, found.commit)
    return found.folder / chosen[0] if is_gguf else found.folder


@contextmanager
def headers_of(name: HubName, progress: Progress | None) -> Iterator[Path]:
    """Reads headers of a model's files, and no weights, unless all of them are in the cache.

    Yields:
        A folder or GGUF file for the time of the block. Its weights have their sizes and headers,
        and holes for the rest.

    Raises:
        CheckpointError: there is no such model, or it cannot be reached.
    """
    found = _ask(name)
    chosen = found.chosen()
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

        with _told(name, f"{name.repository}: "), _shown(progress) as show:
            transfer = Transfer(0, show)
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

    with _told(name := found.name, f"{name.repository}: "), _shown(progress) as show:
        transfer = Transfer(num_bytes, show)

        def fetch(file: str) -> None:
            # The hub gives larger files by its own protocol alone, which huggingface_hub has.
            if files[file].digest and files[file].num_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                transfer.fetch(files[file], blobs)
            hf_hub_download(name.repository, file, revision=found.commit)

        transfer.run("downloading", [*files], fetch)


@contextmanager
def _shown(progress: Progress | None) -> Iterator[Progress]:
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


def _ask(name: HubName) -> _Repository:
    """Lists a repository; what was downloaded before serves where the hub cannot be reached."""
    from huggingface_hub import HfApi, constants, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE)
    place = cache / repo_folder_name(repo_id=name.repository, repo_type="model")
    try:
        with _told(name, ""):
            info = HfApi().model_info(
                name.repository,
                revision=name.revision,
                timeout=_HUB_LIMIT_S,  # the download itself would ask six times
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
            url = hf_hub_url(name.repository, file, revision=commit)
            known = digest if _DIGEST.fullmatch(digest) else ""
            files[file] = HubFile(file, url, sibling.size or 0, known)
    return _Repository(name, commit, place / "snapshots" / commit, files, "")


@contextmanager
def _told(name: HubName, lead: str) -> Iterator[None]:
    """Says in our words, after some others, why the hub did not give what was asked for."""
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
    """The folder beside it whose name is nearest, for the end of a message."""
    try:
        names = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        return ""
    nearest = difflib.get_close_matches(folder.name, names, n=1)
    return f"; did you mean {folder.parent / nearest[0]}?" if nearest else ""
