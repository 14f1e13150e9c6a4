"""``moe-runtime run``: generate text from prompts."""

import contextlib
import dataclasses
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.processes import (
    at_first,
    divided,
    from_first,
    joined_processes,
    start_processes,
)
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.cli.stopping import TextOutput
from moe_runtime.cli.strict import refuse_given
from moe_runtime.config import format_bytes
from moe_runtime.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_runtime.inference.generation import GenerationResult
    from moe_runtime.inference.pictures import Pictures
    from moe_runtime.types import RuntimeStats

_OF_A_TEXT = (
    *("text", "finish_reason", "prompt_tokens", "new_tokens", "ttft_s", "decode_tokens_per_s"),
)


def run(
    ctx: typer.Context,
    *,
    model: options.Model,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p")] = None,
    prompt_file: Path | None = None,
    prompts: Path | None = None,
    image: Annotated[list[Path] | None, typer.Option("--image")] = None,
    chat: bool = False,
    max_new_tokens: options.MaxNewTokens = 128,
    sampling: options.Sampling,
    max_tokens: options.Count | None = None,
    loading: options.AdaptedLoading,
    several: options.SeveralProcesses,
    trace: Path | None = None,
    timeline: Path | None = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
    config: options.Config = None,
) -> None:
    """Generate text; experts that do not fit in memory stream from disk.

    The text goes to stdout as it is generated, a table of statistics to stderr. Several prompts are
    answered one after another, each as if it were alone. Several processes divide the experts
    between them and print the text once.

    Args:
        prompt: Text to continue; repeat it for several prompts.
        prompt_file: File with the prompt; - reads standard input.
        prompts: File with a prompt in each line; in a .jsonl file a JSON string, or an object with
            a prompt. - reads standard input.
        image: Picture before the text of each prompt, which goes into the chat template; repeat it
            for several pictures.
        chat: Put the prompt into the model's chat template.
        max_tokens: Maximum tokens of prompt and answer together. [as many as are needed]
        trace: Record every routing decision into this .npz file.
        timeline: Write the times of layers, waits and reads as a Chrome trace (.json).
    """
    start_processes(several, ctx.obj)
    with joined_processes(ctx.obj) as group:
        texts = from_first(group, "prompts", lambda: read_prompts(prompt, prompt_file, prompts))
        from moe_runtime.checkpoints.opening import find_checkpoint, load_tokenizer

        with console.loading_bar() as progress:
            console.quiet_transformers(ctx.obj)
            found = find_checkpoint(model, weights=False, progress=progress)
            chosen, seed = find_sampling(ctx, found, sampling), sampling.seed
            if group is not None and chosen["temperature"] > 0 and seed is None:
                # all processes sample, and must draw the same tokens
                seed = from_first(group, "seed", lambda: secrets.randbelow(2**63))
            tokenizer = load_tokenizer(found)
            pictures = _read_pictures(found, tokenizer, image) if image else None
            form = {"chat": chat or bool(image), "pictures": pictures}
            room = _room_for(found, tokenizer, texts, max_new_tokens, max_tokens, **form)
            import moe_runtime

            outputs = {"trace": trace, "timeline": timeline}
            settings: dict[str, Any] = {**loading.settings(), **outputs, **divided(several, group)}
            loaded: Any = moe_runtime.load(model, **settings, max_tokens=room, progress=progress)
        with contextlib.closing(loaded.moe):
            asked = {**chosen, "seed": seed, "max_new_tokens": max_new_tokens, **form}
            results = _generate(loaded, tokenizer, texts, show=not as_json, **asked)
            stats = loaded.moe.stats()
        is_interrupted = results[-1].finish_reason == "interrupted"
        if group is not None and not is_interrupted:
            stats = _stats_of_all(group, stats)
        if as_json:
            of_each = [{name: getattr(one, name) for name in _OF_A_TEXT} for one in results]
            outcome = of_each[0]
            if prompts is not None or len(texts) > 1:
                outcome = {"results": of_each, **_sums(results)}
            counts = dataclasses.asdict(stats)
            console.print_json({"model": model, **outcome, **counts, "sampling": chosen})
        else:
            from moe_runtime.inference.generation import sampling_words

            rows = outcome_rows(results, stats, verbose=verbose)
            choice = ("choice of tokens", sampling_words(chosen))
            console.print_rows("what the runtime did", [choice, *rows], to_stderr=True)
    if is_interrupted:
        raise typer.Exit(130)


def _stats_of_all(group: "ProcessGroup", stats: "RuntimeStats") -> "RuntimeStats":
    """Statistics of all processes in the first one; in the others their own."""
    from moe_runtime.inference.expert_partition import add_up
    from moe_runtime.types import RuntimeStats

    parts = at_first(group, "stats", json.dumps(dataclasses.asdict(stats)))
    return add_up([RuntimeStats(**json.loads(part)) for part in parts]) if parts else stats


