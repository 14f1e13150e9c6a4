"""`moe-runtime chat`: turns that go on from one another, what can be typed, how answers end."""

import ast
import contextlib
import copy
import importlib.util
import io
import json
import os
import pty
import shutil
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_lines import COMMANDS
from http_server import TEMPLATE, ScriptedEngine
from rich.console import Console
from rich.markdown import Markdown
from terminal_screen import TypedLines, screen_of

from moe_runtime.cli import terminal
from moe_runtime.cli.main import main
from moe_runtime.cli.stopping import TextOutput
from moe_runtime.errors import MoERuntimeError
from moe_runtime.models.pocket import pocket_path
from moe_runtime.serving import conversation
from moe_runtime.serving.conversation import Conversation
from moe_runtime.serving.engine import Engine
from moe_runtime.serving.http.answer_text import HARMONY_MARKS
from moe_runtime.serving.requests import Finished, NewToken, SamplingOptions

OPTIONS = ["--host-memory", "64MiB", "--dtype", "float32", "-n", "12", "--policy", "lru"]
FIRST, SECOND = "What is a list in Python, and how is it made?", "And a tuple?"


def never() -> bool:
    return False


@pytest.fixture
def talking(pocket: Any, tokenizer: Any) -> Any:
    with Engine(pocket) as engine:
        yield Conversation(
            engine,
            tokenizer,
            end_ids=frozenset(),
            sampling=SamplingOptions(),
            max_new_tokens=12,
            system="Be brief.",
        )


def test_chat_and_generate_import_nothing_that_only_the_server_needs():
    """Without `pip install moe-runtime[serve]` its packages may be absent."""
    pending, seen = ["moe_runtime.serving.conversation"], set[str]()
    pending.append("moe_runtime.serving.batches.batch_run")
    while pending:
        seen.add(module := pending.pop())
        spec = importlib.util.find_spec(module) if "moe_runtime.serving" in module else None
        code = Path(spec.origin).read_text() if spec and spec.origin else ""
        for node in ast.parse(code).body:
            found = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            pending += [one for one in found if one not in seen]
    assert "moe_runtime.serving.http.tool_formats" in seen
    assert seen.isdisjoint({"pydantic", "llguidance", "starlette", "uvicorn", "prometheus_client"})


def scripted(tokenizer: Any, events: list[Any], *end_ids: int) -> Conversation:
    engine: Any = ScriptedEngine(lambda request: events)
    ends, sampling = frozenset(end_ids), SamplingOptions()
    return Conversation(engine, tokenizer, end_ids=ends, sampling=sampling, max_new_tokens=9)


