"""A client that asks a server for tokens, and takes down when each came."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 3600.0
Times = list[float]


class Client:
    """Sends prompts that never come twice to a server.

    Args:
        address: as the server says it.
        ids: the tokens of a long text, of which every prompt is the next piece.
    """

    def __init__(self, address: str, ids: Sequence[int]) -> None:
        self._where = urlsplit(address)
        self._ids = ids
        self._lock = threading.Lock()
        self._begin = 0

    def prompt(self, num_tokens: int) -> list[int]:
        """The next tokens of the text, from its beginning again behind its end, one further on."""
        with self._lock:
            first, self._begin = self._begin, self._begin + num_tokens + 1
        size = len(self._ids)
        return [self._ids[(first + first // size + index) % size] for index in range(num_tokens)]

    def ask(
        self, prompt: Sequence[int], num_new: int, model: str | None = None
    ) -> tuple[Times, list[int]]:
        """Seconds since the question at which each token came, and the tokens."""
        body: dict[str, Any] = {"prompt": list(prompt), "max_tokens": num_new, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True, "return_token_ids": True}
        if model is not None:
            body["model"] = model
        connection = http.client.HTTPConnection(
            self._where.hostname or "", self._where.port, timeout=PATIENCE_S
        )
        times, tokens = [], []
        with contextlib.closing(connection):
            begin = time.perf_counter()
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(response.read().decode())
            for line in response:
                if not line.startswith(b"data: {"):
                    continue
                choices = json.loads(line[6:])["choices"]
                new = choices[0].get("token_ids") or [] if choices else []
                times += [time.perf_counter() - begin] * len(new)
                tokens += new
        assert len(times) == num_new, (len(times), num_new)
        return times, tokens

    def ask_all(
        self,
        prompts: Sequence[Sequence[int]],
        num_new: int,
        models: Sequence[str | None] | None = None,
    ) -> list[tuple[Times, list[int]]]:
        """`ask`, all at a time."""
        numbers = [num_new] * len(prompts)
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.ask, prompts, numbers, models or [None] * len(prompts)))
