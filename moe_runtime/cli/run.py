"""``moe-runtime run``: generate text from a prompt."""

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli.config_file import apply_config
from moe_runtime.cli.console import (
    Session,
    loading_bar,
    print_json,
    print_rows,
    quiet_transformers,
)
from moe_runtime.config import format_bytes, parse_budget
from moe_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from moe_runtime.engine.generation import GenerationResult
    from moe_runtime.types import RuntimeStats


def run(
    ctx: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or name on the hub.")
    ],
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="File with the prompt; - reads standard input.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    host_memory: Annotated[
        str, typer.Option(help="RAM to use: 7GiB, a share such as 0.5, or auto.")
    ] = "auto",
    device_memory: Annotated[
        str, typer.Option(help="GPU memory to use, written the same way.")
    ] = "auto",
    policy: Annotated[str, typer.Option(help="Which expert leaves the cache first.")] = "lru",
    trace: Annotated[
        Path | None, typer.Option(help="Record every routing decision into this .npz file.")
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest share.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        str, typer.Option(help="auto (as stored), bfloat16, float16 or float32.")
    ] = "auto",
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Room for prompt and new tokens; as needed when omitted."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of text.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on errors.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            help="TOML file with defaults for these options.", callback=apply_config, is_eager=True
        ),
    ] = None,
) -> None:
    """Generate text; experts that do not fit in memory stream from disk.

    The text goes to stdout as it comes, a table of what the runtime did to stderr.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    text = _read_prompt(prompt, prompt_file)
    for name, size in (("--host-memory", host_memory), ("--device-memory", device_memory)):
        parse_budget(size, name=name)

    with loading_bar() as progress:
        quiet_transformers(session)
        from moe_runtime.engine.generation import check_options

        check_options(max_new_tokens, temperature, top_p, seed)
        tokenizer = _load_tokenizer(model)
        room = _room_for(tokenizer, text, max_new_tokens, max_tokens, chat=chat)
        import moe_runtime

        loaded = moe_runtime.load(
            model,
            device=device,
            dtype=dtype,
            host_memory=host_memory,
            device_memory=device_memory,
            policy=policy,
            trace=trace,
            max_tokens=room,
            progress=progress,
        )
    with _closed_at_end(loaded):
        result = _generate(
            loaded,
            tokenizer,
            text,
            show=not as_json,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            chat=chat,
        )
        stats = loaded.moe.stats()
    _show_outcome(model, policy, result, stats, as_json=as_json)
    if result.finish_reason == "interrupted":
        raise typer.Exit(130)


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ValueError("give either --prompt TEXT or --prompt-file FILE")
    if prompt is not None:
        return prompt
    assert prompt_file is not None
    if str(prompt_file) == "-":
        return sys.stdin.read()
    try:
        return prompt_file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{prompt_file}: the prompt is not UTF-8 text: {error}") from None


def _load_tokenizer(model: str) -> Any:
    """Loads the tokenizer first: it is quick, and tells how much room the prompt needs."""
    folder = Path(model).expanduser()
    if not folder.exists() and (folder.is_absolute() or model.startswith((".", "~"))):
        raise CheckpointError(f"{model}: no such folder")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{model}: is a file, expected the folder of a checkpoint")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise CheckpointError(f"{model}: has no config.json, so it is not a checkpoint's folder")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else model)
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:
        raise CheckpointError(f"{model}: the tokenizer cannot be loaded: {error}") from error


def _room_for(
    tokenizer: Any, text: str, max_new_tokens: int, max_tokens: int | None, *, chat: bool
) -> int:
    """How many tokens the key-value cache must hold: memory that experts cannot have."""
    from moe_runtime.engine.generation import encode_prompt

    num_prompt_tokens = encode_prompt(tokenizer, text, chat=chat)["input_ids"].shape[1]
    needed = num_prompt_tokens + max_new_tokens
    if max_tokens is not None and max_tokens < needed:
        raise ValueError(
            f"--max-tokens {max_tokens} is too small: the prompt has {num_prompt_tokens} tokens "
            f"and {max_new_tokens} new ones are asked for, together {needed}"
        )
    return max_tokens or needed


@contextlib.contextmanager
def _closed_at_end(loaded: Any) -> Iterator[None]:
    """Closes the model whatever happens, so that files are complete and threads have ended."""
    try:
        yield
    finally:
        loaded.moe.close()


def _generate(
    loaded: Any, tokenizer: Any, text: str, *, show: bool, **options: Any
) -> "GenerationResult":
    from moe_runtime.engine.generation import GenerationInterrupted, generate_text

    output = _Stdout()
    if show and sys.stdout.isatty():
        output.write(f"\033[2m{text}\033[0m")
    try:
        on_text = output.write if show else None
        return generate_text(loaded, tokenizer, text, on_text=on_text, **options)
    except GenerationInterrupted as interrupted:
        return interrupted.result
    finally:
        output.end_line()


class _Stdout:
    """Text as it comes, and a line break after it, also when an error cuts it short."""

    def __init__(self) -> None:
        self._used = False

    def write(self, piece: str) -> None:
        self._used = True
        sys.stdout.write(piece)
        sys.stdout.flush()

    def end_line(self) -> None:
        if self._used:
            self.write("\n")


def _show_outcome(
    model: str, policy: str, result: "GenerationResult", stats: "RuntimeStats", *, as_json: bool
) -> None:
    if as_json:
        print_json(_as_json(model, policy, result, stats))
    else:
        print_rows("what the runtime did", _as_rows(result, stats), to_stderr=True)


def _as_json(
    model: str, policy: str, result: "GenerationResult", stats: "RuntimeStats"
) -> dict[str, Any]:
    return {
        "model": model,
        "policy": policy,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": result.new_tokens,
        "ttft_s": result.ttft_s,
        "decode_tokens_per_s": result.decode_tokens_per_s,
        **dataclasses.asdict(stats),
    }


def _as_rows(result: "GenerationResult", stats: "RuntimeStats") -> list[tuple[str, str]]:
    asked = stats.hits + stats.late_hits + stats.misses
    hit_share = f"{stats.hits / asked:.1%}" if asked else "none asked for"
    rows = [
        ("tokens", f"{result.prompt_tokens} in the prompt, {result.new_tokens} new"),
        ("loading", f"{stats.load_s:.2f} s"),
    ]
    if result.ttft_s is not None:
        rows.append(("first token after", f"{result.ttft_s:.2f} s"))
    if result.decode_tokens_per_s is not None:
        rows.append(("decoding", f"{result.decode_tokens_per_s:.2f} tokens/s"))
    used_bytes = stats.peak_rss_bytes - stats.baseline_rss_bytes
    return [
        *rows,
        (
            "memory",
            f"{format_bytes(used_bytes)} at the peak, budget {format_bytes(stats.budget_bytes)}, "
            f"model {format_bytes(stats.dense_bytes + stats.expert_bytes)}",
        ),
        ("experts in memory", f"{stats.expert_slots} of {format_bytes(stats.slot_bytes)} each"),
        (
            "experts asked for",
            f"{asked}: {hit_share} in memory, {stats.late_hits} on their way, {stats.misses} read",
        ),
        ("read from disk", f"{format_bytes(stats.bytes_read)}, waited {stats.stall_s:.2f} s"),
    ]
