"""Responses that were given and their conversations, for a while, in memory and on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.files import make_folders, read_bounded, write_atomically
from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.schema import Message

_KEPT_BYTES = 64 << 20
_DIGEST_BYTES = 16
_FORM = b"responses 1"
_OURS = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]{8}\.partial)?")


class KeptResponses:
    """The latest responses and their conversations; each key finds its own.

    In memory they are up to ``most_bytes``. With a folder they are files too, of up to as many
    bytes, which later servers find; a damaged one is removed, and is no response.

    Raises:
        ValueError: the folder cannot be made.
    """

    def __init__(self, folder: Path | None = None, most_bytes: int = _KEPT_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._num_bytes = self._num_disk_bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._has_warned = False
        if folder is None:
            return
        try:
            make_folders(folder)
            os.chmod(folder, 0o700)
            self._num_disk_bytes = self._remove_down_to(most_bytes)
        except OSError as error:
            raise ValueError(f"--prefix-disk: {error.filename}: {error.strerror}") from None

    def put(self, owner: str, response: dict[str, Any], messages: Sequence[Message]) -> None:
        plain = [message.model_dump(exclude_none=True) for message in messages]
        kept = json.dumps({"response": response, "messages": plain}).encode()
        self._kept[owner, response["id"]] = kept
        self._num_bytes += len(kept)
        while self._num_bytes > self._most_bytes:
            self._num_bytes -= len(self._kept.popitem(last=False)[1])
        file = self._file(owner, response["id"])
        if file is not None:
            self._write(file, kept)

    def response(self, owner: str, name: str) -> dict[str, Any]:
        return self._find(owner, name, "response_id")["response"]

    def messages(self, owner: str, name: str) -> list[Message]:
        found = self._find(owner, name, "previous_response_id")["messages"]
        return [Message(**message) for message in found]

    def delete(self, owner: str, name: str) -> None:
        self._find(owner, name, "response_id")
        self._num_bytes -= len(self._kept.pop((owner, name), b""))
        file = self._file(owner, name)
        if file is not None:
            file.unlink(missing_ok=True)

    def _find(self, owner: str, name: str, param: str) -> dict[str, Any]:
        found = self._kept.get((owner, name)) or self._read(self._file(owner, name))
        if found is None:
            # in the words and with the code that OpenAI's clients know
            is_before = param == "previous_response_id"
            what, code = (
                ("Previous response", "previous_response")
                if is_before
                else ("Response", "response")
            )
            end = "it ends" if self._folder is None else "others take their place"
            raise ApiError(
                f"{what} with id {clipped(name)} not found. This server keeps the latest, until "
                f"{end}{'; send the whole conversation as input' * is_before}",
                status=400 if is_before else 404,
                param=param,
                code=f"{code}_not_found",
            )
        return json.loads(found)

    def _file(self, owner: str, name: str) -> Path | None:
        if self._folder is None:
            return None
        key = json.dumps([owner, name]).encode()
        return self._folder / hashlib.blake2b(key, digest_size=_DIGEST_BYTES).hexdigest()

    def _read(self, file: Path | None) -> bytes | None:
        if file is None:
            return None
        try:
            raw = read_bounded(file, max_bytes=self._most_bytes)
        except OSError:
            return None
        kept = raw[_DIGEST_BYTES:]
        if raw[:_DIGEST_BYTES] == _sum(file, kept):
            return kept
        with contextlib.suppress(OSError):
            file.unlink()
        return None

    def _write(self, file: Path, kept: bytes) -> None:
        num_bytes = _DIGEST_BYTES + len(kept)
        if num_bytes > self._most_bytes:
            return
        assert self._folder is not None
        try:
            if self._num_disk_bytes + num_bytes > self._most_bytes:
                limit = min(self._most_bytes * 7 // 8, self._most_bytes - num_bytes)
                self._num_disk_bytes = self._remove_down_to(limit)
            make_folders(self._folder)  # the cache may have been emptied
            with write_atomically(file) as output:
                output.write(_sum(file, kept) + kept)
            self._num_disk_bytes += num_bytes
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                message = f"responses are not kept on the disk: {file.parent}: {error.strerror}"
                warnings.warn(message, MoERuntimeWarning, stacklevel=3)

    def _remove_down_to(self, limit: int) -> int:
        """Removes the oldest files; gives the bytes that are left."""
        assert self._folder is not None
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if _OURS.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_mtime_ns, about.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= limit:
                break
            with contextlib.suppress(FileNotFoundError):  # another server removed it
                os.unlink(path)
            total -= size
        return total


def _sum(file: Path, kept: bytes) -> bytes:
    key = bytes.fromhex(file.name)
    return hashlib.blake2b(_FORM + kept, digest_size=_DIGEST_BYTES, key=key).digest()
