"""``moe-runtime chat``: a conversation in the terminal."""

import contextlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.commands.run import find_sampling, load_tokenizer, runtime_rows
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.cli.streams import TextOutput
from moe_runtime.errors import MoERuntimeError
from moe_runtime.files import at_home, check_output_path, require_file_name, write_text

if TYPE_CHECKING:
    from moe_runtime.serving.conversation import Conversation

_INTERRUPTED = 130
_STOPPING = "stopping the answer; Ctrl-C once more leaves"
_HELP = (
    ("/reset", "begin a new conversation"),
    ("/undo", "take the last message and its answer back"),
    ("/image FILE", "put a picture before the next message"),
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
    console.quiet_transformers(ctx.obj)
    console.fetch_model(model, weights=False)
    import moe_runtime
    from moe_runtime.checkpoints.opening import find_checkpoint, read_config
    from moe_runtime.inference.budget import known_positions
    from moe_runtime.inference.generation import (
        check_room,
        encode_messages,
        end_token_ids,
        sampling_words,
        stop_strings_of,
    )
    from moe_runtime.inference.pictures import PictureReader
    from moe_runtime.serving.requests import SamplingOptions

    chosen = find_sampling(ctx, model, sampling, is_engine=True)
    tokenizer = load_tokenizer(model)
    folder = find_checkpoint(model, weights=False)
    model_config = read_config(folder)
    check_room(model_config, "--max-tokens", max_tokens or 0)
    first = [] if system is None else [{"role": "system", "content": system}]
    # a template that cannot be used is refused before weights are read
    encode_messages(tokenizer, [*first, {"role": "user", "content": "Hello"}])
    with console.loading_bar() as progress:
        loaded: Any = moe_runtime.load(
            model, **loading.settings(), max_tokens=max_tokens, progress=progress
        )
    from moe_runtime.serving.conversation import Conversation
    from moe_runtime.serving.engine import Engine

    with contextlib.closing(loaded.moe), Engine(loaded) as engine:
        conversation = Conversation(
            engine,
            tokenizer,
            end_ids=frozenset(end_token_ids(loaded, tokenizer)),
            stops=stop_strings_of(loaded.generation_config),
            sampling=SamplingOptions(
                **chosen,
                seed=sampling.seed,
                repetition_penalty=loaded.generation_config.repetition_penalty or 1.0,
            ),
            max_new_tokens=max_new_tokens,
            known_tokens=known_positions(model_config),
            system=system,
            reader=PictureReader.of(folder, model_config, tokenizer),
        )
        _Terminal(conversation, loaded, sampling_words(chosen)).run()


class _Terminal:
    """Lines in, answers out."""

    def __init__(self, conversation: "Conversation", loaded: Any, sampling: str) -> None:
        self._conversation = conversation
        self._sampling = sampling
        self._loaded = loaded
        self._saved: set[Path] = set()
        self._is_terminal = sys.stdin.isatty()

    def run(self) -> None:
        """Until the lines end."""
        if self._is_terminal:
            print(f"choice of tokens: {self._sampling}", file=sys.stderr)
            context = self._loaded.moe.facts.context
            print(f"context: {context.max_tokens} tokens, {context.reason}", file=sys.stderr)
            print("/help lists commands; Ctrl-D leaves", file=sys.stderr)
        for line in _lines(is_terminal=self._is_terminal):
            if not line.strip():
                continue
            try:
                if not line.startswith("/"):
                    self._answer(line)
                elif not self._obey(*_words_of(line)):
                    return
            except (ValueError, MoERuntimeError, OSError) as error:
                # without a terminal the first error ends the command
                if not self._is_terminal:
                    raise
                console.say_line(str(error))

    def _answer(self, text: str) -> None:
        output = TextOutput()
        with stop_on_signals(_STOPPING) as stop:
            try:
                self._conversation.ask(text, output.write, lambda: stop.is_set)
            finally:
                output.end_line()
        if stop.is_set and stop.exit_code != _INTERRUPTED:
            raise typer.Exit(stop.exit_code)

    def _obey(self, command: str, *given: str) -> bool:
        """Does what a command says; gives whether the conversation goes on."""
        extra = given[command in ("/save", "/image") :]
        if extra and command in _COMMANDS:
            raise ValueError(f"{command}: expected nothing more, got {' '.join(extra)!r}")
        if command in ("/quit", "/exit"):
            return False
        if command == "/reset":
            self._conversation.reset()
        elif command == "/undo":
            if not self._conversation.undo():
                raise ValueError("/undo: there is no message to take back")
        elif command == "/stats":
            self._show_statistics()
        elif command == "/save":
            self._save("".join(given))
        elif command == "/image":
            require_file_name("".join(given), "/image")
            self._conversation.show("".join(given))
        elif command == "/help":
            console.print_rows("commands", _HELP, to_stderr=True)
        else:
            raise ValueError(
                f"{command} is no command; /help lists them, and a space before it makes the line "
                "a message"
            )
        return True

    def _show_statistics(self) -> None:
        turns = self._conversation.turns
        rows = [("answers", f"{len(turns)}, {sum(turn.new_tokens for turn in turns)} tokens")]
        if turns and turns[-1].ttft_s is not None:
            last = turns[-1]
            rate = (last.new_tokens - 1) / last.decode_s if last.decode_s else None
            speed = "" if rate is None else f", {rate:.2f} tokens/s"
            prompt = f"{last.prompt_tokens} tokens, {last.cached_tokens} of them known before"
            rows += [("conversation", prompt), ("last answer", f"after {last.ttft_s:.2f} s{speed}")]
        rows += runtime_rows(self._loaded.moe.stats())
        console.print_rows("what the runtime did", rows, to_stderr=True)

    def _save(self, name: str) -> None:
        require_file_name(name, "/save")
        path = Path(at_home(name))
        check_output_path(path, "conversation")
        if path.exists() and path.resolve() not in self._saved:
            raise ValueError(f"/save {name}: is there already; give another name")
        if not self._conversation.turns:
            raise ValueError("/save: there is no message to write yet")
        messages = {"messages": self._conversation.messages}
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


def _lines(*, is_terminal: bool) -> Iterator[str]:
    """Lines of standard input; on a terminal with a history of what was typed."""
    if not is_terminal:
        try:
            for line in sys.stdin:
                line.encode()  # refuses bytes that Python let pass as halves of surrogate pairs
                yield line.rstrip("\n")
        except UnicodeError as error:
            raise ValueError(f"standard input is not UTF-8 text: {error}") from None
        return
    with contextlib.suppress(ImportError):
        import readline  # gives input() a history

        # a text of several lines that is pasted is one message
        readline.parse_and_bind("set enable-bracketed-paste on")
    with contextlib.suppress(EOFError):
        while True:
            try:
                line = input("> ")
            except (EOFError, KeyboardInterrupt):
                print(file=sys.stderr)  # what is said next does not stand after the prompt
                raise
            yield line
