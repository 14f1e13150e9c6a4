"""``moe-runtime train``: train a language model built on the drop-in layer."""

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import console, options
from moe_runtime.cli.disk import measure_disk
from moe_runtime.cli.processes import joined_processes
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.cli.strict import argument
from moe_runtime.config import format_bytes
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.files import require_not_read

if TYPE_CHECKING:
    from rich.progress import Progress

    from moe_runtime.parallel import ParallelExperts
    from moe_runtime.training.loop import Trainer
    from moe_runtime.training.metrics import Record, StepRecord
    from moe_runtime.training.ranks import OneRank
    from moe_runtime.training.run_config import ParallelConfig, RunConfig
    from moe_runtime.training.train_run import Preparation


ConfigFile = Annotated[
    Path, argument("The run, as docs/training.md describes it.", metavar="CONFIG.toml")
]

# Weight, gradient and AdamW's two moments, all in float32.
_STATE_BYTES = 16
_READ_BYTES = 4 << 20
_SECONDS = 0.2
_WIDTH = 512
WORTH_MEASURING_BYTES = 64 << 20
"""A run whose steps move less does not measure the disk at its beginning."""
_OPERATIONS = 6
"""For a parameter and a token, forward and backward: a product and a sum, three times."""


def train(
    ctx: typer.Context,
    config_file: ConfigFile,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE")] = None,
    resume: options.Resume = False,
    reschedule: options.Reschedule = False,
    dry_run: options.DryRun = False,
    as_json: options.Json = False,
) -> None:
    """Train a Mixture-of-Experts language model on text files.

    Ctrl-C finishes the step, saves a checkpoint and stops; --resume continues from there. At the
    end the run's folder has a Hugging Face checkpoint in model/. Under `torchrun` the processes
    divide the experts and each step's micro-batches between them.

    Args:
        settings: Overrides a key, such as run.steps=100. Repeatable.
    """
    if reschedule and not resume:
        raise ValueError("--reschedule changes a run that goes on: give --resume too")
    from moe_runtime.training.config_tree import read_tree
    from moe_runtime.training.prepared import run_folder
    from moe_runtime.training.run_config import TrainConfig

    with joined_processes(ctx.obj) as group, contextlib.ExitStack() as stack:
        config = read_tree(TrainConfig, config_file, settings=tuple(settings or ()))
        folder = config_file.resolve().parent
        require_not_read(config.run.trace and folder / config.run.trace, "trace", [config_file])
        console.quiet_transformers(ctx.obj)
        is_first = group is None or group.rank() == 0
        is_used = is_first and not dry_run
        storage = config.run.storage_dir and folder / config.run.storage_dir
        output = folder / config.run.output
        stack.enter_context(run_folder(output, storage or None, is_used=is_used))
        with console.loading_bar() as progress:
            from moe_runtime.research.runs import equip
            from moe_runtime.training.ranks import OneRank, SeveralRanks
            from moe_runtime.training.train_run import prepare, start

            is_alone = group is None or group.size() == 1
            if is_alone:
                config.parallel.refuse_alone()
                ranks = OneRank()
            else:
                from moe_runtime.research.pipeoffload import StageOffload

                own = config.parallel
                ranks = SeveralRanks(config, folder, experts_maker(own), StageOffload)
            with ranks.first_alone():
                preparation = prepare(
                    config,
                    folder,
                    on_stage=lambda stage: progress(stage, 0, 0),
                    keeps_text=not dry_run,
                )
            preparation, make = equip(preparation)
        if dry_run:
            plan = _plan(preparation, ranks)
            if as_json:
                console.print_json(plan)
            else:
                console.print_rows("what would be trained", _plan_rows(plan), to_stderr=False)
            return
        begin = partial(start, resume=resume, reschedule=reschedule, make_optimizer=make)
        summary, exit_code = _train(preparation, ranks, begin)
        show_outcome(summary, as_json=as_json)
    if exit_code:  # not within the group of processes, which ends in order
        raise typer.Exit(exit_code)


