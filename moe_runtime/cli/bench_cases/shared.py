"""Options that several cases have, and how every one ends: file, JSON or table, exit code."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import print_json, print_table
from moe_runtime.cli.prompts import read_prompts
from moe_runtime.cli.stopping import StopRequest
from moe_runtime.files import check_output_path
from moe_runtime.reading import require_not_read

if TYPE_CHECKING:
    from moe_runtime.bench.peer_process import PeerProgram

STOPPING = "showing what was measured so far; Ctrl-C once more stops at once"
JOULE_ROWS = {"cpu_joules": "processors, J", "gpu_joules": "GPUs, J"}
MEMORY_ROWS = {
    "load without imports, s": ("load_s", 1.0),
    "imports, s": ("import_s", 1.0),
    "peak memory, GB": ("peak_rss_bytes", 1e-9),
    "after imports, GB": ("rss_after_imports_bytes", 1e-9),
    "read by calls, GB": ("read_call_bytes", 1e-9),
    "of these from the page cache, GB": ("page_cache_bytes", 1e-9),
    "read from storage, GB": ("storage_bytes", 1e-9),
    **{row: (metric, 1.0) for metric, row in JOULE_ROWS.items()},
}

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="Folder of a safetensors checkpoint, or a name on the hub."
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        help="Instead of MODEL: random weights in the shape of olmoe-1b-7b, qwen3-30b-a3b, "
        "mixtral-8x7b, gpt-oss-20b or olmoe-small, written to the user's cache folder and removed "
        "afterwards; for llama_cpp as a GGUF file, too."
    ),
]
Layers = Annotated[
    int | None, typer.Option(min=1, max=1000, help="Layers of --shape; its own when omitted.")
]
Keep = Annotated[
    bool, typer.Option("--keep-shape", help="Keep what --shape wrote; later runs find it.")
]
Peers = Annotated[
    list[str] | None,
    typer.Option(
        "--peer",
        metavar="NAME[:VARIANT][@PYTHON][=MODEL]",
        help="Another system beside this one, several times if wanted: transformers (variants "
        "eager, grouped_mm), accelerate, llama_cpp, openvino, ftllm (cpu, disk), vllm, sglang, or "
        "a file PEER.py; PYTHON is its environment's, MODEL the same model as a file it reads.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(help="File with a prompt in each line, as for `run`; built-in text when omitted."),
]
PromptTokens = Annotated[int, typer.Option(min=1, help="Length of the built-in prompts.")]
Threads = Annotated[
    int | None, typer.Option(min=1, max=4096, help="Threads of every system; all when omitted.")
]
Time = Annotated[
    float | None,
    typer.Option(
        "--time", min=1.0, help="Seconds after which no repetition begins. [300; quick: 60]"
    ),
]
Precision = Annotated[
    float,
    typer.Option(
        min=0.0001, max=1.0, help="Half of the confidence interval that is narrow enough."
    ),
]
Cap = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Cap each system's memory, page cache included, as in 7GiB: by a control group or "
        "systemd. Each repetition then begins with the model out of the page cache.",
    ),
]
Agreement = Annotated[
    float,
    typer.Option(
        min=0.0, max=1.0, help="Share of likeliest tokens that a peer must have in common with us."
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write everything measured to this file.")
]


class AskedModel(NamedTuple):
    """What is measured.

    Attributes:
        path: of the checkpoint.
        gguf: the same as a GGUF file, where that was written.
        facts: its name for a results file, and what random weights are of.
    """

    path: str
    gguf: Path | None
    facts: dict[str, Any]

    def with_files(self, programs: "Sequence[PeerProgram]") -> "list[PeerProgram]":
        """Peers that read GGUF files alone, and were given none, are given that of the shape."""
        from moe_runtime.bench.peer_files import GGUF_PEERS

        return [
            replace(one, settings=one.settings | {"model": str(self.gguf)})
            if self.gguf and one.file.stem in GGUF_PEERS and one.settings["model"] == self.path
            else one
            for one in programs
        ]


@contextmanager
def asked_model(
    model: str | None,
    shape: str | None,
    layers: int | None,
    peers: "Sequence[PeerProgram]",
    *,
    keep: bool,
) -> Iterator[AskedModel]:
    """MODEL, or what ``--shape`` stands for, whose files are there within the block.

    Args:
        model: as on the command line.
        shape, layers, keep: see the options.
        peers: of which one may need a GGUF file; read without a model of theirs.

    Raises:
        ValueError: there is no such shape.
        CapacityError: the disk has too little room for it.
    """
    if shape is None:
        from moe_runtime.checkpoints.model_files import find_checkpoint

        assert model is not None
        yield AskedModel(str(find_checkpoint(model)), None, {"model": Path(model).name})
        return
    from moe_runtime.bench.peer_files import GGUF_PEERS
    from moe_runtime.bench.synthetic.model_shapes import shape_of_name
    from moe_runtime.bench.synthetic.shape_checkpoint import shape_checkpoint, shapes_folder

    asked = shape_of_name(shape, layers)
    needs_gguf = any(one.file.stem in GGUF_PEERS and "model" not in one.settings for one in peers)
    facts = {"model": shape, "layers": asked.num_layers, "weights": "random"}
    with shape_checkpoint(
        asked, shapes_folder(), keep=keep, needs_gguf=needs_gguf, say=say_line
    ) as files:
        yield AskedModel(str(files.checkpoint), files.gguf if needs_gguf else None, facts)


def require_one_model(
    model: str | None, shape: str | None, layers: int | None, *, keep: bool
) -> None:
    """Refuses MODEL and ``--shape`` together, neither, and options of a shape without one.

    Raises:
        ValueError: there is no one thing to measure.
    """
    if (model is None) == (shape is None):
        raise ValueError("expected MODEL or --shape, one of them: what is measured?")
    if shape is None and (layers is not None or keep):
        raise ValueError(f"{'--keep-shape' if keep else '--layers'} belongs to --shape")


def split_off(ids: Sequence[list[int]], num_new: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the last ids of each as the text that follows it."""
    return [one[:-num_new] for one in ids], [one[-num_new:] for one in ids]


