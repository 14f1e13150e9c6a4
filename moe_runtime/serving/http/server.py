"""What all endpoints share: models, limits, metrics, the log, and whether the server is ready."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from moe_runtime.serving.http.api_errors import ApiError, FieldError
from moe_runtime.serving.http.generating import AnswerChoice, Generation
from moe_runtime.serving.http.metrics import Metrics, RequestTimes
from moe_runtime.serving.http.models.served_model import ServedModel

Log = Callable[[str, Mapping[str, Any]], None]
"""Called with an event's name and its fields."""

ValueT = TypeVar("ValueT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one request may ask for.

    Attributes:
        body_bytes: length of its body.
        choices: sequences, all prompts and ``n`` of each.
        seconds: from its arrival to the end of its answer.
    """

    body_bytes: int = 16 << 20
    choices: int = 256
    seconds: float = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Who may ask.

    Attributes:
        keys: one of them must come with a request; everybody may ask where there is none.
        origins: pages of other origins that may read answers in a browser; ``*`` for all.
        hosts: names by which the server may be called; None for any.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    hosts: Sequence[str] | None = None


@dataclass(slots=True)
class Server:
    """The state of one server.

    Attributes:
        models: by name; the first answers requests that name none.
        limits: of a request.
        access: who may ask.
        log: takes one event for each request.
        is_draining: takes no more requests.
    """

    models: Mapping[str, ServedModel]
    limits: Limits
    access: Access
    log: Log
    is_draining: bool = False
    metrics: Metrics = field(init=False)
    # Tokenizers and grammars are slow with long texts; one thread keeps them out of the loop.
    worker: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        """Makes what the models need."""
        models = {name: model for name, model in self.models.items() if model.parent is None}
        self.metrics = Metrics({name: model.engine for name, model in models.items()})
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="texts")

    def model(self, name: str | None) -> ServedModel:
        """The model that a request names.

        Raises:
            ApiError: there is none of that name, or the server takes no more requests.
        """
        if self.is_draining:
            raise ApiError("the server is shutting down", status=503, code="shutting_down")
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise ApiError(
                f"model: {name!r} is not served here; there is {', '.join(self.models)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.models[name]

    async def aside(self, work: Callable[..., ValueT], *args: Any) -> ValueT:
        """Runs what takes a while in the thread for texts."""
        import asyncio

        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.worker, partial(work, *args))

    def begin(self, model: ServedModel, choices: Sequence[AnswerChoice]) -> Generation:
        """Hands a request to the engine.

        Raises:
            ApiError: it is not taken.
        """
        if len(choices) > self.limits.choices:
            raise FieldError(
                "n", f"{len(choices)} answers are asked for, at most {self.limits.choices} may be"
            )
        times = RequestTimes(self.metrics, model.parent or model.name)
        generation = Generation(model, choices, times, self.limits.seconds)
        generation.submit()
        return generation
