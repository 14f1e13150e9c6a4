"""Stands in for vLLM: an engine whose steps give nothing, one token or several of each request."""

from typing import Any

from recorded_calls import continuation, note


class EngineArgs:
    def __init__(self, **options: Any) -> None:
        note("EngineArgs", **options)


class SamplingParams:
    def __init__(self, **options: Any) -> None:
        note("SamplingParams", **options)
        self.max_tokens = options["max_tokens"]


class Output:
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


class RequestOutput:
    def __init__(self, token_ids: list[int]) -> None:
        self.outputs = [Output(token_ids)]


class LLMEngine:
    def __init__(self) -> None:
        self._said: list[int] = []
        self._given = 0

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        assert isinstance(args, EngineArgs)
        return cls()

    def add_request(self, number: str, prompt: dict[str, Any], params: SamplingParams) -> None:
        note("add_request", number, prompt)
        self._said, self._given = continuation(prompt["prompt_token_ids"], params.max_tokens), 0
        self._begun = False

    def has_unfinished_requests(self) -> bool:
        return self._given < len(self._said)

    def step(self) -> list[RequestOutput]:
        if not self._begun:
            self._begun = True
            return []
        # All that was said so far, the last two of them new.
        self._given = min(self._given + 2, len(self._said))
        return [RequestOutput(self._said[: self._given])]
