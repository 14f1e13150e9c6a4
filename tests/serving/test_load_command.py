"""`moe-runtime bench serve`: its options, its words for what goes wrong, and a real server."""

import dataclasses
import errno
import json
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from command_lines import COMMANDS

from moe_runtime.benchmarks.cases import load as generator
from moe_runtime.benchmarks.cases.load import (
    Lengths,
    Level,
    LoadSettings,
    MeasuredLevel,
    TimedAnswer,
)
from moe_runtime.benchmarks.suite import read_results
from moe_runtime.cli.main import main

SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    looks = 0

    def do_GET(self):
        Handler.looks += 1
        if self.path == "/read":
            open("/dev/zero", "rb", buffering=0).read(1 << 20)
        self.send_response(503 if Handler.looks == 1 else 200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
NOBODY = "http://127.0.0.1:9"
"""The port of a service that throws away what it gets; it is closed to all but the system."""
ARRIVES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "url": (["--url", "http://there"], {"url": "http://there"}),
    "model": (["--model", "other"], {"model": "other"}),
    "api_keys": (["--api-keys", "keys"], {"key": "first"}),
    "concurrency": (["--concurrency", "2,8"], {"levels": [Level(2, None), Level(8, None)]}),
    "rate": (["--rate", "0.5,3"], {"levels": [Level(None, 0.5), Level(None, 3.0)]}),
    "requests": (["--requests", "5"], {"num_requests": 5}),
    "warm_up": (["--warm-up", "3"], {"num_warm_up": 3}),
    "turns": (["--turns", "3"], {"num_turns": 3}),
    "prompt_tokens": (["--prompt-tokens", "3:9"], {"prompt": Lengths(3, 9)}),
    "output_tokens": (["--output-tokens", "7"], {"output": Lengths(7, 7)}),
    "prompts": (["--prompts", "own.jsonl"], {"texts": ["a\nb", "c"]}),
    "chat": (["--chat"], {"chat": True}),
    "ignore_eos": (["--no-ignore-eos"], {"ignore_eos": False}),
    "seed": (["--seed", "4"], {"seed": 4}),
    "timeout": (["--timeout", "2.5"], {"timeout_s": 2.5}),
}
BELOW = {"start", "cap", "goodput", "output", "as_json", "debug", "routing"}
"""What other tests look at."""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys").write_text("first\nsecond\n")
    (tmp_path / "own.jsonl").write_text('"a\\nb"\n\n{"prompt": "c"}\n')
    return tmp_path


