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
    sizes_of_shape,
)
from moe_runtime.benchmarks.commands.shared import (
    JOULE_ROWS,
    CaseRun,
    Threads,
    case,
    equal_cell,
    mean_cell,
    median_cell,
    num_repetitions,
    show_rows,
    unit_of,
    with_numbers,
)
from moe_runtime.benchmarks.suite.figures import unit_for
from moe_runtime.cli import options
from moe_runtime.cli.console import print_table, quiet_transformers
from moe_runtime.config import format_bytes, parse_budget, require_known

if TYPE_CHECKING:
    import torch

    from moe_runtime.benchmarks.suite.peers import PeerProgram

_MOST_TOKENS = 1 << 20
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
        help="Instead of MODEL: olmoe-1b-7b, qwen3-30b-a3b, mixtral-8x7b or gpt-oss-20b, "
        "without any file.",
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
OpsShape = Annotated[
    str | None,
    typer.Option(
        callback=options.named("shape", lambda: LAYER_SHAPES),
        help="Sizes of a layer of olmoe-1b-7b, qwen3-30b-a3b, mixtral-8x7b or gpt-oss-20b; 32 "
        "experts of 512 x 1024, 4 a token, when omitted.",
    ),
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
        help="Another system beside these, several times if wanted: deepspeed, or a file PEER.py; "
        "PYTHON is its environment's.",
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
    memory: Memory = None,
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
    if memory is not None and formats is None:
        raise ValueError("--memory bounds experts of --formats; leave it out")
    numbers = parse_tokens("1,16" if tokens is None and formats else tokens, quick=run.quick)
    num_bytes = options.bytes_of(memory or "2GiB", "--memory", needs_unit=True)
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
    from moe_runtime.benchmarks.cases.expert_layers import PEERS, kinds_of_calls
    from moe_runtime.kernels.operands import find_device

    asked, place, num_threads = parse_dtype(dtype), find_device(device), use_threads(threads)
    block_s = 0.2 if run.quick else 0.5
    if names:
        from moe_runtime.benchmarks.cases.formats import FormatsPlan, measure_formats

        sizes = sizes_of_shape(shape) if shape else experts.sizes_of_model(model or "", "auto")[0]
        kind, more = "bfloat16", {"formats": names, "memory": num_bytes}
        plan: Any = FormatsPlan(names, sizes, num_bytes, numbers, block_s)
        measure: Callable[..., dict[str, Any]] = measure_formats
    else:
        if shape is not None:
            layer = experts.synthetic_layer(shape, asked or torch.bfloat16)
        else:
            layer = experts.layer_of_model(model or "", asked or "auto")
        layer.module.to(place)
        sizes = LayerSizes(layer.num_experts, layer.top_k, layer.dim_model, layer.dim_hidden)
        kind, more = str(layer.dtype).removeprefix("torch."), {}
        plan = experts.ExpertsPlan(layer=layer, tokens=numbers, trains=training, block_s=block_s)
        measure = experts.measure_experts
    given = {"model": None, "format": "bf16", "num_threads": num_threads}
    given |= {"top_k": sizes.top_k, "most_tokens": numbers[-1]}
    settings = {
        **_sizes_said(model, shape, sizes),
        "dtype": kind,
        "tokens": numbers,
        "training": training,
        "device": str(place),
        "gpu": torch.cuda.get_device_name(place) if place.type == "cuda" else None,
        "num_threads": num_threads,
        **more,
    }
    peers = find_peers(peer or (), given, "experts", PEERS)
    judged = [name for name, _, _ in kinds_of_calls(numbers, trains=training)]
    show = show_formats if names else show_experts
    run.measure(measure, plan, settings, judged, show, peers, unasked=PEERS)


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
    import torch

    from moe_runtime.benchmarks.cases.expert_layers import sizes_of_model
    from moe_runtime.benchmarks.cases.layer import PEERS, LayerPlan, measure_layer

    asked, num_threads = parse_dtype(dtype), use_threads(threads)
    if shape is not None:
        sizes, found = sizes_of_shape(shape), asked or torch.bfloat16
    else:
        sizes, found = sizes_of_model(model or "", asked or "auto")
    block_s = 0.2 if run.quick else 0.5
    plan = LayerPlan(sizes=sizes, dtype=found, tokens=numbers, trains=training, block_s=block_s)
    settings = {
        **_sizes_said(model, shape, sizes),
        "dtype": str(found).removeprefix("torch."),
        "tokens": numbers,
        "training": training,
        "num_threads": num_threads,
    }
    show = partial(show_experts, what="layer")
    run.measure(measure_layer, plan, settings, plan.metrics(), show, unasked=PEERS)


@case(quick=_QUICK)
def bench_ops(
    run: CaseRun,
    shape: OpsShape = None,
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
        sizes=SIZES if shape is None else sizes_of_shape(shape),
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
    from moe_runtime.benchmarks.cases.expert_layers import sizes_of_model
    from moe_runtime.inference.budget import available_device_bytes, available_host_bytes
    from moe_runtime.kernels.operands import find_device

    dtypes = {str(one).removeprefix("torch."): one for one in training.TOLERANCE}
    if dtype not in dtypes:
        raise ValueError(f"--dtype must be {' or '.join(dtypes)}, got {dtype!r}")
    place = find_device(device)
    if peers and place.type != "cpu":
        raise ValueError(f"--peer {peers[0].name} trains on the CPU; leave --device {device} out")
    num_threads = use_threads(threads)
    sizes = TRAINING_SHAPES[shape] if shape else sizes_of_model(model or "", "auto")[0]
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


def _sizes_said(model: str | None, shape: str | None, sizes: LayerSizes) -> dict[str, Any]:
    return {
        "model": shape or Path(model or "").name,
        "experts": sizes.num_experts,
        "top_k": sizes.top_k,
        "dim_model": sizes.dim_model,
        "dim_hidden": sizes.dim_hidden,
    }


def parse_dtype(name: str) -> "torch.dtype | None":
    """The type to compute in; None for ``auto``."""
    from moe_runtime.checkpoints.checkpoint import COMPUTE_DTYPES
    from moe_runtime.config import require_known

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
    shown = with_numbers(results)
    rows = [["repetitions", *map(num_repetitions, shown), ""]] if shown else []
    for metric in dict.fromkeys(name for one in shown for name in one["summary"]):
        passes, tokens = metric.split("_")[:2]
        factor, unit = unit_of(shown, metric)
        cells = [mean_cell(one, metric, factor) for one in shown]
        rows.append([f"{passes}, T={tokens}, {unit}", *cells, _ratio(shown, metric)])
    title = f"{what} of {_sizes_shown(results)}, {results['settings']['dtype']}"
    show_rows(title, ["", *(one["system"] for one in shown), "best / ours"], rows)


def _sizes_shown(results: dict[str, Any]) -> str:
    settings = results["settings"]
    return (
        f"{settings['model']}: E={settings['experts']} K={settings['top_k']} "
        f"D={settings['dim_model']} F={settings['dim_hidden']}"
    )


def _ratio(shown: list[dict[str, Any]], metric: str) -> str:
    medians = {
        one["system"]: one["summary"][metric]["median"] for one in shown if metric in one["summary"]
    }
    ours = medians.pop("moe_runtime", None)
    return f"{min(medians.values()) / ours:.2f}" if ours and medians else ""


def show_formats(results: dict[str, Any]) -> None:
    shown, heads = with_numbers(results), [""]
    rows = [[one["system"]] for one in shown]
    for number in results["settings"]["tokens"] if shown else ():
        factor, unit = unit_of(shown, f"forward_{number}_s")
        heads += [f"T={number}, {unit}", "of a read"]
        for one, row in zip(shown, rows, strict=True):
            share = one["summary"].get(f"forward_{number}_of_read")
            row.append(mean_cell(one, f"forward_{number}_s", factor))
            row.append(f"{share['median']:.2f}" if share else "")
    most = format_bytes(results["settings"]["memory"])
    show_rows(f"experts of {_sizes_shown(results)}, at most {most} of a format", heads, rows)


def show_ops(results: dict[str, Any]) -> None:
    settings, rows = results["settings"], []
    for one in results["measurements"]:
        for kind in ("forward", "backward"):
            names = [f"{kind}_{tokens}_s" for tokens in settings["tokens"]]
            medians = [one["summary"][name]["median"] for name in names if name in one["summary"]]
            if medians:
                factor, unit = unit_for("s", medians)
                cells = (mean_cell(one, name, factor) for name in names)
                rows.append([one["system"], f"{kind}, {unit}", *cells])
    title = (
        f"ops: E={settings['num_experts']} K={settings['top_k']} D={settings['dim_model']} "
        f"F={settings['dim_hidden']}, {settings['dtype']}"
    )
    lengths = [(f"T={tokens}", "right") for tokens in settings["tokens"]]
    if rows:
        print_table(title, [("", "left"), ("", "left"), *lengths], rows)


def show_training(results: dict[str, Any]) -> None:
    from moe_runtime.benchmarks.suite.comparing import counted

    settings, shown = results["settings"], with_numbers(results)
    heads = ["", "repetitions", "step, ms", "tokens/s", "losses equal"]
    factors: dict[str, float] = {}
    for what, metric in _FURTHER.items():
        if any(metric in one["summary"] for one in shown):
            factors[metric], unit = unit_of(shown, metric)
            heads.append(f"{what}, {unit}")
    rows = [
        [
            *(one["system"], num_repetitions(one), mean_cell(one, "step_s", 1e3)),
            *(median_cell(one, "tokens_per_s", 1.0), equal_cell(one)),
            *(median_cell(one, metric, factor) for metric, factor in factors.items()),
        ]
        for one in shown
    ]
    title = (
        f"training of {settings['model']}: {counted('{} layers', settings['layers'])}, "
        f"{settings['sequences']} x {settings['context']} tokens, {settings['dtype']}"
    )
    show_rows(title, heads, rows)