def test_analysis_of_gpt_oss_is_shown_and_not_remembered(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": list(HARMONY_MARKS)})
    tokenizer.chat_template = "<|start|><|channel|><|message|>{{ messages[-1].content }}"
    text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    text += "<|channel|>final<|message|>Ho."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    talking = scripted(tokenizer, [*(NewToken(one, None, ()) for one in ids), Finished("stop")])
    pieces: list[str] = []
    talking.ask("Hi", pieces.append, never)
    assert "".join(pieces) == "Hm.\n\nHo."
    assert talking.messages[-1] == {"role": "assistant", "content": "Ho."}


def test_the_text_of_an_end_token_is_neither_shown_nor_remembered(tokenizer):
    ids = tokenizer("Yes.")["input_ids"]
    assert tokenizer.decode(ids[-1:]) == "."
    talking = scripted(tokenizer, [*map(NewToken, ids), Finished("stop")], ids[-1])
    pieces: list[str] = []
    talking.ask("Well?", pieces.append, never)
    assert "".join(pieces) == talking.messages[-1]["content"] == "Yes"


def test_an_answer_that_fails_says_what_the_error_came_from(tokenizer):
    talking = scripted(tokenizer, [Finished("error", "no more", cause="a disk")])
    with pytest.raises(MoERuntimeError, match=r"^no more \(a disk\)$"):
        talking.ask("Well?", lambda piece: None, never)


def test_a_turn_goes_on_from_what_the_last_one_computed(talking):
    pieces: list[str] = []
    first = talking.ask(FIRST, pieces.append, never)
    second = talking.ask(SECOND, lambda piece: None, never)
    assert len(pieces) > 1
    assert [message["role"] for message in talking.messages] == [
        *("system", "user", "assistant", "user", "assistant")
    ]
    assert talking.messages[2]["content"] == "".join(pieces)
    assert (first.new_tokens, first.cached_tokens, first.reason) == (12, 0, "length")
    # in whole blocks of 16 tokens, the question at least
    assert second.cached_tokens >= first.prompt_tokens // 16 * 16 > 0
    assert talking.undo()
    assert len(talking.messages) == 3
    talking.reset()
    assert talking.messages == [{"role": "system", "content": "Be brief."}]
    assert not talking.undo()


def test_a_stopped_answer_is_remembered_as_far_as_it_came(talking):
    pieces: list[str] = []
    turn = talking.ask(FIRST, pieces.append, lambda: bool(pieces))
    assert turn.reason in ("cancelled", "length")  # the engine may be at the end by then
    assert talking.messages[-1]["content"] == "".join(pieces)
    assert talking.ask(SECOND, pieces.append, never).new_tokens == 12


def test_an_answer_ends_before_a_stop_string_of_the_model(talking):
    talking.ask(FIRST, lambda piece: None, never)
    whole = talking.messages[-1]["content"]
    talking.reset()
    talking._stops, pieces = [whole[5:9]], list[str]()
    turn = talking.ask(FIRST, pieces.append, never)
    assert talking.messages[-1]["content"] == "".join(pieces) == whole[: whole.index(whole[5:9])]
    assert turn.reason == "stop"
    assert talking.ask(SECOND, pieces.append, never).new_tokens > 0


@pytest.mark.parametrize(("known", "is_whole"), [(None, False), (512, True), (513, False)])
def test_the_advice_for_a_full_conversation_can_be_followed(talking, known, is_whole):
    before = [*talking.messages]
    with pytest.raises(ValueError, match="tokens and may have 512 with its answer; send a shorter"):
        talking.ask("word " * 600, lambda piece: None, never)
    assert talking.messages == before
    talking._known_tokens = known
    talking.ask(FIRST, lambda piece: None, never)
    with pytest.raises(ValueError, match="/reset begins a new one, or send a shorter") as refusal:
        talking.ask("word " * 600, lambda piece: None, never)
    assert ("as many as the model knows" in str(refusal.value)) == is_whole
    assert ("larger --max-tokens" in str(refusal.value)) != is_whole


def terminal_of(talking: Conversation) -> Any:
    from moe_runtime.cli.commands.chat import _Terminal

    nothing: Any = None
    return _Terminal(SimpleNamespace(talk=talking), nothing)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in pocket_path().glob("*.*"):
        if file.suffix in (".json", ".safetensors"):
            shutil.copy(file, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    def run(model: Any, lines: list[str], *words: str) -> int:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return main(["chat", str(model), *OPTIONS, *words])

    return run


def test_lines_of_a_pipe_are_answered_as_run_answers_and_commands_obeyed(
    model, say, capsys, tmp_path
):
    assert main(["run", str(model), "--chat", "-p", FIRST, *OPTIONS]) == 0
    expected = capsys.readouterr().out
    saved = tmp_path / "saved.jsonl"
    lines = [FIRST, "", f"/save {saved}", "/stats", "/help", "/undo", FIRST, f"/save {saved}"]
    assert say(model, [*lines, "/reset", "/quit", SECOND]) == 0
    told = capsys.readouterr()
    assert told.out == expected * 2
    assert "of them known before" in told.err
    assert "/save FILE" in told.err
    # a line that ends in a line break is the text and one more of the command
    content = expected.removesuffix("\n")
    asked, answered = json.loads(saved.read_text())["messages"]
    assert asked == {"role": "user", "content": FIRST}
    assert answered == {"role": "assistant", "content": content}


def test_a_conversation_without_a_message_is_not_written(model, say, capsys, tmp_path):
    assert say(model, [f"/save {tmp_path / 'empty.jsonl'}"]) == 2
    assert "there is no message to write yet" in capsys.readouterr().err
    assert not (tmp_path / "empty.jsonl").exists()


def test_the_penalty_of_the_checkpoint_holds_as_for_run(model, say, capsys):
    told = []
    for penalty in (1.0, 1.5):
        config = {"eos_token_id": 1, "repetition_penalty": penalty}
        (model / "generation_config.json").write_text(json.dumps(config))
        assert say(model, [FIRST]) == 0
        told.append(capsys.readouterr().out)
    assert main(["run", str(model), "--chat", "-p", FIRST, *OPTIONS]) == 0
    assert told[0] != told[1] == capsys.readouterr().out


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(model, say, monkeypatch, capsys):
    real, num_pieces = TextOutput.write, 0

    def write(self: TextOutput, piece: str) -> None:
        nonlocal num_pieces
        num_pieces += 1
        real(self, piece)
        if num_pieces == 1:
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(TextOutput, "write", write)
    try:
        assert say(model, [FIRST, SECOND]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
    told = capsys.readouterr()
    assert "Ctrl-C once more leaves" in told.err
    assert told.out.count("\n") >= 2


def test_options_arrive(model, say, monkeypatch):
    import moe_runtime

    real, told = moe_runtime.load, {}

    def load(path: str, **options: Any) -> Any:
        told.update(options, model=path)
        return real(path, **options)

    def end(*_: Any, **options: Any) -> None:
        told.update(options)
        raise ValueError("this is where it ends")

    monkeypatch.setitem(vars(moe_runtime), "load", load)
    monkeypatch.setattr(conversation, "Conversation", end)
    given = {
        **{"model": str(model), "system": "Hm", "max_new_tokens": 23, "host_memory": "60MiB"},
        **{"device_memory": "auto", "max_tokens": 237, "policy": "slru", "shares": "adaptive"},
        **{"cache_code": "none", "kv_cache": "exact", "activations": "exact", "misses": "device"},
        **{"prefetch": "observe", "predictor": "running-counts", "draft": "lookup"},
        **{"device": "cpu", "dtype": "bfloat16", "teach": False},
    }
    sampling = SamplingOptions(temperature=0.375, top_p=0.17, seed=241)
    words = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in given.items()
        if name not in ("model", "teach")
    ]
    words.append("--no-teach")
    words += ["--temperature=0.375", "--top-p=0.17", "--seed=241"]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", str(model), *words]) == 2
    assert {name: told[name] for name in given} == given
    assert told["sampling"] == sampling
    options = {param.name for param in COMMANDS["chat"].params}
    # refused beside a draft, or not there; test_arrivals.py, test_processes.py and a test below
    others = {"routing", "skip_below", "adapter", "processes", "gpus", "placement"}
    followed = given.keys() | others | {"temperature", "top_p", "seed"}
    assert options - {"debug", "config", "help"} == followed


def test_it_reads_the_adapter_it_is_given(model, say, capsys):
    assert say(model, [], "--adapter", "nowhere") == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_conversation_is_as_long_as_the_model_knows(model, say, capsys):
    known = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    assert say(model, [], "--max-tokens", str(known)) == 0
    capsys.readouterr()
    for asked in (known + 1, 10**8):  # so many would exceed the memory, too
        assert say(model, [], "--max-tokens", str(asked)) == 2
        err = capsys.readouterr().err
        assert f"--max-tokens {asked}: a text cannot be longer than the {known} pos" in err
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/bogus", "/bogus is not a command; /help lists them, and a space before it makes"),
        ("/undo", "/undo: there is no message to take back"),
        ("/save", "/save: is empty, expected the name of a file"),
        ("/save here.txt", "/save here.txt: is there already; give another name"),
        ("/save ~no-one/here.txt", "no home folder ~no-one is known"),
        ('/save "here.txt"', "/save here.txt: is there already; give another name"),
        ('/save "here.txt', '/save "here.txt: no closing quotation'),
        ('/save "here.txt" there', "/save: expected nothing more, got 'there'"),
        ("/quit now", "/quit: expected nothing more, got 'now'"),
        ("/reset all", "/reset: expected nothing more, got 'all'"),
    ],
)
def test_what_cannot_be_obeyed_is_one_line(line, complaint, talking, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.txt").write_text("old")
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    with pytest.raises(ValueError, match=complaint.replace(".", r"\.").replace("?", r"\?")):
        terminal_of(talking).run()
    assert (tmp_path / "here.txt").read_text() == "old"


class Typing:
    """A terminal with a program in it, which is typed into."""

    def __init__(self, program: str, folder: Path) -> None:
        self._child, terminal = pty.fork()
        if not self._child:
            environment = {**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(folder)}
            os.execve(sys.executable, [sys.executable, "-P", "-c", program], environment)
        self._screen = os.fdopen(terminal, "r+b", buffering=0)
        self._shown = b""

    def until(self, text: bytes) -> None:
        while text not in self._shown:
            self._shown += self._screen.read(64)
        self._shown = self._shown.partition(text)[2]

    def prompt(self) -> None:
        """Waits until keys are understood, and says where the cursor is, as terminals do."""
        self.until(b"\x1b[6n\x1b[?2004h")
        self.press(b"\x1b[1;1R")

    def press(self, keys: bytes) -> None:
        self._screen.write(keys)

    def end(self) -> int:
        with self._screen, contextlib.suppress(OSError):
            while self._screen.read(64):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self._child, 0)[1])


