"""``moe-runtime chat``: a conversation in the terminal."""

import contextlib
import gc
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.allocator import give_back_free_pages
from moe_runtime.cli import console, options
from moe_runtime.cli.commands.run import find_sampling, runtime_rows
from moe_runtime.cli.processes import divided, follow_first, joined_processes, start_processes
from moe_runtime.cli.stopping import TextOutput, say_at_once, stop_on_signals
from moe_runtime.errors import MoERuntimeError, text_of
from moe_runtime.files import at_home, check_output_path, require_file_name, write_text

if TYPE_CHECKING:
    from moe_runtime.inference.pictures import Picture
    from moe_runtime.serving.conversation import Conversation, Said

_INTERRUPTED = 130
_STOPPING = "stopping the answer; Ctrl-C once more leaves"
_HELP = (
    ("/reset", "begin a new conversation"),
    ("/undo", "take the last message and its answer back"),
    ("/image FILE", "put a picture before the next message"),
    ("/model NAME", "go on with another model; without a name, say which one answers"),
    ("/plain", "show answers as they are written, or as markdown again"),
    ("/stats", "the cost of the answers so far"),
    ("/save FILE", "write the conversation, as a line that `moe-runtime generate` takes"),
    ("/quit", "leave, as Ctrl-D does"),
    ("/help", "this list"),
)
_COMMANDS = {"/exit", *(usage.split()[0] for usage, _ in _HELP)}


def chat(
    ctx: typer.Context,
    *,
    model: options.Model,
    system: str | None = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 1024,
    sampling: options.Sampling,
    max_tokens: Annotated[int | None, typer.Option(min=16)] = None,
    loading: options.AdaptedLoading,
    several: options.SeveralProcesses,
    config: options.Config = None,
) -> None:
    """Talk to a model; each line is a message, and /help lists the commands.

    The chat keeps its cache between turns. Ctrl-C stops an answer, a second one leaves. Lines can
    also come from a pipe.

    Args:
        system: System message at the beginning of the conversation.
        max_new_tokens: Most tokens of an answer.
        max_tokens: Maximum tokens of the whole conversation, which take memory. [4096, or more if
            all experts fit anyway]
    """
    start_processes(several, ctx.obj)
    with joined_processes(ctx.obj) as group:
        console.quiet_transformers(ctx.obj)
        own = {**loading.settings(), **divided(several, group), "max_tokens": max_tokens}
        if group is not None and group.rank():
            import moe_runtime

            follow_first(moe_runtime.load(model, **own))
            return

        asked = _Asked(ctx, sampling, own, system, max_new_tokens)
        with contextlib.ExitStack() as stack:
            model_here = _Model(model, asked)
            model_here.open(stack)
            _Terminal(model_here, stack).run()


@dataclass(frozen=True)
class _Asked:
    """The options that all models of a conversation have in common."""

    ctx: typer.Context
    sampling: options.Sampling
    loading: dict[str, Any]
    system: str | None
    max_new_tokens: int


class _Model:
    """A model to talk to. The constructor checks its checkpoint; `open` reads its weights.

    Raises:
        ValueError, MoERuntimeError: the checkpoint, its tokenizer or an option is unfit.
    """

    def __init__(self, name: str, asked: _Asked) -> None:
        folder = console.fetch_model(name, weights=False)
        from moe_runtime.checkpoints.opening import load_tokenizer, read_config
        from moe_runtime.inference.generation import check_room
        from moe_runtime.inference.pictures import PictureReader

        self.name, self.asked = name, asked
        self.loaded: Any = None
        self.talk: Any = None
        self.sampling = find_sampling(asked.ctx, folder, asked.sampling, is_engine=True)
        self._tokenizer, self._config = load_tokenizer(folder), read_config(folder)
        check_room(self._config, "--max-tokens", asked.loading["max_tokens"] or 0)
        self.is_divided = "group" in asked.loading
        self._reader = None
        if not self.is_divided:  # several processes take no pictures
            self._reader = PictureReader.of(folder, self._config, self._tokenizer)
        first = [] if asked.system is None else [{"role": "system", "content": asked.system}]
        # a template that cannot be used is refused before weights are read
        self._check([*first, {"role": "user", "content": "Hello"}], [])

    def open(self, stack: contextlib.ExitStack) -> None:
        """Loads the model and starts a conversation; the stack closes both."""
        import moe_runtime
        from moe_runtime.inference.budget import known_positions
        from moe_runtime.inference.generation import end_token_ids, stop_strings_of
        from moe_runtime.serving.conversation import Conversation
        from moe_runtime.serving.engine import Engine
        from moe_runtime.serving.requests import SamplingOptions

        asked = self.asked
        with console.loading_bar() as progress:
            loaded = moe_runtime.load(self.name, **asked.loading, progress=progress)
        self.loaded = loaded
        stack.enter_context(contextlib.closing(self.loaded.moe))
        settings = self.loaded.generation_config
        self.talk = Conversation(
            stack.enter_context(Engine(loaded)),
            self._tokenizer,
            end_ids=frozenset(end_token_ids(loaded, self._tokenizer)),
            stops=stop_strings_of(settings),
            sampling=SamplingOptions(
                **self.sampling,
                seed=asked.sampling.seed,
                repetition_penalty=settings.repetition_penalty or 1.0,
            ),
            max_new_tokens=asked.max_new_tokens,
            known_tokens=known_positions(self._config),
            system=asked.system,
            reader=self._reader,
        )

    def _check(self, messages: list[dict[str, Any]], pictures: "list[Picture]") -> None:
        from moe_runtime.inference.generation import encode_messages
        from moe_runtime.inference.pictures import Pictures

        found = Pictures(self._reader, pictures) if self._reader and pictures else None
        encode_messages(self._tokenizer, messages, found)

    def pictures_of(self, said: "Said") -> "list[Picture]":
        """The pictures of a conversation with another model, read for this one."""
        files = [*said.shown, *said.waiting]
        if files and self._reader is None:
            raise ValueError(
                f"{self.name} takes no pictures, and the conversation has some; /reset first"
            )
        pictures = self._reader.open_all(files) if self._reader and files else []
        if said.turns:
            self._check(said.messages, pictures[: len(said.shown)])
        return pictures


