"""``moe-runtime run``: generate text from prompts."""

import contextlib
import dataclasses
import json
import secrets
import sys
from functools import partial
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
from moe_runtime.cli.prompt_progress import prompt_progress
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.cli.run_outcome import outcome_json, outcome_rows
from moe_runtime.cli.streams import TextOutput
from moe_runtime.cli.strict import refuse_given, refuse_idle_predictor
from moe_runtime.config import parse_budget
from moe_runtime.files import check_not_in_progress, check_output_path

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from moe_runtime.inference.generation import GenerationResult
    from moe_runtime.types import RuntimeStats


def run(
    ctx: typer.Context,
    model: options.Model,
    prompt: options.Prompt = None,
    prompt_file: options.PromptFile = None,
    prompts: options.Prompts = None,
    chat: options.Chat = False,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    host_memory: options.HostMemory = "auto",
    device_memory: options.DeviceMemory = "auto",
    max_tokens: options.MaxTokens = None,
    policy: options.Policy = "auto",
    shares: options.Shares = "auto",
    cache_code: options.CacheCode = "none",
    activations: options.Activations = "exact",
    misses: options.Misses = "device",
    prefetch: options.Prefetch = "auto",
    predictor: options.Predictor = "auto",
    placement: options.PlacementFile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    trace: options.Trace = None,
    timeline: options.Timeline = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
    debug: options.Debug = False,
    config: options.Config = None,
) -> None:
    """Generate text; experts that do not fit in memory stream from disk.

    The text goes to stdout as it comes, a table of what the runtime did to stderr. Several prompts
    are answered one after another, each as if it were alone, by a model that is loaded once. Under
    `torchrun` the processes divide the experts between them and print the text once.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    refuse_idle_predictor(ctx, policy, prefetch, predictor)
    if as_json and verbose:
        raise ValueError("--verbose is for the table, which --json leaves out; give one of them")
    with joined_processes(session) as group:
        texts: list[str] = json.loads(
            from_first(
                group, "prompts", lambda: json.dumps(read_prompts(prompt, prompt_file, prompts))
            )
        )
        _check_budgets_and_files(host_memory, device_memory, trace, timeline)
        from moe_runtime.checkpoints.model_files import find_checkpoint

        with loading_bar() as progress:
            quiet_transformers(session)
            find_checkpoint(model, weights=False, progress=progress)
            sampling = find_sampling(ctx, model, temperature, top_p)
            if group is not None and sampling["temperature"] > 0 and seed is None:
                # Every process samples, and all must draw the same tokens.
                drawn = from_first(group, "seed", lambda: str(secrets.randbelow(2**63)))
                seed = int(drawn)
            tokenizer = load_tokenizer(model)
            room = _room_for(model, tokenizer, texts, max_new_tokens, max_tokens, chat=chat)
            loaded = _load_model(
                model,
                device=device,
                dtype=dtype,
                host_memory=host_memory,
                device_memory=device_memory,
                policy=policy,
                shares=shares,
                cache_code=cache_code,
                activations=activations,
                misses=misses,
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
            settings = {**sampling, "seed": seed, "max_new_tokens": max_new_tokens, "chat": chat}
            results = _generate(loaded, tokenizer, texts, show=not as_json, **settings)
            stats = loaded.moe.stats()
        is_interrupted = results[-1].finish_reason == "interrupted"
        if group is not None and not is_interrupted:
            stats = _stats_of_all(group, stats)
        if as_json:
            is_list = prompts is not None or len(texts) > 1
            outcome = outcome_json(model, results, stats, is_list=is_list)
            print_json({**outcome, "sampling": sampling})
        else:
            from moe_runtime.inference.generation import sampling_words

            print_rows(
                "what the runtime did",
                [
                    ("choice of tokens", sampling_words(sampling)),
                    *outcome_rows(results, stats, verbose=verbose),
                ],
                to_stderr=True,
            )
    if is_interrupted:
        raise typer.Exit(130)


def _stats_of_all(group: "ProcessGroup", stats: "RuntimeStats") -> "RuntimeStats":
    """What all processes did together, in the first one; in the others what they did."""
    from moe_runtime.inference.expert_partition import add_up
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


def load_tokenizer(model: str) -> Any:
    """Loads the tokenizer first: it is quick, and tells how much room the prompt needs.

    Raises:
        CheckpointError: there is none, or it cannot be loaded.
        UnsupportedModelError: transformers does not know the architecture.
    """
    from moe_runtime.checkpoints.model_files import find_checkpoint
    from moe_runtime.checkpoints.model_files import load_tokenizer as load

    return load(find_checkpoint(model, weights=False))


def find_sampling(
    ctx: typer.Context,
    model: str,
    temperature: float | None,
    top_p: float | None,
    *,
    is_engine: bool = False,
) -> dict[str, Any]:
    """How tokens are chosen: as the options say, else as the checkpoint's settings say.

    Settings that are not obeyed are named in a warning; ``is_engine`` as for `warn_of_unused`.

    Raises:
        CheckpointError: the checkpoint or its settings cannot be read.
        ValueError: an option is out of range, or has no effect on greedy decoding.
    """
    from moe_runtime.checkpoints.model_files import find_checkpoint, read_generation_config
    from moe_runtime.inference.generation import check_options, sampling_for, warn_of_unused

    without_effect = "has no effect without sampling: give --temperature too"
    if temperature == 0:
        refuse_given(ctx, {"top_p", "seed"}, without_effect)
    check_options(1, temperature or 0.0, 1.0 if top_p is None else top_p, None)
    settings = read_generation_config(find_checkpoint(model, weights=False))
    warn_of_unused(settings, is_engine=is_engine)
    sampling = sampling_for(settings, temperature=temperature, top_p=top_p)
    if sampling["temperature"] == 0:
        refuse_given(ctx, {"top_p", "seed"}, without_effect)
    return sampling


def _room_for(
    model: str,
    tokenizer: Any,
    texts: list[str],
    num_new_tokens: int,
    max_tokens: int | None,
    *,
    chat: bool,
) -> int:
    """How many tokens the key-value cache must hold: memory that experts cannot have."""
    from moe_runtime.checkpoints.model_files import find_checkpoint, read_config
    from moe_runtime.inference.generation import check_length, encode_prompt

    num_prompt_tokens = max(
        encode_prompt(tokenizer, text, chat=chat)["input_ids"].shape[1] for text in texts
    )
    config = read_config(find_checkpoint(model, weights=False))
    check_length(config, num_prompt_tokens, num_new_tokens)
    needed = num_prompt_tokens + num_new_tokens
    if max_tokens is not None and max_tokens < needed:
        raise ValueError(
            f"--max-tokens {max_tokens} is too small: the prompt has "
            f"{num_prompt_tokens} token{'s'[num_prompt_tokens == 1 :]} and {num_new_tokens} new "
            f"ones are asked for, together {needed}"
        )
    return max_tokens or needed


def _load_model(model: str, **settings: Any) -> Any:
    import moe_runtime

    return moe_runtime.load(model, **settings)


def _generate(
    loaded: Any, tokenizer: Any, texts: list[str], *, show: bool, **settings: Any
) -> "list[GenerationResult]":
    """Answers one prompt after another, up to an interruption."""
    from moe_runtime.inference.generation import GenerationInterrupted, generate_text

    results = []
    for text in texts:
        output = TextOutput()
        if show and results:
            output.write("\n")
        shows_prompt = show and sys.stdout.isatty()
        on_text = output.write if show else None
        try:
            with prompt_progress(
                loaded, partial(output.show_prompt, text) if shows_prompt else lambda: None
            ):
                results.append(generate_text(loaded, tokenizer, text, on_text=on_text, **settings))
        except GenerationInterrupted as interrupted:
            return [*results, interrupted.result]
        finally:
            output.end_line()
    return results
