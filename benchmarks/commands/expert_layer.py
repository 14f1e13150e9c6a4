"""``moe-runtime bench experts``: one layer of experts beside those of transformers."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.benchmarks.commands import shared
from moe_runtime.benchmarks.commands.expert_formats import parse_formats, show_formats
from moe_runtime.benchmarks.commands.tables import mean_cell, unit_of
from moe_runtime.benchmarks.experts.layer_shapes import LAYER_SHAPES, LayerSizes, sizes_of_shape
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_table, quiet_transformers
from moe_runtime.cli.stopping import stop_on_signals

if TYPE_CHECKING:
    import torch

_MOST_TOKENS = 1 << 20

Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Checkpoint whose first layer of experts is taken."),
]
Shape = Annotated[
    str | None,
    typer.Option(
        callback=options.named("shape", lambda: LAYER_SHAPES),
        help="Instead of MODEL: olmoe-1b-7b, qwen3-30b-a3b, mixtral-8x7b or gpt-oss-20b, "
        "without any file.",
    ),
]
Tokens = Annotated[
    str | None,
    typer.Option(help="Tokens of a call, with commas. [1,16,64,256; quick: 1,16,256]"),
]
Formats = Annotated[
    str | None,
    typer.Option(
        help="Instead of transformers' implementations: experts computed from their codes, beside "
        "a plain read of as many bytes. With commas, of bf16, fp8, mxfp4, int4, q8_0, q4_k, q6_k; "
        "with -int8 behind any but the first two, activations are rounded to int8. Without "
        "--tokens a call has 1 and 16 of them."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="With --formats: experts of a format take no more, and fewer are made. [2GiB]",
    ),
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME[:VARIANT][@PYTHON][=FOLDER]",
        help="Another system beside these, forward alone, several times if wanted: kt_kernel "
        "(kt_kernel:one_thread; bf16, with --formats fp8, mxfp4, int4-int8 too), on a GPU "
        "megablocks and scattermoe, or a file PEER.py; FOLDER is kt_kernel's wheel unpacked where "
        "PYTHON's environment has none.",
    ),
]
Training = Annotated[bool, typer.Option("--training", help="Calls with backward, too.")]
Dtype = Annotated[
    str, typer.Option(help="Type of weights and tokens; auto is the checkpoint's, else bfloat16.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer and shorter calls, about a minute.")]


def bench_experts(
    ctx: typer.Context,
    model: Model = None,
    shape: Shape = None,
    peer: Peers = None,
    tokens: Tokens = None,
    formats: Formats = None,
    memory: Memory = None,
    training: Training = False,
    dtype: Dtype = "auto",
    device: options.Device = "cpu",
    threads: shared.Threads = None,
    max_s: shared.Time = None,
    precision: shared.Precision = 0.05,
    quick: Quick = False,
    output: shared.Output = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Time one layer's experts: ours, and transformers' eager, grouped_mm and batched_mm.

    Weights are random, of the shape of MODEL's first layer of experts or of a known model; no
    weight is read. Implementations take turns; with --formats they are ours in each format, one
    format after the other. One whose results differ from those in float64 by more than roundings
    allow gets no numbers. Ctrl-C shows what was measured so far.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    if (model is None) == (shape is None):
        raise ValueError("expected MODEL or --shape, one of them: whose experts are measured?")
    if memory is not None and formats is None:
        raise ValueError("--memory bounds experts of --formats; leave it out")
    numbers = parse_tokens("1,16" if tokens is None and formats else tokens, quick=quick)
    num_bytes = options.bytes_of(memory or "2GiB", "--memory", needs_unit=True)
    from moe_runtime.benchmarks.suite.peer_files import find_peers

    found = find_peers(peer or (), {}, "experts")
    shared.check_results(output, found)
    refused = {
        "--training": training,
        f"--dtype {dtype}": dtype not in ("auto", "bfloat16"),
        f"--device {device}": not device.startswith("cpu"),
    }
    names = parse_formats(formats, refused, found) if formats is not None else []
    quiet_transformers(session)
    import torch

    from moe_runtime.benchmarks.experts.layers import (
        PEERS,
        kinds_of_calls,
        layer_of_model,
        sizes_of_model,
        synthetic_layer,
    )
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.kernels.operands import find_device
    from moe_runtime.lab.this_machine import num_usable_cores

    asked, place = parse_dtype(dtype), find_device(device)
    num_threads, block_s = threads or num_usable_cores(), 0.2 if quick else 0.5
    torch.set_num_threads(num_threads)
    if names:
        from moe_runtime.benchmarks.experts.format_systems import FormatsPlan, measure_formats

        sizes = sizes_of_shape(shape) if shape else sizes_of_model(model or "", "auto")[0]
        kind, more = "bfloat16", {"formats": names, "memory": num_bytes}
        formats_plan = FormatsPlan(names, sizes, num_bytes, numbers, block_s)
        measure: Callable[..., dict[str, Any]] = partial(measure_formats, formats_plan)
    else:
        from moe_runtime.benchmarks.experts.backends import measure_experts
        from moe_runtime.benchmarks.experts.results import ExpertsPlan

        if shape is not None:
            layer = synthetic_layer(shape, asked or torch.bfloat16)
        else:
            layer = layer_of_model(model or "", asked or "auto")
        layer.module.to(place)
        sizes = LayerSizes(layer.num_experts, layer.top_k, layer.dim_model, layer.dim_hidden)
        kind, more = str(layer.dtype).removeprefix("torch."), {}
        plan = ExpertsPlan(layer=layer, tokens=numbers, trains=training, block_s=block_s)
        measure = partial(measure_experts, plan)
    rules = Rules(
        judged=[name for name, _, _ in kinds_of_calls(numbers, trains=training)],
        precision=precision,
        max_s=max_s or (60.0 if quick else 300.0),
    )
    given = {"model": None, "format": "bf16", "num_threads": num_threads}
    given |= {"top_k": sizes.top_k, "most_tokens": numbers[-1]}
    with stop_on_signals(shared.STOPPING) as stop:
        results = measure(
            rules,
            time.monotonic,
            settings={
                "model": shape or Path(model or "").name,
                "experts": sizes.num_experts,
                "top_k": sizes.top_k,
                "dim_model": sizes.dim_model,
                "dim_hidden": sizes.dim_hidden,
                "dtype": kind,
                "tokens": numbers,
                "training": training,
                "device": str(place),
                "gpu": torch.cuda.get_device_name(place) if place.type == "cuda" else None,
                "num_threads": num_threads,
                "precision": precision,
                "max_s": rules.max_s,
                **more,
            },
            peers=find_peers(peer or (), given, "experts", PEERS),
            on_repetition=shared.say_repetition,
            is_stopping=lambda: stop.is_set,
        )
    show = show_formats if names else show_experts
    shared.end_case(results, output, stop, show, as_json=as_json, unasked=PEERS)


def parse_dtype(name: str) -> "torch.dtype | None":
    """The type to compute in; None for ``auto``.

    Raises:
        ValueError: there is no such type.
    """
    from moe_runtime.checkpoints.checkpoint import COMPUTE_DTYPES
    from moe_runtime.config import require_known

    known = {str(one).removeprefix("torch."): one for one in COMPUTE_DTYPES}
    if name == "auto":
        return None
    require_known("--dtype", name, ("auto", *known))
    return known[name]


def parse_tokens(text: str | None, *, quick: bool) -> list[int]:
    """Numbers of tokens, in order; fewer with ``--quick`` where none are given.

    Raises:
        ValueError: one is no number, too small or too large.
    """
    if text is None:
        return [1, 16, 256] if quick else [1, 16, 64, 256]
    try:
        numbers = sorted({int(word) for word in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not 1 <= numbers[0] <= numbers[-1] <= _MOST_TOKENS:
        raise ValueError(
            f"--tokens must be whole numbers from 1 to {_MOST_TOKENS}, with commas, got {text!r}"
        )
    return numbers


def show_experts(results: dict[str, Any], what: str = "experts") -> None:
    """Prints a column for each implementation, and how much quicker ours is than the best."""
    shown = [one for one in results["measurements"] if one["summary"]]
    if not shown:
        return
    rows = [["repetitions", *(str(len(one["repetitions"])) for one in shown), ""]]
    for metric in dict.fromkeys(name for one in shown for name in one["summary"]):
        passes, tokens = metric.split("_")[:2]
        factor, unit = unit_of(shown, metric)
        cells = [mean_cell(one, metric, factor) for one in shown]
        rows.append([f"{passes}, T={tokens}, {unit}", *cells, _ratio(shown, metric)])
    settings = results["settings"]
    title = (
        f"{what} of {settings['model']}: E={settings['experts']} K={settings['top_k']} "
        f"D={settings['dim_model']} F={settings['dim_hidden']}, {settings['dtype']}"
    )
    columns = (*(one["system"] for one in shown), "best / ours")
    print_table(title, [("", "left"), *((name, "right") for name in columns)], rows)


def _ratio(shown: list[dict[str, Any]], metric: str) -> str:
    medians = {
        one["system"]: one["summary"][metric]["median"] for one in shown if metric in one["summary"]
    }
    ours = medians.pop("moe_runtime", None)
    return f"{min(medians.values()) / ours:.2f}" if ours and medians else ""