class _Meter:
    """The cost of an answer, from its first token on."""

    def __init__(self, talk: "Conversation") -> None:
        self._talk = talk
        self._num_before, self._before = self._talk.num_generated, self._talk.expert_stats()
        self._first_s = self._last_s = 0.0
        self._num = 0

    def words(self) -> str:
        """Tokens, tokens a second and the share of experts that were in memory."""
        num, stats = self._talk.num_generated - self._num_before, self._talk.expert_stats()
        if num != self._num:
            self._num, self._last_s = num, time.monotonic()
            self._first_s = self._first_s or self._last_s
        seconds = self._last_s - self._first_s
        asked, found = (
            sum(getattr(stats, name) - getattr(self._before, name) for name in names)
            for names in (("hits", "late_hits", "misses"), ("hits",))
        )
        if not num:
            return "reading the prompt"
        parts = [f"{num} tokens"]
        if seconds:
            parts.append(f"{(num - 1) / seconds:.1f} tokens/s")
        if asked:
            parts.append(f"{found / asked:.0%} of experts in memory")
        return "  ".join(parts)


class _Terminal:
    """Reads lines, obeys commands and prints answers."""

    def __init__(self, model: _Model, stack: contextlib.ExitStack) -> None:
        self._model, self._stack = model, stack
        self._saved: set[Path] = set()
        self._is_terminal = sys.stdin.isatty()
        self._is_plain, self._is_loaded = False, True
        self._speed = ""

    def run(self) -> None:
        """Until the lines end."""
        if self._is_terminal:
            self._introduce()
            print("/help lists commands; Ctrl-D leaves", file=sys.stderr)
            from moe_runtime.cli import terminal

            lines = terminal.typed_messages([usage.split()[0] for usage, _ in _HELP], self._status)
        else:
            lines = _piped_lines()
        for line in lines:
            if not line.strip():
                continue
            try:
                if not line.startswith("/"):
                    self._answer(line)
                elif not self._obey(*_words_of(line)):
                    return
            except (ValueError, MoERuntimeError, OSError) as error:
                # without a terminal, or without a model, an error ends the command
                if not (self._is_terminal and self._is_loaded) or self._model.talk.has_ended:
                    raise
                console.say_line(text_of(error))

    def _introduce(self) -> None:
        from moe_runtime.inference.generation import sampling_words

        model, context = self._model, self._model.loaded.moe.facts.context
        print(f"choice of tokens: {sampling_words(model.sampling)}", file=sys.stderr)
        print(f"context: {context.max_tokens} tokens, {context.reason}", file=sys.stderr)

    def _status(self) -> str:
        """The line below the editor: the model, the room, the speed of the last answer."""
        turns, name = self._model.talk.turns, Path(self._model.name).name
        used = turns[-1].prompt_tokens + turns[-1].new_tokens if turns else 0
        most = self._model.loaded.moe.facts.context.max_tokens
        return "  ".join(filter(None, (name, f"{used} of {most} tokens", self._speed)))

    def _answer(self, text: str) -> None:
        talk = self._model.talk
        meter = _Meter(talk) if self._is_terminal else None
        drawn = None
        if meter and not self._is_plain:
            from moe_runtime.cli.terminal import MarkdownOutput

            drawn = MarkdownOutput.of_stdout(meter.words)
        output = drawn or TextOutput()

        def is_stopped() -> bool:
            if drawn:
                drawn.redraw()
            return stop.is_set

        with stop_on_signals(_STOPPING, say=drawn.say if drawn else say_at_once) as stop:
            try:
                talk.ask(text, output.write, is_stopped)
            finally:
                output.end_line()
                self._speed = meter.words() if meter else ""
        if stop.is_set and stop.exit_code != _INTERRUPTED:
            raise typer.Exit(stop.exit_code)

    def _switch(self, name: str) -> None:
        """Continues with another model, or with this one if the other cannot be loaded."""
        old = self._model
        if not name:
            console.print_rows("what answers", [("model", old.name)], to_stderr=True)
            return
        if old.is_divided:
            raise ValueError("/model: several processes keep their model; start again with another")
        said, new = old.talk.said, _Model(name, old.asked)
        pictures = new.pictures_of(said)
        console.fetch_model(name)
        try:
            self._open(new, said, pictures)
        except (ValueError, MoERuntimeError, OSError):
            console.say_line(f"loading {old.name} again")
            self._open(old, said, old.pictures_of(said))
            raise
        self._introduce()

    def _open(self, model: _Model, said: "Said", pictures: "list[Picture]") -> None:
        """Replaces the model in memory, which has no room for both."""
        self._is_loaded = False
        self._model.loaded = self._model.talk = None
        self._stack.close()
        gc.collect()
        give_back_free_pages()
        model.open(self._stack)
        self._model, self._is_loaded = model, True
        model.talk.go_on_from(said, pictures)
        self._speed = ""

    def _obey(self, command: str, *given: str) -> bool:
        """Obeys a command; returns whether the conversation continues."""
        extra = given[command in ("/save", "/image", "/model") :]
        if extra and command in _COMMANDS:
            raise ValueError(f"{command}: expected nothing more, got {' '.join(extra)!r}")
        if command == "/model":  # no variable here may keep the old model alive
            self._switch("".join(given))
            return True
        talk = self._model.talk
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            talk.reset()
        elif command == "/undo":
            if not talk.undo():
                raise ValueError("/undo: there is no message to take back")
        elif command == "/stats":
            self._show_statistics()
        elif command == "/save":
            self._save("".join(given))
        elif command == "/image":
            require_file_name("".join(given), "/image")
            talk.show("".join(given))
        elif command == "/plain":
            self._is_plain = not self._is_plain
        elif command == "/help":
            console.print_rows("commands", _HELP, to_stderr=True)
        else:
            raise ValueError(
                f"{command} is not a command; /help lists them, and a space before it makes the "
                "line a message"
            )
        return True

    def _show_statistics(self) -> None:
        turns = self._model.talk.turns
        rows = [("answers", f"{len(turns)}, {sum(turn.new_tokens for turn in turns)} tokens")]
        if turns and turns[-1].ttft_s is not None:
            last = turns[-1]
            rate = (last.new_tokens - 1) / last.decode_s if last.decode_s else None
            speed = "" if rate is None else f", {rate:.2f} tokens/s"
            prompt = f"{last.prompt_tokens} tokens, {last.cached_tokens} of them known before"
            rows += [("conversation", prompt), ("last answer", f"after {last.ttft_s:.2f} s{speed}")]
        rows += runtime_rows(self._model.talk.expert_stats())
        console.print_rows("what the runtime did", rows, to_stderr=True)

    def _save(self, name: str) -> None:
        require_file_name(name, "/save")
        path = Path(at_home(name))
        check_output_path(path, "conversation")
        if path.exists() and path.resolve() not in self._saved:
            raise ValueError(f"/save {name}: is there already; give another name")
        if not self._model.talk.turns:
            raise ValueError("/save: there is no message to write yet")
        messages = {"messages": self._model.talk.messages}
        write_text(path, f"{json.dumps(messages, ensure_ascii=False)}\n")
        self._saved.add(path.resolve())


def _words_of(line: str) -> list[str]:
    """A command and its argument, which may be in quotes."""
    command, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if rest[:1] not in ('"', "'"):
        return [command, rest] if rest else [command]
    try:
        return [command, *shlex.split(rest)]
    except ValueError as error:
        raise ValueError(f"{command} {rest}: {str(error).lower()}") from None


def _piped_lines() -> Iterator[str]:
    try:
        for line in sys.stdin:
            line.encode()  # refuses bytes that are not UTF-8
            yield line.rstrip("\n")
    except UnicodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error}") from None
