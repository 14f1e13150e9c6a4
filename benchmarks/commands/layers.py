"""``bench experts``, ``layer``, ``ops`` and ``training``: layers of experts and their parts.

Weights are random, with the sizes of a known model or of a checkpoint, none of which is read.
"""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.benchmarks.cases.layer_shapes import (
    LAYER_SHAPES,
    TRAINING_SHAPES,
    LayerSizes,
)
from moe_runtime.benchmarks.commands.shared import (
    JOULE_ROWS,
    CaseRun,
    Threads,
    case,
    cells_of,
    equal_cell,
    mean_cell,
    median_cell,
    num_repetitions,
    show_rows,
    with_numbers,
)
from moe_runtime.benchmarks.suite.figures import unit_for
from moe_runtime.cli import options
from moe_runtime.cli.console import quiet_transformers
from moe_runtime.config import format_bytes, parse_budget, require_known

if TYPE_CHECKING:
    import torch

    from moe_runtime.benchmarks.suite.peers import PeerProgram

_MOST_TOKENS = 1 << 20
_FORMAT_BYTES = 2 << 30
"""Experts of a format take no more, and fewer are made."""
_FURTHER = {
    "read": "storage_read_bytes",
    "written": "storage_written_bytes",
    "waited": "stall_s",
    "these bytes alone": "storage_alone_s",
    **JOULE_ROWS,
}
# What holds the libraries of torch to an instruction set, from the start of a process.
OLDER = {
    "avx512bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}
Model = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="Checkpoint whose first layer of experts is taken."),
]
Shape = Annotated[
    str | None,
    typer.Option(
        callback=options.named("shape", lambda: LAYER_SHAPES),
        help=f"Sizes instead of MODEL's, without any file: {', '.join(LAYER_SHAPES)}.",
    ),
]
Tokens = Annotated[
    str | None, typer.Option(help="Tokens of a call, with commas. [1,16,64,256; quick: 1,16,256]")
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
TrainingShape = Annotated[
    str | None,
    typer.Option(
        callback=options.named("shape", lambda: TRAINING_SHAPES),
        help="Instead of MODEL, without any file: pocket, small, 300m, qwen3-30b-a3b, or for "
        "--host-memory many and few (tokens an expert).",
    ),
]
TrainingPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME[@PYTHON]",
        help="Another system, several times if wanted: deepspeed, or a file PEER.py.",
    ),
]
Layers = Annotated[int, typer.Option(min=1, max=1000, help="Layers of the model.")]
Sequences = Annotated[int, typer.Option(min=1, max=1 << 16, help="Sequences of a step.")]
Context = Annotated[int, typer.Option(min=1, max=1 << 16, help="Tokens of a sequence.")]
TrainingDtype = Annotated[
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
Isa = Annotated[
    str | None,
    typer.Option(
        help="Hold all systems to the instructions of an older processor: avx512bf16, avx512, avx2."
    ),
]
_QUICK = "Fewer and shorter calls, about a minute."


@case(quick=_QUICK)
def bench_experts(
    run: CaseRun,
    model: Model = None,
    shape: Shape = None,
    peer: Peers = None,
    tokens: Tokens = None,
    formats: Formats = None,
    training: Training = False,
    dtype: Dtype = "auto",
    device: options.Device = "cpu",
    threads: Threads = None,
) -> None:
    """Time one layer's experts: ours, and transformers' eager, grouped_mm and batched_mm.

    Weights are random, of the shape of MODEL's first layer of experts or of a known model; no
    weight is read. Implementations take turns; with --formats they are ours in each format, one
    format after the other. One whose results differ from those in float64 by more than roundings
    allow gets no numbers. Ctrl-C shows what was measured so far.
    """
    require_one(model, shape, "whose experts are measured?")
    numbers = parse_tokens("1,16" if tokens is None and formats else tokens, quick=run.quick)
    from moe_runtime.benchmarks.suite.peers import find_peers

    found = find_peers(peer or (), {}, "experts")
    run.refuse_peer_files(found)
    refused = {
        "--training": training,
        f"--dtype {dtype}": dtype not in ("auto", "bfloat16"),
        f"--device {device}": not device.startswith("cpu"),
    }
    names = parse_formats(formats, refused, found) if formats is not None else []
    quiet_transformers(run.session)
    import torch

    from moe_runtime.benchmarks.cases import expert_layers as experts
    from moe_runtime.kernels.operands import find_device

    asked, place, num_threads = parse_dtype(dtype), find_device(device), use_threads(threads)
    rest: dict[str, Any] = {"tokens": numbers, "block_s": 0.2 if run.quick else 0.5}
    if names:
        from moe_runtime.benchmarks.cases.formats import FormatsPlan, measure_formats

        sizes = sizes_of(model, shape, None)[0]
        kind, more = "bfloat16", {"formats": names, "memory": _FORMAT_BYTES}
        plan: Any = FormatsPlan(names, sizes, _FORMAT_BYTES, **rest)
        measure: Callable[..., dict[str, Any]] = measure_formats
    else:
        if shape is not None:
            layer = experts.synthetic_layer(shape, asked or torch.bfloat16)
        else:
            layer = experts.layer_of_model(model or "", asked or "auto")
        layer.module.to(place)
        sizes = LayerSizes(layer.num_experts, layer.top_k, layer.dim_model, layer.dim_hidden)
        kind, more = str(layer.dtype).removeprefix("torch."), {}
        plan = experts.ExpertsPlan(layer=layer, trains=training, **rest)
        measure = experts.measure_experts
    given = {"model": None, "format": "bf16", "num_threads": num_threads}
    given |= {"top_k": sizes.top_k, "most_tokens": numbers[-1]}
    settings = {
        **_said(model, shape, sizes, kind, numbers, training, num_threads),
        "device": str(place),
        "gpu": torch.cuda.get_device_name(place) if place.type == "cuda" else None,
        **more,
    }
    peers = find_peers(peer or (), given, "experts", experts.PEERS)
    judged = [name for name in plan.metrics() if name.endswith("_s")]
    show = show_formats if names else show_experts
    run.measure(measure, plan, settings, judged, show, peers, unasked=experts.PEERS)


@case(quick=_QUICK)
def bench_layer(
    run: CaseRun,
    model: Model = None,
    shape: Shape = None,
    tokens: Tokens = None,
    training: Training = False,
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Time `MoELayer` on the CPU, routing included, beside transformers' eager and grouped_mm.

    The formula is that of Qwen3-MoE, with the sizes of MODEL's first layer of experts or of a known
    model; weights are random and shared by all. Results are compared as by `bench experts`.
    """
    require_one(model, shape, "whose sizes are taken?")
    numbers = parse_tokens(tokens, quick=run.quick)
    quiet_transformers(run.session)
    from moe_runtime.benchmarks.cases.layer import PEERS, LayerPlan, measure_layer

    sizes, found = sizes_of(model, shape, parse_dtype(dtype))
    num_threads, block_s = use_threads(threads), 0.2 if run.quick else 0.5
    plan = LayerPlan(sizes=sizes, dtype=found, tokens=numbers, trains=training, block_s=block_s)
    kind = str(found).removeprefix("torch.")
    settings = _said(model, shape, sizes, kind, numbers, training, num_threads)
    show = partial(show_experts, what="layer")
    run.measure(measure_layer, plan, settings, plan.metrics(), show, unasked=PEERS)


@case(quick=_QUICK)
def bench_ops(
    run: CaseRun,
    shape: Shape = None,
    tokens: Tokens = None,
    training: Training = False,
    dtype: Dtype = "auto",
    threads: Threads = None,
) -> None:
    """Time each op of a layer of experts on the CPU: sorting, products, combining, the whole.

    Weights are random. An op whose result differs from its reference's gets no numbers; two files
    of this case say which op became quicker or slower. Ctrl-C shows what was measured so far.
    """
    numbers = parse_tokens(tokens, quick=run.quick)
    import torch

    from moe_runtime.benchmarks.cases.ops import SIZES, OpsPlan, measure_ops

    plan = OpsPlan(
        sizes=SIZES if shape is None else LAYER_SHAPES[shape],
        dtype=parse_dtype(dtype) or torch.bfloat16,
        tokens=numbers,
        trains=training,
        block_s=0.05 if run.quick else 0.2,
    )
    settings = {
        "model": shape,
        **plan.sizes._asdict(),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "tokens": numbers,
        "training": training,
        "num_threads": use_threads(threads),
    }
    run.measure(measure_ops, plan, settings, plan.metrics(), show_ops)


@case(quick=_QUICK)
def bench_training(
    run: CaseRun,
    model: Model = None,
    shape: TrainingShape = None,
    peer: TrainingPeers = None,
    layers: Layers = 2,
    sequences: Sequences = 4,
    context: Context = 256,
    dtype: TrainingDtype = "float32",
    host_memory: Offloaded = None,
    device: options.Device = "cpu",
    isa: Isa = None,
    threads: Threads = None,
) -> None:
    """Time optimizer steps: ours, and transformers with torch's fused AdamW.

    The model has --layers layers with the sizes of MODEL's first layer of experts, 4,096 words, and
    random weights that all begin with. Systems take turns. One whose losses differ from ours by
    more than roundings allow gets no numbers. Ctrl-C shows what was measured so far.
    """
    require_one(model, shape, "whose sizes are taken?")
    budget = None if host_memory is None else parse_budget(host_memory, name="--host-memory")
    from moe_runtime.benchmarks.suite.peers import find_peers

    peers = find_peers(peer or (), {}, "training")
    for one in peers:
        if "model" in one.settings:
            raise ValueError(
                f"--peer {one.name} is given {one.settings['model']}, but trains the random "
                "weights of all; leave =MODEL out"
            )
    run.refuse_peer_files(peers)
    hold_to(isa)
    quiet_transformers(run.session)
    from moe_runtime.benchmarks.cases import training
    from moe_runtime.inference.budget import available_device_bytes, available_host_bytes
    from moe_runtime.kernels.operands import find_device

    dtypes = {str(one).removeprefix("torch."): one for one in training.TOLERANCE}
    if dtype not in dtypes:
        raise ValueError(f"--dtype must be {' or '.join(dtypes)}, got {dtype!r}")
    place = find_device(device)
    if peers and place.type != "cpu":
        raise ValueError(f"--peer {peers[0].name} trains on the CPU; leave --device {device} out")
    num_threads = use_threads(threads)
    sizes = TRAINING_SHAPES[shape] if shape else sizes_of(model, None, None)[0]
    free = available_host_bytes()
    plan = training.TrainingPlan(
        sizes=sizes,
        layers=layers,
        sequences=sequences,
        context=context,
        dtype=dtypes[dtype],
        host_memory=None if budget is None else budget.resolve(free, auto_share=0.5),
        device=place,
    )
    given = {"num_threads": num_threads, "dtype": dtype, "sequences": sequences}
    settings = {
        "model": shape or Path(model or "").name,
        **sizes._asdict(),
        "layers": layers,
        "context": context,
        "host_memory": plan.host_memory,
        "device": str(place),
        "isa": isa,
        **given,
    }
    free_bytes = free if place.type == "cpu" else available_device_bytes(place)
    own = {"model": None, "host_memory": plan.host_memory, **given}
    programs = find_peers(peer or (), own, "training", plan.peers())
    run.measure(
        *(training.measure_training, plan, settings, [training.METRIC], show_training),
        *(free_bytes, programs),
        unasked=plan.peers(),
    )


def require_one(model: str | None, shape: str | None, question: str) -> None:
    """Refuses MODEL and ``--shape`` together, and neither."""
    if (model is None) == (shape is None):
        raise ValueError(f"expected MODEL or --shape, one of them: {question}")


def use_threads(threads: int | None) -> int:
    """Has torch compute with so many threads, or with all; their number."""
    import torch

    from moe_runtime.lab.this_machine import num_usable_cores

    number = threads or num_usable_cores()
    torch.set_num_threads(number)
    return number


def sizes_of(
    model: str | None, shape: str | None, dtype: "torch.dtype | None"
) -> "tuple[LayerSizes, torch.dtype]":
    """Sizes of a layer, and the type to compute in; that of a shape is bfloat16 by default."""
    import torch

    from moe_runtime.benchmarks.cases.expert_layers import sizes_of_model

    if shape is not None:
        return LAYER_SHAPES[shape], dtype or torch.bfloat16
    return sizes_of_model(model or "", dtype or "auto")


def _said(
    model: str | None,
    shape: str | None,
    sizes: LayerSizes,
    dtype: str,
    tokens: list[int],
    training: bool,
    num_threads: int,
) -> dict[str, Any]:
    num_experts, *others = sizes
    names = dict(zip(("experts", *LayerSizes._fields[1:]), (num_experts, *others), strict=True))
    asked = {"dtype": dtype, "tokens": tokens, "training": training, "num_threads": num_threads}
    return {"model": shape or Path(model or "").name, **names, **asked}


def parse_dtype(name: str) -> "torch.dtype | None":
    """The type to compute in; None for ``auto``."""
    from moe_runtime.checkpoints.checkpoint import COMPUTE_DTYPES

    known = {str(one).removeprefix("torch."): one for one in COMPUTE_DTYPES}
    if name == "auto":
        return None
    require_known("--dtype", name, ("auto", *known))
    return known[name]


def parse_tokens(text: str | None, *, quick: bool) -> list[int]:
    """Numbers of tokens, in order; fewer with ``--quick`` where none are given."""
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


def parse_formats(text: str, refused: dict[str, bool], peers: Sequence["PeerProgram"]) -> list[str]:
    """The formats of ``--formats``, each once."""
    from moe_runtime.benchmarks.cases.formats import FORMATS
    from moe_runtime.benchmarks.suite.peers import describe_peer

    names = [*dict.fromkeys(word.strip() for word in text.split(","))]
    for name in names:
        require_known("format of --formats", name, tuple(FORMATS))
    if given := [option for option, is_given in refused.items() if is_given]:
        raise ValueError(f"--formats: forward passes in bfloat16 on a CPU alone, not {given[0]}")
    for one in peers:
        known = describe_peer(one.file)["FORMATS"]
        if not {*known} & {*names}:
            raise ValueError(f"--peer {one.name}: has {', '.join(known)}; none is in --formats")
    return names


def hold_to(isa: str | None) -> None:
    """Selects an instruction set here, and starts the process anew if torch was not held to it."""
    if isa is None:
        return
    require_known("--isa", isa, tuple(OLDER))
    if any(os.environ.get(name) != value for name, value in OLDER[isa].items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | OLDER[isa])
    from moe_runtime.kernels.native import require_native

    require_native().select_isa(isa)


def show_experts(results: dict[str, Any], what: str = "experts") -> None:
    """Prints a column for each implementation, and how much quicker ours is than the best."""
    shown, rows = with_numbers(results), []
    for metric in dict.fromkeys(name for one in shown for name in one["summary"]):
        passes, tokens = metric.split("_")[:2]
        found = {one["system"]: one["summary"][metric]["median"] for one in shown
                 if metric in one["summary"]}  # fmt: skip
        ours, others = found.pop("moe_runtime", None), found.values()
        ratio = f"{min(others) / ours:.2f}" if ours and others else ""
        row, unit = cells_of(shown, metric, mean_cell)
        rows.append([f"{passes}, T={tokens}, {unit}", *row, ratio])
    title = f"{what} of {_sizes_shown(results)}, {results['settings']['dtype']}"
    counts = ["repetitions", *map(num_repetitions, shown), ""]
    heads = ["", *(one["system"] for one in shown), "best / ours"]
    show_rows(title, heads, [counts, *rows] if shown else [])


def _sizes_shown(results: dict[str, Any]) -> str:
    of = results["settings"]
    experts = of.get("experts", of.get("num_experts"))
    model = f"{of['model']}: " if "experts" in of else ""
    return f"{model}E={experts} K={of['top_k']} D={of['dim_model']} F={of['dim_hidden']}"


def show_formats(results: dict[str, Any]) -> None:
    shown, heads = with_numbers(results), [""]
    rows = [[one["system"]] for one in shown]
    for number in results["settings"]["tokens"] if shown else ():
        cells, unit = cells_of(shown, f"forward_{number}_s", mean_cell)
        heads += [f"T={number}, {unit}", "of a read"]
        for one, row, cell in zip(shown, rows, cells, strict=True):
            share = one["summary"].get(f"forward_{number}_of_read")
            row += [cell, f"{share['median']:.2f}" if share else ""]
    most = format_bytes(results["settings"]["memory"])
    show_rows(f"experts of {_sizes_shown(results)}, at most {most} of a format", heads, rows)


def show_ops(results: dict[str, Any]) -> None:
    tokens, rows = results["settings"]["tokens"], []
    for one in results["measurements"]:
        for kind in ("forward", "backward"):
            names = [f"{kind}_{number}_s" for number in tokens]
            medians = [one["summary"][name]["median"] for name in names if name in one["summary"]]
            if medians:
                factor, unit = unit_for("s", medians)
                cells = (mean_cell(one, name, factor) for name in names)
                rows.append([one["system"], f"{kind}, {unit}", *cells])
    title = f"ops: {_sizes_shown(results)}, {results['settings']['dtype']}"
    show_rows(title, ["", "", *(f"T={number}" for number in tokens)], rows, num_left=2)


def show_training(results: dict[str, Any]) -> None:
    from moe_runtime.benchmarks.suite.comparing import counted

    of, shown = results["settings"], with_numbers(results)
    heads = ["", "repetitions", "step, ms", "tokens/s", "losses equal"]
    further = []
    for what, metric in _FURTHER.items():
        if any(metric in one["summary"] for one in shown):
            cells, unit = cells_of(shown, metric, median_cell)
            further.append(cells)
            heads.append(f"{what}, {unit}")
    rows = [
        [
            *(one["system"], num_repetitions(one), mean_cell(one, "step_s", 1e3)),
            *(median_cell(one, "tokens_per_s", 1.0), equal_cell(one)),
            *(cells[place] for cells in further),
        ]
        for place, one in enumerate(shown)
    ]
    layers, tokens = counted("{} layers", of["layers"]), f"{of['sequences']} x {of['context']}"
    show_rows(f"training of {of['model']}: {layers}, {tokens} tokens, {of['dtype']}", heads, rows)
