"""Stands in for vLLM: resumable requests, each piece of which is answered with one token.

A step of the engine answers one of the requests that wait, and the first one after each piece none.
Both of its halves lengthen the prompt that they were handed, as the real ones do in one process.
"""

from typing import Any

from recorded_calls import continuation


class EngineArgs:
    def __init__(self, **options: Any) -> None: ...


class SamplingParams:
    def __init__(self, **options: Any) -> None: ...


class Output:
    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids


class RequestOutput:
    def __init__(self, request_id: str, token_ids: list[int]) -> None:
        self.request_id, self.outputs = request_id, [Output(token_ids)]


class Piece:
    def __init__(self, request_id: str, ids: list[int]) -> None:
        self.request_id, self.prompt_token_ids = request_id, ids
        self.external_req_id: str | None = None


class InputProcessor:
    def process_inputs(
        self, name: str, prompt: dict[str, Any], params: Any, tasks: Any, *, resumable: bool
    ) -> Piece:
        assert isinstance(params, SamplingParams)
        assert tasks == ("generate",)
        return Piece(name, prompt["prompt_token_ids"])


class Half:
    """What the output processor and the core have in common: prompts by request."""

    def __init__(self) -> None:
        self.prompts: dict[str, list[int]] = {}
        self.waiting: list[str] = []

    def add_request(self, piece: Piece, prompt: None = None) -> None:
        assert piece.external_req_id is not None
        if piece.request_id in self.prompts:
            self.prompts[piece.request_id].extend(piece.prompt_token_ids)
        else:
            self.prompts[piece.request_id] = piece.prompt_token_ids
        self.waiting.append(piece.request_id)


class LLMEngine:
    def __init__(self) -> None:
        self.input_processor = InputProcessor()
        self.output_processor, self.engine_core = Half(), Half()
        self._begun = False

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLMEngine":
        assert isinstance(args, EngineArgs)
        return cls()

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def abort_request(self, names: list[str], *, internal: bool) -> None:
        for half in (self.output_processor, self.engine_core):
            for name in names:
                del half.prompts[name]

    def step(self) -> list[RequestOutput]:
        self._begun = not self._begun
        if self._begun:
            return []
        # The last one first: answers come in an order of the engine's own.
        name = self.engine_core.waiting.pop()
        return [RequestOutput(name, continuation(self.engine_core.prompts[name], 1))]
