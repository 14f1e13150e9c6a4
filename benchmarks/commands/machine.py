"""``bench io``, ``dispatch``, ``kernels`` and ``ablation``: disk, processes, GPU, training."""

import contextlib
import dataclasses
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from moe_runtime.benchmarks.commands.shared import (
    CaseRun,
    case,
    equal_cell,
    mean_cell,
    median_cell,
    num_repetitions,
    say_repetition,
    show_rows,
    show_systems,
    with_numbers,
)
from moe_runtime.cli import options
from moe_runtime.cli.commands.train import ConfigFile
from moe_runtime.cli.console import fetch_model, quiet_transformers, say_line
from moe_runtime.cli.processes import joined_processes
from moe_runtime.config import format_bytes, require_known
from moe_runtime.files import require_not_read

# One layer of Qwen3-30B-A3B at three batches, OLMoE and Mixtral.
_SHAPES = [
    "128,2048,768,128,8",
    "1024,2048,768,128,8",
    "8192,2048,768,128,8",
    "4096,2048,1024,64,8",
    "4096,4096,14336,8,2",
]
_IO_THREADS = 4
_REPEATED_S = 120.0
"""Seconds after which no repetition begins that a results file is to have."""
_READS = {"an expert": "expert_read_s"}
_READS_IN_ALL = {"all of them": "bytes_per_s", "from storage": "from_storage"}
_TRAININGS = {
    "loss": "loss",
    "held out": "held_out_loss",
    "max load": "max_load",
    "dropped": "dropped_share",
    "bytes a parameter": "state_bytes_per_parameter",
    "tokens/s": "tokens_per_s",
}
Experts = Annotated[
    int | None, typer.Option(min=1, help="Experts of a repetition. [128; quick: 32; at most all]")
]
InFlight = Annotated[int, typer.Option(min=1, max=256, help="Experts on their way at any time.")]
Ranks = Annotated[int, typer.Option(min=2, max=64, help="Processes here; torchrun has its own.")]
Tokens = Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of each process.")]
Dim = Annotated[int, typer.Option(min=1, max=1 << 16, help="Width of a token.")]
AllExperts = Annotated[int, typer.Option(min=2, max=1 << 14, help="Experts of all processes.")]
TopK = Annotated[int, typer.Option("--top-k", min=1, max=1 << 10, help="Choices of a token.")]
Load = Annotated[
    str, typer.Option(help="How often experts are chosen: balanced, uniform, zipf; with commas.")
]
Dtype = Annotated[str, typer.Option(help="Types of rows: float32, bfloat16; with commas.")]
Tune = Annotated[
    bool, typer.Option("--tune", help="Try other tiles and keep the fastest for later runs.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="T,H,I,E,K",
        help="Tokens, hidden size, intermediate size, experts and top-k; several times if wanted.",
    ),
]
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
        min=1, max=1000, help="Trainings of each variant, from run.seed upwards. [3; quick: 1]"
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(min=1, help="Steps instead of run.steps. [run.steps; quick: a tenth of them]"),
]


@case(quick="Fewer experts, half a minute at most.", seconds=(120, 30))
def bench_io(
    run: CaseRun, model: options.Model, experts: Experts = None, in_flight: InFlight = 4
) -> None:
    """Time reads of MODEL's experts from disk: bytes a second, and how long an expert takes.

    Through this project's queue of direct reads, and by threads that call preadv, past the page
    cache and through it. What the kernel keeps of the files is dropped before every repetition;
    the table says what share came from storage. Bytes are compared with those of the file.
    """
    quiet_transformers(run.session)
    from moe_runtime.benchmarks.cases.io import ReadPlan, measure_reads
    from moe_runtime.checkpoints.expert_map import map_experts
    from moe_runtime.checkpoints.opening import build_on_meta, open_checkpoint

    checkpoint = open_checkpoint(fetch_model(model), "auto")
    layouts = map_experts(build_on_meta(checkpoint), checkpoint).layouts
    num_experts = min(experts or (32 if run.quick else 128), len(layouts))
    asked = {"in_flight": min(in_flight, num_experts), "io_threads": _IO_THREADS}
    plan = ReadPlan(layouts=layouts, num_experts=num_experts, **asked)
    sizes = sorted({layout.tensor_bytes for layout in layouts.values()})
    settings = {"model": Path(model).name, "expert_bytes": sizes, "experts": num_experts, **asked}
    peers = ("preadv", "preadv:direct")
    run.measure(measure_reads, plan, settings, ["bytes_per_s"], show_reads, unasked=peers)


