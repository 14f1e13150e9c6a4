"""`moe-runtime serve` from its first screen to the signals that end it."""

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moe_runtime.cli.commands import serve as command
from moe_runtime.cli.main import main
from moe_runtime.cli.stopping import StopRequest
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving.sampling import Sampler

SMALL = ["--host-memory", "256MiB", "--max-tokens", "512", "--port", "0", "--policy", "lru"]


def completion(address: str, body: dict[str, Any], path: str = "completions", key: str = "") -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{address}/v1/{path}", json.dumps(body).encode(), headers)
    return urllib.request.urlopen(request)


@pytest.fixture
def goes_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What answers wait for behind their third token."""
    may_go_on, choose = threading.Event(), Sampler.choose

    def waiting(self: Sampler, logits_V: Any, answer_ids: Any) -> Any:
        assert len(answer_ids) < 3 or may_go_on.wait(600)
        return choose(self, logits_V, answer_ids)

    monkeypatch.setattr(Sampler, "choose", waiting)
    return may_go_on


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command, and a function that asks its address once it is ready."""
    announce = command.announce

    def run(ask: Callable[[str], None], model: Any, *words: str) -> int:
        threads: list[threading.Thread] = []

        def ready(found: Any, *args: Any, **options: Any) -> None:
            announce(found, *args, **options)
            threads.append(threading.Thread(target=ask, args=(found.address,)))
            threads[0].start()

        monkeypatch.setattr(command, "announce", ready)
        code = main(["serve", str(model), *SMALL, *words])
        threads[0].join()
        return code

    return run


def is_ready(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"{address}/health").status == 200
    except urllib.error.HTTPError:
        return False


def test_a_termination_lets_the_running_answer_finish(serve, capsys, goes_on):
    addresses: list[str] = []
    answers: list[bytes] = []

    def ask(address: str) -> None:
        addresses.append(address)
        body = {"prompt": "The", "max_tokens": 20, "stream": True, "ignore_eos": True, "seed": 1}
        try:
            with completion(address, body) as response:
                answers.append(response.readline())
                os.kill(os.getpid(), signal.SIGTERM)
                while is_ready(address):
                    time.sleep(0.01)
                goes_on.set()
                answers.append(response.read())
        finally:
            goes_on.set()
            if not answers:  # the command would wait for ever
                os.kill(os.getpid(), signal.SIGTERM)

    assert serve(ask, pocket_path(), "--json") == 143
    assert answers[0].startswith(b"data: {")
    assert answers[1].endswith(b"data: [DONE]\n\n")
    assert b'"finish_reason":"length"' in answers[1]
    said = capsys.readouterr()
    ready_line = json.loads(said.out)
    assert (ready_line["address"], ready_line["model"]) == (addresses[0], "pocket")
    log = [json.loads(line) for line in said.err.splitlines() if line.startswith("{")]
    assert [line["event"] for line in log if line.get("path") != "/health"] == [
        *("signal", "draining", "request")
    ]
    assert log[-1]["new_tokens"] == 20


@pytest.mark.parametrize("num_signals", [2, 3])
def test_further_signals_cut_answers_off_with_an_error(
    serve, monkeypatch, capsys, goes_on, num_signals
):
    listen = command.stop_on_signals
    stops: list[StopRequest] = []
    told: list[bytes] = []

    def ask(address: str) -> None:
        body = {"prompt": "The", "max_tokens": 200, "stream": True, "ignore_eos": True}
        try:
            with completion(address, body) as response:
                told.append(response.readline())
                for number in range(num_signals):
                    os.kill(os.getpid(), signal.SIGINT)
                    while number < 2 and stops[0].num_signals <= number:
                        time.sleep(0.01)  # signals that wait are one
                told.append(response.read())
        finally:
            goes_on.set()

    @contextlib.contextmanager
    def listening(*args: Any, **options: Any) -> Iterator[StopRequest]:
        with listen(*args, **options) as stop:
            stops.append(stop)
            yield stop

    monkeypatch.setattr(command, "stop_on_signals", listening)
    assert serve(ask, pocket_path()) == 130
    assert told[0].startswith(b"data: {")
    assert b'"code":"shutting_down"' in told[1]
    assert told[1].endswith(b"data: [DONE]\n\n")
    assert "cutting answers off" in capsys.readouterr().err