def experts_maker(parallel: "ParallelConfig") -> "Callable[..., ParallelExperts] | None":
    """The constructor of experts that move between ranks; None for experts that stay."""
    if parallel.experts == "sparse":
        from moe_runtime.research.hecate import CopyRules, SparseExperts

        copies = parallel.copies
        rules = CopyRules(max_experts=copies, slots_per_rank=copies)
        return partial(SparseExperts, rules=rules)
    if parallel.experts in ("switching", "auto"):
        from moe_runtime.research.parallelism_switching import SwitchingExperts

        measured: list[Any] = []  # once for all layers

        def make(*sizes: Any, **options: Any) -> SwitchingExperts:
            link = measured[0] if measured else None
            measured.append((experts := SwitchingExperts(*sizes, link=link, **options)).link)
            return experts

        return make
    return None


def _train(
    preparation: "Preparation", ranks: "OneRank", begin: "Callable[..., Trainer]"
) -> tuple[dict[str, Any], int]:
    """Trains and exports; returns the summary, in the first process, and the exit code."""
    from moe_runtime.training.train_run import finish

    plan = _offload_plan(preparation, ranks)
    trainer = begin(preparation, ranks=ranks)
    with contextlib.closing(trainer):
        if ranks.exchange:
            console.say_line(f"by measured links, {ranks.exchange}")
        if ranks.rank == 0:
            _timed(plan, preparation, ranks, begins=True)  # warns of a slow disk
        exit_code = take_steps(trainer, preparation.config.run)
        if ranks.rank > 0:
            return {}, exit_code
        family, obstacle = _export_family(preparation)
        summary = finish(preparation, trainer, export=not exit_code and family is not None)
    return {"complete": not exit_code, **summary, "export_obstacle": obstacle or None}, exit_code


def take_steps(trainer: "Trainer", run: "RunConfig") -> int:
    """Trains until the run is complete or a signal asks it to stop; returns the exit code."""
    if trainer.origin is not None:
        console.say_line(f"goes on after step {trainer.step}, from {trainer.origin}")
    message = "stopping after this step, with a checkpoint; once more stops at once"
    with (
        stop_on_signals(message) as stop,
        TrainingDisplay(run.steps, run.log_every, trainer.step) as display,
    ):
        is_complete = trainer.train(should_stop=lambda: stop.is_set, on_record=display.show)
    return 0 if is_complete else stop.exit_code


def _export_family(preparation: "Preparation") -> tuple[str | None, str]:
    """The architecture of the exported model, or None and the reason."""
    from moe_runtime.models.lm.export import hugging_face_family

    if preparation.config.research.memory is not None:
        return None, "no Hugging Face architecture has layers with a memory"
    try:
        return hugging_face_family(preparation.config.model), ""
    except UnsupportedModelError as error:
        return None, str(error)


def _plan(preparation: "Preparation", ranks: "OneRank") -> dict[str, Any]:
    from moe_runtime.research.scaling_laws import ROUTED_LAWS, routed_law_of
    from moe_runtime.training.checkpoint import checkpoints_in

    config = preparation.config
    family, reason = _export_family(preparation)
    found = checkpoints_in(preparation.checkpoints)
    num_parameters = preparation.num_parameters
    tokens = config.run.steps * config.data.tokens_per_step
    available = preparation.batches.windows_per_epoch * config.data.context
    equivalent = None  # the dense model that a scaling law expects to be as good
    if (moe := config.model.moe) is not None:
        law = routed_law_of(moe.gate)
        active = preparation.num_active_parameters
        parameters = ROUTED_LAWS[law].dense_equivalent(active, moe.num_experts)
        equivalent = {"law": law, "parameters": round(parameters)}
    return {
        "parameters": num_parameters,
        "active_parameters": preparation.num_active_parameters,
        "dense_equivalent": equivalent,
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
        "offload": _timed(_offload_plan(preparation, ranks), preparation, ranks),
        "export": family,
        "export_obstacle": reason or None,
    }


def _offload_plan(preparation: "Preparation", ranks: "OneRank") -> dict[str, Any]:
    """Places of experts and the bytes that a step moves; empty if all are in memory."""
    if preparation.config.run.host_memory is None:
        return {}
    from moe_runtime.training.train_plan import offload_plan

    return offload_plan(preparation.config, preparation.model, ranks, preparation.device)


