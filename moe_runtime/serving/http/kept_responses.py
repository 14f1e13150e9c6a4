"""Keeps the latest responses and their conversations, on the disk or in memory."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from moe_runtime.checkpoints.strict_json import clipped
from moe_runtime.serving.digest_files import DIGEST_BYTES, DigestFiles
from moe_runtime.serving.http.api_errors import ApiError
from moe_runtime.serving.http.schema import Message

_KEPT_BYTES = 64 << 20


class KeptResponses:
    """The latest responses and their conversations, by owner.

    They are in ``files``, where later servers find them. Without files, or if writing fails, they
    are in memory, up to ``most_bytes``. Thread-safe and slow: not for the event loop.
    """

    def __init__(self, files: DigestFiles | None = None, most_bytes: int = _KEPT_BYTES) -> None:
        self._files = files
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, owner: str, response: dict[str, Any], messages: Sequence[Message]) -> None:
        plain = to_json(messages, exclude_none=True)  # json would hold the GIL for longer
        kept = json.dumps(response).encode() + b"\n" + plain
        if self._files is not None:
            try:
                return self._files.write(_file(self._files, owner, response["id"]), kept)
            except OSError as error:
                self._files.failed(error)
        with self._lock:
            self._kept[owner, response["id"]] = kept
            self._num_bytes += len(kept)
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= len(self._kept.popitem(last=False)[1])

    def response(self, owner: str, name: str) -> dict[str, Any]:
        return json.loads(self._find(owner, name, "response_id")[0])

    def conversation(self, owner: str, name: str) -> tuple[dict[str, Any], list[Message]]:
        """The response, and the messages up to its end."""
        response, messages = self._find(owner, name, "previous_response_id")
        return json.loads(response), [Message(**message) for message in from_json(messages)]

    def delete(self, owner: str, name: str) -> None:
        self._find(owner, name, "response_id")
        if self._files is not None:
            try:
                _file(self._files, owner, name).unlink(missing_ok=True)
            except OSError as error:
                message = f"the response cannot be removed from the disk: {error.strerror}"
                raise ApiError(message, status=500, code="internal_error") from None
        with self._lock:
            self._num_bytes -= len(self._kept.pop((owner, name), b""))

    def _find(self, owner: str, name: str, param: str) -> list[bytes]:
        """JSON of the response and of the messages."""
        found = self._kept.get((owner, name))
        if found is None and self._files is not None:
            file = _file(self._files, owner, name)
            data = self._files.read(file)
            found = None if data is None else data.numpy().tobytes()
            if found is not None:
                self._files.use([file])
        if found is None:
            # OpenAI's words and codes.
            is_before = param == "previous_response_id"
            what = "Previous response" if is_before else "Response"
            end = "it ends" if self._files is None else "others take their place"
            raise ApiError(
                f"{what} with id {clipped(name)} not found. This server keeps the latest, until "
                f"{end}{'; send the whole conversation as input' * is_before}",
                status=400 if is_before else 404,
                param=param,
                code=f"{what.lower().replace(' ', '_')}_not_found",
            )
        return found.split(b"\n", 1)


def _file(files: DigestFiles, owner: str, name: str) -> Path:
    key = json.dumps(["response", owner, name]).encode()
    return files.folder / hashlib.blake2b(key, digest_size=DIGEST_BYTES).hexdigest()