def prompt_ids(
    model: str, prompts: Path | None, num_tokens: int, num_built_in: int, num_after: int = 0
) -> list[list[int]]:
    """Token ids of the prompts of a file, or of built-in ones.

    Args:
        model: the checkpoint, whose tokenizer is taken.
        prompts: the file.
        num_tokens, num_built_in: of built-in prompts.
        num_after: ids of text that follow each prompt.
    """
    from moe_runtime.bench.texts import cut_prompts
    from moe_runtime.cli.commands.run import load_tokenizer
    from moe_runtime.inference.generation import encode_prompt

    tokenizer = load_tokenizer(model)
    if prompts is None:
        return cut_prompts(tokenizer, num_built_in, num_tokens + num_after)
    texts = read_prompts(None, None, prompts)
    found = [encode_prompt(tokenizer, text)["input_ids"][0].tolist() for text in texts]
    if not num_after:
        return found
    after = cut_prompts(tokenizer, len(found), num_after)
    return [ids + more for ids, more in zip(found, after, strict=True)]


def cap_bytes(cap: str | None) -> int | None:
    """The bytes of ``--cap``.

    Raises:
        ValueError: it is no size, or memory cannot be capped here.
    """
    if cap is None:
        return None
    from moe_runtime.bench.memory_cap import why_unavailable

    limit = options.bytes_of(cap, "--cap")
    if reason := why_unavailable():
        raise ValueError(f"--cap {cap}: memory cannot be capped here: {reason}")
    return limit