def _timed(
    plan: dict[str, Any], preparation: "Preparation", ranks: "OneRank", *, begins: bool = False
) -> dict[str, Any]:
    return timed_plan(
        plan,
        preparation.storage,
        tokens=preparation.config.data.tokens_per_step // ranks.num_data_ranks,
        active_parameters=preparation.num_active_parameters,
        begins=begins,
    )


def _plan_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    text = ", ".join(
        f"{name} {count:,} + {plan['held_out_tokens'][name]:,} held out"
        for name, count in plan["training_tokens"].items()
    )
    worth = plan["dense_equivalent"]
    dense = worth and f"a dense model of about {worth['parameters'] / 1e6:.3g} million parameters"
    return [
        (
            "model",
            f"{plan['parameters']:,} parameters, {plan['active_parameters']:,} active a token",
        ),
        *([("worth", f"{dense}, by the scaling law of {worth['law']}")] if worth else []),
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
        *(offload_rows(plan["offload"], plan["tokens_per_step"]) if plan["offload"] else []),
    ]


def offload_rows(found: dict[str, Any], tokens: int) -> list[tuple[str, str]]:
    """The rows about budgets, places of experts, bytes that a step moves, and its time."""
    host, device = found["host_budget_bytes"], found["device_budget_bytes"]
    reserves = (
        f"{format_bytes(found['dense_bytes'])} of it for everything but experts, "
        f"{format_bytes(found['activation_bytes'])} for activations"
    )
    rows = [("host memory", f"{format_bytes(host)}, {reserves}")]
    if device is not None:
        experts = f"{format_bytes(host)}, {format_bytes(found['slot_bytes'])} of it for experts"
        rows = [("host memory", experts), ("device memory", f"{format_bytes(device)}, {reserves}")]
    speed = f"about {found['step_s']:.3g} s a step, {tokens / found['step_s']:,.0f} tokens/s"
    if "disk_s" in found:
        speed += f"; {found['disk_s']:.3g} s of it for the disk, if it were alone"
    moved = (
        f"{found['experts_in_memory']} of {found['experts']} in memory; a step reads at "
        f"most {format_bytes(found['read_bytes_per_step'])} and writes "
        f"{format_bytes(found['written_bytes_per_step'])}; "
        f"{format_bytes(found['disk_bytes'])} of disk, and twice that with checkpoints"
    )
    return [*rows, ("experts", moved), ("speed", speed)]


def show_outcome(summary: dict[str, Any], *, as_json: bool) -> None:
    """Prints the summary, if this process has one."""
    if as_json and summary:
        console.print_json(summary)
    elif summary:
        console.print_rows("what was trained", _outcome_rows(summary), to_stderr=True)


def _outcome_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
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
        from moe_runtime.training.train_plan import offload_status

        rows.append(("experts", offload_status(summary["offload"], summary["elapsed_s"])))
    obstacle = summary.get("export_obstacle")
    missing = f"in the last checkpoint only: {obstacle}" if obstacle else "not exported"
    if "adapters" in summary:
        rows.append(("adapters", summary["adapters"]))
    if summary["model"] or "adapters" not in summary:
        rows.append(("model", summary["model"] or missing))
    if not summary["complete"]:
        rows.append(("go on", "the same command with --resume"))
    return rows