def _read_pictures(folder: Path, tokenizer: Any, files: "Sequence[Path]") -> "Pictures":
    from moe_runtime.checkpoints.opening import read_config
    from moe_runtime.inference.pictures import PictureReader, Pictures

    reader = PictureReader.of(folder, read_config(folder), tokenizer)
    if reader is None:
        raise UnsupportedModelError(
            f"{folder} takes no pictures; give a vision-language model whose processor "
            "transformers has, or no picture"
        )
    return Pictures(reader, reader.open_all(files))


def find_sampling(
    ctx: typer.Context, folder: Path, asked: options.Sampling, *, is_engine: bool = False
) -> dict[str, Any]:
    """Sampling as the options say, else as the checkpoint's settings say.

    A warning names unused settings; `is_engine` as for `warn_of_unused`.
    """
    from moe_runtime.checkpoints.opening import read_generation_config
    from moe_runtime.inference.generation import check_options, sampling_for, warn_of_unused

    temperature, top_p = asked.temperature, asked.top_p
    without_effect = "has no effect without sampling: give --temperature too"
    if temperature == 0:
        refuse_given(ctx, {"top_p", "seed"}, without_effect)
    check_options(1, temperature or 0.0, 1.0 if top_p is None else top_p, None)
    settings = read_generation_config(folder)
    warn_of_unused(settings, is_engine=is_engine)
    sampling = sampling_for(settings, temperature=temperature, top_p=top_p)
    if sampling["temperature"] == 0:
        refuse_given(ctx, {"top_p", "seed"}, without_effect)
    return sampling


def _room_for(
    folder: Path,
    tokenizer: Any,
    texts: list[str],
    num_new_tokens: int,
    max_tokens: int | None,
    **form: Any,
) -> int:
    """Tokens that the KV cache must hold."""
    from moe_runtime.checkpoints.opening import read_config
    from moe_runtime.inference.generation import check_length, check_room, encode_prompt

    count = max(encode_prompt(tokenizer, text, **form)["input_ids"].shape[1] for text in texts)
    config = read_config(folder)
    check_length(config, count, num_new_tokens)
    check_room(config, "--max-tokens", max_tokens or 0)
    needed = count + num_new_tokens
    if max_tokens is not None and max_tokens < needed:
        raise ValueError(
            f"--max-tokens {max_tokens} is too small: the prompt has {count} token"
            f"{'s'[count == 1 :]} and {num_new_tokens} new ones are asked for, together {needed}"
        )
    return max_tokens or needed


def _generate(
    loaded: Any, tokenizer: Any, texts: list[str], *, show: bool, **settings: Any
) -> "list[GenerationResult]":
    """Answers the prompts in order, up to an interruption."""
    from moe_runtime.inference.generation import GenerationInterrupted, generate_text

    results = []
    for text in texts:
        output = TextOutput()
        if show and results:
            output.write("\n")
        shows_prompt = show and sys.stdout.isatty()
        on_read = partial(output.show_prompt, text) if shows_prompt else lambda: None
        on_text = output.write if show else None
        try:
            with _prompt_progress(loaded, on_read):
                results.append(generate_text(loaded, tokenizer, text, on_text=on_text, **settings))
        except GenerationInterrupted as interrupted:
            return [*results, interrupted.result]
        finally:
            output.end_line()
    return results