def test_options_arrive(files, monkeypatch):
    given: list[LoadSettings] = []

    def measure(settings: LoadSettings, **_: Any) -> Any:
        given.append(settings)
        raise ValueError("this is where it ends")

    monkeypatch.setattr(generator, "measure", measure)
    assert main(["bench", "serve"]) == 2
    plain = given[-1]
    for words, changes in ARRIVES.values():
        assert main(["bench", "serve", *words]) == 2
        assert given[-1] == dataclasses.replace(plain, **changes) != plain
    options = {param.name for param in COMMANDS["bench serve"].params}
    assert options == ARRIVES.keys() | BELOW


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "0"], "--concurrency must be whole numbers above 0"),
        (["--concurrency", "1,a"], "--concurrency must be whole numbers above 0"),
        (["--rate", "nan"], "--rate must be numbers above 0"),
        (["--rate", "1", "--concurrency", "1"], "two ways to press a server; give one"),
        (["--prompts", "own.jsonl", "--prompt-tokens", "5"], "--prompt-tokens has no effect"),
        (["--prompt-tokens", "5:1"], "--prompt-tokens must be"),
        (["--output-tokens", "x"], "--output-tokens must be"),
        (["--cap", "1GiB"], "--cap holds a server that --start begins"),
        (["--start", "'"], "--start ': No closing quotation"),
        (["--start", " "], "--start must be a command"),
        (["--start", "no-such-program", "--url", NOBODY], "cannot run no-such-program: No such"),
        (["--start", "false", "--url", NOBODY], "the server ended with exit code 1 before it"),
        (["--goodput", "fast"], "--goodput must be bounds such as"),
        (["--output", "absent/there.json"], "the output cannot be written: there is no folder"),
        (["--url", "there"], "--url there: expected an address such as http://127.0.0.1:8000"),
        (["--url", "http://a:b"], "--url http://a:b: "),
        (["--url", "http://127.0.0.1:99999"], "127.0.0.1:99999: expected an address such as"),
        (["--start", "no-such-program", "--url", "ftp://a"], "ftp://a: expected an address such"),
        (["--url", NOBODY], f"{NOBODY}/v1/: no connection: "),
        (["--url", NOBODY, "--model", "m"], "a first request failed: no connection: "),
    ],
)
def test_what_cannot_be_measured_is_one_line(files, capsys, words, said):
    assert main(["bench", "serve", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_a_real_server_is_measured(site, tmp_path, capsys):
    words = ["bench", "serve", "--url", site.address, "--requests", "4", "--concurrency", "1,4"]
    words += ["--prompt-tokens", "9:12", "--output-tokens", "3", "--goodput", "e2e=600s", "--json"]
    assert main([*words, "--output", str(tmp_path / "found.json")]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err.count(" of 4 requests\n") == 8
    assert (found["model"], found["is_interrupted"]) == ("pocket", False)
    for row, clients in zip(found["levels"], (1, 4), strict=True):
        assert (row["concurrency"], row["answered"], row["errors"]) == (clients, 4, {})
        assert (row["output_tokens"], row["are_tokens_counted"]) == (12, True)
        assert row["goodput"]["share"] == 1.0
        assert 0 < row["time_to_first_token_s"]["p50"] <= row["end_to_end_s"]["p50"]
    kept = read_results(tmp_path / "found.json")
    assert (kept["case"], kept["ended"]) == ("serve", "most")
    assert kept["settings"]["prompt_tokens"] == "9:12"
    for row, one, name in zip(
        found["levels"], kept["measurements"], ("1 at a time", "4 at a time"), strict=True
    ):
        assert (one["system"], one["failure"], len(one["repetitions"])) == (name, None, 4 + 1)
        for metric in ("time_to_first_token_s", "inter_token_s", "end_to_end_s"):
            assert one["summary"][metric]["p90"] == pytest.approx(row[metric]["p90"])
        assert one["summary"]["output_tokens_per_s"]["median"] == row["output_tokens_per_s"]
        assert one["summary"]["within_bounds"]["median"] == 1.0
    file = str(tmp_path / "found.json")
    capsys.readouterr()
    assert main(["bench", "compare", file, file]) == 0


def test_a_server_is_started_measured_and_ended(tmp_path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "server.py").write_text(SERVER)
    start = shlex.join([sys.executable, str(tmp_path / "server.py"), url.rpartition(":")[2]])

    def measure(settings: LoadSettings, *, meters: Any, **_: Any) -> Any:
        with urlopen(f"{settings.url}/v1/models") as answer:
            assert answer.status == 200
        (meter,) = meters
        with meter.measured() as counts:
            urlopen(f"{settings.url}/read").close()
        assert counts["read_call_bytes"] >= 1 << 20
        assert counts["storage_bytes"] >= 0
        assert counts["peak_rss_bytes"] > 1 << 20
        assert main(["bench", "serve", "--start", start, "--url", url]) == 2  # another one
        assert "something answers at" in capsys.readouterr().err
        answers = [TimedAnswer(0.0, 0.5, [0.125, 0.25], 3, 2)]
        return "it", [MeasuredLevel(settings.levels[0], 0.0, 4.0, 1, answers, counts)]

    monkeypatch.setattr(generator, "measure", measure)
    path = tmp_path / "found.json"
    assert main(["bench", "serve", "--start", start, "--url", url, "-o", str(path)]) == 0
    assert "peak rss, MB" in capsys.readouterr().out
    kept = read_results(path)
    assert kept["settings"]["start"] == start
    assert kept["measurements"][0]["summary"]["peak_rss_bytes"]["unit"] == "bytes"
    with pytest.raises(URLError):
        urlopen(url)


def test_ctrl_c_shows_what_was_measured(tmp_path, monkeypatch, capsys):
    def measure(settings: LoadSettings, *, is_stopping: Any, **_: Any) -> Any:
        assert not is_stopping()
        os.kill(os.getpid(), signal.SIGINT)
        assert is_stopping()
        answers = [TimedAnswer(0.0, 0.5, [0.125, 0.25], 3, 2), TimedAnswer(0.0, error="cut off")]
        joules = {"cpu_joules": 7.5}
        return "it", [MeasuredLevel(settings.levels[0], 0.0, 4.0, 9, answers, joules)]

    monkeypatch.setattr(generator, "measure", measure)
    path = tmp_path / "found.json"
    assert main(["bench", "serve", "--output", str(path)]) == 130
    kept = read_results(path)
    assert (kept["ended"], kept["measurements"][0]["summary"]["failed"]["median"]) == (
        *("interrupted", 1),
    )
    assert kept["measurements"][0]["summary"]["cpu_joules"]["median"] == 7.5
    out, err = capsys.readouterr()
    rows = {tuple(line.split()) for line in out.splitlines()}
    assert ("cpu,", "J", "7.5") in rows
    assert ("answered", "1") in rows
    assert ("output", "tokens,", "tokens/s", "0.5") in rows
    assert ("time", "to", "first", "token,", "ms:", "p90", "125") in rows
    assert "1 at a time: 1 failed: cut off" in err
    assert "instead" in err


def test_no_answer_at_all_is_a_failure(tmp_path, monkeypatch, capsys):
    def measure(settings: LoadSettings, **_: Any) -> Any:
        return "it", [
            MeasuredLevel(
                settings.levels[0], 0.0, 4.0, 1, [TimedAnswer(0.0, error="cut off", message="lost")]
            )
        ]

    monkeypatch.setattr(generator, "measure", measure)
    path = tmp_path / "found.json"
    path.write_text("an older run's")
    assert main(["bench", "serve", "-o", str(path)]) == 2
    assert path.read_text() == "an older run's"
    out, err = capsys.readouterr()
    assert not out
    assert f"nothing was measured, and {path} is left as it was" in err
    assert "1 failed: cut off" in err


def test_what_was_measured_is_shown_where_its_file_cannot_be_written(tmp_path, monkeypatch, capsys):
    answers = [
        TimedAnswer(0.0, 0.5, [0.125, 0.25], 3, 2),
        TimedAnswer(0.0, error="HTTP 500", message="\x1b[2Jgone"),
    ]

    def measure(settings: LoadSettings, **_: Any) -> Any:
        return "\x1b]0;mine\x07", [MeasuredLevel(settings.levels[0], 0.0, 4.0, 2, answers)]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(generator, "measure", measure)
    monkeypatch.setattr("moe_runtime.benchmarks.suite.write_text", full)
    path = tmp_path / "found.json"
    assert main(["bench", "serve", "-o", str(path)]) == 2
    out, err = capsys.readouterr()
    assert ["answered", "1"] in [line.split() for line in out.splitlines()]
    assert out.splitlines()[0].startswith(r"serve: \x1b]0;mine\x07, ")
    assert r"1 failed: HTTP 500: \x1b[2Jgone" in err
    assert err.endswith(f"{path}: the results cannot be written: No space left on device\n")
    assert "\x1b" not in out + err
