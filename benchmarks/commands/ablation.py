"""``moe-runtime bench ablation``: variants of a training configuration beside it."""

import time
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.tables import mean_cell
from moe_runtime.cli import options
from moe_runtime.cli.commands.train import ConfigFile
from moe_runtime.cli.console import Session, print_table, quiet_transformers
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.files import check_output_path, require_not_read

_COLUMNS = {
    "loss": "loss",
    "held out": "held_out_loss",
    "max load": "max_load",
    "dropped": "dropped_share",
    "bytes a parameter": "state_bytes_per_parameter",
    "tokens/s": "tokens_per_s",
}
Vary = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE[,VALUE...]",
        help="A variant for each value of a key, such as model.moe.top_k=1,4. Repeatable; each "
        "changes this key alone. Variants of several keys are tables [variants.NAME] in CONFIG.",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1000,
        help="Trainings of each variant, from run.seed upwards. [3; quick: 1]",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Steps instead of run.steps. [run.steps; quick: a tenth of them]"),
]
Quick = Annotated[bool, typer.Option("--quick", help="One seed, a tenth of the steps.")]


def bench_ablation(
    ctx: typer.Context,
    config_file: ConfigFile,
    vary: Vary = None,
    seeds: Seeds = None,
    steps: Steps = None,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Train variants of a configuration with the same seeds, and compare what came out.

    All take turns with the first seed, the configuration as it is among them, then with the next.
    What cannot be trained is refused before anything is. Nothing is kept but the numbers. Ctrl-C
    ends the training that runs, and shows what was measured so far.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if output is not None:
        require_not_read(output, "results", [config_file])
        check_output_path(output, "results")
    quiet_transformers(session)
    from moe_runtime.benchmarks.cases.ablation import measure_ablation, read_variants
    from moe_runtime.training.data import text_files

    def steps_of(configured: int) -> int:
        return steps or max(1, configured // 10)

    is_told = quick or steps is not None
    variants = read_variants(config_file, vary or (), steps_of=steps_of if is_told else None)
    folder = config_file.resolve().parent
    if output is not None:
        read = [file for one in variants for file in text_files(one.config.data, folder)]
        require_not_read(output, "results", read)
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_ablation(
            variants,
            folder,
            seeds or (1 if quick else 3),
            time.monotonic,
            settings={"model": config_file.name},
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(results, output, stop, show_ablation, as_json=as_json)


def show_ablation(results: dict[str, Any]) -> None:
    """Prints a row for each variant."""
    settings = results["settings"]
    shown = [one for one in results["measurements"] if one["summary"]]
    columns = {
        what: metric
        for what, metric in _COLUMNS.items()
        if any(metric in one["summary"] and one["summary"][metric]["p99"] for one in shown)
    }
    rows = [
        [
            one["system"],
            str(len(one["repetitions"])),
            *(mean_cell(one, metric, 1.0) for metric in columns.values()),
            _equal(one),
        ]
        for one in shown
    ]
    if rows:
        title = (
            f"{settings['model']}: {settings['steps']} steps of {settings['sequences']} x "
            f"{settings['context']} tokens"
        )
        heads = ["seeds", *columns, "losses equal"]
        print_table(title, [("", "left"), *((name, "right") for name in heads)], rows)


def _equal(one: dict[str, Any]) -> str:
    found = one["quality"]
    return "–" if found is None else f"{found['equal']} of {found['compared']}"
