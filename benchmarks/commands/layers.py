"""``bench experts``, ``layer``, ``ops`` and ``training``: layers of experts and their parts.

Weights are random, with the sizes of a known model or of a checkpoint, none of which is read.
"""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.benchmarks.commands.shared import Peers, Threads, TimedRun
from moe_runtime.benchmarks.synthetic.model_shapes import (
    LAYER_SHAPES,
    TRAINING_SHAPES,
    LayerSizes,
)
from moe_runtime.cli import options
from moe_runtime.cli.console import quiet_transformers
from moe_runtime.config import parse_budget, require_known

if TYPE_CHECKING:
    import torch

    from moe_runtime.benchmarks.suite.peers import PeerProgram

_MOST_TOKENS = 1 << 20
_FORMAT_BYTES = 2 << 30
"""Experts in a format take at most this; fewer are drawn if needed."""
# Limits torch's libraries to an instruction set from the start of a process.
OLDER = {
    "avx512bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
    },
}
Model = Annotated[str | None, typer.Argument(metavar="MODEL")]
Shape = Annotated[str | None, typer.Option(callback=options.named("shape", lambda: LAYER_SHAPES))]


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The timed calls of a layer.

    Args:
        shape: Sizes of a known model instead of MODEL's, without any file: olmoe-1b-7b,
            qwen3-30b-a3b, mixtral-8x7b, gpt-oss-20b.
        tokens: Tokens of a call; several with commas. [1,16,64,256; quick: 1,16,256]
        training: Also time calls with a backward pass.
        dtype: Dtype of weights and tokens; auto is the checkpoint's, or bfloat16 for --shape.
    """

    shape: Shape = None
    tokens: str | None = None
    training: bool = False
    dtype: str = "auto"
    threads: Threads = None


def bench_experts(
    run: TimedRun,
    asked: Calls,
    model: Model = None,
    peer: Peers = None,
    formats: str | None = None,
    device: options.Device = "cpu",
) -> None:
    """Time one layer's experts: ours, and transformers' eager, grouped_mm and batched_mm.

    Weights are random, in the sizes of MODEL's first layer of experts or of a known model; no
    weight is read. Implementations take turns; with --formats ours runs in one format after the
    other. An implementation whose results differ from float64 by more than rounding gets no
    numbers. Ctrl-C shows what was measured so far.

    Args:
        model: Checkpoint with the sizes of the layer.
        peer: Another system, forward only; repeatable. kt_kernel (kt_kernel:one_thread; bf16, and
            fp8, mxfp4, int4-int8 of --formats), on a GPU megablocks and scattermoe, or a file
            PEER.py. For kt_kernel, MODEL is its unpacked wheel if PYTHON has none installed.
        formats: Instead of transformers' implementations: experts in these quantised formats, and
            a plain read of as many bytes. Several with commas: bf16, fp8, mxfp4, int4, q8_0, q4_k,
            q6_k. All but the first two take the suffix -int8, which rounds activations to int8.
            The default of --tokens is then 1,16.
    """
    shape, dtype, training = asked.shape, asked.dtype, asked.training
    require_one(model, shape, "whose experts are measured?")
    tokens = "1,16" if asked.tokens is None and formats else asked.tokens
    numbers = parse_tokens(tokens, quick=run.quick)
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

    kind, place, num_threads = parse_dtype(dtype), find_device(device), use_threads(asked.threads)
    rest: dict[str, Any] = {"tokens": numbers, "block_s": 0.2 if run.quick else 0.5}
    if names:
        from moe_runtime.benchmarks.cases.formats import FormatsPlan, measure_formats

        sizes = sizes_of(model, shape, None)[0]
        computed, more = torch.bfloat16, {"formats": names, "memory": _FORMAT_BYTES}
        plan: Any = FormatsPlan(names, sizes, _FORMAT_BYTES, **rest)
        measure: Callable[..., dict[str, Any]] = measure_formats
    else:
        if shape is not None:
            layer = experts.synthetic_layer(shape, kind or torch.bfloat16)
        else:
            layer = experts.layer_of_model(model or "", kind or "auto")
        layer.module.to(place)
        sizes = LayerSizes(layer.num_experts, layer.top_k, layer.dim_model, layer.dim_hidden)
        computed, more = layer.dtype, {}
        plan = experts.ExpertsPlan(layer=layer, trains=training, **rest)
        measure = experts.measure_experts
    given = {"model": None, "format": "bf16", "num_threads": num_threads}
    given |= {"top_k": sizes.top_k, "most_tokens": numbers[-1]}
    settings = {
        **_said(model, asked, sizes, computed, numbers, num_threads),
        "device": str(place),
        "gpu": torch.cuda.get_device_name(place) if place.type == "cuda" else None,
        **more,
    }
    peers = find_peers(peer or (), given, "experts", experts.PEERS)
    judged = [name for name in plan.metrics() if name.endswith("_s")]
    run.measure(measure, plan, settings, judged, peers, unasked=experts.PEERS)


def bench_layer(run: TimedRun, asked: Calls, model: Model = None) -> None:
    """Time `MoELayer` on the CPU, routing included, and transformers' eager and grouped_mm.

    All compute Qwen3-MoE's block with the same random weights, in the sizes of MODEL's first layer
    of experts or of a known model. Results are compared as in `bench experts`.

    Args:
        model: Checkpoint with the sizes of the layer.
    """
    require_one(model, asked.shape, "whose sizes are taken?")
    numbers = parse_tokens(asked.tokens, quick=run.quick)
    quiet_transformers(run.session)
    from moe_runtime.benchmarks.cases.expert_layers import ExpertsPlan
    from moe_runtime.benchmarks.cases.layer import PEERS, make_layer, measure_layer

    sizes, found = sizes_of(model, asked.shape, parse_dtype(asked.dtype))
    rest = {"trains": asked.training, "block_s": 0.2 if run.quick else 0.5}
    plan = ExpertsPlan(layer=make_layer(sizes, found), tokens=numbers, **rest)
    settings = _said(model, asked, sizes, found, numbers, use_threads(asked.threads))
    run.measure(measure_layer, plan, settings, plan.metrics(), unasked=PEERS)


def bench_ops(run: TimedRun, asked: Calls) -> None:
    """Time each op of a layer of experts on the CPU: sorting, products, combining, and all.

    Weights are random. An op whose result differs from its reference gets no numbers. Compare two
    results files to see which op became faster or slower. Ctrl-C shows what was measured so far.
    """
    numbers = parse_tokens(asked.tokens, quick=run.quick)
    import torch

    from moe_runtime.benchmarks.cases.ops import SIZES, OpsPlan, measure_ops

    plan = OpsPlan(
        sizes=SIZES if asked.shape is None else LAYER_SHAPES[asked.shape],
        dtype=parse_dtype(asked.dtype) or torch.bfloat16,
        tokens=numbers,
        trains=asked.training,
        block_s=0.05 if run.quick else 0.2,
    )
    settings = {
        "model": asked.shape,
        **plan.sizes._asdict(),
        "dtype": str(plan.dtype).removeprefix("torch."),
        "tokens": numbers,
        "training": asked.training,
        "num_threads": use_threads(asked.threads),
    }
    run.measure(measure_ops, plan, settings, plan.metrics())


def bench_training(
    run: TimedRun,
    model: Model = None,
    shape: Annotated[
        str | None, typer.Option(callback=options.named("shape", lambda: TRAINING_SHAPES))
    ] = None,
    peer: Peers = None,
    layers: Annotated[int, typer.Option(min=1, max=1000)] = 2,
    sequences: Annotated[int, typer.Option(min=1, max=1 << 16)] = 4,
    context: Annotated[int, typer.Option(min=1, max=1 << 16)] = 256,
    dtype: str = "float32",
    host_memory: str | None = None,
    device: options.Device = "cpu",
    isa: str | None = None,
    threads: Threads = None,
) -> None:
    """Time optimizer steps: ours, and transformers with torch's fused AdamW.

    The model has --layers layers in the sizes of MODEL's first layer of experts, a vocabulary of
    4,096, and the same random weights for all. Systems take turns. A system whose losses differ
    from ours by more than rounding gets no numbers. Ctrl-C shows what was measured so far.

    Args:
        model: Checkpoint with the sizes of the layers.
        shape: Sizes instead of MODEL's, without any file: pocket, small, 300m, qwen3-30b-a3b; for
            --host-memory also many and few (tokens per expert).
        peer: Another system: deepspeed, or a file PEER.py; repeatable.
        layers: Number of layers.
        sequences: Sequences in a step.
        context: Tokens of a sequence.
        dtype: float32, or bfloat16 under autocast; weights stay float32.
        host_memory: Also measure our training with experts and their states offloaded beyond this
            budget: 2GiB, or a share such as 0.25.
        isa: Limit all systems to an instruction set: avx512bf16, avx512, avx2.
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
    given = {"num_threads": num_threads, **run.asked("dtype", "sequences")}
    settings = {"model": shape or Path(model or "").name, **sizes._asdict(), **given}
    settings |= run.asked("layers", "context", "isa")
    settings |= {"host_memory": plan.host_memory, "device": str(place)}
    free_bytes = free if place.type == "cpu" else available_device_bytes(place)
    own = {"model": None, "host_memory": plan.host_memory, **given}
    programs = find_peers(peer or (), own, "training", plan.peers())
    run.measure(
        *(training.measure_training, plan, settings, [training.METRIC], free_bytes, programs),
        unasked=plan.peers(),
    )


