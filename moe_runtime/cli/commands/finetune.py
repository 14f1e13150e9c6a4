"""``moe-runtime finetune``: train a transformers checkpoint further on text files."""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.commands.train import budget_rows, offload_row, outcome_rows, take_steps
from moe_runtime.cli.console import (
    Session,
    loading_bar,
    print_json,
    print_rows,
    quiet_transformers,
    say_line,
)
from moe_runtime.cli.step_speed import (
    predict_step,
    speed_row,
    warn_of_slow_disk,
    warn_where_much_moves,
)
from moe_runtime.cli.strict import FOLDER, refuse_given
from moe_runtime.config import parse_budget
from moe_runtime.files import at_home

if TYPE_CHECKING:
    from moe_runtime.training.finetune.finetuning import FinetunePreparation
    from moe_runtime.training.finetune.settings import FinetuneConfig

Data = Annotated[
    list[str],
    typer.Argument(
        metavar="DATA...", help="Text files, folders of .txt files, or patterns such as 'a/*.md'."
    ),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar=FOLDER, help="Folder of the run.")]
Lora = Annotated[
    int | None,
    typer.Option(min=1, metavar="RANK", help="Train adapters of this rank, nothing else."),
]
LoraOn = Annotated[
    str, typer.Option(help="What has adapters: attention, experts, or both with a comma.")
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Optimizer steps; once over the text when omitted.")
]
ZerothOrder = Annotated[
    bool,
    typer.Option(
        "--zeroth-order", help="Train by forward passes alone: no gradients, no optimizer states."
    ),
]
Eps = Annotated[
    float | None, typer.Option(help="With --zeroth-order: how far to either side it measures.")
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Learning rate after the warm-up; a cosine follows. 1e-5, or 1e-7 with --zeroth-order."
    ),
]
Warmup = Annotated[int, typer.Option(min=0, help="Steps of linear warm-up.")]
SequenceTokens = Annotated[int, typer.Option("--context", min=1, help="Tokens of a sequence.")]
Sequences = Annotated[int, typer.Option(min=1, help="Sequences of a step.")]
MicroBatches = Annotated[
    int, typer.Option(min=1, help="Parts that a step is computed in; fewer need more memory.")
]
StorageDir = Annotated[
    Path | None,
    typer.Option(help="Folder on a fast disk for the experts' states; the run's own if omitted."),
]
Precision = Annotated[
    str, typer.Option(help="Of products: float32 or bfloat16; trained weights stay float32.")
]
Recompute = Annotated[
    bool, typer.Option("--recompute", help="Keep a block's input alone, and compute it twice.")
]
CheckpointEvery = Annotated[int, typer.Option(min=0, help="Steps between checkpoints.")]
ExportDtype = Annotated[
    str, typer.Option(help="Of the result: auto (as it was), float32, bfloat16 or float16.")
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="FILE.npz", help="Record where the gates send tokens, for `report`."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen, write nothing, and stop.")
]
Seed = Annotated[
    int,
    typer.Option(
        min=0, help="Decides the order of the text, adapters' first weights, random directions."
    ),
]


