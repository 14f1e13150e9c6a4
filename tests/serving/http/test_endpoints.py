"""What the server says of itself and of text, who may ask, and what happens to odd clients."""

import contextlib
import copy
import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from http_server import ScriptedEngine, Served, served_engine

import moe_runtime
from moe_runtime.checkpoints.opening import load_tokenizer
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.http.server import Access, Limits
from moe_runtime.serving.requests import (
    Event,
    Finished,
    GenerationRequest,
    NewToken,
    OnEvent,
    PromptRead,
    QueueFullError,
)

BODY = {"prompt": [5, 6], "max_tokens": 3}


@contextlib.contextmanager
def scripted(
    tokenizer: Any, events: Sequence[Event], **options: Any
) -> Iterator[tuple[Served, ScriptedEngine]]:
    engine = ScriptedEngine(lambda request: events)
    with served_engine(engine, tokenizer, **options) as site:
        yield site, engine


def test_text_and_tokens(site, tokenizer):
    ids = tokenizer("naïve")["input_ids"]
    found = site.answer("/tokenize", {"prompt": "naïve", "return_token_strs": True})
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 512)
    assert site.ask("/detokenize", {"tokens": ids}) == (200, {"prompt": "naïve"})
    assert site.ask("/detokenize", {"tokens": [4096]})[0] == 400
    assert site.ask("/detokenize", {"tokens": []}) == (200, {"prompt": ""})
    assert site.ask("/detokenize", {"tokens": [5] * 512})[0] == 200
    assert site.refused("/detokenize", {"tokens": [5] * 513})["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": "Hi"}]
    found = site.answer("/tokenize", {"messages": messages})
    assert tokenizer.decode(found["tokens"]) == "user: Hi\nassistant:"
    tools = [{"type": "function", "function": {"name": "now"}}]
    found = site.answer("/tokenize", {"messages": messages, "tools": tools})
    assert site.ask("/tokenizer_info")[1]["eos_token"] == "<|endoftext|>"


@pytest.mark.parametrize(
    "grammar",
    ['start: "x" start', "start: T\nT: /a/ & /b/", 'start: "y" T\nT: /a/ & /b/', "start: start"],
)
def test_grammars_that_no_text_is_of_are_refused_when_that_is_seen(site, grammar):
    asked = {"prompt": "a", "response_format": {"type": "grammar", "grammar": grammar}}
    status, found = site.ask("/v1/completions", asked)
    assert status == 400
    assert found["error"]["param"] == "response_format"
    assert found["error"]["code"] == "invalid_grammar"
    assert "\n" not in found["error"]["message"]
    status, text = site.ask("/v1/completions", asked | {"stream": True})
    assert "invalid_grammar" in (text if status == 200 else json.dumps(text))


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_answer_ends_where_its_grammar_does(site, more):
    how = {"type": "regex", "regex": "ab"}
    asked = {"prompt": "a", "max_tokens": 40, "response_format": how, **more}
    found = site.answer("/v1/completions", asked)
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == ("ab", "stop")
    assert found["usage"]["completion_tokens"] <= 3  # two letters and the end


@pytest.mark.parametrize(
    "field", [b'"max_tokens": 1, "max_tokens": 9', b'"logit_bias": {"5": 1, "5": 2}']
)
def test_a_field_that_is_there_twice_is_refused(site, field):
    status, found = site.ask("/v1/completions", b'{"prompt": "a", ' + field + b"}")
    assert status == 400
    assert "twice in one object" in found["error"]["message"]


def test_one_call_at_most_is_held_where_calls_have_no_mark(staged, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = '{% if tools %}{"name": "x", "parameters": {}}{% endif %}user: '
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "max_tokens": 2}
    held: list[bool] = []
    engine = ScriptedEngine(
        lambda one: held.append(one.constraint is not None) or [PromptRead(0), Finished("length")]
    )
    site = staged(engine, own=tokenizer)
    assert site.ask("/v1/chat/completions", body | {"parallel_tool_calls": True})[0] == 200
    assert site.ask("/v1/chat/completions", body | {"parallel_tool_calls": False})[0] == 200
    assert held == [False, True]