def test_a_line_editor_takes_pastes_searches_and_forgets_on_ctrl_c(tmp_path):
    program = (
        "from moe_runtime.cli.terminal import typed_messages\n"
        "for _ in range(2):\n"
        " for line in typed_messages(['/help'], lambda: 'ready'): print(ascii(line), flush=True)"
    )
    typing = Typing(program, tmp_path)
    typing.prompt()
    typing.until(b"ready")
    # as a terminal marks what is pasted into it, once the program has asked for marks
    typing.press(b"\x1b[200~one\n/quit\x1b[201~\r")
    typing.until(b"'one\\n/quit'")
    typing.prompt()
    typing.press(b"two\x1b\rlines\r")
    typing.until(b"'two\\nlines'")
    typing.prompt()
    typing.press(b"not sent\x03/he\t")
    typing.until(b"lp")
    typing.press(b"\r")
    typing.until(b"'/help'")
    typing.prompt()
    typing.press(b"\x04")
    typing.prompt()
    typing.until(b">")
    typing.press(b"\x12quit\r\r")  # Ctrl-R finds what another editor was told
    typing.until(b"'one\\n/quit'")
    typing.prompt()
    typing.press(b"\x03")
    typing.until(b"once more")
    typing.press(b"\x03")
    assert typing.end() == -signal.SIGINT
    kept = tmp_path / "moe-runtime" / "chat_history"
    assert kept.stat().st_mode & 0o777 == 0o600