@contextlib.contextmanager
def _prompt_progress(model: Any, on_read: Callable[[], None]) -> Iterator[None]:
    """Shows the layers that a prompt has passed on stderr, if it is a terminal.

    The bar lasts for the first forward pass of the block, and then `on_read` is called; at once if
    there is no bar.
    """
    if not sys.stderr.isatty():
        on_read()
        yield
        return
    from rich.progress import BarColumn, MofNCompleteColumn
    from torch.nn import ModuleList

    lists = [part for part in model.get_decoder().children() if isinstance(part, ModuleList)]
    blocks = max(lists, key=len, default=())  # the model's layers
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    bar = console.terminal_bar(*columns, "layers{task.fields[speed]}")
    task = bar.add_task("", total=len(blocks) or None, speed="")
    bytes_before, num_tokens, started_s = model.moe.stats().bytes_read, 0, 0.0

    def start(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal num_tokens, started_s
        tokens = kwargs.get("input_ids", args[0] if args else None)
        num_tokens, started_s = (0 if tokens is None else tokens.numel()), time.perf_counter()
        bar.update(task, description=f"reading a prompt of {num_tokens:,} tokens")
        shown.enter_context(bar)

    def passed(*_: Any) -> None:
        bar.advance(task)
        done = num_tokens * bar.tasks[0].completed / len(blocks)
        rate = done / (time.perf_counter() - started_s)
        read = format_bytes(model.moe.stats().bytes_read - bytes_before)
        bar.update(task, speed=f", {rate:,.0f} tokens/s, {read} read")

    def end(*_: Any) -> None:
        shown.close()
        on_read()

    with contextlib.ExitStack() as shown:
        shown.callback(model.register_forward_pre_hook(start, with_kwargs=True).remove)
        shown.callback(model.register_forward_hook(end).remove)
        for block in blocks:
            shown.callback(block.register_forward_hook(passed).remove)
        yield


def _sums(results: "Sequence[GenerationResult]") -> dict[str, Any]:
    waits = [result.ttft_s for result in results if result.ttft_s is not None]
    rated = [(r.new_tokens - 1, r.decode_tokens_per_s) for r in results if r.decode_tokens_per_s]
    decode_s = sum(tokens / rate for tokens, rate in rated)
    return {
        "prompt_tokens": sum(result.prompt_tokens for result in results),
        "new_tokens": sum(result.new_tokens for result in results),
        "ttft_s": sum(waits) if waits else None,
        "decode_tokens_per_s": sum(tokens for tokens, _ in rated) / decode_s if rated else None,
    }


def outcome_rows(
    results: "Sequence[GenerationResult]", stats: "RuntimeStats", *, verbose: bool = False
) -> list[tuple[str, str]]:
    """The rows of the table of a run."""
    sums = _sums(results)
    prompts = "the prompt" if len(results) == 1 else f"{len(results)} prompts"
    rows = [
        ("tokens", f"{sums['prompt_tokens']} in {prompts}, {sums['new_tokens']} new"),
        ("loading", f"{stats.load_s:.2f} s"),
    ]
    num_begun = sum(result.ttft_s is not None for result in results)
    if num_begun:
        each = "" if num_begun == 1 else " on average"
        rows.append(("first token after", f"{sums['ttft_s'] / num_begun:.2f} s{each}"))
    if sums["decode_tokens_per_s"] is not None:
        rows.append(("decoding", f"{sums['decode_tokens_per_s']:.2f} tokens/s"))
    return [*rows, *runtime_rows(stats, verbose=verbose)]


def runtime_rows(stats: "RuntimeStats", *, verbose: bool = False) -> list[tuple[str, str]]:
    """The rows about memory and experts."""
    asked = stats.hits + stats.late_hits + stats.misses
    hit_share = f"{stats.hits / asked:.1%}" if asked else "none asked for"
    used_bytes = stats.peak_rss_bytes - stats.baseline_rss_bytes
    rows = [
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
    ]
    if stats.computed_misses or stats.planned_s:
        copied = stats.misses - stats.computed_misses
        row = f"{stats.computed_misses} computed on the CPU, {copied} copied"
        planned = f"; planned {stats.planned_s:.2f} s, took {stats.spent_s:.2f} s"
        rows.append(("misses", row + planned * bool(stats.planned_s)))
    if stats.miss_cpu_s:
        each = f"{stats.miss_cpu_s * 1e3:.2f} ms on the CPU"
        rows.append(("a missing expert", f"{each}, {stats.miss_copy_s * 1e3:.2f} ms to copy"))
    if steps := stats.resident_steps + stats.fetched_steps + stats.cut_steps:
        whole = f"{stats.resident_steps} without misses, {stats.fetched_steps} that read misses"
        rows.append(("recorded steps", f"{steps}: {whole}, {stats.cut_steps} cut in every layer"))
    if stats.recorded_bytes:
        reserved = format_bytes(stats.recorded_reserve_bytes)
        row = f"{format_bytes(stats.recorded_bytes)} of the GPU, {reserved} reserved"
        rows.append(("memory of recorded steps", row))
    changed = {
        "replaced": stats.replaced_choices,
        "by stand-ins": stats.stand_in_choices,
        "left out": stats.skipped_choices,
    }
    if stats.kv_cache != "exact":
        rows.append(("keys and values (lossy)", f"kept in {stats.kv_cache}"))
    if any(changed.values()):
        each = ", ".join(f"{number} {words}" for words, number in changed.items() if number)
        rows.append(("choices changed (lossy)", each))
    if stats.draft_bytes:
        rows.append(("memory of drafts", f"{format_bytes(stats.draft_bytes)} of the budget"))
    if stats.draft_steps:
        rate = 1 + stats.accepted_drafts / stats.draft_steps
        row = f"{stats.accepted_drafts} of {stats.drafted_tokens} tokens right"
        rows.append(("drafts", f"{row}, {rate:.2f} tokens a step"))
    if stats.policy_reason:
        reason = f": {stats.policy_reason}" if verbose else ""
        rows.append(("policy", f"{stats.policy}, {stats.shares} shares{reason}"))
    if stats.prefetch == "off":
        return rows
    if not verbose:
        return [*rows, ("prefetch", stats.prefetch.partition(";")[0].partition(":")[0])]
    outcome = (
        f"{stats.guesses} experts: {stats.useful_guesses} in time, {stats.late_guesses} late, "
        f"{stats.wasted_guesses} wasted; guessing took {stats.predict_s:.2f} s"
    )
    return [*rows, ("prefetch", stats.prefetch), ("prefetched", outcome)]
