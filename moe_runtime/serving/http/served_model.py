"""A model as the server knows it: its engine, its words, its chat template, its defaults."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_runtime.inference.generation import end_token_ids, stop_strings_of, warn_of_unused
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.chat_template import ChatTemplate
from moe_runtime.serving.http.grammars import Grammars
from moe_runtime.serving.http.limits import LimitedProcess
from moe_runtime.serving.http.vocabulary import Vocabulary

_OPENAI = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model that requests can name, or a model with an adapter.

    Attributes:
        template: of its conversations; None where it was trained for none.
        defaults: of sampling, as the checkpoint says, else as OpenAI does.
        created_s: when it was loaded, in seconds since 1970.
        parent: the model whose adapter it is; None for a model.
    """

    name: str
    engine: Engine
    vocabulary: Vocabulary
    template: ChatTemplate | None
    grammars: Grammars
    defaults: Mapping[str, float] = field(default_factory=_OPENAI.copy)
    created_s: int = field(default_factory=lambda: int(time.time()))
    parent: str | None = None


def serve_model(
    name: str,
    engine: Engine,
    tokenizer: Any,
    model: Any,
    templates: LimitedProcess,
    grammars: LimitedProcess,
) -> ServedModel:
    settings = model.generation_config
    warn_of_unused(settings, is_engine=True)
    size = model.config.get_text_config().vocab_size
    template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer, templates)
    ends = end_token_ids(model, tokenizer, template and template.write)
    vocabulary = Vocabulary(tokenizer, size, ends, stop_strings_of(settings))
    found = {option: getattr(settings, option, None) for option in _OPENAI}
    return ServedModel(
        name=name,
        engine=engine,
        vocabulary=vocabulary,
        template=template,
        grammars=Grammars(vocabulary, grammars),
        defaults=_OPENAI | {name: value for name, value in found.items() if value is not None},
    )
