"""``moe-runtime train``: train a language model built on the drop-in layer."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import Session, loading_bar, print_json, print_rows, quiet_transformers
from moe_runtime.cli.processes import joined_processes
from moe_runtime.cli.step_speed import (
    predict_step,
    speed_row,
    warn_of_slow_disk,
    warn_where_much_moves,
)
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.cli.train_progress import training_display
from moe_runtime.config import format_bytes
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import require_not_read

if TYPE_CHECKING:
    from moe_runtime.training.loop import Trainer
    from moe_runtime.training.ranks import OneRank
    from moe_runtime.training.run_config import RunConfig
    from moe_runtime.training.session import Preparation

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG.toml", help="The run, as docs/training.md describes it.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Overrides a key, such as run.steps=100. Repeatable."
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen, write nothing, and stop.")
]

# Weight, gradient and AdamW's two moments, all in float32.
_STATE_BYTES = 16


def train(
    ctx: typer.Context,
    config_file: ConfigFile,
    settings: Settings = None,
    resume: options.Resume = False,
    reschedule: options.Reschedule = False,
    dry_run: DryRun = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train a Mixture-of-Experts language model on text files.

    Ctrl-C finishes the step, saves a checkpoint and stops; --resume goes on as if nothing had
    happened. At the end the run's folder holds a Hugging Face checkpoint in model/. Under
    `torchrun` the processes divide the experts and each step's micro-batches between them.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if reschedule and not resume:
        raise ValueError("--reschedule changes a run that goes on: give --resume too")
    from moe_runtime.training.config_tree import read_tree
    from moe_runtime.training.prepared import run_folder
    from moe_runtime.training.run_config import TrainConfig

    with joined_processes(session) as group, contextlib.ExitStack() as stack:
        config = read_tree(TrainConfig, config_file, settings=tuple(settings or ()))
        folder = config_file.resolve().parent
        require_not_read(config.run.trace and folder / config.run.trace, "trace", [config_file])
        quiet_transformers(session)
        is_first = group is None or group.rank() == 0
        is_used = is_first and not dry_run
        storage = config.run.storage_dir and folder / config.run.storage_dir
        output = folder / config.run.output
        stack.enter_context(run_folder(output, storage or None, is_used=is_used))
        with loading_bar() as progress:
            from moe_runtime.training.ranks import OneRank, SeveralRanks
            from moe_runtime.training.session import prepare

            is_alone = group is None or group.size() == 1
            ranks = OneRank() if is_alone else SeveralRanks(config)
            with ranks.first_alone():
                preparation = prepare(
                    config,
                    folder,
                    on_stage=lambda stage: progress(stage, 0, 0),
                    keeps_text=not dry_run,
                )
        if dry_run:
            _show_plan(preparation, ranks, as_json=as_json)
            return
        summary, exit_code = _train(preparation, ranks, resume=resume, reschedule=reschedule)
        if as_json and summary:
            print_json(summary)
        elif summary:
            print_rows("what was trained", outcome_rows(summary), to_stderr=True)
    if exit_code:
        raise typer.Exit(exit_code)


def _train(
    preparation: "Preparation", ranks: "OneRank", *, resume: bool, reschedule: bool
) -> tuple[dict[str, Any], int]:
    """Trains and exports; returns the summary, in the first process, and the exit code."""
    from moe_runtime.training.session import finish, start

    plan = _offload_plan(preparation, ranks)
    trainer = start(preparation, resume=resume, reschedule=reschedule, ranks=ranks)
    try:
        if ranks.rank == 0:
            warn_where_much_moves(
                plan,
                preparation.storage,
                tokens=preparation.config.data.tokens_per_step // ranks.num_data_ranks,
                active_parameters=preparation.num_active_parameters,
            )
        exit_code = take_steps(trainer, preparation.config.run)
        is_complete = exit_code == 0
        if ranks.rank > 0:
            return {}, exit_code
        family, obstacle = _export_family(preparation)
        summary = finish(preparation, trainer, export=is_complete and family is not None)
    finally:
        trainer.close()
    return {"complete": is_complete, **summary, "export_obstacle": obstacle or None}, exit_code


def take_steps(trainer: "Trainer", run: "RunConfig") -> int:
    """Trains until the run is complete or a signal comes; returns the exit code."""
    message = "stopping after this step, with a checkpoint; once more stops at once"
    with (
        stop_on_signals(message) as stop,
        training_display(run.steps, run.log_every, trainer.step) as display,
    ):
        is_complete = trainer.train(should_stop=lambda: stop.is_set, on_record=display.show)
    return 0 if is_complete else stop.exit_code


def _export_family(preparation: "Preparation") -> tuple[str | None, str]:
    """The architecture that the model leaves as, or None and the reason."""
    from moe_runtime.models.lm.hugging_face import hugging_face_family

    try:
        return hugging_face_family(preparation.config.model), ""
    except UnsupportedModelError as error:
        return None, str(error)


def _show_plan(preparation: "Preparation", ranks: "OneRank", *, as_json: bool) -> None:
    plan = _plan(preparation, ranks)
    if as_json:
        print_json(plan)
    else:
        print_rows("what would be trained", _plan_rows(plan), to_stderr=False)


def _plan(preparation: "Preparation", ranks: "OneRank") -> dict[str, Any]:
    from moe_runtime.training.checkpoint import checkpoints_in

    config = preparation.config
    family, reason = _export_family(preparation)
    found = checkpoints_in(preparation.checkpoints)
    num_parameters = preparation.num_parameters
    tokens = config.run.steps * config.data.tokens_per_step
    available = preparation.batches.windows_per_epoch * config.data.context
    return {
        "parameters": num_parameters,
        "active_parameters": preparation.num_active_parameters,
        "dense_equivalent": _dense_equivalent(preparation),
        "state_bytes": num_parameters * _STATE_BYTES,
        "vocab_size": config.model.vocab_size,
        "steps": config.run.steps,
        "tokens_per_step": config.data.tokens_per_step,
        "tokens": tokens,
        "training_tokens": {n: len(s.training) for n, s in preparation.streams.items()},
        "held_out_tokens": {n: len(s.held_out) for n, s in preparation.streams.items()},
        "epochs": tokens / available,
        "device": str(preparation.device),
        "output": str(preparation.output),
        "last_checkpoint": found[-1].name if found else None,
        "offload": _timed_offload_plan(preparation, ranks),
        "export": family,
        "export_obstacle": reason or None,
    }


def _dense_equivalent(preparation: "Preparation") -> dict[str, Any] | None:
    """The dense model that a scaling law expects to be as good; None of a dense model."""
    from moe_runtime.research.scaling_laws import ROUTED_LAWS, routed_law_of

    moe = preparation.config.model.moe
    if moe is None:
        return None
    law = routed_law_of(moe.gate)
    active = preparation.num_active_parameters
    parameters = ROUTED_LAWS[law].dense_equivalent(active, moe.num_experts)
    return {"law": law, "parameters": round(parameters)}


def _offload_plan(preparation: "Preparation", ranks: "OneRank") -> dict[str, Any]:
    """Where experts live and what a step moves; empty where all are in memory."""
    if preparation.config.run.host_memory is None:
        return {}
    from moe_runtime.training.offloaded import offload_plan

    return offload_plan(preparation.config, preparation.model, ranks, preparation.device)


def _timed_offload_plan(preparation: "Preparation", ranks: "OneRank") -> dict[str, Any]:
    """Likewise, with how long a step will take; warns of a slow disk."""
    plan = _offload_plan(preparation, ranks)
    if not plan:
        return {}
    predicted = predict_step(
        plan,
        preparation.storage,
        tokens=preparation.config.data.tokens_per_step // ranks.num_data_ranks,
        active_parameters=preparation.num_active_parameters,
    )
    warn_of_slow_disk(predicted, preparation.storage)
    return {**plan, **predicted}


def _plan_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    text = ", ".join(
        f"{name} {count:,} + {plan['held_out_tokens'][name]:,} held out"
        for name, count in plan["training_tokens"].items()
    )
    rows = [
        (
            "model",
            f"{plan['parameters']:,} parameters, {plan['active_parameters']:,} active a token",
        ),
        *_worth_rows(plan["dense_equivalent"]),
        ("memory", f"{format_bytes(plan['state_bytes'])} for weights, gradients and AdamW"),
        ("text", f"{text} tokens, vocabulary {plan['vocab_size']:,}"),
        (
            "run",
            f"{plan['steps']:,} steps of {plan['tokens_per_step']:,} tokens, "
            f"{plan['tokens']:,} in all, {plan['epochs']:.2f} epochs, on {plan['device']}",
        ),
        ("folder", plan["output"]),
        ("last checkpoint", plan["last_checkpoint"] or "none"),
        ("leaves as", plan["export"] or f"no Hugging Face checkpoint: {plan['export_obstacle']}"),
    ]
    if plan["offload"]:
        rows += budget_rows(plan["offload"])
        rows.append(("experts", offload_row(plan["offload"])))
        rows.append(("speed", speed_row(plan["offload"], plan["tokens_per_step"])))
    return rows


def budget_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The budget of each memory and what of it is set aside, for people."""
    host, device = (found[f"{name}_budget_bytes"] for name in ("host", "device"))
    aside = (
        f"{format_bytes(found['dense_bytes'])} of it for everything but experts, "
        f"{format_bytes(found['activation_bytes'])} for activations"
    )
    if device is None:
        return [("host memory", f"{format_bytes(host)}, {aside}")]
    experts = f"{format_bytes(host)}, {format_bytes(found['slot_bytes'])} of it for experts"
    return [("host memory", experts), ("device memory", f"{format_bytes(device)}, {aside}")]


