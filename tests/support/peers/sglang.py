"""Stands in for SGLang: an engine that streams all ids so far."""

from collections.abc import Iterator
from typing import Any

from recorded_calls import continuation, note


class Engine:
    def __init__(self, **options: Any) -> None:
        note("Engine", **options)

    def generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any], stream: bool
    ) -> Iterator[dict[str, list[int]]]:
        note("generate", input_ids, sampling_params, stream)
        said = continuation(input_ids, sampling_params["max_new_tokens"])
        for length in range(1, len(said) + 1):
            yield {"output_ids": said[:length]}

    def shutdown(self) -> None:
        note("shutdown")
