"""``moe-runtime finetune``: train a transformers checkpoint further on conversations or text."""

import contextlib
import dataclasses
import glob
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.commands.train import offload_rows, show_outcome, take_steps, timed_plan
from moe_runtime.cli.processes import joined_processes
from moe_runtime.cli.strict import refuse_given
from moe_runtime.files import at_home

if TYPE_CHECKING:
    from moe_runtime.checkpoints.checkpoint import Progress
    from moe_runtime.training.finetune.finetune_run import FinetunePreparation
    from moe_runtime.training.finetune.settings import FinetuneConfig


_OF_A_RUN = (
    *("output", "seed", "precision", "recompute", "host_memory", "device_memory", "device"),
    *("evaluate_every", "patience", "checkpoint_every"),
)
"""Options that are keys of a run's configuration."""


def finetune(
    ctx: typer.Context,
    model: options.Model,
    data: Annotated[list[str], typer.Argument(metavar="DATA...")],
    output: options.OutputFolder = Path("finetuned"),
    lora: Annotated[int | None, typer.Option(min=1, metavar="RANK")] = None,
    lora_on: str = "attention,experts",
    lora_alpha: float | None = None,
    lora_dropout: float = 0.0,
    rslora: bool = False,
    dora: bool = False,
    lora_from: Annotated[Path | None, typer.Option("--lora-from", metavar="FOLDER")] = None,
    merge: bool = False,
    steps: options.Count | None = None,
    epochs: float | None = None,
    zeroth_order: bool = False,
    eps: float | None = None,
    rate: float | None = None,
    warmup: options.Natural = 0,
    context: options.Count = 512,
    sequences: options.Count = 8,
    micro_batches: options.Count = 1,
    host_memory: options.HostMemory = "auto",
    device_memory: options.DeviceMemory = "auto",
    device: options.Device = "cpu",
    storage_dir: Path | None = None,
    precision: str = "float32",
    recompute: bool = False,
    held_out: Annotated[list[str] | None, typer.Option("--held-out", metavar="FILE")] = None,
    held_out_share: float = 0.05,
    evaluate_every: options.Natural = 0,
    patience: options.Natural = 0,
    checkpoint_every: options.Natural = 100,
    export_dtype: str = "auto",
    seed: options.Natural = 0,
    trace: Annotated[Path | None, typer.Option("--trace", metavar="FILE.npz")] = None,
    resume: options.Resume = False,
    reschedule: options.Reschedule = False,
    dry_run: options.DryRun = False,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Train a Mixture-of-Experts checkpoint further; its experts may exceed the memory.

    Without --lora every parameter is trained: experts and their optimizer states are in memory up
    to --host-memory, and the rest on disk. With --lora experts are read from the checkpoint and
    never written. With --zeroth-order every parameter is trained, along random directions, and an
    expert takes the memory of its weights only. Ctrl-C saves a checkpoint and stops; --resume
    continues. At the end the folder's model/ has a checkpoint with the names and layout of MODEL.
    With --lora, adapters/ has the adapters as PEFT writes them, which `run`, `chat`, `generate` and
    `serve` take, and --merge writes model/ too. Quantised and packed checkpoints can be trained
    with --lora only.

    Args:
        data: Files of records (.jsonl, .json, .parquet), text files, folders, patterns such as
            'a/*.md', or data sets of the hub (OWNER/NAME). A record has `messages`, `prompt` and
            `completion`, `text`, or `input_ids`. In conversations, only answers are trained on.
        output: Folder of the run.
        lora: Train adapters of this rank only.
        lora_on: Modules with adapters: attention, experts, or both with a comma.
        lora_alpha: Factor of the adapters, divided by the rank; twice the rank when omitted.
        lora_dropout: Dropout on the adapters' inputs; needs --lora-on attention.
        rslora: Divide the factor by the root of the rank.
        dora: Also train the norm of each weight row (DoRA); needs --lora-on attention.
        lora_from: PEFT adapter to start from, made with the same options.
        merge: With --lora, also write the checkpoint with the adapters merged.
        steps: Optimizer steps; once over the data when omitted.
        epochs: How often all data is trained on, instead of --steps. The last step is filled with
            rows of the next time.
        zeroth_order: Train by forward passes alone: no gradients, no optimizer states.
        eps: With --zeroth-order: the distance of its two measurements.
        rate: Learning rate after the warm-up, followed by a cosine. 1e-5, or 1e-7 with
            --zeroth-order.
        warmup: Steps of linear warm-up.
        context: Tokens of a sequence.
        sequences: Sequences of a step.
        micro_batches: Split each step into N parts (gradient accumulation). More parts use less
            memory.
        storage_dir: Folder on a fast disk for the experts' states; the run's own if omitted.
        precision: Of products: float32 or bfloat16; trained weights stay float32.
        recompute: Use gradient checkpointing: less memory, slower.
        held_out: Files that are measured and never trained on. Repeatable.
        held_out_share: Share of the data that is held out if --held-out names no file.
        evaluate_every: Steps between measurements of held-out data; 0 measures at the end.
        patience: End after N measurements in a row without a better one; 0 never.
        checkpoint_every: Steps between checkpoints.
        export_dtype: Of the result: auto (as it was), float32, bfloat16 or float16.
        seed: Seed of the text's order, initial adapters and random directions.
        trace: Record which experts the gates choose, for `report`.
    """
    from moe_runtime.training.config_tree import build_tree
    from moe_runtime.training.finetune.settings import FinetuneConfig

    config_class = FinetuneConfig
    tree: dict[str, Any] = {
        "model": model,
        "merge": merge,
        "export_dtype": export_dtype,
        "run": {name: ctx.params[name] for name in _OF_A_RUN},
        "data": {
            "sources": {"text": {"files": [*data], "held_out_files": [*(held_out or ())]}},
            "held_out_share": held_out_share,
            "context": context,
            "tokens_per_step": context * sequences,
            "micro_batches": micro_batches,
        },
        "optimizer": {
            "peak_rate": (1e-7 if zeroth_order else 1e-5) if rate is None else rate,
            "warmup_steps": warmup,
            **({"weight_decay": 0.0} if zeroth_order else {}),
        },
    }
    if zeroth_order:
        from moe_runtime.research.zeroth_order import ZerothOrderFinetuneConfig

        config_class = ZerothOrderFinetuneConfig
        tree["zeroth_order"] = {} if eps is None else {"eps": eps}
    elif eps is not None:
        raise ValueError("--eps belongs to --zeroth-order; give both, or neither")
    given = {"storage_dir": storage_dir, "trace": trace, "steps": steps or 1, "log_every": 1}
    tree["run"] |= {name: value for name, value in given.items() if value is not None}
    if lora_alpha is not None and not (lora_alpha > 0 and math.isfinite(lora_alpha)):
        raise ValueError(f"--lora-alpha must be positive, got {lora_alpha}")
    if lora is not None:
        places = [place.strip() for place in lora_on.split(",")]
        tree["lora"] = {
            "rank": lora, "places": places, "rslora": rslora, "dora": dora, "dropout": lora_dropout,
            **({} if lora_alpha is None else {"scale": lora_alpha / lora}),
            **({} if lora_from is None else {"start": lora_from}),
        }  # fmt: skip
        refuse_given(ctx, ("storage_dir",), "is for experts that are trained; --lora writes none")
    else:
        refuse_given(ctx, ("lora_on",), "says where adapters are; give --lora RANK too")
        own = ("merge", "lora_alpha", "lora_dropout", "rslora", "dora", "lora_from")
        refuse_given(ctx, own, "is for adapters; give --lora RANK too")
    if steps is not None:
        refuse_given(ctx, ("epochs",), "says how long a run is, as --steps does; give one of them")
    if epochs is not None and not (epochs > 0 and math.isfinite(epochs)):
        raise ValueError(f"--epochs must be positive, got {epochs}")
    if held_out:
        refuse_given(ctx, ("held_out_share",), "is for runs without --held-out")
    if not resume:
        refuse_given(ctx, ("reschedule",), "changes a run that goes on; give --resume too")
    try:
        settings = build_tree(config_class, tree)
    except ValueError as error:
        raise ValueError(_with_options(str(error), ctx.params)) from None
    console.quiet_transformers(ctx.obj)
    from moe_runtime.training.prepared import run_folder
    from moe_runtime.training.ranks import OneRank, together

    with joined_processes(ctx.obj) as group, contextlib.ExitStack() as stack:
        is_first = group is None or group.rank() == 0
        is_used = is_first and not dry_run
        run = settings.run
        stack.enter_context(run_folder(run.output, run.storage_dir, is_used=is_used))
        ranks = together(group)
        with console.loading_bar() as progress:
            from moe_runtime.training.finetune.finetune_run import prepare

            with (ranks or OneRank()).first_alone():
                preparation = prepare(
                    _with_files(settings, progress),
                    epochs=(epochs or 1) if steps is None else None,
                    on_stage=lambda stage: progress(stage, 0, 0),
                    progress=progress,
                    keeps_text=is_used,
                    ranks=ranks,
                )
        if dry_run:
            _show_plan(preparation, as_json=as_json)
            return
        summary, exit_code = _finetune(preparation, resume=resume, reschedule=reschedule)
        show_outcome(summary, as_json=as_json)
    if exit_code:  # not within the group of processes, which ends in order
        raise typer.Exit(exit_code)


def _finetune(
    preparation: "FinetunePreparation", *, resume: bool, reschedule: bool
) -> tuple[dict[str, Any], int]:
    """Trains and exports; returns the summary and the exit code."""
    from moe_runtime.training.finetune.finetune_run import finish, plan, start

    found = plan(preparation)
    with console.loading_bar() as progress:
        trainer = start(preparation, resume=resume, reschedule=reschedule, progress=progress)
    with contextlib.closing(trainer):
        _timed(found, preparation, begins=True)  # warns of a slow disk
        exit_code = take_steps(trainer, preparation.config.run)
        if preparation.ranks.rank > 0:
            return {}, exit_code
        summary = finish(preparation, trainer, export=exit_code == 0)
    return {"complete": exit_code == 0, **summary}, exit_code


def _with_options(complaint: str, names: Iterable[str]) -> str:
    """An error about configuration keys, with the options in place of the keys."""

    def option(found: re.Match[str]) -> str:
        known = {"peak_rate": "rate", "warmup_steps": "warmup", "dropout": "lora_dropout"}
        name = known.get(found[1], found[1])
        is_key = name in names and (found.start() == 0 or "_" in name)
        return f"--{name.replace('_', '-')}" if is_key else found[0]

    return re.sub(r"(?:\brun\.)?\b(\w+)", option, re.sub(r"^\[\w+\]: ", "", complaint))


def _with_files(settings: "FinetuneConfig", progress: "Progress") -> "FinetuneConfig":
    """The settings with the files of folders and data sets instead of their names."""
    source = settings.data.sources["text"]
    files, held_out = (
        tuple(pattern for name in names for pattern in _patterns(name, progress))
        for names in (source.files, source.held_out_files)
    )
    source = dataclasses.replace(source, files=files, held_out_files=held_out)
    data = dataclasses.replace(settings.data, sources={"text": source})
    return dataclasses.replace(settings, data=data)


def _patterns(name: str, progress: "Progress") -> list[str]:
    """Patterns of the files of a name; those of a folder are its records, or else its texts."""
    from moe_runtime.checkpoints.hub import data_set, download_files
    from moe_runtime.training.finetune.records import RECORD_FILES

    place = at_home(name)
    if (found := data_set(name)) and not os.path.lexists(place) and not os.path.isdir(found.owner):
        return [glob.escape(str(path)) for path in download_files(found, RECORD_FILES, progress)]
    if not os.path.isdir(place):
        return [name]
    patterns = [os.path.join(glob.escape(name), "**", f"*{kind}") for kind in RECORD_FILES]
    return [pattern for pattern in patterns if glob.glob(at_home(pattern), recursive=True)] or [
        os.path.join(glob.escape(name), "**", "*.txt")
    ]


def _timed(
    found: dict[str, Any], preparation: "FinetunePreparation", *, begins: bool = False
) -> dict[str, Any]:
    is_frozen = preparation.config.lora is not None
    return timed_plan(
        found,
        preparation.checkpoint.folder if is_frozen else preparation.storage,
        tokens=preparation.config.data.tokens_per_step,
        active_parameters=preparation.num_active_parameters,
        begins=begins,
    )


def _show_plan(preparation: "FinetunePreparation", *, as_json: bool) -> None:
    from moe_runtime.training.finetune.finetune_run import plan

    config, found = preparation.config, _timed(plan(preparation), preparation)
    about = _examples(preparation)
    rows = preparation.batches.windows_per_epoch
    drawn = config.run.steps * config.data.sequences_per_step
    unseen = max(0, rows - drawn)
    lora = None if config.lora is None else dataclasses.asdict(config.lora)
    if as_json:
        console.print_json(
            {
                "parameters": preparation.num_parameters,
                "active_parameters": preparation.num_active_parameters,
                "lora": lora,
                "zeroth_order": not config.method.has_backward,
                "steps": config.run.steps,
                "tokens_per_step": config.data.tokens_per_step,
                "drawn_rows": drawn,
                "unseen_rows": unseen,
                "examples": about,
                "output": str(preparation.output),
                "offload": found,
            }
        )
        return
    trained = "every parameter" if lora is None else f"adapters of rank {lora['rank']}"
    if not config.method.has_backward:
        trained += ", by forward passes alone"
    facts = [
        (
            "model",
            f"{preparation.num_parameters:,} parameters, "
            f"{preparation.num_active_parameters:,} active a token",
        ),
        ("trained", trained),
        ("run", f"{config.run.steps:,} steps of {config.data.tokens_per_step:,} tokens"),
        ("rows", f"{drawn:,} in all steps, {rows:,} in the data, {unseen:,} never trained on"),
        *([("examples", _shown(about))] if about else []),
        *offload_rows(found, config.data.tokens_per_step),
        ("time", f"about {found['step_s'] * config.run.steps:,.3g} s for all steps"),
        ("folder", str(preparation.output)),
    ]
    console.print_rows("what would be trained", facts, to_stderr=False)
    for number, parts in enumerate(about.get("first", ()), 1):
        console.print_parts(f"example {number}", parts)


def _examples(preparation: "FinetunePreparation") -> dict[str, Any]:
    """Lengths, targets and rows of a run's records, and the first three; empty for texts."""
    from moe_runtime.training.examples import Examples
    from moe_runtime.training.finetune.rendering import parts_of

    examples = preparation.streams["text"].training
    if not isinstance(examples, Examples):
        return {}
    lengths, held_out = sorted(examples.lengths.tolist()), preparation.streams["text"].held_out
    room = preparation.batches.windows_per_epoch * (preparation.config.data.context + 1)
    numbers = range(min(3, len(lengths)))
    return {
        "number": len(lengths),
        "held_out": len(held_out.ends) if isinstance(held_out, Examples) else 0,
        "shortest": lengths[0],
        "median": lengths[len(lengths) // 2],
        "longest": lengths[-1],
        "tokens": len(examples),
        "targets": int(examples.trained.sum()),
        "rows": preparation.batches.windows_per_epoch,
        "filled": len(examples) / room,
        "packed": examples.shares_rows,
        "first": [parts_of(preparation.tokenizer, examples, number) for number in numbers],
    }


def _shown(about: dict[str, Any]) -> str:
    return (
        f"{about['number']:,}, {about['held_out']:,} more held out; {about['shortest']:,} to "
        f"{about['longest']:,} tokens, median {about['median']:,}; {about['targets']:,} of "
        f"{about['tokens']:,} tokens are trained on; {about['rows']:,} "
        f"{'packed' if about['packed'] else 'padded'} rows, {about['filled']:.0%} full"
    )
