"""``bench io``, ``dispatch``, ``kernels`` and ``ablation``: disk, processes, GPU, training."""

import contextlib
import dataclasses
import itertools
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from moe_runtime.benchmarks.commands.shared import CaseRun, QuickRun, TimedRun, say_repetition
from moe_runtime.cli import options
from moe_runtime.cli.commands.train import ConfigFile
from moe_runtime.cli.console import fetch_model, quiet_transformers, say_line
from moe_runtime.cli.processes import joined_processes
from moe_runtime.config import require_known
from moe_runtime.files import require_not_read

# A layer of Qwen3-30B-A3B at three batch sizes, OLMoE and Mixtral.
_SHAPES = [
    "128,2048,768,128,8",
    "1024,2048,768,128,8",
    "8192,2048,768,128,8",
    "4096,2048,1024,64,8",
    "4096,4096,14336,8,2",
]
_IO_THREADS = 4
_REPEATED_S = 120.0
"""Seconds after which no repetition starts, with --output."""


def bench_io(
    run: TimedRun,
    model: options.Model,
    experts: options.Count | None = None,
    in_flight: Annotated[int, typer.Option(min=1, max=256)] = 4,
) -> None:
    """Time reads of MODEL's experts from disk: bytes per second, and seconds per expert.

    Compares this project's queue of direct reads with threads that call preadv, with and without
    the page cache. The files leave the page cache before every repetition; the table shows which
    share came from storage. The bytes read are checked.

    Args:
        experts: Experts in a repetition. [128; quick: 32; at most all]
        in_flight: Experts being read at any time.
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
    shown = {"unasked": peers, "percentiles": ["expert_read_s"]}
    run.measure(measure_reads, plan, settings, ["bytes_per_s"], **shown)


def bench_dispatch(
    run: TimedRun,
    ranks: Annotated[int, typer.Option(min=2, max=64)] = 2,
    tokens: Annotated[int, typer.Option(min=1, max=1 << 20)] = 2048,
    dim: Annotated[int, typer.Option(min=1, max=1 << 16)] = 1024,
    experts: Annotated[int, typer.Option(min=2, max=1 << 14)] = 32,
    top_k: Annotated[int, typer.Option(min=1, max=1 << 10)] = 2,
    load: str = "balanced,uniform,zipf",
    dtype: str = "float32,bfloat16",
) -> None:
    """Time dispatch and combine between processes (gloo), and a padded all-to-all.

    The padded exchange gives every expert as many slots as the busiest one needs. Results must be
    equal to the bit. Processes have one thread each; this command or torchrun starts them.

    Args:
        ranks: Processes to start; ignored under torchrun.
        tokens: Tokens of each process.
        dim: Width of a token.
        experts: Experts of all processes.
        top_k: Experts of a token.
        load: Distribution of tokens over experts: balanced, uniform, zipf; several with commas.
        dtype: Dtype of rows: float32, bfloat16; several with commas.
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

        from moe_runtime.benchmarks.cases import dispatch

        sizes = run.asked("tokens", "dim", "experts", "top_k")
        kinds = itertools.product(dtypes, loads)
        shapes = [
            dispatch.ExchangeShape(tokens, dim, experts, top_k, one, kind) for kind, one in kinds
        ]
        plan = dispatch.DispatchBenchPlan(shapes=shapes, rounds=3 if run.quick else 5)
        if group is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            stack.enter_context(dispatch.ranks_here(plan, num_ranks, str(Path(folder, "store"))))
        times = [f"{one.name}_s" for one in shapes]
        rules = stack.enter_context(run.rules(*times))
        settings = {"backend": "gloo", "ranks": num_ranks, **sizes, "loads": loads}
        settings |= {"dtypes": dtypes, "rounds": plan.rounds}
        results = dispatch.measure_dispatch(plan, rules, settings)
    if results is not None:
        run.end(results, percentiles=times)


def _names(what: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        require_known(what, name, known)
    return names


def bench_kernels(
    run: CaseRun,
    tune: bool = False,
    shape: Annotated[list[str] | None, typer.Option(metavar="T,H,I,E,K")] = None,
) -> None:
    """Time every product of a layer of experts on the GPU, forward and backward, in bf16.

    --tune first tries other tiles (a few minutes per shape) and saves the fastest for all later
    runs on this GPU model. Tiles change the order of sums, and so the last bits of results. Ctrl-C
    keeps the tiles found so far.

    Args:
        tune: Try other tiles and save the fastest.
        shape: Tokens, hidden size, intermediate size, experts and top-k; repeatable.
    """
    import torch

    from moe_runtime.kernels.triton_support import require_triton

    if not torch.cuda.is_available():
        raise ValueError("bench kernels needs a CUDA or ROCm GPU, and torch sees none here")
    require_triton(torch.device("cuda"))
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    from moe_runtime.benchmarks.cases.products import METRICS, TimedProduct, median_seconds
    from moe_runtime.benchmarks.suite import Rules, measure_systems
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
                products.append(TimedProduct(layer, measured))
                found = measured.tile
                said = f"tile {found.block_m} x {found.block_n} x {found.block_k}"
                if tune:
                    write_table(path, gpu, {measured.problem.key: found})
                    ratio = f"{measured.rule_seconds / measured.seconds:.2f} times the rule's speed"
                    said += f", {ratio}, the best of {measured.num_tried}"
                say_line(f"{products[-1].name}: {said}")
                if stop.is_set:
                    break
        limits: Any = {"max_s": _REPEATED_S, "is_stopping": lambda: stop.is_set}
        tiles = {one.name: dataclasses.asdict(one.tile) for one in products}
        settings = {"gpu": gpu, "dtype": "bfloat16", "tiles": tiles}
        rules = Rules(judged=("product_s",), **limits)
        results = measure_systems("kernels", products, METRICS, rules, settings)
    if tune:
        say_line(f"tiles are written to {path}")
    run.end(results)


def bench_ablation(
    run: QuickRun,
    config_file: ConfigFile,
    vary: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE[,VALUE...]")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000)] | None = None,
    steps: options.Count | None = None,
) -> None:
    """Train variants of a configuration with the same seeds, and compare the losses.

    The configuration itself and all variants train with the first seed, then with the next.
    Variants that cannot be trained are refused before the first training. Only the numbers are
    kept. Ctrl-C ends the current training and shows what was measured so far.

    Args:
        vary: A variant for each value of a key, such as model.moe.top_k=1,4; repeatable. Variants
            that change several keys are tables `variants.NAME` in CONFIG.
        seeds: Number of seeds, starting at run.seed. [3; quick: 1]
        steps: Steps instead of run.steps. [quick: a tenth of run.steps]
    """
    quiet_transformers(run.session)
    from moe_runtime.benchmarks.cases.ablation import measure_ablation, read_variants
    from moe_runtime.benchmarks.suite import Rules
    from moe_runtime.training.data import data_files

    def steps_of(configured: int) -> int:
        return steps or max(1, configured // 10)

    is_given = run.quick or steps is not None
    variants = read_variants(config_file, vary or (), steps_of=steps_of if is_given else None)
    folder = config_file.resolve().parent
    if run.output is not None:
        read = [file for one in variants for file in data_files(one.config.data, folder)]
        require_not_read(run.output, "results", read)
    with run.stopping() as stop:
        rules = Rules(
            judged=("loss",),
            most=seeds or (1 if run.quick else 3),
            on_repetition=say_repetition,
            is_stopping=lambda: stop.is_set,
        )
        results = measure_ablation(variants, folder, rules, {"model": config_file.name})
    run.end(results)