def finetune(
    ctx: typer.Context,
    model: options.Model,
    data: Data,
    output: Output = Path("finetuned"),
    lora: Lora = None,
    lora_on: LoraOn = "attention,experts",
    steps: Steps = None,
    zeroth_order: ZerothOrder = False,
    eps: Eps = None,
    rate: Rate = None,
    warmup: Warmup = 0,
    context: SequenceTokens = 512,
    sequences: Sequences = 8,
    micro_batches: MicroBatches = 1,
    host_memory: options.HostMemory = "auto",
    device_memory: options.DeviceMemory = "auto",
    device: options.Device = "cpu",
    storage_dir: StorageDir = None,
    precision: Precision = "float32",
    recompute: Recompute = False,
    checkpoint_every: CheckpointEvery = 100,
    export_dtype: ExportDtype = "auto",
    seed: Seed = 0,
    trace: Trace = None,
    resume: options.Resume = False,
    reschedule: options.Reschedule = False,
    dry_run: DryRun = False,
    config: options.Config = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train a Mixture-of-Experts checkpoint further; its experts may exceed the memory.

    Without --lora every parameter is trained: experts live with their optimizer states in memory as
    far as --host-memory goes and on the disk beyond it. With --lora experts are read from the
    checkpoint and never written. With --zeroth-order every parameter is trained, along random
    directions, and an expert takes the room of its weights. Ctrl-C saves a checkpoint and stops;
    --resume goes on. At the end the folder's model/ holds a checkpoint with the names and layout of
    the first one. Beside quantised or packed weights --lora alone trains, and adapters/ holds the
    adapters, as PEFT reads them; `serve` takes those of --lora-on attention.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    parse_budget(host_memory, name="--host-memory")
    parse_budget(device_memory, name="--device-memory")
    from moe_runtime.training.config_tree import build_tree
    from moe_runtime.training.finetune.settings import FinetuneConfig

    config_class = FinetuneConfig
    tree: dict[str, Any] = {
        "model": model,
        "export_dtype": export_dtype,
        "run": {
            "output": output,
            "steps": steps or 1,
            "seed": seed,
            "precision": precision,
            "recompute": recompute,
            "host_memory": host_memory,
            "device_memory": device_memory,
            "device": device,
            "log_every": 1,
            "checkpoint_every": checkpoint_every,
        },
        "data": {
            "sources": {"text": {"files": [_pattern(name) for name in data]}},
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
        from moe_runtime.research.zeroth_order.finetuning import ZerothOrderFinetuneConfig

        config_class = ZerothOrderFinetuneConfig
        tree["zeroth_order"] = {} if eps is None else {"eps": eps}
    elif eps is not None:
        raise ValueError("--eps belongs to --zeroth-order; give both, or neither")
    if storage_dir is not None:
        tree["run"]["storage_dir"] = storage_dir
    if trace is not None:
        tree["run"]["trace"] = trace
    if lora is not None:
        places = [place.strip() for place in lora_on.split(",")]
        tree["lora"] = {"rank": lora, "places": places}
        refuse_given(ctx, ("storage_dir",), "is for experts that are trained; --lora writes none")
    else:
        refuse_given(ctx, ("lora_on",), "says where adapters are; give --lora RANK too")
    if not resume:
        refuse_given(ctx, ("reschedule",), "changes a run that goes on; give --resume too")
    settings = build_tree(config_class, tree)
    quiet_transformers(session)
    from moe_runtime.training.prepared import run_folder

    with run_folder(settings.run.output, settings.run.storage_dir, is_used=not dry_run):
        preparation = _prepare(settings, has_steps=steps is not None, keeps_text=not dry_run)
        _warn_of_adapters(preparation)
        if dry_run:
            _show_plan(preparation, as_json=as_json)
            return
        summary, exit_code = _finetune(preparation, resume=resume, reschedule=reschedule)
    if as_json:
        print_json(summary)
    else:
        print_rows("what was trained", outcome_rows(summary), to_stderr=True)
    if exit_code:
        raise typer.Exit(exit_code)


def _prepare(
    config: "FinetuneConfig", *, has_steps: bool, keeps_text: bool
) -> "FinetunePreparation":
    with loading_bar() as progress:
        from moe_runtime.training.finetune.finetuning import prepare

        return prepare(
            config,
            epochs=None if has_steps else 1,
            on_stage=lambda stage: progress(stage, 0, 0),
            progress=progress,
            keeps_text=keeps_text,
        )


def _warn_of_adapters(preparation: "FinetunePreparation") -> None:
    """Says on stderr, before anything is trained, who can use adapters of frozen experts."""
    lora = preparation.config.lora
    if preparation.exporter is None and lora is not None and "experts" in lora.places:
        say_line(
            f"warning: {preparation.config.model} is quantised or packed, so adapters of its "
            "experts are for PEFT alone: `moe-runtime serve` refuses them, and they cannot be "
            "merged; --lora-on attention trains adapters that serve takes"
        )


def _finetune(
    preparation: "FinetunePreparation", *, resume: bool, reschedule: bool
) -> tuple[dict[str, Any], int]:
    """Trains and exports; returns the summary and the exit code."""
    from moe_runtime.training.finetune.finetuning import finish, plan, start

    found = plan(preparation)
    with loading_bar() as progress:
        trainer = start(preparation, resume=resume, reschedule=reschedule, progress=progress)
    try:
        warn_where_much_moves(
            found,
            _place_of_experts(preparation),
            tokens=preparation.config.data.tokens_per_step,
            active_parameters=preparation.num_active_parameters,
        )
        exit_code = take_steps(trainer, preparation.config.run)
        summary = finish(preparation, trainer, export=exit_code == 0)
    finally:
        trainer.close()
    return {"complete": exit_code == 0, **summary}, exit_code


def _pattern(name: str) -> str:
    """A folder stands for the text files in it."""
    is_folder = os.path.isdir(at_home(name))
    return os.path.join(name, "**", "*.txt") if is_folder else name


def _place_of_experts(preparation: "FinetunePreparation") -> Path:
    """The folder that experts are read from."""
    is_frozen = preparation.config.lora is not None
    return preparation.checkpoint.folder if is_frozen else preparation.storage


def _show_plan(preparation: "FinetunePreparation", *, as_json: bool) -> None:
    from moe_runtime.training.finetune.finetuning import plan

    config, found = preparation.config, plan(preparation)
    tokens = config.data.tokens_per_step
    place = _place_of_experts(preparation)
    predicted = predict_step(
        found, place, tokens=tokens, active_parameters=preparation.num_active_parameters
    )
    warn_of_slow_disk(predicted, place)
    lora = None if config.lora is None else dataclasses.asdict(config.lora)
    if as_json:
        print_json(
            {
                "parameters": preparation.num_parameters,
                "active_parameters": preparation.num_active_parameters,
                "lora": lora,
                "zeroth_order": not config.method.has_backward,
                "steps": config.run.steps,
                "tokens_per_step": config.data.tokens_per_step,
                "output": str(preparation.output),
                "offload": {**found, **predicted},
            }
        )
        return
    trained = "every parameter" if lora is None else f"adapters of rank {lora['rank']}"
    if not config.method.has_backward:
        trained += ", by forward passes alone"
    rows = [
        (
            "model",
            f"{preparation.num_parameters:,} parameters, "
            f"{preparation.num_active_parameters:,} active a token",
        ),
        ("trained", trained),
        ("run", f"{config.run.steps:,} steps of {config.data.tokens_per_step:,} tokens"),
        *budget_rows(found),
        ("experts", offload_row(found)),
        ("speed", speed_row(predicted, tokens)),
        ("folder", str(preparation.output)),
    ]
    print_rows("what would be trained", rows, to_stderr=False)
