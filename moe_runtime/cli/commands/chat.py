"""``moe-runtime chat``: a conversation in the terminal."""

import contextlib
import gc
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.allocator import give_back_free_pages
from moe_runtime.cli import console, options
from moe_runtime.cli.commands.run import find_sampling, load_tokenizer, runtime_rows
from moe_runtime.cli.processes import divided, follow_first, joined_processes, start_processes
from moe_runtime.cli.stopping import TextOutput, say_at_once, stop_on_signals
from moe_runtime.errors import MoERuntimeError
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
    ("/stats", "what the answers cost so far"),
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
        max_tokens: Memory for the whole conversation, in tokens; when omitted 4096, or more where
            experts leave it.
    """
    start_processes(several, ctx.obj)
    with joined_processes(ctx.obj) as group:
        console.quiet_transformers(ctx.obj)
        own = {**loading.settings(), **divided(several, group), "max_tokens": max_tokens}
        if group is not None and group.rank():
            import moe_runtime

            follow_first(moe_runtime.load(model, **own))
            return

        def prepare(name: str) -> _Prepared:
            return _Prepared(
                name,
                find_settings=lambda: find_sampling(ctx, name, sampling, is_engine=True),
                loading=own,
                system=system,
                seed=sampling.seed,
                max_new_tokens=max_new_tokens,
            )

        with contextlib.ExitStack() as stack:
            _Terminal(_opened(prepare(model), stack), prepare, stack).run()


class _Prepared:
    """A model that can be talked to, before its weights are read.

    Raises:
        ValueError, MoERuntimeError: the checkpoint, its tokenizer or an option is unfit.
    """

    def __init__(
        self,
        name: str,
        *,
        find_settings: Callable[[], dict[str, Any]],
        loading: dict[str, Any],
        system: str | None,
        seed: int | None,
        max_new_tokens: int,
    ) -> None:
        console.fetch_model(name, weights=False)
        from moe_runtime.checkpoints.opening import find_checkpoint, read_config
        from moe_runtime.inference.generation import check_room
        from moe_runtime.inference.pictures import PictureReader

        self.name, self.loading, self.system, self.seed = name, loading, system, seed
        self.max_new_tokens = max_new_tokens
        self.chosen = find_settings()
        self.tokenizer = load_tokenizer(name)
        folder = find_checkpoint(name, weights=False)
        self.config = read_config(folder)
        check_room(self.config, "--max-tokens", loading["max_tokens"] or 0)
        self.is_divided = "group" in loading
        self.reader = None
        if not self.is_divided:  # several processes take no pictures
            self.reader = PictureReader.of(folder, self.config, self.tokenizer)
        first = [] if system is None else [{"role": "system", "content": system}]
        # a template that cannot be used is refused before weights are read
        self._check([*first, {"role": "user", "content": "Hello"}], [])

    def _check(self, messages: list[dict[str, Any]], pictures: "list[Picture]") -> None:
        from moe_runtime.inference.generation import encode_messages
        from moe_runtime.inference.pictures import Pictures

        found = Pictures(self.reader, pictures) if self.reader and pictures else None
        encode_messages(self.tokenizer, messages, found)

    def pictures_of(self, said: "Said") -> "list[Picture]":
        """The pictures of what was said to another model, which this one could go on with."""
        files = [*said.shown, *said.waiting]
        if files and self.reader is None:
            raise ValueError(
                f"{self.name} takes no pictures, and the conversation has some; /reset first"
            )
        pictures = self.reader.open_all(files) if self.reader and files else []
        if said.turns:
            self._check(said.messages, pictures[: len(said.shown)])
        return pictures


@dataclass
class _Opened:
    """A model in memory, and the conversation with it."""

    prepared: _Prepared
    loaded: Any
    talk: "Conversation"


class _Meter:
    """What an answer costs, from its first token on."""

    def __init__(self, opened: _Opened) -> None:
        self._talk = opened.talk
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


def _opened(prepared: _Prepared, stack: contextlib.ExitStack) -> _Opened:
    """Loads a model; the stack closes it."""
    import moe_runtime
    from moe_runtime.inference.budget import known_positions
    from moe_runtime.inference.generation import end_token_ids, stop_strings_of
    from moe_runtime.serving.conversation import Conversation
    from moe_runtime.serving.engine import Engine
    from moe_runtime.serving.requests import SamplingOptions

    with console.loading_bar() as progress:
        loaded: Any = moe_runtime.load(prepared.name, **prepared.loading, progress=progress)
    stack.enter_context(contextlib.closing(loaded.moe))
    engine = stack.enter_context(Engine(loaded))
    talk = Conversation(
        engine,
        prepared.tokenizer,
        end_ids=frozenset(end_token_ids(loaded, prepared.tokenizer)),
        stops=stop_strings_of(loaded.generation_config),
        sampling=SamplingOptions(
            **prepared.chosen,
            seed=prepared.seed,
            repetition_penalty=loaded.generation_config.repetition_penalty or 1.0,
        ),
        max_new_tokens=prepared.max_new_tokens,
        known_tokens=known_positions(prepared.config),
        system=prepared.system,
        reader=prepared.reader,
    )
    return _Opened(prepared, loaded, talk)


class _Terminal:
    """Lines in, answers out."""

    def __init__(
        self,
        opened: _Opened,
        prepare: Callable[[str], _Prepared],
        stack: contextlib.ExitStack,
    ) -> None:
        self._opened, self._prepare, self._stack = opened, prepare, stack
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
                # without a terminal the first error ends the command, without a model any
                if not (self._is_terminal and self._is_loaded) or self._opened.talk.has_ended:
                    raise
                console.say_line(str(error))

    def _introduce(self) -> None:
        from moe_runtime.inference.generation import sampling_words

        prepared, context = self._opened.prepared, self._opened.loaded.moe.facts.context
        print(f"choice of tokens: {sampling_words(prepared.chosen)}", file=sys.stderr)
        print(f"context: {context.max_tokens} tokens, {context.reason}", file=sys.stderr)

    def _status(self) -> str:
        """The line below what is typed: the model, what the last answer cost, the room."""
        turns, name = self._opened.talk.turns, Path(self._opened.prepared.name).name
        used = turns[-1].prompt_tokens + turns[-1].new_tokens if turns else 0
        most = self._opened.loaded.moe.facts.context.max_tokens
        return "  ".join(filter(None, (name, f"{used} of {most} tokens", self._speed)))

    def _answer(self, text: str) -> None:
        talk = self._opened.talk
        meter = _Meter(self._opened) if self._is_terminal else None
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
        """Goes on with another model, or with this one where the other cannot be loaded."""
        if not name:
            said = [("model", self._opened.prepared.name)]
            console.print_rows("what answers", said, to_stderr=True)
            return
        old, said = self._opened.prepared, self._opened.talk.said
        if old.is_divided:
            raise ValueError("/model: several processes keep their model; start again with another")
        prepared = self._prepare(name)
        pictures = prepared.pictures_of(said)
        console.fetch_model(name)
        try:
            self._open(prepared, said, pictures)
        except (ValueError, MoERuntimeError, OSError):
            console.say_line(f"loading {old.name} again")
            self._open(old, said, old.pictures_of(said))
            raise
        self._introduce()

    def _open(self, prepared: _Prepared, said: "Said", pictures: "list[Picture]") -> None:
        """Puts a model in the place of the one that is in memory, which has no room for both."""
        self._is_loaded = False
        vars(self).pop("_opened", None)
        self._stack.close()
        gc.collect()
        give_back_free_pages()
        self._opened = _opened(prepared, self._stack)
        self._is_loaded = True
        self._opened.talk.go_on_from(said, pictures)
        self._speed = ""

    def _obey(self, command: str, *given: str) -> bool:
        """Does what a command says; gives whether the conversation goes on."""
        extra = given[command in ("/save", "/image", "/model") :]
        if extra and command in _COMMANDS:
            raise ValueError(f"{command}: expected nothing more, got {' '.join(extra)!r}")
        if command == "/model":  # nothing here may hold the model that goes
            self._switch("".join(given))
            return True
        talk = self._opened.talk
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
                f"{command} is no command; /help lists them, and a space before it makes the line "
                "a message"
            )
        return True

    def _show_statistics(self) -> None:
        turns = self._opened.talk.turns
        rows = [("answers", f"{len(turns)}, {sum(turn.new_tokens for turn in turns)} tokens")]
        if turns and turns[-1].ttft_s is not None:
            last = turns[-1]
            rate = (last.new_tokens - 1) / last.decode_s if last.decode_s else None
            speed = "" if rate is None else f", {rate:.2f} tokens/s"
            prompt = f"{last.prompt_tokens} tokens, {last.cached_tokens} of them known before"
            rows += [("conversation", prompt), ("last answer", f"after {last.ttft_s:.2f} s{speed}")]
        rows += runtime_rows(self._opened.talk.expert_stats())
        console.print_rows("what the runtime did", rows, to_stderr=True)

    def _save(self, name: str) -> None:
        require_file_name(name, "/save")
        path = Path(at_home(name))
        check_output_path(path, "conversation")
        if path.exists() and path.resolve() not in self._saved:
            raise ValueError(f"/save {name}: is there already; give another name")
        if not self._opened.talk.turns:
            raise ValueError("/save: there is no message to write yet")
        messages = {"messages": self._opened.talk.messages}
        write_text(path, f"{json.dumps(messages, ensure_ascii=False)}\n")
        self._saved.add(path.resolve())


def _words_of(line: str) -> list[str]:
    """A command and its argument; a name with spaces in quotes, or as it is."""
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
            line.encode()  # refuses bytes that Python let pass as halves of surrogate pairs
            yield line.rstrip("\n")
    except UnicodeError as error:
        raise ValueError(f"standard input is not UTF-8 text: {error}") from None