def test_a_dry_run_shows_how_to_call_the_server_and_who_else_may(tmp_path, capsys):
    words = ["serve", str(pocket_path()), *SMALL, "--dry-run", "--host", "0.0.0.0"]
    assert main([*words, "--name", "mine"]) == 0
    said = capsys.readouterr().err
    assert "/v1/completions -H 'content-type: application/json'" in said
    assert "mine" in said
    assert "any client that reaches 0.0.0.0 may ask" in said
    (tmp_path / "keys").write_text("key\n")
    assert main([*words, "--api-keys", str(tmp_path / "keys")]) == 0
    assert "any client that reaches" not in capsys.readouterr().err


@pytest.mark.long
def test_a_server_that_anybody_may_ask_warns_beside_json(capsys):
    words = ["serve", str(pocket_path()), *SMALL, "--dry-run", "--host", "0.0.0.0", "--json"]
    assert main(words) == 0
    assert "any client that reaches 0.0.0.0 may ask" in capsys.readouterr().err


def test_what_cannot_work_is_said_before_the_model_is_loaded(tmp_path, monkeypatch, capsys):
    def refused(*words: str) -> str:
        assert main(["serve", "no-model", *words]) == 2
        return capsys.readouterr().err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen at 127.0.0.1 port {port}" in refused("--port", port)
    assert "cannot listen at 203.0.113.7" in refused("--host", "203.0.113.7")
    (tmp_path / "keys").write_text("\n# one for each team\n")
    assert "expected a key" in refused("--api-keys", str(tmp_path / "keys"))
    assert "--max-body" in refused("--max-body", "much")
    assert "--prefix-disk must be positive" in refused("--prefix-disk", "0")
    both = ("--no-prefix-cache", "--prefix-disk", "1GiB")
    assert "--prefix-disk needs the prefix cache" in refused(*both)
    assert "--share-prefixes shares the prefix cache between" in refused("--share-prefixes")
    assert "no-model is not a directory" in refused("--port", "0")
    why = "has no effect: steps are recorded on a GPU, and this server computes on the CPU"
    assert f"--decode-rows {why} (--device cpu)" in refused("--device", "cpu", "--decode-rows", "4")
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'moe-runtime[serve]'" in refused()


@pytest.mark.long
def test_a_later_server_finds_prefixes_and_responses_on_the_disk(serve, tmp_path, monkeypatch):
    """A key finds its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "keys").write_text("one\ntwo")
    model = tmp_path / "model"
    shutil.copytree(pocket_path(), model, ignore=shutil.ignore_patterns("*.py"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (model / "tokenizer_config.json").write_text(
        json.dumps({**settings, "chat_template": template})
    )
    body = {"prompt": list(range(2, 42)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    found: list[tuple[str, int]] = []
    said: list[dict[str, Any]] = []

    def ask(address: str) -> None:
        try:
            with completion(address, body, key="one") as response:
                answer = json.load(response)
            asked = {"input": "Hi", "max_output_tokens": 2}
            if said:
                asked["previous_response_id"] = said[-1]["id"]
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    completion(address, asked, "responses", "two")
            with completion(address, asked, "responses", "one") as response:
                said.append(json.load(response))
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            found.append((answer["choices"][0]["text"], cached))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    for dtype in ("float32", "float32", "bfloat16"):
        words = ["--prefix-disk", "64MiB", "--dtype", dtype]
        assert serve(ask, model, *words, "--api-keys", str(tmp_path / "keys")) == 143
    assert found[0][0] == found[1][0]
    assert [cached for _, cached in found] == [0, 32, 0]
    assert said[1]["usage"]["input_tokens"] > said[0]["usage"]["input_tokens"]
    assert len(said) == 3


def test_lines_of_a_file_of_keys_may_be_comments(tmp_path):
    (tmp_path / "keys").write_text("# team one\nfirst\n\n  #second\n third#3 \n")
    assert command.read_keys(tmp_path / "keys") == ("first", "third#3")
