"""Models of the hub: what a name asks for, which bytes come, and what an interruption leaves."""

import contextlib
import hashlib
import io
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import gguf_checkpoints
import numpy as np
import pytest
from huggingface_hub import constants, snapshot_download
from safetensors.numpy import save_file
from text_checkpoint import tiny_text_model, tiny_tokenizer

from moe_runtime.checkpoints.hub import (
    HubName,
    data_set,
    download_files,
    gguf_files,
    parse_hub_name,
)
from moe_runtime.checkpoints.opening import find_checkpoint
from moe_runtime.cli.console import fetch_model
from moe_runtime.cli.main import main
from moe_runtime.config import format_bytes
from moe_runtime.errors import CapacityError, CheckpointError
from moe_runtime.inference.inspection import inspect_checkpoint

_API = re.compile(r"/api/(?:models|datasets)/([^/]+/[^/]+)/revision/(.+)")
_FILE = re.compile(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_PIECE = 1 << 14
_LIMIT_S = 600.0


@dataclass
class LocalHub:
    """What is served, and what was asked."""

    address: str = ""  # of the server
    repositories: dict[tuple[str, str], tuple[str, Path]] = field(default_factory=dict)
    # bytes of each file that were sent, by its name
    sent: dict[str, int] = field(default_factory=dict)
    # the ranges of files that were asked for
    ranges: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)  # that requests came with
    # status and error code that files are answered with; None where they are sent
    refusal: tuple[int, str] | None = None
    most_bytes: int | None = None  # of a file that are sent at once before the connection is closed
    # whether such a connection stands still instead, until ``released`` is set
    at_limit: bool = False
    stalled: threading.Event = field(default_factory=threading.Event)  # set when one does
    released: threading.Event = field(default_factory=threading.Event)
    wrong_bytes: bool = False  # whether files are sent with other bytes than announced
    ignores_ranges: bool = False  # whether whole files are sent

    def add(self, name: str, folder: Path, revision: str = "main") -> str:
        """Serves a folder as a revision of a repository, and returns its commit."""
        files = [(str(path), path.stat().st_size) for path in sorted(folder.rglob("*"))]
        commit = hashlib.sha1(f"{name} {revision} {files}".encode()).hexdigest()
        self.repositories[name, revision] = self.repositories[name, commit] = (commit, folder)
        return commit


