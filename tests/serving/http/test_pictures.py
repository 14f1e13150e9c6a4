"""Pictures in chats: the text of transformers, prefixes that tell them apart, and limits."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import picture_checkpoints as pc
import pytest
import torch
from http_server import Served, served_pictures
from PIL import Image

from moe_runtime.checkpoints.opening import load_tokenizer, read_config
from moe_runtime.checkpoints.transformers_private import picture_processor
from moe_runtime.serving.http import chat

CHAT = "/v1/chat/completions"
GREEDY = {"temperature": 0, "max_tokens": 8}
KEEPS_NONE = "Qwen4ExpForConditionalGeneration"
"""A family that keeps no prefixes. `inference/test_picture_prompts.py` has all families."""
FAMILIES = [
    pytest.param(name, marks=[pytest.mark.long] * bool(number))
    for number, name in enumerate(pc.TABLE)
    if not number or name == KEEPS_NONE
]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pc.save_seeing_checkpoint(request.param, tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return pc.model_of(folder)


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[Served]:
    with served_pictures(folder) as found:
        yield found


def ask(site: Served, *turns: Any) -> Any:
    """The answer to turns of the user and the assistant."""
    messages = [
        {"role": role, "content": turn if isinstance(turn, str) else pc.content_of(turn)}
        for role, turn in zip(itertools.cycle(["user", "assistant"]), turns, strict=False)
    ]
    answer = site.answer(CHAT, {"messages": messages, "logprobs": True, **GREEDY})
    return answer


def text_of(answer: Any) -> str:
    return answer["choices"][0]["message"]["content"]


def expected(reference: Any, folder: Path, *turns: Any) -> list[float]:
    """Log-probabilities of the greedy answer of transformers."""
    tokenizer = load_tokenizer(folder)
    processor = picture_processor(folder, read_config(folder), tokenizer)
    conversation, images = [], []
    for role, turn in zip(itertools.cycle(["user", "assistant"]), turns, strict=False):
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
    out = reference.generate(
        **pc.known_inputs(reference, given),
        max_new_tokens=GREEDY["max_tokens"],
        do_sample=False,
        eos_token_id=tokenizer.eos_token_id,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return torch.cat(out.logits).log_softmax(-1).max(-1).values.tolist()


def logprobs(answer: Any) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


@pytest.mark.parametrize(
    "talk",
    [
        [["First", pc.picture(1, 17, 31), "and then", pc.picture(2, 40, 9), "which is larger?"]],
        ["Hello there"],
        [[pc.picture(0), "What is it?"], "a cat", "Are you sure?"],
        ["Look", "yes", ["at", pc.picture(4)]],
    ],
    ids=["odd sizes between texts", "no picture", "a second turn", "a picture in a second turn"],
)
def test_an_answer_is_that_of_transformers(site, reference, folder, talk):
    found = logprobs(ask(site, *talk))
    wanted = expected(reference, folder, *talk)[: len(found)]
    assert found == pytest.approx(wanted, abs=1e-3)


def test_a_second_turn_uses_the_prefix_and_another_picture_does_not(site, reference, folder):
    def cached_tokens(answer: Any) -> int:
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = [pc.picture(7), "Describe what you see in this picture, please."]
    one, again = ask(site, first), ask(site, first, "a cat", "Are you sure?")
    seen = [pc.picture(8), *first[1:]]
    other = ask(site, seen)
    keeps = site.server.models["seeing"].engine._passes.keeps_prefixes
    assert (cached_tokens(again) > cached_tokens(other)) == keeps
    assert logprobs(one) != pytest.approx(logprobs(other), abs=1e-3)
    wanted = expected(reference, folder, seen)
    assert logprobs(other) == pytest.approx(wanted[: len(logprobs(other))], abs=1e-3)


TURN: Any = [pc.picture(5), "What is it?"]


def test_other_apis_give_the_same_text(site):
    wanted, url = ask(site, TURN), pc.data_url(TURN[0])
    content: Any = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": TURN[1]},
    ]
    asked: Any = {"temperature": 0, "max_output_tokens": 8}
    user = [{"role": "user", "content": content}]
    _, found = site.ask("/v1/responses", {"input": user, **asked})
    text = found["output"][0]["content"][0]["text"]
    assert text == text_of(wanted)
    more = {"input": "Sure?", "previous_response_id": found["id"], **asked}
    again = site.ask("/v1/responses", more)[1]["output"][0]["content"][0]["text"]
    assert again == text_of(ask(site, TURN, text, "Sure?"))
    head, _, data = url.partition(",")
    source = {"type": "base64", "media_type": head[5:].partition(";")[0], "data": data}
    content = [{"type": "image", "source": source}, {"type": "text", "text": TURN[1]}]
    body: Any = {"messages": [{"role": "user", "content": content}]}
    _, counted = site.ask("/v1/messages/count_tokens", body)
    assert counted["input_tokens"] == wanted["usage"]["prompt_tokens"]
    (block,) = site.ask("/v1/messages", {**body, **GREEDY})[1]["content"]
    assert block["text"] == text_of(wanted)


def test_pictures_that_tools_give_are_in_a_message_of_the_user(site):
    url = pc.data_url(TURN[0])
    function = {"name": "look", "arguments": "{}"}
    plain = [{"role": "user", "content": "Look."}, None, None]
    calls = [{"id": "1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "1", "content": "Here"}
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TURN[1]}]
    plain[1:] = [{"role": "assistant", "tool_calls": calls}, result]
    plain.append({"role": "user", "content": parts})
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    shown = [{"type": "text", "text": "Here"}, {"type": "image", "source": source}]
    blocks = [{"type": "tool_result", "tool_use_id": "1", "content": shown}]
    use = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    of_anthropic = [plain[0], {"role": "assistant", "content": [use]}]
    of_anthropic.append({"role": "user", "content": [*blocks, parts[1]]})
    output = [{"type": "input_text", "text": "Here"}, {"type": "input_image", "image_url": url}]
    items = [plain[0], {"type": "function_call", "call_id": "1", **function}]
    items.append({"type": "function_call_output", "call_id": "1", "output": output})
    items.append({"role": "user", "content": TURN[1]})
    _, wanted = site.ask(CHAT, {"messages": plain, **GREEDY})
    text = text_of(wanted)
    body = {"messages": of_anthropic, **GREEDY}
    assert site.ask("/v1/messages", body)[1]["content"][0]["text"] == text
    body = {"input": items, "max_output_tokens": 8, "temperature": 0}
    assert site.ask("/v1/responses", body)[1]["output"][0]["content"][0]["text"] == text
    counted = site.ask("/v1/responses/input_tokens", {"input": items})[1]
    num_tokens = wanted["usage"]["prompt_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": num_tokens}


def refusal(site: Served, content: list[Any], role: str = "user") -> Any:
    body = {"messages": [{"role": role, "content": content}], "max_tokens": 2}
    status, answer = site.ask(CHAT, body)
    assert status == 400, answer
    return answer["error"]


URL = {"type": "image_url", "image_url": {"url": "https://127.0.0.1:1/picture.png"}}


@pytest.mark.parametrize(
    ("part", "complaint"),
    [
        (URL, "--allow-remote-images"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "expected a data URL"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "data:image/png;base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}}, "expected base64"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,QUJD"}}, "not a whole picture"),
        (pc.content_of([Image.new("1", (9000, 5000))])[0], "9000 x 5000 pixels"),
    ],
    ids=["address", "file", "no base64", "bad base64", "text", "too many pixels"],
)
def test_what_is_no_picture_is_refused(site, part, complaint):
    error = refusal(site, [{"type": "text", "text": "Look"}, part])
    assert complaint in error["message"]
    assert error["param"] == "messages.0.content.1.image_url"


def test_pictures_have_a_place_and_an_end(site):
    (image,) = pc.content_of([pc.picture(0)])
    assert "may be in a message of the user" in refusal(site, [image], "system")["message"]
    many = refusal(site, [image] * 33)["message"]
    assert "may have 32 pictures" in many
    tokenizer = site.server.models["seeing"].vocabulary.tokenizer
    mark = {"type": "text", "text": tokenizer.image_token}
    assert "leave it out of texts" in refusal(site, [image, mark])["message"]


class Files(SimpleHTTPRequestHandler):
    """Those of a folder, and one that comes byte by byte for ever."""

    def do_GET(self) -> None:
        if self.path != "/endless":
            return super().do_GET()
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):  # the server gave up
            while True:
                self.wfile.write(b"x")
                time.sleep(0.01)


def test_addresses_are_fetched_where_the_server_may(site, tmp_path, monkeypatch):
    model = replace(site.server.models["seeing"], fetches_pictures=True)
    monkeypatch.setitem(site.server.models.place("seeing").served, "seeing", model)
    (tmp_path / "picture.png").write_bytes(pc.png(TURN[0]))
    handler = partial(Files, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as files:
        thread = threading.Thread(target=files.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{files.server_port}"
            image = {"type": "image_url", "image_url": {"url": f"{url}/picture.png"}}
            absent = {"type": "image_url", "image_url": {"url": f"{url}/none.png"}}
            content: Any = [image, {"type": "text", "text": TURN[1]}]
            user = {"role": "user", "content": content}
            _, found = site.ask(CHAT, {"messages": [user], **GREEDY})
            assert "cannot fetch" in refusal(site, [absent])["message"]
            clock = SimpleNamespace(monotonic=itertools.count().__next__)  # a second a part
            monkeypatch.setattr(chat, "time", clock)
            slow = {"type": "image_url", "image_url": {"url": f"{url}/endless"}}
            assert "not whole after 10 s" in refusal(site, [slow])["message"]
        finally:
            files.shutdown()
            thread.join()
    assert text_of(found) == text_of(ask(site, TURN))