def offload_row(found: dict[str, Any]) -> str:
    """Where experts would live and what a step would move, for people."""
    return (
        f"{found['experts_in_memory']} of {found['experts']} in memory; a step reads at "
        f"most {format_bytes(found['read_bytes_per_step'])} and writes "
        f"{format_bytes(found['written_bytes_per_step'])}; "
        f"{format_bytes(found['disk_bytes'])} of disk, and twice that with checkpoints"
    )


def _worth_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    millions = f"{found['parameters'] / 1e6:.3g} million"
    text = f"a dense model of about {millions} parameters, by the scaling law of {found['law']}"
    return [("worth", text)]


def outcome_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """What a run came to, for people."""
    rows = [
        ("steps", f"{summary['steps']:,}{'' if summary['complete'] else ', stopped early'}"),
        ("tokens", f"{summary['tokens']:,} in {summary['elapsed_s']:,.0f} s"),
    ]
    if summary["loss"] is not None:
        rows.append(("loss", f"{summary['loss']:.4f}"))
    if summary["held_out_mean"] is not None:
        rows.append(("held out", f"{summary['held_out_mean']:.4f}"))
    if summary["skipped_steps"]:
        rows.append(("skipped", f"{summary['skipped_steps']} steps, gradients not finite"))
    if summary["offload"]:
        from moe_runtime.training.offloaded import offload_status

        rows.append(("experts", offload_status(summary["offload"], summary["elapsed_s"])))
    obstacle = summary.get("export_obstacle")
    missing = f"in the last checkpoint only: {obstacle}" if obstacle else "not exported"
    kind = "adapters" if "adapters" in summary else "model"
    rows.append((kind, summary[kind] or missing))
    if not summary["complete"]:
        rows.append(("go on", "the same command with --resume"))
    return rows