ANSWER = """# Title

A line with *stress*
and a <b>second</b> line, long enough to be wrapped by a narrow terminal.

1. one
2. two
   - inner

```python
def f(x):
    return x
```

| a | b |
|---|--:|
| 1 | 22 |

> the end \x1b[31m[a](https://b.c)
"""


@pytest.mark.parametrize("size", [3, 11, 1000])
def test_an_answer_in_pieces_is_drawn_as_one_that_is_whole(size, monkeypatch):
    monkeypatch.setattr(terminal, "_REDRAW_S", 0)
    written, whole = io.StringIO(), io.StringIO()
    output = terminal.MarkdownOutput(
        Console(file=written, force_terminal=True, width=40, height=8), lambda: "the status"
    )
    for begin in range(0, len(ANSWER), size):
        output.write(ANSWER[begin : begin + size])
        assert [line for line in screen_of(written.getvalue()) if line][-1] == "the status"
    output.end_line()
    text = ANSWER.replace("\x1b", "").replace("stress*\n", "stress*\\\n").replace("<", "\\<")
    Console(file=whole, width=40).print(Markdown(text, hyperlinks=False))
    drawn, wanted = screen_of(written.getvalue()), whole.getvalue().splitlines()
    assert [line for line in drawn if line] == [line.rstrip() for line in wanted if line.strip()]
    assert "the status" not in drawn


