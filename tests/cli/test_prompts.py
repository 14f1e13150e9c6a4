"""Several prompts in one run: each is a request of its own; and how far the first pass has come."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Capsys, Patch
from terminal_screen import screen_of

import moe_runtime
from moe_runtime.cli.main import main
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.lab.traces import read_trace
from moe_runtime.models.pocket import pocket_path

PROMPTS = ["The store reads", "An expert computes", "A third text that is longer than the others"]


def texts_alone(checkpoint: Path, capsys: Capsys, *words: str) -> list[str]:
    found = []
    for prompt in PROMPTS:
        assert main(["run", str(checkpoint), "-p", prompt, "-n", "6", *words]) == 0
        found.append(capsys.readouterr().out)
    return found


def test_each_prompt_is_answered_as_if_it_were_alone(checkpoint, fake_load, tmp_path, capsys):
    sampling = ("--temperature", "3", "--seed", "5")
    alone = texts_alone(checkpoint, capsys, *sampling)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n\n")
    words = [word for prompt in PROMPTS for word in ("-p", prompt)]
    for given in (words, ["--prompts", str(file)]):
        assert main(["run", str(checkpoint), *given, "-n", "6", *sampling]) == 0
        out, err = capsys.readouterr()
        assert out == "\n".join(alone)
        assert "3 prompts, 18 new" in err


def test_json_has_a_result_for_every_prompt(checkpoint, fake_load, tmp_path, capsys):
    alone = texts_alone(checkpoint, capsys)
    file = tmp_path / "prompts.jsonl"
    lines = [json.dumps(PROMPTS[0]), *(json.dumps({"id": 7, "prompt": p}) for p in PROMPTS[1:])]
    file.write_text("\n".join(lines))
    assert main(["run", str(checkpoint), "--prompts", str(file), "-n", "6", "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert [result["text"] + "\n" for result in outcome["results"]] == alone
    assert outcome["new_tokens"] == 18
    for name in ("prompt_tokens", "new_tokens", "ttft_s"):
        total = sum(result[name] for result in outcome["results"])
        assert outcome[name] == pytest.approx(total, rel=1e-12)  # the same sum of floats
    assert outcome["decode_tokens_per_s"] > 0
    assert "text" not in outcome


def test_room_is_what_the_longest_prompt_needs(checkpoint, fake_load):
    from transformers import AutoTokenizer

    words = [word for prompt in PROMPTS[::-1] for word in ("-p", prompt)]
    assert main(["run", str(checkpoint), *words, "-n", "2"]) == 0
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    longest = max(len(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS)
    assert fake_load.options["max_tokens"] == longest + 2


def test_a_prompt_that_is_too_long_is_refused_before_the_first_is_answered(
    checkpoint, fake_load, capsys
):
    assert main(["run", str(checkpoint), "-p", "short", "-p", "long " * 600]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "positions; shorten the prompt" in err


def test_ctrl_c_keeps_the_texts_so_far(checkpoint, fake_load, monkeypatch, capsys):
    steps = iter(range(100))

    def load(path: str, **options: Any) -> Any:
        def interrupt(*_: Any) -> None:
            if next(steps) == 8:  # the third step of the second prompt
                raise KeyboardInterrupt

        model = fake_load(path, **options)
        model.register_forward_hook(interrupt)
        return model

    monkeypatch.setitem(vars(moe_runtime), "load", load)
    words = [word for prompt in PROMPTS for word in ("-p", prompt)]
    assert main(["run", str(checkpoint), *words, "-n", "6", "--json"]) == 130
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["finish_reason"] for result in results] == ["length", "interrupted"]
    assert [result["new_tokens"] for result in results] == [6, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "\n \n", "holds no prompts"),
        ("p.jsonl", '"a"\n{"text": "b"}', "line 2: expected a JSON string, or an object"),
        ("p.jsonl", '"a"\n\n{', "line 3: not JSON"),
        ("p.jsonl", '{"prompt": 3}', "line 1: expected a JSON string"),
        ("p.jsonl", '"a"\n{"prompt": "b \\ud800"}', r"line 2: \\ud800 is half a surrogate pair"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(None, None, tmp_path / name)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_and_a_mark_at_the_begin_are_no_text(tmp_path, end):
    path = tmp_path / "p.txt"
    path.write_bytes(b"\xef\xbb\xbf" + end.join(["one", "two", ""]).encode())
    assert read_prompts(None, None, path) == ["one", "two"]
    assert (
        read_prompts(None, path, None) == [path.read_text(encoding="utf-8-sig")] == ["one\ntwo\n"]
    )


def test_a_file_that_cannot_be_read_to_its_end_is_named(capsys):
    """Reading the first byte of a process's memory is an error without a file's name."""
    assert main(["run", str(pocket_path()), "--prompt-file", "/proc/self/mem"]) == 2
    assert "/proc/self/mem: Input/output error" in capsys.readouterr().err


def test_every_prompt_is_a_request_of_the_trace(tmp_path, capsys):
    path = tmp_path / "trace.npz"
    words = [word for prompt in PROMPTS for word in ("-p", prompt)]
    assert main(["run", str(pocket_path()), *words, "-n", "3", "--trace", str(path)]) == 0
    trace = read_trace(path)
    assert sorted(set(trace.token_request.tolist())) == [0, 1, 2]
    begins = trace.token_position == 0
    assert trace.token_request[begins].tolist() == [0, 1, 2]
    # the last new token of each is never fed back
    assert trace.step_phase.tolist() == [0, 1, 1] * 3


class Terminal:
    """A pseudo-terminal as the process's stderr, and what is left to see on it."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.file = os.fdopen(slave, "w")
        self.seen = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._master, 4096)
            except OSError:  # the other side is closed
                return
            self.seen += piece

    def wait_for(self, piece: bytes) -> None:
        """Until it was written: rich draws from a thread, now and then."""
        while piece not in self.seen:
            time.sleep(0.01)

    def close(self) -> str:
        """Everything that was written to it."""
        self.file.close()
        self._reader.join()
        os.close(self._master)
        return self.seen.decode()


