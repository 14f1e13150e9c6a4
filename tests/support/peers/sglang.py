"""Stands in for SGLang: an engine that streams all ids so far, in one list that grows."""

from collections.abc import Iterator
from typing import Any

from recorded_calls import continuation


class Engine:
    def __init__(self, **options: Any) -> None:
        self._places = min(options["context_length"], options.get("max_total_tokens", 1 << 20))

    def generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> Iterator[dict[str, list[int]]]:
        assert sampling_params["temperature"] == 0
        # Two places of a sequence hold nothing, and what has no place is not given.
        room = self._places - 2 - len(input_ids)
        said: list[int] = []
        for token in continuation(input_ids, min(sampling_params["max_new_tokens"], room)):
            said.append(token)
            yield {"output_ids": said}

    def shutdown(self) -> None: ...
