"""Options that several cases have, and how every one ends: file, JSON or table, exit code."""

import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moe_runtime.cli import options
from moe_runtime.cli.console import print_json, require_address_space, say_line
from moe_runtime.cli.stopping import StopRequest
from moe_runtime.files import check_output_path, require_not_read

if TYPE_CHECKING:
    from moe_runtime.benchmarks.suite.peer_process import PeerProgram
    from moe_runtime.types import ModelSignature

STOPPING = "showing what was measured so far; Ctrl-C once more stops at once"

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Folder of a safetensors checkpoint, a GGUF file, or a name on the hub.",
    ),
]


def _known_shape(name: str | None) -> str | None:
    """Refuses other shapes than those that are known, and files, before torch is imported."""
    if name is None or name.endswith(".json"):
        return name
    require_address_space()
    from moe_runtime.benchmarks.synthetic.gguf_shape import GGUF_SHAPES
    from moe_runtime.benchmarks.synthetic.model_shapes import SHAPES

    return options.named("shape", lambda: (*SHAPES, *GGUF_SHAPES))(name)


Shape = Annotated[
    str | None,
    typer.Option(
        callback=_known_shape,
        help="Instead of MODEL: random weights in the shape of olmoe-1b-7b, qwen3-30b-a3b, "
        "gpt-oss-20b, olmoe-small and others, which a wrong name lists, or of any configuration, "
        "CONFIG.json; written to the user's cache folder and removed afterwards; for llama_cpp as "
        "a GGUF file, too.",
    ),
]
Layers = Annotated[
    int | None, typer.Option(min=1, max=1000, help="As many layers of --shape; all when omitted.")
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
        "eager, grouped_mm), accelerate, llama_cpp, openvino, ftllm (cpu, disk), vllm, sglang, "
        "moe_runtime (int8, planes: this project itself), or a file PEER.py; PYTHON is its "
        "environment's, MODEL the same model as a file it reads.",
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
        min=0.0001,
        max=1.0,
        help="Half of the 95 % confidence interval that is narrow enough, as a share of the mean.",
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


def cap_bytes(cap: str | None) -> int | None:
    """The bytes of ``--cap``.

    Raises:
        ValueError: it is no size, or memory cannot be capped here.
    """
    if cap is None:
        return None
    from moe_runtime.benchmarks.suite.memory_cap import why_unavailable

    limit = options.bytes_of(cap, "--cap", needs_unit=True)
    if reason := why_unavailable():
        raise ValueError(f"--cap {cap}: memory cannot be capped here: {reason}")
    return limit


def say_repetition(name: str, number: int) -> None:
    """A line of progress."""
    say_line(f"{name}: repetition {number}" if number else f"{name}: has what all are held to")


def check_results(output: Path | None, peers: Sequence["PeerProgram"]) -> None:
    """Refuses a place where no results can be written, or where they would replace a peer's files.

    Raises:
        CheckpointError: no file can be written there.
        ValueError: it is the file of a peer, or of the model that it is given.
    """
    if output is None:
        return
    from moe_runtime.benchmarks.suite.peer_process import files_under

    models = [Path(one.settings["model"]) for one in peers if one.settings.get("model")]
    read = [file for model in models for file in files_under(model)]
    require_not_read(output, "results", [*(one.file for one in peers), *read])
    check_output_path(output, "results")


def command_line() -> str:
    """The words of this process."""
    return shlex.join(["moe-runtime", *sys.argv[1:]])


def keep_results(results: dict[str, Any], output: Path | None) -> str | None:
    """Writes what was measured before it is shown, so that neither is lost with the other.

    Nothing is written, and nothing older replaced, where there is no number.

    Returns:
        A line that says why it could not be written, to be shown last; None where all is well.
    """
    from moe_runtime.benchmarks.suite.results import write_results

    results["command"] = command_line()
    if not any(one["repetitions"] for one in results["measurements"]):
        left = "" if output is None else f", and {output} is left as it was"
        say_line(f"nothing was measured{left}")
    elif output is not None:
        try:
            write_results(output, results)
        except OSError as error:
            return f"error: {output}: the results cannot be written: {error.strerror}"
    return None


def trace_settings(names: str, num_tokens: int, signature: "ModelSignature") -> dict[str, Any]:
    """What results of recorded routing say of it.

    Args:
        names: of the trace's file, or of several.
        num_tokens: in all of them.
        signature: of the model.
    """
    return {
        "model": names,
        "tokens": num_tokens,
        "layers": signature.num_layers,
        "experts": signature.num_experts,
        "top_k": signature.top_k,
    }


def end_case(
    results: dict[str, Any],
    output: Path | None,
    stop: StopRequest,
    show: Callable[[dict[str, Any]], None],
    *,
    as_json: bool,
    unasked: Collection[str] = (),
) -> None:
    """Writes and prints what was measured; says who failed.

    Args:
        results: content of a results file.
        output: the file, if any.
        stop: whether it was stopped.
        show: prints the table.
        as_json: print all of it in its place.
        unasked: systems that took part though nobody named them; they may fail.

    Raises:
        typer.Exit: it was stopped, the file cannot be written, or what was asked for has no
            numbers.
    """
    unwritten = keep_results(results, output)
    if as_json:
        print_json(results)
    else:
        show(results)
    failed = [one for one in results["measurements"] if one["failure"] is not None]
    for one in failed:
        say_line(f"{one['system']}: {one['failure']}")
    if unwritten is not None:
        say_line(unwritten)
    if stop.is_set:
        raise typer.Exit(stop.exit_code)
    if unwritten is not None or results["ended"] == "failed":
        raise typer.Exit(2)
    if asked := [one["system"] for one in failed if one["system"] not in unasked]:
        say_line(f"error: {', '.join(asked)}: asked for, and without numbers; exit code 1")
        raise typer.Exit(1)
