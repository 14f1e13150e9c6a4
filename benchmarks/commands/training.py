"""``moe-runtime bench training``: steps of a language model beside those of transformers."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.expert_layer import Model, Quick
from moe_runtime.benchmarks.commands.older_isa import Isa, hold_to
from moe_runtime.benchmarks.commands.tables import JOULE_ROWS, mean_cell, unit_of
from moe_runtime.benchmarks.experts.layer_shapes import TRAINING_SHAPES
from moe_runtime.benchmarks.suite.figures import figure
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_table, quiet_transformers
from moe_runtime.cli.stopping import stop_on_signals
from moe_runtime.config import parse_budget

_FURTHER = {
    "read": "storage_read_bytes",
    "written": "storage_written_bytes",
    "waited": "stall_s",
    "these bytes alone": "storage_alone_s",
    **JOULE_ROWS,
}
Shape = Annotated[
    str | None,
    typer.Option(
        callback=options.named("shape", lambda: TRAINING_SHAPES),
        help="Instead of MODEL, without any file: pocket, small, 300m, qwen3-30b-a3b, or for "
        "--host-memory many and few (tokens an expert).",
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME[@PYTHON]",
        help="Another system beside these, several times if wanted: deepspeed, or a file PEER.py; "
        "PYTHON is its environment's.",
    ),
]
Layers = Annotated[int, typer.Option(min=1, max=1000, help="Layers of the model.")]
Sequences = Annotated[int, typer.Option(min=1, max=1 << 16, help="Sequences of a step.")]
Context = Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of a sequence.")]
Dtype = Annotated[
    str, typer.Option(help="float32, or bfloat16 under autocast; weights stay float32.")
]
Offloaded = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        help="Also our training with experts and their states off memory beyond this: 2GiB, or a "
        "share such as 0.25.",
    ),
]


def bench_training(
    ctx: typer.Context,
    model: Model = None,
    shape: Shape = None,
    peer: Peers = None,
    layers: Layers = 2,
    sequences: Sequences = 4,
    context: Context = 256,
    dtype: Dtype = "float32",
    host_memory: Offloaded = None,
    device: options.Device = "cpu",
    isa: Isa = None,
    threads: shared.Threads = None,
    max_s: shared.Time = None,
    precision: shared.Precision = 0.05,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time optimizer steps: ours, and transformers with torch's fused AdamW.

    The model has --layers layers with the sizes of MODEL's first layer of experts, 4,096 words, and
    random weights that all begin with. Systems take turns. One whose losses differ from ours by
    more than roundings allow gets no numbers. Ctrl-C shows what was measured so far.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if (model is None) == (shape is None):
        raise ValueError("expected MODEL or --shape, one of them: whose sizes are taken?")
    budget = None if host_memory is None else parse_budget(host_memory, name="--host-memory")
    from moe_runtime.benchmarks.suite.peer_files import find_peers

    peers = find_peers(peer or (), {}, "training")
    for one in peers:
        if "model" in one.settings:
            raise ValueError(
                f"--peer {one.name} is given {one.settings['model']}, but trains the random "
                "weights of all; leave =MODEL out"
            )
    shared.check_results(output, peers)
    hold_to(isa)
    quiet_transformers(session)
    import torch

    from moe_runtime.benchmarks.cases.training_plan import METRIC, TrainingPlan
    from moe_runtime.benchmarks.cases.training_steps import TOLERANCE, measure_training
    from moe_runtime.benchmarks.experts.layers import sizes_of_model
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.inference.budget import available_device_bytes, available_host_bytes
    from moe_runtime.kernels.operands import find_device
    from moe_runtime.lab.this_machine import num_usable_cores

    dtypes = {str(one).removeprefix("torch."): one for one in TOLERANCE}
    if dtype not in dtypes:
        raise ValueError(f"--dtype must be {' or '.join(dtypes)}, got {dtype!r}")
    place = find_device(device)
    if peers and place.type != "cpu":
        raise ValueError(f"--peer {peers[0].name} trains on the CPU; leave --device {device} out")
    num_threads = threads or num_usable_cores()
    torch.set_num_threads(num_threads)
    if shape is not None:
        sizes = TRAINING_SHAPES[shape]
    else:
        assert model is not None
        sizes, _ = sizes_of_model(model, "auto")
    free = available_host_bytes()
    free_there = free if place.type == "cpu" else available_device_bytes(place)
    plan = TrainingPlan(
        sizes=sizes,
        layers=layers,
        sequences=sequences,
        context=context,
        dtype=dtypes[dtype],
        host_memory=None if budget is None else budget.resolve(free, auto_share=0.5),
        device=place,
    )
    rules = Rules(judged=(METRIC,), precision=precision, max_s=max_s or (60.0 if quick else 300.0))
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure_training(
            plan,
            rules,
            time.monotonic,
            free_bytes=free_there,
            settings={
                "model": shape or Path(model or "").name,
                **sizes._asdict(),
                "layers": layers,
                "sequences": sequences,
                "context": context,
                "dtype": dtype,
                "host_memory": plan.host_memory,
                "device": str(place),
                "isa": isa,
                "num_threads": num_threads,
                "precision": precision,
                "max_s": rules.max_s,
            },
            programs=find_peers(
                peer or (),
                {
                    "model": None,
                    "num_threads": num_threads,
                    "dtype": dtype,
                    "sequences": sequences,
                },
                "training",
                plan.peers(),
            ),
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    shared.end_case(results, output, stop, show_training, as_json=as_json, unasked=plan.peers())


def show_training(results: dict[str, Any]) -> None:
    """Prints a row for each system."""
    from moe_runtime.benchmarks.suite.measured_work import counted

    settings = results["settings"]
    title = (
        f"training of {settings['model']}: {counted('{} layers', settings['layers'])}, "
        f"{settings['sequences']} x {settings['context']} tokens, {settings['dtype']}"
    )
    shown = [one for one in results["measurements"] if one["summary"]]
    columns = ["repetitions", "step, ms", "tokens/s", "losses equal"]
    units: dict[str, float] = {}
    for what, metric in _FURTHER.items():
        if any(metric in one["summary"] for one in shown):
            units[metric], unit = unit_of(shown, metric)
            columns.append(f"{what}, {unit}")
    rows = [
        [
            one["system"],
            str(len(one["repetitions"])),
            mean_cell(one, "step_s", 1e3),
            figure(one["summary"]["tokens_per_s"]["median"]),
            f"{one['quality']['equal']} of {one['quality']['compared']}",
            *(_median_cell(one, metric, factor) for metric, factor in units.items()),
        ]
        for one in shown
    ]
    if rows:
        print_table(title, [("", "left"), *((name, "right") for name in columns)], rows)


def _median_cell(one: dict[str, Any], metric: str, factor: float) -> str:
    found = one["summary"].get(metric)
    return figure(found["median"] * factor) if found else "–"
