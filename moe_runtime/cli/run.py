"""``moe-runtime run``: generate text from a prompt."""

import contextlib
import dataclasses
import json
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import (
    Session,
    loading_bar,
    print_json,
    print_rows,
    quiet_transformers,
)
from moe_runtime.cli.processes import at_first, from_first, joined_processes
from moe_runtime.config import format_bytes, parse_budget
from moe_runtime.errors import CheckpointError
from moe_runtime.files import check_not_in_progress, check_output_path, draft_of, writes_directly

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_runtime.engine.generation import GenerationResult
    from moe_runtime.types import RuntimeStats

_NO_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
"""Removes what a terminal would obey: a model can write escape sequences as well as text."""


def run(
    ctx: typer.Context,
    model: options.Model,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    seed: options.Seed = None,
    host_memory: options.HostMemory = "auto",
    device_memory: options.DeviceMemory = "auto",
    max_tokens: options.MaxTokens = None,
    policy: options.Policy = "auto",
    shares: options.Shares = "auto",
    prefetch: options.Prefetch = "auto",
    predictor: options.Predictor = "auto",
    placement: options.PlacementFile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trace: options.Trace = None,
    timeline: options.Timeline = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
    config: options.Config = None,
) -> None:
    """Generate text; experts that do not fit in memory stream from disk.

    The text goes to stdout as it comes, a table of what the runtime did to stderr. Under `torchrun`
    the processes divide the experts between them and print the text once.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    sampling = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    with joined_processes(session) as group:
        text = from_first(group, "prompt", lambda: read_prompt(prompt, prompt_file))
        if group is not None and temperature > 0 and seed is None:
            # Every process samples, and all must draw the same tokens.
            drawn = from_first(group, "seed", lambda: str(secrets.randbelow(2**63)))
            sampling["seed"] = int(drawn)
        _check_budgets_and_files(host_memory, device_memory, trace, timeline)
        with loading_bar() as progress:
            quiet_transformers(session)
            tokenizer = load_tokenizer(model)
            room = _room_for(tokenizer, text, sampling, max_tokens, chat=chat)
            loaded = _load_model(
                model,
                device=device,
                dtype=dtype,
                host_memory=host_memory,
                device_memory=device_memory,
                policy=policy,
                shares=shares,
                prefetch=prefetch,
                predictor=predictor,
                trace=trace,
                timeline=timeline,
                max_tokens=room,
                progress=progress,
                **({} if placement is None else {"placement": placement}),
                **({} if group is None else {"group": group}),
            )
        with contextlib.closing(loaded.moe):
            result = _generate(loaded, tokenizer, text, show=not as_json, chat=chat, **sampling)
            stats = loaded.moe.stats()
        is_interrupted = result.finish_reason == "interrupted"
        if group is not None and not is_interrupted:
            stats = _stats_of_all(group, stats)
        _show_outcome(model, result, stats, as_json=as_json)
    if is_interrupted:
        raise typer.Exit(130)


def _stats_of_all(group: "ProcessGroup", stats: "RuntimeStats") -> "RuntimeStats":
    """What all processes did together, in the first one; in the others what they did."""
    from moe_runtime.engine.share import add_up
    from moe_runtime.types import RuntimeStats

    parts = at_first(group, "stats", json.dumps(dataclasses.asdict(stats)))
    return add_up([RuntimeStats(**json.loads(part)) for part in parts]) if parts else stats


def _check_budgets_and_files(
    host_memory: str, device_memory: str, trace: Path | None, timeline: Path | None
) -> None:
    """Refuses what loading would refuse minutes later."""
    parse_budget(host_memory, name="--host-memory")
    parse_budget(device_memory, name="--device-memory")
    for path, what in ((trace, "trace"), (timeline, "timeline")):
        if path is not None:
            check_output_path(path, what)
            check_not_in_progress(path, what)
    if trace is None or timeline is None or writes_directly(trace):
        return
    if draft_of(trace) == draft_of(timeline):
        raise ValueError(f"--trace and --timeline must be different files, got {trace} twice")


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The text of one of the two; ``-`` as a file is standard input.

    Raises:
        ValueError: neither or both are given, or the file is not UTF-8.
    """
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