def show_reads(results: dict[str, Any]) -> None:
    settings = results["settings"]
    sizes = settings["expert_bytes"]
    size = format_bytes(sizes[0]) + (f" to {format_bytes(sizes[-1])}" if len(sizes) > 1 else "")
    title = f"experts of {settings['model']}, {size} each, {settings['in_flight']} at once"
    show_systems(results, title, _READS, _READS_IN_ALL, "tensors equal the file's")


@case(quick="Fewer rounds, about a minute.")
def bench_dispatch(
    run: CaseRun,
    ranks: Ranks = 2,
    tokens: Tokens = 2048,
    dim: Dim = 1024,
    experts: AllExperts = 32,
    top_k: TopK = 2,
    load: Load = "balanced,uniform,zipf",
    dtype: Dtype = "float32,bfloat16",
) -> None:
    """Time dispatch and combine between processes (gloo), beside a padded all-to-all.

    The peer sends equal parts, as many slots for each expert as the busiest one needs. Results must
    be equal to the bit. Processes are started here, one thread each, or by torchrun.
    """
    loads = _names("load", load, ("balanced", "uniform", "zipf"))
    dtypes = _names("dtype", dtype, ("float32", "bfloat16"))
    if top_k > experts:
        raise ValueError(f"--top-k {top_k}: expected at most --experts, which is {experts}")
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(joined_processes(run.session))
        num_ranks = ranks if group is None else group.size()
        if experts % num_ranks:
            raise ValueError(f"--experts {experts}: expected a multiple of the {num_ranks} ranks")

        from moe_runtime.benchmarks.cases.dispatch import (
            DispatchBenchPlan,
            ExchangeShape,
            measure_dispatch,
        )
        from moe_runtime.benchmarks.cases.dispatch_ranks import ranks_here

        sizes = {"tokens": tokens, "dim": dim, "experts": experts, "top_k": top_k}
        kinds = itertools.product(dtypes, loads)
        shapes = [ExchangeShape(tokens, dim, experts, top_k, one, kind) for kind, one in kinds]
        plan = DispatchBenchPlan(shapes=shapes, rounds=3 if run.quick else 5)
        if group is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(ranks_here(plan, num_ranks, str(Path(folder, "store"))))
        rules = stack.enter_context(run.rules(*(f"{plan.name(one)}_s" for one in plan.shapes)))
        settings = {"backend": "gloo", "ranks": num_ranks, **sizes, "loads": loads}
        settings |= {"dtypes": dtypes, "rounds": plan.rounds}
        results = measure_dispatch(plan, rules, settings)
    if results is not None:
        run.end(results, show_dispatch)