@contextlib.contextmanager
def local_hub() -> Iterator[LocalHub]:
    """A hub that runs for the time of the block."""
    hub = LocalHub()

    class Handler(_Handler):
        served = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def use(hub: LocalHub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets huggingface_hub of this process ask a local hub, with an empty cache and no token."""
    from huggingface_hub import constants

    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in {
        "ENDPOINT": hub.address,
        "HUGGINGFACE_CO_URL_TEMPLATE": template,
        "HF_HUB_CACHE": str(cache),
        "HF_TOKEN_PATH": str(cache / "token"),
        "HF_HUB_OFFLINE": False,
    }.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.delenv("HF_TOKEN", raising=False)


def digest_of(file: Path) -> tuple[str, bool]:
    """What the hub calls a file's bytes, and whether it is stored as a large file."""
    content = file.read_bytes()
    if file.suffix in (".safetensors", ".gguf"):
        return hashlib.sha256(content).hexdigest(), True
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(), False


class _Handler(BaseHTTPRequestHandler):
    served: LocalHub
    protocol_version = "HTTP/1.1"
    timeout = _LIMIT_S

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, has_body: bool) -> None:
        self.served.tokens.add(self.headers.get("Authorization"))
        path = unquote(urlsplit(self.path).path)
        asked = _API.fullmatch(path) or _FILE.fullmatch(path)
        names = {name for name, _ in self.served.repositories}
        if asked is None or asked[1] not in names:
            # as the hub answers who has no token
            self._refuse(401, "RepoNotFound")
        elif asked.group(1, 2) not in self.served.repositories:
            self._refuse(404, "RevisionNotFound")
        elif asked.re is _API:
            self._list(*asked.group(1, 2))
        elif self.served.refusal is not None:
            self._refuse(*self.served.refusal)
        else:
            self._send_file(*asked.group(1, 2, 3), has_body=has_body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, name: str, revision: str) -> None:
        commit, folder = self.served.repositories[name, revision]
        siblings = []
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest, is_large = digest_of(file)
            size = file.stat().st_size
            about = {"rfilename": file.relative_to(folder).as_posix(), "size": size}
            large = {"lfs": {"size": size, "sha256": digest, "pointerSize": 130}}
            siblings.append(
                about | ({"blobId": "0" * 40, **large} if is_large else {"blobId": digest})
            )
        body = json.dumps({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def _send_file(self, name: str, revision: str, file: str, *, has_body: bool) -> None:
        hub = self.served
        commit, folder = hub.repositories[name, revision]
        if not (folder / file).is_file():
            self._refuse(404, "EntryNotFound")
            return
        content = (folder / file).read_bytes()
        begin, end = 0, len(content)
        asked = self.headers.get("Range")
        if has_body and asked:
            hub.ranges.append((file, asked))
        if asked and not hub.ignores_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(end, int(last or end) + 1)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{digest_of(folder / file)[0]}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        if has_body:
            self._send(file, content[begin:end])

    def _send(self, file: str, content: bytes) -> None:
        hub = self.served
        limit = len(content) if hub.most_bytes is None else hub.most_bytes
        if hub.wrong_bytes:
            content = bytes(byte ^ 1 for byte in content)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for begin in range(0, min(limit, len(content)), _PIECE):
                piece = content[begin : min(begin + _PIECE, limit)]
                hub.sent[file] = hub.sent.get(file, 0) + len(piece)
                self.wfile.write(piece)
        if limit < len(content):
            if hub.at_limit:
                hub.stalled.set()
                hub.released.wait(_LIMIT_S)
            self.close_connection = True


NAME = "maker/tiny"
SMALL = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded checkpoint beside files that nothing needs."""
    folder = tmp_path_factory.mktemp("repository") / "tiny"
    tiny_text_model(400).save_pretrained(folder, max_shard_size="300KB")
    tiny_tokenizer().save_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "original").mkdir()
    save_file({"x": np.zeros(8)}, folder / "original" / "model.safetensors")
    save_file({"x": np.zeros(8)}, folder / "consolidated.safetensors")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    with local_hub() as hub:
        use(hub, tmp_path / "cache", monkeypatch)
        yield hub


def shards_of(folder: Path) -> list[str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return sorted(set(index["weight_map"].values()))


def refused(name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_checkpoint(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a/b", HubName("a/b")),
        ("a/b@v1.0", HubName("a/b", "v1.0")),
        ("a/b:Q4_K_M", HubName("a/b", quantisation="Q4_K_M")),
        ("hf.co/a/b:UD-Q4_K_XL@v2", HubName("a/b", "v2", "UD-Q4_K_XL")),
        ("a/b/c.gguf", HubName("a/b", file="c.gguf")),
        ("hf://a/b/Q8_0/c-00001-of-00002.gguf", HubName("a/b", file="Q8_0/c-00001-of-00002.gguf")),
        ("https://huggingface.co/a/b/tree/v1", HubName("a/b", "v1")),
        (
            "https://huggingface.co/a/b/resolve/v1/c.gguf?download=true",
            HubName("a/b", "v1", file="c.gguf"),
        ),
        ("a/b/c", None),
        ("a/b@v1@v2", None),
        ("a/b@../../x", None),
        ("/a/b", None),
        ("a/b\n", None),
    ],
)
def test_names_of_the_hub(text, expected):
    assert parse_hub_name(text) == expected


GGUF = {
    "README.md": 1,
    "imatrix.gguf": 1,
    "mmproj-F16.gguf": 1,
    "M-Q4_K_M.gguf": 5 << 20,
    "M-UD-Q4_K_XL.gguf": 6,
    "Q8_0/M-Q8_0-00002-of-00002.gguf": 1,
    "Q8_0/M-Q8_0-00001-of-00002.gguf": 1,
    "BF16/M-BF16-00001-of-00002.gguf": 1,
}
Q8 = ["Q8_0/M-Q8_0-00001-of-00002.gguf", "Q8_0/M-Q8_0-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b:Q4_K_M", ["M-Q4_K_M.gguf"]),
        ("a/b:q4_k_m", ["M-Q4_K_M.gguf"]),
        ("a/b:Q4_K_XL", ["M-UD-Q4_K_XL.gguf"]),
        ("a/b:Q8_0", Q8),
        (f"a/b/{Q8[0]}", Q8),
        ("a/b/mmproj-F16.gguf", ["mmproj-F16.gguf"]),
        ("a/b", ["M-Q4_K_M.gguf"]),
        ("a/b:Q3_K", r"no 'Q3_K'; it has BF16 \(1.*Q4_K_M \(5 MiB\), UD-Q4_K_XL .*a/b:QUANT"),
        ("a/b/M.gguf", r"has no 'M.gguf'; .* or a/b/FILE.gguf"),
        ("a/b:BF16", "expected all of BF16/M-BF16, found 1 of the 2 files"),
    ],
)
def test_which_files_of_a_gguf_repository(name, expected):
    parsed = parse_hub_name(name)
    assert parsed is not None
    if isinstance(expected, list):
        assert gguf_files(parsed, GGUF) == expected
        return
    with pytest.raises(CheckpointError, match=expected):
        gguf_files(parsed, GGUF)


def test_repositories_in_which_no_file_is_the_usual_one_leave_the_choice():
    with pytest.raises(CheckpointError, match=r"several models; it has IQ2_M \(1 B\), Q6_K"):
        gguf_files(HubName("a/b"), {"M-Q6_K.gguf": 1, "M-IQ2_M.gguf": 1})
    with pytest.raises(CheckpointError, match=r"several models; it has L-Q8_0\.gguf"):
        gguf_files(HubName("a/b"), {"M-Q8_0.gguf": 1, "L-Q8_0.gguf": 1, "M-F16.gguf": 1})
    with pytest.raises(CheckpointError, match="it has no GGUF files; name a/b alone"):
        gguf_files(HubName("a/b", quantisation="Q8_0"), {"config.json": 1, "m.safetensors": 1})


def test_a_file_and_a_quantisation_are_one_too_many():
    assert "leave :Q8_0 out" in refused("a/b/c.gguf:Q8_0")


def test_only_what_is_needed_is_downloaded_into_the_cache_of_the_hub(hub, folder):
    hub.add(NAME, folder)
    shown: list[tuple[str, int, int]] = []
    assert {path.name for path in find_checkpoint(NAME, weights=False).iterdir()} >= SMALL
    assert not any(name.endswith(".safetensors") for name in hub.sent)
    found = find_checkpoint(f"hf.co/{NAME}", progress=lambda *about: shown.append(about))
    shards = shards_of(folder)
    assert len(shards) > 1
    assert {name for name in hub.sent if name.endswith(".safetensors")} == {*shards}
    for name in (*SMALL, *shards):
        assert (found / name).read_bytes() == (folder / name).read_bytes()
        assert hub.sent[name] == (folder / name).stat().st_size
    # what huggingface_hub finds without a connection is this folder
    assert snapshot_download(NAME, local_files_only=True) == str(found)
    total = sum((folder / name).stat().st_size for name in shards)
    assert shown
    assert all(line.startswith("downloading ") and size == total for line, _, size in shown)
    before = dict(hub.sent)
    assert find_checkpoint(NAME) == found
    assert hub.sent == before


def test_where_stderr_is_no_terminal_lines_tell_of_a_download(hub, folder, capsys):
    hub.add(NAME, folder)
    hub.most_bytes = 1 << 16
    fetch_model(NAME)
    lines = capsys.readouterr().err.splitlines()
    weights = sum((folder / shard).stat().st_size for shard in shards_of(folder))
    assert f"moe-runtime: downloading {format_bytes(weights)}" in lines
    assert lines[-1].startswith(f"moe-runtime: downloaded {format_bytes(weights)} in ")
    fetch_model(NAME)
    assert not capsys.readouterr().err


def test_revisions(hub, folder, tmp_path):
    other = tmp_path / "other"
    tiny_text_model(300).save_pretrained(other)
    hub.add(NAME, folder)
    commit = hub.add(NAME, other, "v2")
    for name in (f"{NAME}@v2", f"{NAME}@{commit}"):
        assert find_checkpoint(name).name == commit
    assert "has no revision 'v3' of it" in refused(f"{NAME}@v3")


def test_a_download_goes_on_where_it_was_interrupted(hub, folder):
    hub.add(NAME, folder)
    find_checkpoint(NAME, weights=False)
    hub.most_bytes, hub.at_limit = 50_000, True

    def interrupt(*_: object) -> None:
        if hub.stalled.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        find_checkpoint(NAME, progress=interrupt)
    blobs = Path(constants.HF_HUB_CACHE) / "models--maker--tiny" / "blobs"
    digests = {digest_of(folder / name)[0]: name for name in shards_of(folder)}
    assert not any((blobs / digest).exists() for digest in digests)
    hub.released.set()
    for thread in threading.enumerate():
        if thread.name == "moe-hub":
            thread.join()
    hub.most_bytes, hub.at_limit = None, False
    parts = {path.stem: path.stat().st_size for path in blobs.glob("*.incomplete")}
    assert max(parts.values()) > 0
    hub.ranges.clear()
    found = find_checkpoint(NAME)
    for digest, name in digests.items():
        assert (found / name).read_bytes() == (folder / name).read_bytes()
        size = (folder / name).stat().st_size
        if parts.get(digest):
            assert (name, f"bytes={parts[digest]}-{size - 1}") in hub.ranges
    assert not [*blobs.glob("*.incomplete")]


def test_a_connection_that_breaks_off_is_made_again(hub, folder):
    hub.add(NAME, folder)
    hub.most_bytes = 50_000
    found = find_checkpoint(NAME)
    for name in shards_of(folder):
        assert (found / name).read_bytes() == (folder / name).read_bytes()
        assert hub.sent[name] == (folder / name).stat().st_size


def test_bytes_that_are_not_those_announced_are_refused(hub, folder):
    hub.add(NAME, folder)
    find_checkpoint(NAME, weights=False)
    hub.wrong_bytes = True
    assert "expected bytes of digest " in refused(NAME)
    hub.wrong_bytes = False
    assert (find_checkpoint(NAME) / shards_of(folder)[0]).exists()


def test_a_disk_without_room(hub, folder, monkeypatch):
    hub.add(NAME, folder)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    with pytest.raises(CapacityError, match=r"are to be downloaded, and 10 B are free .*HF_HOME"):
        find_checkpoint(NAME)


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_inspecting_a_model_of_the_hub_reads_headers_alone(
    hub, folder, ignores_ranges, monkeypatch
):
    monkeypatch.setattr("moe_runtime.checkpoints.hub._FIRST_BYTES", 1 << 10)
    hub.add(NAME, folder)
    hub.ignores_ranges = ignores_ranges
    expected = inspect_checkpoint(folder, max_tokens=64)
    found = inspect_checkpoint(NAME, max_tokens=64)
    assert found.path == Path(NAME)
    for name in ("num_layers", "total_experts", "expert_bytes", "dense_bytes", "signature"):
        assert getattr(found, name) == getattr(expected, name)
    shards = shards_of(folder)
    assert {name for name, _ in hub.ranges} == {*shards, "model.safetensors.index.json", *SMALL}
    if not ignores_ranges:
        assert all(hub.sent[name] < (folder / name).stat().st_size / 10 for name in shards)
    cache = Path(constants.HF_HUB_CACHE)
    assert not [*cache.rglob("*.safetensors"), *cache.rglob("*.incomplete")]
    inspect_checkpoint(NAME, max_tokens=64, verify=True)
    assert len([*cache.rglob("*.safetensors")]) == len(shards)
    hub.sent.clear()
    assert inspect_checkpoint(NAME, max_tokens=64).expert_bytes == expected.expert_bytes
    assert not hub.sent  # all of it is here


def test_gguf_repositories(hub, tmp_path, capsys):
    sample = next(one for one in gguf_checkpoints.SAMPLES if one.architecture == "olmoe")
    source = tmp_path / "repository"
    source.mkdir()
    written = gguf_checkpoints.write(sample, source, most_tensors=9)
    parts = sorted(source.glob("*.gguf"))
    assert len(parts) > 1
    for part in parts:
        part.rename(part.with_name(part.name.replace("model-", "M-Q8_0-")))
    (source / "M-Q2_K.gguf").write_bytes(b"GGUF")
    first = source / written.folder.name.replace("model-", "M-Q8_0-")
    expected = inspect_checkpoint(first, max_tokens=64)
    hub.add(NAME, source)
    found = inspect_checkpoint(f"{NAME}:Q8_0", max_tokens=64)
    assert (found.expert_bytes, found.dense_bytes) == (expected.expert_bytes, expected.dense_bytes)
    assert not [*Path(constants.HF_HUB_CACHE).rglob("*.gguf")]
    assert main(["inspect", NAME, "--json"]) == 0
    sizes = {"Q2_K": 4, "Q8_0": sum(part.stat().st_size for part in source.glob("M-Q8_0-*"))}
    assert json.loads(capsys.readouterr().out)["quantisations"] == sizes
    hub.sent.clear()
    for name in (f"{NAME}:Q8_0", f"https://huggingface.co/{NAME}/blob/main/{first.name}"):
        file = find_checkpoint(name)
        assert file.name == first.name
        assert inspect_checkpoint(file, max_tokens=64).expert_bytes == expected.expert_bytes
    assert len(hub.sent) == len(parts)
    shown: list[str] = []
    assert find_checkpoint(NAME, progress=lambda stage, *_: shown.append(stage)) == file
    assert shown == [f"chose Q8_0 of 2 GGUF models; {NAME}:QUANTISATION takes another"]
    capsys.readouterr()
    fetch_model(NAME)
    assert capsys.readouterr().err == f"moe-runtime: {shown[0]}\n"


def test_models_on_this_disk_are_listed_and_removed(hub, folder, tmp_path, monkeypatch, capsys):
    def listed() -> dict[str, Any]:
        assert main(["models", "list", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        for model in found["models"]:
            read = datetime.fromisoformat(model.pop("last_used")).timestamp()
            assert read == 7 or model["name"] != NAME
        return {model["name"]: model for model in found["models"]}

    def refusal(*words: str) -> str:
        assert main(["models", "remove", *words]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    cache = Path(constants.HF_HUB_CACHE)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))  # which is not a terminal
    assert listed() == {}
    other = tmp_path / "other"
    tiny_text_model(300).save_pretrained(other)
    old = hub.add(NAME, folder)
    find_checkpoint(NAME)
    new = hub.add(NAME, other)
    find_checkpoint(NAME)
    hub.add("maker/gguf", source := tmp_path / "gguf")
    source.mkdir()
    (source / "M-Q4_K_M.gguf").write_bytes(b"GGUF")
    hub.add("maker/gguf", source)
    find_checkpoint("maker/gguf")
    blobs = cache / "models--maker--tiny" / "blobs"
    (blobs / "x.incomplete").write_bytes(b"some")
    (cache / "datasets--maker--tiny" / "snapshots").mkdir(parents=True)
    for file in (cache / "models--maker--tiny").glob("snapshots/*/*"):
        if file.name != "config.json":  # which a list reads
            os.utime(file, (7, 7))

    found = listed()
    assert [*found] == ["maker/gguf", NAME]
    tiny = found[NAME]
    whole = sum(blob.stat().st_size for blob in blobs.iterdir())
    assert tiny["num_bytes"] + tiny["unfinished_bytes"] == whole
    assert (tiny["unfinished_bytes"], tiny["family"]) == (4, tiny_text_model(300).config.model_type)
    assert (tiny["formats"], found["maker/gguf"]["formats"]) == (["float32"], ["Q4_K_M"])
    assert tiny["revisions"] == {old: [], new: ["main"]}
    assert main(["models", "list"]) == 0
    assert "4 B unfinished" in capsys.readouterr().out

    assert "there is maker/gguf, maker/tiny" in refusal("maker/absent", "-y")
    assert "expected OWNER/NAME or OWNER/NAME@REVISION" in refusal(f"{NAME}:Q4_K_M", "-y")
    assert "has no such revision in the cache" in refusal(f"{NAME}@v7", "-y")
    assert "give --yes: there is no terminal to ask" in refusal(NAME)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin.readline", lambda: "no\n", raising=False)
    assert main(["models", "remove", NAME]) == 2
    assert "nothing was removed" in capsys.readouterr().err
    assert listed() == found

    assert main(["models", "remove", f"{NAME}@{old}", "--yes"]) == 0
    assert listed()[NAME]["revisions"] == {new: ["main"]}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_checkpoint(NAME).name == new
    monkeypatch.setattr("sys.stdin.readline", lambda: "y\n", raising=False)
    capsys.readouterr()
    assert main(["models", "remove", NAME]) == 0
    assert [*listed()] == ["maker/gguf"]
    assert not blobs.parent.exists()

    # a file that is gone from the disk: the repository cannot be read, and is not passed over
    for blob in (cache / "models--maker--gguf" / "blobs").iterdir():
        blob.unlink()
    assert listed() == {}
    assert main(["models", "list"]) == 0
    assert "damaged, to be removed by hand: " in (said := capsys.readouterr().err)
    assert "no models in " in said
    assert "models--maker--gguf" in refusal("maker/gguf", "-y")


def test_a_token_is_sent_to_the_hub(hub, folder, monkeypatch):
    hub.add(NAME, folder)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    inspect_checkpoint(NAME, max_tokens=64)
    find_checkpoint(NAME)
    assert hub.tokens == {"Bearer hf_x"}


def test_a_data_set_gives_its_files_for_training(hub, tmp_path, monkeypatch):
    files = {"data/train-0.jsonl": "1", "data/test-0.jsonl": "2", "other/a.json": "3"}
    for name, text in {**files, "dataset_infos.json": "{}", "README.md": ""}.items():
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_text(text)
    hub.add("maker/set", tmp_path / "set")

    def found(text: str) -> list[str]:
        name = data_set(text)
        assert name is not None
        return [path.read_text() for path in download_files(name, (".jsonl", ".json"))]

    assert found("maker/set") == ["1"]
    assert found("maker/set/other") == ["3"]
    assert found("https://huggingface.co/datasets/maker/set") == ["1"]
    assert found("maker/set/data/test-0.jsonl@main") == ["2"]
    with pytest.raises(CheckpointError, match=r"has no files of .* below none to train on"):
        found("maker/set/none")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert found("maker/set") == ["1"]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def chosen(*names: str, below: str = "") -> list[str]:
        own = f"maker/of-{len(hub.repositories)}"
        for name in names:
            (tmp_path / own / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / own / name).write_text(name)
        hub.add(own, tmp_path / own)
        return found(own + below)

    for name in ("latest/constraints.jsonl", "devices.jsonl", "contest.jsonl", "train/a/0.jsonl"):
        assert chosen(name, "train_eval.jsonl", "a/Validation-0.jsonl") == [name]
    assert chosen("constraints.jsonl", "TRAIN2.jsonl", "training/3.jsonl") == [
        "TRAIN2.jsonl",
        "training/3.jsonl",
    ]
    several = ("main/train-0.jsonl", "socratic/train-0.jsonl", "main/test-0.jsonl")
    with pytest.raises(CheckpointError, match=r"\['main', 'socratic'\]: .*/of-\d+/main"):
        chosen(*several)
    assert chosen(*several, below="/socratic") == ["socratic/train-0.jsonl"]
    assert chosen("test/0.jsonl", "train/0.jsonl", below="/test") == ["test/0.jsonl"]
    for local in ("chats.jsonl", "texts/chats.jsonl", "texts/*", "/data/set"):
        assert data_set(local) is None


def test_without_a_connection_the_cache_serves(hub, folder, monkeypatch):
    hub.add(NAME, folder)
    find_checkpoint(NAME, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    message = refused(NAME)
    assert f"there is no {shards_of(folder)}; HF_HUB_OFFLINE is set" in message
    assert "HF_HOME" in refused("maker/other")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    found = find_checkpoint(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_checkpoint(NAME) == found
    assert inspect_checkpoint(NAME, max_tokens=64).path == found
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert find_checkpoint(NAME) == found
    assert "http://127.0.0.1:9 (HF_ENDPOINT) cannot be reached: " in refused("maker/other")


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (
            (403, "GatedRepo"),
            r"it is gated, and HF_TOKEN is not set: accept its terms at .*/maker/tiny, and set",
        ),
        ((401, "GatedRepo"), "it is gated, and HF_TOKEN is not set"),
        ((403, ""), r"refused it \(403\): HF_TOKEN is not set"),
    ],
)
def test_files_that_the_hub_refuses(hub, folder, refusal, expected, monkeypatch):
    hub.add(NAME, folder)
    hub.refusal = refusal
    with pytest.raises(CheckpointError, match=expected):
        find_checkpoint(NAME)
    with pytest.raises(CheckpointError, match=expected):
        inspect_checkpoint(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert "the token in HF_TOKEN may not read it" in refused(NAME)


def test_names_that_the_hub_does_not_have_are_one_line(hub, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"x")
    hub.add("maker/pickles", tmp_path / "empty")
    assert "none of that name, or it is private and HF_TOKEN is not set" in refused("maker/absent")
    assert "neither config.json nor GGUF files; found ['pytorch_model.bin']" in refused(
        "maker/pickles"
    )
    assert main(["inspect", "maker/absent"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