def common_settings(
    model: str,
    threads: int | None,
    prompts: Sequence[list[int]],
    num_new: int,
    cap: int | None = None,
) -> dict[str, Any]:
    """Settings of every system."""
    from moe_runtime.lab.this_machine import num_usable_cores

    return {
        "model": model,
        "num_threads": threads or num_usable_cores(),
        "max_tokens": max(map(len, prompts)) + num_new,
        "cap_bytes": cap,
    }


def say_repetition(name: str, number: int) -> None:
    """A line of progress."""
    say_line(f"{name}: repetition {number}" if number else f"{name}: has what all are held to")


def say_line(text: str) -> None:
    """A line of progress, of the program."""
    print(f"moe-runtime: {text}", file=sys.stderr, flush=True)


def check_results(output: Path | None, peers: Sequence["PeerProgram"]) -> None:
    """Refuses a place where no results can be written, or where they would replace a peer's files.

    Raises:
        CheckpointError: no file can be written there.
        ValueError: it is the file of a peer, or of the model that it is given.
    """
    if output is None:
        return
    from moe_runtime.bench.peer_process import files_under

    models = [Path(one.settings["model"]) for one in peers if one.settings.get("model")]
    read = [file for model in models for file in files_under(model)]
    require_not_read(output, "results", [*(one.file for one in peers), *read])
    check_output_path(output, "results")


def command_line() -> str:
    """The words of this process."""
    return shlex.join(["moe-runtime", *sys.argv[1:]])


def end_case(
    results: dict[str, Any],
    output: Path | None,
    stop: StopRequest,
    show: Callable[[dict[str, Any]], None],
    *,
    as_json: bool,
) -> None:
    """Writes and prints what was measured; says who failed.

    Raises:
        typer.Exit: it was stopped, or there are no numbers.
        OSError: the file cannot be written.
    """
    from moe_runtime.bench.results import write_results

    results["command"] = command_line()
    if output is not None:
        write_results(output, results)
    if as_json:
        print_json(results)
    else:
        show(results)
    for one in results["measurements"]:
        if one["failure"] is not None:
            print(f"moe-runtime: {one['system']}: {one['failure']}", file=sys.stderr)
    if stop.is_set:
        raise typer.Exit(stop.exit_code)
    if results["ended"] == "failed":
        raise typer.Exit(2)


def show_systems(
    results: dict[str, Any],
    title: str,
    spreads: dict[str, tuple[str, float]],
    singles: dict[str, tuple[str, float]],
    equal: str,
) -> None:
    """Prints a column for each system that has numbers.

    Args:
        results: content of a results file.
        title: of the table.
        spreads: metrics shown with percentiles and mean, by what their rows are called, and what
            their values are multiplied by.
        singles: metrics of which the median is shown, where there are any.
        equal: what was compared.
    """
    shown = [one for one in results["measurements"] if one["summary"]]
    if not shown:
        return
    rows = [["repetitions", *(str(len(one["repetitions"])) for one in shown)]]
    for what, (metric, scale) in spreads.items():
        for part in ("p50", "p90", "p99"):
            values = (one["summary"][metric][part] * scale for one in shown)
            rows.append([f"{what}: {part}", *(f"{value:.4g}" for value in values)])
        rows.append([f"{what}: mean", *(with_interval(one, metric, scale) for one in shown)])
    for what, (metric, scale) in singles.items():
        found = [one["summary"].get(metric) for one in shown]
        if any(found):
            cells = (f"{one['median'] * scale:.3g}" if one else "–" for one in found)
            rows.append([what, *cells])
    counts = (f"{one['quality']['equal']} of {one['quality']['compared']}" for one in shown)
    rows.append([equal, *counts])
    print_table(title, [("", "left"), *((one["system"], "right") for one in shown)], rows)


def with_interval(one: dict[str, Any], metric: str, scale: float) -> str:
    """A mean and half of its interval."""
    found = one["summary"][metric]
    if found["low"] is None:
        return f"{found['mean'] * scale:.4g}"
    half = (found["high"] - found["low"]) / 2
    return f"{found['mean'] * scale:.4g} ± {half * scale:.2g}"