def test_another_model_goes_on_and_the_first_one_stays_where_it_cannot(
    model, say, capsys, tmp_path, monkeypatch
):
    import moe_runtime

    assert say(model, [FIRST, SECOND]) == 0
    expected = capsys.readouterr().out
    other = shutil.copytree(model, tmp_path / "other")
    broken = shutil.copytree(model, tmp_path / "broken")
    real, loaded, in_memory_at_a_load = moe_runtime.load, [], []

    def load(path: str, **options: Any) -> Any:
        in_memory_at_a_load.append(sum(one() is not None for one in loaded))
        if path == str(broken):
            raise MoERuntimeError("no room for it")
        found = real(path, **options)
        loaded.append(weakref.ref(found))
        return found

    monkeypatch.setitem(vars(moe_runtime), "load", load)
    lines = ["/model nowhere", FIRST, f"/model {other}", "/model", f"/model {broken}", SECOND]
    monkeypatch.setattr(terminal, "typed_messages", lambda *_: iter(lines))
    monkeypatch.setattr(sys, "stdin", TypedLines())
    assert main(["chat", str(model), *OPTIONS]) == 0
    told = capsys.readouterr()
    assert told.out == expected
    assert "nowhere" in told.err
    assert "no room for it" in told.err
    assert "other" in told.err
    # never two at a time: the first, the other, the broken one, the other again
    assert in_memory_at_a_load == [0, 0, 0, 0]
    assert len(loaded) == 3


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_bytes_that_are_no_text_are_refused(errors, talking, monkeypatch):
    """Whatever Python makes of them: the locale decides."""
    raw = io.TextIOWrapper(io.BytesIO(b"/help\ncaf\xc3\xa9 \xff\n"), "utf-8", errors)
    monkeypatch.setattr(sys, "stdin", raw)
    with pytest.raises(ValueError, match="standard input is not UTF-8 text: "):
        terminal_of(talking).run()
    assert [message["role"] for message in talking.messages] == ["system"]


@pytest.mark.parametrize("line", ["/save {}", '/save "{}"', "/save '{}'  "])
def test_a_name_with_spaces_is_taken_as_it_is_or_in_quotes(line, talking, tmp_path, monkeypatch):
    talking.ask(FIRST, lambda piece: None, never)
    monkeypatch.setattr(sys, "stdin", io.StringIO(line.format(tmp_path / "its own name")))
    terminal_of(talking).run()
    assert [path.name for path in tmp_path.iterdir()] == ["its own name"]


def test_a_model_without_a_template_is_refused_before_it_is_loaded(say, capsys, monkeypatch):
    import moe_runtime

    monkeypatch.setitem(vars(moe_runtime), "load", None)
    assert say(pocket_path(), [FIRST]) == 2
    error = capsys.readouterr().err
    assert "this model's tokenizer has no chat template" in error
    assert error.count("\n") == 1