def _names(what: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        require_known(what, name, known)
    return names


def show_dispatch(results: dict[str, Any]) -> None:
    from moe_runtime.benchmarks.suite.comparing import counted

    settings = results["settings"]
    names = [f"{load}_{kind}" for kind in settings["dtypes"] for load in settings["loads"]]
    show_systems(
        results,
        f"dispatch and combine, {counted('{} ranks', settings['ranks'])}",
        {name.replace("_", ", "): f"{name}_s" for name in names},
        {f"{name.replace('_', ', ')}, sent": f"{name}_bytes" for name in names},
        "tokens equal",
    )


@case(seconds=None)
def bench_kernels(run: CaseRun, tune: Tune = False, shape: Shapes = None) -> None:
    """Time every product of a layer of experts on the GPU, forward and backward, in bf16.

    With --tune, other tiles are tried first (some minutes a shape), and the fastest are written to
    a table that every later run on this model of GPU reads. Tiles change the order of sums, and so
    the last bits of a result. Products are then timed in turn. Ctrl-C keeps what was found so far.
    """
    import torch

    from moe_runtime.kernels.triton_support import require_triton

    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA or ROCm GPU, and torch sees none here")
    require_triton(torch.device("cuda"))
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from moe_runtime.benchmarks.cases.products import METRICS, TimedProduct
    from moe_runtime.benchmarks.suite.results import measure_systems
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.kernels.grouped_gemm.tile import describe_device, table_path, write_table
    from moe_runtime.kernels.grouped_gemm.tuner import candidate_tiles, layer_problems, parse_shape
    from moe_runtime.kernels.grouped_gemm.tuner import tune as tune_problems

    shapes = [*dict.fromkeys(parse_shape(text) for text in shape or _SHAPES)]
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = torch.cuda.get_device_name(device)
    path, room, products = table_path(gpu), describe_device(device), list[TimedProduct]()
    with run.stopping() as stop:
        for layer in itertools.takewhile(lambda _: not stop.is_set, shapes):
            for measured in tune_problems(
                layer_problems(layer, torch.bfloat16, device),
                (lambda problem: candidate_tiles(problem, room)) if tune else lambda problem: (),
                median_seconds,
                refusals=(OutOfResources, PTXASError, CompilationError),
                num_threads=os.cpu_count() or 1,
            ):
                products.append(TimedProduct(layer, measured, median_seconds))
                if tune:
                    write_table(path, gpu, {measured.problem.key: measured.tile})
                    ratio = f"{measured.rule_seconds / measured.seconds:.2f} times the rule's speed"
                    say_line(f"{products[-1].name}: {ratio}, the best of {measured.num_tried}")
                if stop.is_set:
                    break
        limits: Any = {"max_s": _REPEATED_S, "is_stopping": lambda: stop.is_set}
        tiles = {one.name: dataclasses.asdict(one.tile) for one in products}
        settings = {"gpu": gpu, "dtype": "bfloat16", "tiles": tiles}
        rules = Rules(judged=("product_s",), **limits)
        results = measure_systems("kernels", products, METRICS, rules, settings)
    if tune:
        say_line(f"tiles are written to {path}")
    run.end(results, show_products)


def median_seconds(call: Callable[[], Any]) -> float:
    """Median time of a call by the GPU's own clock, with a cold second-level cache."""
    from triton.testing import do_bench

    return cast(float, do_bench(call, warmup=10, rep=40, return_mode="median")) / 1e3


def show_products(results: dict[str, Any]) -> None:
    rows = []
    for one in with_numbers(results):
        tile = results["settings"]["tiles"][one["system"]]
        sizes = " x ".join(f"{tile[f'block_{axis}']:>3}" for axis in "mnk")
        speed = median_cell(one, "tflops", 1.0)
        rows.append([one["system"], sizes, mean_cell(one, "product_s", 1e3), speed])
    heads = ["product", "tile", "ms", "TFLOP/s"]
    show_rows(f"products on {results['settings']['gpu']}", heads, rows, num_left=2)


@case(quick="One seed, a tenth of the steps.", seconds=None)
def bench_ablation(
    run: CaseRun,
    config_file: ConfigFile,
    vary: Vary = None,
    seeds: Seeds = None,
    steps: Steps = None,
) -> None:
    """Train variants of a configuration with the same seeds, and compare what came out.

    All take turns with the first seed, the configuration as it is among them, then with the next.
    What cannot be trained is refused before anything is. Nothing is kept but the numbers. Ctrl-C
    ends the training that runs, and shows what was measured so far.
    """
    quiet_transformers(run.session)
    from moe_runtime.benchmarks.cases.ablation import measure_ablation, read_variants
    from moe_runtime.benchmarks.suite.runner import Rules
    from moe_runtime.training.data import text_files

    def steps_of(configured: int) -> int:
        return steps or max(1, configured // 10)

    is_given = run.quick or steps is not None
    variants = read_variants(config_file, vary or (), steps_of=steps_of if is_given else None)
    folder = config_file.resolve().parent
    if run.output is not None:
        read = [file for one in variants for file in text_files(one.config.data, folder)]
        require_not_read(run.output, "results", read)
    with run.stopping() as stop:
        rules = Rules(
            judged=("loss",),
            most=seeds or (1 if run.quick else 3),
            on_repetition=say_repetition,
            is_stopping=lambda: stop.is_set,
        )
        results = measure_ablation(variants, folder, rules, {"model": config_file.name})
    run.end(results, show_ablation)


def show_ablation(results: dict[str, Any]) -> None:
    of, shown = results["settings"], with_numbers(results)
    found = {
        what: metric
        for what, metric in _TRAININGS.items()
        if any(metric in one["summary"] and one["summary"][metric]["p99"] for one in shown)
    }
    rows = []
    for one in shown:
        cells = (mean_cell(one, metric, 1.0) for metric in found.values())
        rows.append([one["system"], num_repetitions(one), *cells, equal_cell(one)])
    title = f"{of['model']}: {of['steps']} steps of {of['sequences']} x {of['context']} tokens"
    show_rows(title, ["", "seeds", *found, "losses equal"], rows)
