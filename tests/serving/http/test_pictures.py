"""Pictures in chats: the text of transformers, prefixes that tell them apart, and limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import picture_checkpoints as pc
import pytest
import torch
from http_server import Served, model_of, served
from PIL import Image

import moe_runtime
from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.checkpoints.transformers_private import picture_processor
from moe_runtime.inference.pictures import PictureReader
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.requests import EngineOptions

if TYPE_CHECKING:
    import openai

NUM_NEW = 8
Parts = Sequence[str | Image.Image]


@pytest.fixture(scope="module", params=pc.TABLE)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pc.save_seeing_checkpoint(request.param, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return pc.model_of(folder)


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Served]:
    """Prompts are cut into pieces shorter than a picture."""
    tokenizer = load_tokenizer(folder)
    pictures = PictureReader.of(folder, read_config(folder), tokenizer)
    loaded: Any = moe_runtime.load(
        folder, device="cpu", dtype="float32", host_memory="1GiB", max_tokens=2048
    )
    options = EngineOptions(prompt_tokens=16, idle_prompt_tokens=16)
    with loaded.moe, Engine(loaded, options) as engine:
        model = model_of("seeing", engine, tokenizer, len(tokenizer), pictures=pictures)
        with served([model]) as found:
            yield found
        engine.check()


@pytest.fixture(scope="module")
def client(site: Served) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=f"{site.address}/v1", api_key="none", max_retries=0) as found:
        yield found


def ask(client: openai.OpenAI, *turns: Any) -> Any:
    """The answer to turns of the user and the assistant."""
    roles = ["user", "assistant"] * len(turns)
    messages: Any = [
        {"role": role, "content": turn if isinstance(turn, str) else pc.content_of(turn)}
        for role, turn in zip(roles, turns, strict=False)
    ]
    return client.chat.completions.create(
        model="seeing", messages=messages, temperature=0, max_tokens=NUM_NEW, logprobs=True
    )


def expected(reference: Any, folder: Path, *turns: Any) -> list[float]:
    """Log-probabilities of the greedy answer of transformers."""
    tokenizer = load_tokenizer(folder)
    processor = picture_processor(folder, read_config(folder), tokenizer)
    conversation, images = [], []
    for role, turn in zip(["user", "assistant"] * len(turns), turns, strict=False):
        parts: Any = turn
        if not isinstance(turn, str):
            images += [part for part in turn if not isinstance(part, str)]
            parts = [
                {"type": "text", "text": one} if isinstance(one, str) else {"type": "image"}
                for one in turn
            ]
        conversation.append({"role": role, "content": parts})
    prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    given = processor(
        text=[prompt], images=images or None, return_tensors="pt", add_special_tokens=False
    )
    inputs = pc.known_inputs(reference, given)
    out = reference.generate(
        **inputs,
        max_new_tokens=NUM_NEW,
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    rows = torch.cat(out.logits).log_softmax(-1)
    return rows.max(-1).values.tolist()


def logprobs(answer: Any) -> list[float]:
    return [token.logprob for token in answer.choices[0].logprobs.content]


TALKS: dict[str, list[Any]] = {
    "one": [[pc.picture(0), "What is it?"]],
    "two of odd sizes, between texts": [
        ["First", pc.picture(1, 17, 31), "and then", pc.picture(2, 40, 9), "which is larger?"]
    ],
    "none": ["Hello there"],
    "another of the same size": [[pc.picture(3), "What is it?"]],
    "a second turn": [[pc.picture(0), "What is it?"], "a cat", "Are you sure?"],
    "a picture in the second turn": ["Look", "yes", ["at", pc.picture(4)]],
}


@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
def test_an_answer_is_that_of_transformers(
    client: openai.OpenAI, reference: Any, folder: Path, talk: list[Any]
) -> None:
    found = logprobs(ask(client, *talk))
    wanted = expected(reference, folder, *talk)[: len(found)]
    assert found == pytest.approx(wanted, abs=1e-3)


def test_a_second_turn_uses_the_prefix_and_another_picture_does_not(client: openai.OpenAI) -> None:
    def cached_tokens(answer: Any) -> int:
        return answer.usage.prompt_tokens_details.cached_tokens

    first = [pc.picture(7), "Describe what you see in this picture, please."]
    one, again = ask(client, first), ask(client, first, "a cat", "Are you sure?")
    other = ask(client, [pc.picture(8), *first[1:]])
    assert cached_tokens(again) > cached_tokens(other)
    assert logprobs(one) != pytest.approx(logprobs(other), abs=1e-3)


TURN: Any = [pc.picture(5), "What is it?"]


def test_the_responses_api_gives_the_same_text(client: openai.OpenAI) -> None:
    wanted = ask(client, TURN)
    image = {"type": "input_image", "image_url": pc.data_url(TURN[0]), "detail": "auto"}
    content: Any = [image, {"type": "input_text", "text": TURN[1]}]
    asked: Any = {"model": "seeing", "temperature": 0, "max_output_tokens": NUM_NEW}
    found = client.responses.create(input=[{"role": "user", "content": content}], **asked)
    assert found.output_text == wanted.choices[0].message.content
    again = client.responses.create(input="Sure?", previous_response_id=found.id, **asked)
    kept = ask(client, TURN, found.output_text, "Sure?")
    assert again.output_text == kept.choices[0].message.content


def test_the_messages_api_gives_the_same_text(site: Served, client: openai.OpenAI) -> None:
    import anthropic

    wanted = ask(client, TURN)
    head, _, data = pc.data_url(TURN[0]).partition(",")
    source = {"type": "base64", "media_type": head[5:].partition(";")[0], "data": data}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": TURN[1]}]
    messages: Any = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=site.address, api_key="none", max_retries=0) as speaker:
        counted = speaker.messages.count_tokens(model="seeing", messages=messages)
        found = speaker.messages.create(
            model="seeing", messages=messages, max_tokens=NUM_NEW, extra_body={"temperature": 0}
        )
    text = "".join(block.text for block in found.content if block.type == "text")
    assert text == wanted.choices[0].message.content
    assert wanted.usage is not None
    assert counted.input_tokens == wanted.usage.prompt_tokens
