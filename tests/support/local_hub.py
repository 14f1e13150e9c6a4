"""A hub over loopback: it serves folders as the Hugging Face hub serves repositories."""

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

_API = re.compile(r"/api/models/([^/]+/[^/]+)/revision/(.+)")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_PIECE = 1 << 14
_LIMIT_S = 60.0


@dataclass
class LocalHub:
    """What is served, and what was asked."""

    address: str = ""  # of the server
    repositories: dict[tuple[str, str], tuple[str, Path]] = field(default_factory=dict)
    # bytes of each file that were sent, by its name
    sent: dict[str, int] = field(default_factory=dict)
    # the ranges of files that were asked for
    ranges: list[tuple[str, str]] = field(default_factory=list)
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