def load_tokenizer(model: str) -> Any:
    """Loads the tokenizer first: it is quick, and tells how much room the prompt needs.

    Raises:
        CheckpointError: there is none, or it cannot be loaded.
        UnsupportedModelError: transformers does not know the architecture.
    """
    folder = Path(model).expanduser()
    if not folder.exists() and (folder.is_absolute() or model.startswith((".", "~"))):
        raise CheckpointError(f"{model}: no such folder")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{model}: is a file, expected the folder of a checkpoint")
    if folder.is_dir():
        from moe_runtime.engine.checkpoint import read_config

        # transformers looks into it for the tokenizer's class: what is wrong there is not the
        # tokenizer's fault.
        read_config(folder)
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder) if folder.is_dir() else model)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{model}: the tokenizer cannot be loaded: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{model}: the tokenizer cannot be loaded; its files are damaged ({error!r})"
        ) from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        # transformers makes up an empty tokenizer where there are no files.
        raise CheckpointError(f"{model}: has no tokenizer files, such as tokenizer.json")
    return tokenizer


def _room_for(
    tokenizer: Any, text: str, sampling: dict[str, Any], max_tokens: int | None, *, chat: bool
) -> int:
    """How many tokens the key-value cache must hold: memory that experts cannot have."""
    from moe_runtime.engine.generation import check_options, encode_prompt

    check_options(**sampling)
    num_prompt_tokens = encode_prompt(tokenizer, text, chat=chat)["input_ids"].shape[1]
    num_new_tokens = sampling["max_new_tokens"]
    needed = num_prompt_tokens + num_new_tokens
    if max_tokens is not None and max_tokens < needed:
        raise ValueError(
            f"--max-tokens {max_tokens} is too small: the prompt has {num_prompt_tokens} tokens "
            f"and {num_new_tokens} new ones are asked for, together {needed}"
        )
    return max_tokens or needed


def _load_model(model: str, **settings: Any) -> Any:
    import moe_runtime

    return moe_runtime.load(model, **settings)


def _generate(
    loaded: Any, tokenizer: Any, text: str, *, show: bool, **settings: Any
) -> "GenerationResult":
    from moe_runtime.engine.generation import GenerationInterrupted, generate_text

    output = _Stdout()
    if show and sys.stdout.isatty():
        output.show_prompt(text)
    try:
        on_text = output.write if show else None
        return generate_text(loaded, tokenizer, text, on_text=on_text, **settings)
    except GenerationInterrupted as interrupted:
        return interrupted.result
    finally:
        output.end_line()


class _Stdout:
    """Text as it comes, and a line break after it, also when an error cuts it short."""

    def __init__(self) -> None:
        self._used = False
        self._is_terminal = sys.stdout.isatty()

    def show_prompt(self, text: str) -> None:
        """Shows the prompt dimmed, so that the text reads as its continuation."""
        sys.stdout.write("\033[2m")
        self.write(text)
        sys.stdout.write("\033[0m")

    def write(self, piece: str) -> None:
        self._used = True
        sys.stdout.write(piece.translate(_NO_CONTROL) if self._is_terminal else piece)
        sys.stdout.flush()

    def end_line(self) -> None:
        if self._used:
            self.write("\n")


def _show_outcome(
    model: str, result: "GenerationResult", stats: "RuntimeStats", *, as_json: bool
) -> None:
    if as_json:
        print_json(_as_json(model, result, stats))
    else:
        print_rows("what the runtime did", _as_rows(result, stats), to_stderr=True)


def _as_json(model: str, result: "GenerationResult", stats: "RuntimeStats") -> dict[str, Any]:
    return {
        "model": model,
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
        ("room in memory", f"{stats.expert_slots} experts of {format_bytes(stats.slot_bytes)}"),
        (
            "experts asked for",
            f"{asked}: {hit_share} in memory, {stats.late_hits} on their way, {stats.misses} read",
        ),
        ("read from disk", f"{format_bytes(stats.bytes_read)}, waited {stats.stall_s:.2f} s"),
        *_policy_rows(stats),
        *_prefetch_rows(stats),
    ]


def _policy_rows(stats: "RuntimeStats") -> list[tuple[str, str]]:
    if not stats.policy_reason:
        return []
    return [("policy", f"{stats.policy}, {stats.shares} shares: {stats.policy_reason}")]


def _prefetch_rows(stats: "RuntimeStats") -> list[tuple[str, str]]:
    if stats.prefetch == "off":
        return []
    outcome = (
        f"{stats.guesses} experts: {stats.useful_guesses} in time, {stats.late_guesses} late, "
        f"{stats.wasted_guesses} in vain; guessing took {stats.predict_s:.2f} s"
    )
    return [("prefetch", stats.prefetch), ("prefetched", outcome)]