def test_tokens_are_returned_where_they_are_asked_for(site, tokenizer):
    asked = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    body = {**asked, "prompt": [5, 6]}
    (choice,) = site.ask("/v1/completions", body)[1]["choices"]
    assert choice["prompt_token_ids"] == [5, 6]
    assert len(choice["token_ids"]) == 8
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]
    chunks = [chunk["choices"][0] for chunk in site.stream("/v1/completions", body)]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]
    assert ["prompt_token_ids" in chunk for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    body = {**asked, "messages": [{"role": "user", "content": "Hi"}]}
    whole = site.ask("/v1/chat/completions", body)[1]
    chunks = site.stream("/v1/chat/completions", body)
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == whole[
        "choices"
    ][0]["token_ids"]


def test_what_the_server_says_of_itself(site):
    assert site.ask("/health") == (200, {"alive": True, "ready": True})
    assert site.ask("/ping")[0] == 200
    assert site.ask("/version") == (200, {"version": moe_runtime.__version__})
    page = site.answer("/")
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert site.ask("/nothing")[1]["error"]["code"] == "unknown_url"
    assert site.ask("/v1/completions", method="GET")[0] == 405


def test_metrics_have_the_counts_of_the_engine_and_of_requests(tokenizer):
    events = [PromptRead(1), NewToken(7), NewToken(8), Finished("length")]
    with scripted(tokenizer, events) as (site, _):
        assert site.ask("/v1/completions", BODY)[0] == 200
        text = site.answer("/metrics")
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    label = '{engine="0",model_name="pocket"}'
    expected = {
        f"vllm:num_requests_running{label}": 1,
        f"vllm:num_requests_waiting{label}": 2,
        f"vllm:kv_cache_usage_perc{label}": 0.2,
        f"vllm:generation_tokens_total{label}": 60,
        f"vllm:prefix_cache_hits_total{label}": 20,
        f"moe:prefix_disk_hits_total{label}": 16,
        f"moe:prefix_disk_failures_total{label}": 1,
        f"moe:adapter_reads_total{label}": 3,
        f"moe:expert_hits_total{label}": 7,
        f"moe:expert_stall_seconds_total{label}": 0.5,
        'moe:expert_bytes_read_total{engine="0",model_name="pocket",tier="disk"}': 4096,
        'moe:kv_cache_info{engine="0",form="int8",model_name="pocket"}': 1,
        f"vllm:time_to_first_token_seconds_count{label}": 1,
        f"vllm:inter_token_latency_seconds_count{label}": 1,
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="pocket"}': 1,
        'moe:http_responses_total{path="/v1/completions",status="200"}': 1,
    }
    assert {name: float(found[name]) for name in expected} == expected


def test_a_failed_step_is_an_error_before_and_within_a_stream(tokenizer):
    failure = Finished("error", "expert 3 of layer 1: input/output", cause="of a file there")
    events = [PromptRead(0), NewToken(7), failure]
    with scripted(tokenizer, events) as (site, _):
        status, answer = site.ask("/v1/completions", BODY)
        assert (status, answer["error"]["code"]) == (500, "generation_failed")
        assert answer["error"]["message"] == failure.message
        *_, last = site.stream("/v1/completions", BODY)
        assert last["error"]["code"] == "generation_failed"
        _, text = site.ask("/metrics")
    logged = [fields for event, fields in site.log if event == "request"]
    assert [fields["status"] for fields in logged] == [500, 500]
    assert {fields["error"] for fields in logged} == {f"{failure.message} ({failure.cause})"}
    assert 'moe:http_responses_total{path="/v1/completions",status="500"} 2.0' in text


def test_a_full_queue_is_to_be_tried_again(staged):
    def refuse(request: GenerationRequest) -> list[Event]:
        raise QueueFullError("7 requests wait already")

    site = staged(ScriptedEngine(refuse))
    assert (
        site.refused("/v1/completions", {**BODY, "stream": True}, status=429)["code"]
        == "queue_full"
    )


def test_an_answer_that_takes_too_long_is_given_up(tokenizer):
    with scripted(tokenizer, [], limits=Limits(seconds=0.05)) as (site, engine):
        assert site.refused("/v1/completions", BODY, status=408)["code"] == "timeout"
        assert engine.cancelled.is_set()


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_client_that_goes_away_is_cancelled(tokenizer, stream):
    with scripted(tokenizer, [PromptRead(0), NewToken(7)]) as (site, engine):
        where = urlsplit(site.address)
        body = b'{"prompt": [5], "stream": ' + stream + b"}"
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection((where.hostname, where.port)) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert engine.asked.wait(600)
        assert engine.cancelled.wait(600)
    (fields,) = [fields for event, fields in site.log if event == "request"]
    assert fields["status"] == 499