def stderr_terminal(monkeypatch: Patch) -> Terminal:
    """Called within a test: between its phases pytest puts its own stderr in place."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal.file)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return terminal


def watched_layers(
    fake_load: Any, monkeypatch: Patch, within_a_layer: Callable[[], None]
) -> list[int]:
    """Calls back within the second layer; returns how many hooks each step finds on the first."""
    hooks: list[int] = []

    def load(path: str, **options: Any) -> Any:
        model = fake_load(path, **options)
        layers = model.get_decoder().layers

        layers[1].mlp.register_forward_hook(lambda *_: within_a_layer())
        model.register_forward_pre_hook(lambda *_: hooks.append(len(layers[0]._forward_hooks)))
        return model

    monkeypatch.setitem(vars(moe_runtime), "load", load)
    return hooks


@pytest.mark.parametrize("output", [["--json"], []], ids=["json", "text"])
def test_a_terminal_sees_how_far_a_prompt_has_come_and_keeps_no_trace_of_it(
    checkpoint, fake_load, monkeypatch, capsys, output
):
    terminal = stderr_terminal(monkeypatch)
    hooks = watched_layers(fake_load, monkeypatch, lambda: terminal.wait_for(b"1/3"))
    words = [word for prompt in PROMPTS[:2] for word in ("-p", prompt)]
    assert main(["run", str(checkpoint), *words, "-n", "2", *output]) == 0
    written = terminal.close()
    for prompt in PROMPTS[:2]:
        num_tokens = prompt_tokens(checkpoint, prompt)
        assert f"reading a prompt of {num_tokens} tokens" in written
    assert "1/3" in written
    assert "tokens/s" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")  # the cursor is back
    left = screen_of(written)
    assert not any("reading" in line for line in left)
    assert [line for line in left if line][:1] == ([] if output else ["what the runtime did"])
    assert "reading a prompt" not in capsys.readouterr().out
    # in the steps after a prompt nothing watches the layers
    assert hooks == [1, 0, 1, 0]


def interrupt() -> None:
    raise KeyboardInterrupt


def prompt_tokens(checkpoint: Path, prompt: str) -> int:
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(checkpoint)(prompt)["input_ids"])


def test_ctrl_c_within_a_prompt_leaves_the_terminal_as_it_was(
    checkpoint, fake_load, monkeypatch, capsys
):
    terminal = stderr_terminal(monkeypatch)
    watched_layers(fake_load, monkeypatch, interrupt)
    assert main(["run", str(checkpoint), "-p", PROMPTS[0], "-n", "2", "--json"]) == 130
    written = terminal.close()
    assert "reading a prompt" in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert not any(screen_of(written))
    assert json.loads(capsys.readouterr().out)["finish_reason"] == "interrupted"
    assert not fake_load.model.get_decoder().layers[0]._forward_hooks


def test_the_prompt_is_shown_when_the_bar_is_gone(checkpoint, fake_load, monkeypatch):
    """Both on one terminal: the bar would be drawn over the line that the prompt ends in."""
    terminal = stderr_terminal(monkeypatch)
    monkeypatch.setattr("sys.stdout", terminal.file)
    assert main(["run", str(checkpoint), "-p", PROMPTS[0], "-n", "2"]) == 0
    written = terminal.close()
    assert written.rindex("\x1b[?25h") < written.index("\x1b[2m" + PROMPTS[0])
    assert any(line.startswith(PROMPTS[0]) for line in screen_of(written))
