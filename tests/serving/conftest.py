"""The bundled model, loaded once, and what listens to an engine's requests."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from http_server import HERMES, TEMPLATE, ScriptedEngine, Served, model_of, served_engine, table_of
from tokenizers import AddedToken

import moe_runtime
from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.served_model import ServedModel
from moe_runtime.serving.requests import Event, Finished, GenerationRequest, NewToken, PromptRead

CAPACITY = 512
"""Tokens that the model is loaded for."""


@pytest.fixture(scope="session")
def pocket() -> Iterator[Any]:
    """In fp32, where no two tokens of a greedy text are so near that rounding swaps them."""
    model = moe_runtime.load(
        pocket_path(), device="cpu", dtype="float32", host_memory="256MiB", max_tokens=CAPACITY
    )
    with model.moe:
        yield model


@pytest.fixture(scope="session")
def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    lengths = (5, 23, 1, 12, 40)
    return [
        tuple(torch.randint(2, 4096, (length,), generator=generator).tolist()) for length in lengths
    ]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    found = load_tokenizer(pocket_path())
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="session")
def site(pocket: Any, tokenizer: Any) -> Iterator[Served]:
    with Engine(pocket) as engine, served_engine(engine, tokenizer) as found:
        yield found


@pytest.fixture(scope="session")
def stage(tokenizer: Any) -> Iterator[Served]:
    """A server over loopback that many tests share, one after another."""
    with served_engine(ScriptedEngine(lambda _: []), tokenizer) as found:
        yield found


@pytest.fixture(scope="session")
def plain_model(tokenizer: Any) -> ServedModel:
    """Whose vocabulary and grammars copies of the tokenizer share: they are slow to make."""
    return model_of("pocket", None, tokenizer, 4096)


@pytest.fixture
def staged(stage: Served, tokenizer: Any, plain_model: ServedModel) -> Callable[..., Served]:
    """Puts an engine behind the shared server, and another tokenizer; gives the server.

    ``like`` is a model whose tokenizer has the same tokens.
    """

    def put(engine: Any = None, own: Any = tokenizer, size: int = 4096, like: Any = None) -> Served:
        model = model_of("pocket", engine or ScriptedEngine(lambda _: []), own, size)
        if size == 4096 == len(own):
            like = plain_model
        if like is not None:
            model = replace(model, vocabulary=like.vocabulary, grammars=like.grammars)
        stage.server.models = table_of([model])
        return stage

    return put


@pytest.fixture
def speaking(staged: Any, tokenizer: Any) -> Callable[..., Served]:
    """A server whose model says exactly a text, or what it is to say to a prompt, where the
    request's grammar lets it."""
    known: dict[str, ServedModel] = {}

    def say(
        said: str | Callable[[str], str], template: str = HERMES, added: Sequence[AddedToken] = ()
    ) -> Served:
        own = copy.deepcopy(tokenizer)
        own.chat_template = template
        own.add_tokens(list(added))

        def script(request: GenerationRequest) -> list[Event]:
            text = said if isinstance(said, str) else said(own.decode(request.prompt_ids))
            ids = own(text, add_special_tokens=False)["input_ids"]
            constraint = request.constraint
            for end, token in enumerate([*ids, own.eos_token_id]):
                mask = None if constraint is None else constraint.allowed(ids[:end])
                assert mask is None or mask[token], (text[-60:], own.decode(ids[:end]))
            return [PromptRead(0), *map(NewToken, ids), Finished("stop")]

        engine = ScriptedEngine(script)
        if not isinstance(said, str):
            engine.most_request_tokens = 1 << 17
        site = staged(engine, own, len(own), known.get(str(added)))
        known[str(added)] = site.server.models["pocket"]
        return site

    return say


@pytest.fixture
def asked(staged: Any) -> Callable[..., GenerationRequest]:
    """What the engine is asked for a body."""

    def ask(path: str, body: dict[str, Any]) -> GenerationRequest:
        found: list[GenerationRequest] = []
        engine = ScriptedEngine(
            lambda one: found.append(one) or [PromptRead(0), Finished("length")]
        )
        staged(engine).answer(path, body)
        return found[0]

    return ask