def test_keys_bodies_and_names_are_checked(tokenizer):
    access = Access(keys=["one", "two"], origins=["http://page"], hosts=["127.0.0.1"])
    with scripted(tokenizer, [], access=access, limits=Limits(body_bytes=1000)) as (site, _):
        assert site.ask("/health")[0] == 200
        assert site.ask("/v1/models")[1]["error"]["code"] == "invalid_api_key"
        assert site.ask("/v1/models", headers={"authorization": "Bearer three"})[0] == 401
        key = {"authorization": "Bearer two"}
        assert site.ask("/v1/models", headers=key)[0] == 200
        assert site.ask("/v1/models", headers={**key, "host": "evil.example"})[0] == 403
        long = b'{"prompt": "%s"}' % (b"x" * 1000)
        assert site.ask("/v1/completions", long, headers=key)[0] == 413
        chunked = {**key, "transfer-encoding": "chunked"}
        sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(long), long)
        assert site.ask("/v1/completions", sent, headers=chunked)[0] in (400, 413)
        text = {**key, "content-type": "text/plain"}
        assert site.ask("/v1/completions", b"{}", headers=text)[0] == 415
        # a page of another origin may send a body of no type without asking first
        assert site.ask("/v1/completions", b"{}", headers={**key, "content-type": None})[0] == 415
        packed = {**key, "content-type": "application/json", "content-encoding": "gzip"}
        status, found = site.ask("/v1/completions", b"{}", headers=packed)
        assert (status, "content-encoding 'gzip'" in found["error"]["message"]) == (415, True)
        _, metrics = site.ask("/metrics", headers=key)
    assert 'moe:http_responses_total{path="/v1/completions",status="413"}' in metrics
    assert 'moe:http_responses_total{path="/v1/models",status="403"}' in metrics


@pytest.mark.parametrize(
    ("keys", "client"), [(("one", "two"), "1"), ((), "127.0.0.1")], ids=["key", "address"]
)
def test_clients_are_told_apart(tokenizer, keys, client):
    asked: list[GenerationRequest] = []
    with scripted(tokenizer, [], access=Access(keys=keys)) as (site, engine):
        engine.script = lambda request: asked.append(request) or [Finished("length")]
        assert site.ask("/v1/completions", BODY, headers={"authorization": "bearer two"})[0] == 200
    assert [request.client for request in asked] == [client]


def test_requests_are_logged_without_their_text(tokenizer):
    events = [PromptRead(2), NewToken(7), Finished("length")]
    with scripted(tokenizer, events) as (site, _):
        site.ask("/v1/completions", {**BODY, "prompt": "secret", "user": "me"})
    # The line is written when the response is sent, which a client may see first.
    (event, fields), *_ = site.log
    assert event == "request"
    assert "secret" not in str(fields)
    kept = ("path", "status", "model", "cached_tokens", "new_tokens", "finish", "user")
    assert [fields[name] for name in kept] == [
        *("/v1/completions", 200, "pocket"),
        *(2, 1, "length", "me"),
    ]


def test_a_model_without_a_template_has_no_chats(staged):
    messages = [{"role": "user", "content": "Hi"}]
    site = staged(own=load_tokenizer(pocket_path()))
    assert (
        site.refused("/v1/chat/completions", {"messages": messages})["code"] == "unsupported_model"
    )


class HoldingEngine(ScriptedEngine):
    def submit(self, request: GenerationRequest, on_event: OnEvent) -> ScriptedEngine:
        self.finish = lambda: on_event(Finished("length"))
        return super().submit(request, on_event)


def test_a_server_that_drains_says_so_until_the_last_answer(tokenizer):
    engine = HoldingEngine(lambda request: [PromptRead(0), NewToken(5)])
    with contextlib.ExitStack() as serving, ThreadPoolExecutor(2) as threads:
        site = serving.enter_context(served_engine(engine, tokenizer))
        answer = threads.submit(site.ask, "/v1/completions", BODY)
        engine.asked.wait()
        assert site.ask("/health") == (200, {"alive": True, "ready": True})
        stopping = threads.submit(serving.close)
        while site.ask("/health")[0] == 200:
            pass
        assert site.ask("/health") == (503, {"alive": True, "ready": False})
        assert site.ask("/v1/completions", BODY)[0] == 503
        engine.finish()
        stopping.result()
    assert answer.result()[0] == 200


def test_answers_that_the_end_cuts_off_say_so(tokenizer):
    engine = HoldingEngine(lambda request: [PromptRead(0), NewToken(5)])
    with contextlib.ExitStack() as serving, ThreadPoolExecutor(2) as threads:
        site = serving.enter_context(served_engine(engine, tokenizer, drain_s=0))
        whole = threads.submit(site.ask, "/v1/completions", BODY)
        engine.asked.wait()
        engine.asked.clear()
        streamed = threads.submit(site.stream, "/v1/completions", BODY)
        engine.asked.wait()
        serving.close()
    status, answer = whole.result()
    assert (status, answer["error"]["code"]) == (503, "shutting_down")
    assert streamed.result()[-1]["error"]["code"] == "shutting_down"