def timed_plan(
    plan: dict[str, Any], folder: Path, *, tokens: int, active_parameters: int, begins: bool = False
) -> dict[str, Any]:
    """The plan of a step with its time, from the measured speed of the disk and of products.

    Disk and products work at the same time; writes count as reads. Warns if the disk makes a step
    take over twice as long as its products. At the beginning of a run, a step that moves little is
    not measured, and a disk that cannot be measured is no error.
    """
    moved = plan.get("read_bytes_per_step", 0) + plan.get("written_bytes_per_step", 0)
    if not plan or (begins and moved < WORTH_MEASURING_BYTES):
        return plan
    import torch

    # products in fp32, as wide as those of a small expert
    left, right = torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH, _WIDTH)
    done, started = 0, time.perf_counter()
    while done < 2 or time.perf_counter() - started < _SECONDS / 2:
        torch.mm(left, right)
        done += 1
    product_s = (time.perf_counter() - started) / done
    compute_s = disk_s = _OPERATIONS * active_parameters * tokens / (2 * _WIDTH**3) * product_s
    disk = {}
    if moved:
        there = next(path for path in (folder, *folder.resolve().parents) if path.is_dir())
        try:
            speed = measure_disk(there, read_bytes=_READ_BYTES, seconds=_SECONDS)
        except OSError:
            if begins:
                return plan
            raise
        rate = speed.direct_bytes_per_s or speed.buffered_bytes_per_s
        disk_s = moved / rate
        disk = {"disk_bytes_per_s": rate, "disk_s": disk_s}
        if disk_s > 2 * compute_s:
            console.say_line(
                f"warning: the disk of {folder} reads {format_bytes(round(rate))}/s, so a step "
                f"will take about {disk_s:.3g} s, its products alone {compute_s:.3g} s; more "
                "memory, larger steps or a faster storage_dir help"
            )
    return {**plan, **disk, "compute_s": compute_s, "step_s": max(compute_s, disk_s)}


class TrainingDisplay(contextlib.AbstractContextManager["TrainingDisplay"]):
    """Shows records on stderr: a live line on a terminal, else a line every `log_every` steps."""

    def __init__(self, num_steps: int, log_every: int, first_step: int) -> None:
        self._num_steps = num_steps
        self._log_every = log_every
        self._recent: deque[StepRecord] = deque(maxlen=log_every)
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            from rich import progress
            from rich.table import Column

            # a short line cuts the end of the status off, and keeps step and loss
            rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
            status = progress.TextColumn("{task.fields[status]}", markup=False, table_column=rest)
            columns = ("step", progress.MofNCompleteColumn(), status)
            remaining = progress.TimeRemainingColumn()
            self._bar = console.terminal_bar(*columns, remaining, expand=True, transient=False)
            self._bar.add_task("train", total=num_steps, completed=first_step, status="")
            self._bar.start()

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, record: "Record") -> None:
        from moe_runtime.training.metrics import StepRecord

        step = f"step {record.step}/{self._num_steps}  "
        if not isinstance(record, StepRecord):
            shown = ", ".join(f"{name} {nats:.4f}" for name, nats in record.held_out.items())
            each = f" ({shown})" if len(record.held_out) > 1 else ""
            line = f"{step}held out {record.held_out_mean:.4f}{each}"
            if self._bar is None:
                print(line, file=sys.stderr, flush=True)
            else:
                self._bar.console.print(line, markup=False, highlight=False)
            return
        self._recent.append(record)
        if self._bar is not None:
            task = self._bar.task_ids[0]
            self._bar.update(task, completed=record.step, status=self._status())
        elif record.step % self._log_every == 0 or record.step == self._num_steps:
            print(f"{step}{self._status()}", file=sys.stderr, flush=True)

    def _status(self) -> str:
        """Loss, speed, balance and dropped choices over the recent steps."""
        records = list(self._recent)
        last = records[-1]
        seconds = sum(record.step_s for record in records)
        losses = [record.loss for record in records if record.loss is not None]

        def mean(name: str) -> float:
            return sum(getattr(record, name) for record in records) / len(records)

        loss = f"{sum(losses) / len(losses):.4f}" if losses else "no number"
        speed = last.tokens // last.step * len(records) / seconds
        parts = [f"loss {loss}", f"{speed:,.0f} tokens/s"]
        if last.max_load is not None:
            parts.append(f"load {mean('max_load'):.2f}")
        if last.dropped_share is not None:
            parts.append(f"dropped {mean('dropped_share'):.1%}")
        if last.stall_s is not None:
            parts.append(f"stall {mean('stall_s') * len(records) / seconds:.1%}")
            found, read, written = (
                format_bytes(mean(f"{way}_bytes")) for way in ("memory", "read", "written")
            )
            parts.append(f"memory {found}  disk {read} in, {written} out a step")
        parts.append(f"rate {last.rate:.2e}")
        if skipped := sum(record.is_skipped for record in records):
            parts.append(f"skipped {skipped}")
        return "  ".join(parts)