def require_one(model: str | None, shape: str | None, question: str) -> None:
    """Require MODEL or ``--shape``, but not both."""
    if (model is None) == (shape is None):
        raise ValueError(f"expected MODEL or --shape, one of them: {question}")


def use_threads(threads: int | None) -> int:
    """Set the number of torch threads, by default all cores; return it."""
    import torch

    from moe_runtime.lab.this_machine import num_usable_cores

    number = threads or num_usable_cores()
    torch.set_num_threads(number)
    return number


def sizes_of(
    model: str | None, shape: str | None, dtype: "torch.dtype | None"
) -> "tuple[LayerSizes, torch.dtype]":
    """The sizes of a layer and the compute dtype, bfloat16 by default for a shape."""
    import torch

    from moe_runtime.benchmarks.cases.expert_layers import sizes_of_model

    if shape is not None:
        return LAYER_SHAPES[shape], dtype or torch.bfloat16
    return sizes_of_model(model or "", dtype or "auto")


def _said(
    model: str | None,
    asked: Calls,
    sizes: LayerSizes,
    dtype: "torch.dtype",
    tokens: list[int],
    num_threads: int,
) -> dict[str, Any]:
    names = zip(("experts", *LayerSizes._fields[1:]), sizes, strict=True)
    given = {"dtype": str(dtype).removeprefix("torch."), "tokens": tokens}
    given |= {"training": asked.training, "num_threads": num_threads}
    return {"model": asked.shape or Path(model or "").name, **dict(names), **given}


def parse_dtype(name: str) -> "torch.dtype | None":
    """The compute dtype; None for ``auto``."""
    from moe_runtime.checkpoints.checkpoint import COMPUTE_DTYPES

    known = {str(one).removeprefix("torch."): one for one in COMPUTE_DTYPES}
    if name == "auto":
        return None
    require_known("--dtype", name, ("auto", *known))
    return known[name]


def parse_tokens(text: str | None, *, quick: bool) -> list[int]:
    """Sorted numbers of tokens; by default fewer with ``--quick``."""
    if text is None:
        return [1, 16, 256] if quick else [1, 16, 64, 256]
    expected = f"whole numbers from 1 to {_MOST_TOKENS}, with commas"
    numbers = options.numbers_of(
        text, "--tokens", expected, int, is_sound=lambda number: 1 <= number <= _MOST_TOKENS
    )
    return sorted(numbers)


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
    """Select an instruction set; restart the process if torch was not limited to it."""
    if isa is None:
        return
    require_known("--isa", isa, tuple(OLDER))
    if any(os.environ.get(name) != value for name, value in OLDER[isa].items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | OLDER[isa])
    from moe_runtime.kernels.native import require_native

    require_native().select_isa(isa)
