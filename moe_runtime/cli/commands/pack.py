"""``moe-runtime pack``: write a checkpoint with smaller experts, on disk and in memory."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moe_runtime.cli import console, options
from moe_runtime.config import format_bytes

if TYPE_CHECKING:
    from moe_runtime.checkpoints.packing import MatrixError


def pack(
    ctx: typer.Context,
    model: options.Model,
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    code: Literal["planes", "none"] | None = None,
    quantize: Literal["mxfp4", "int4", "int8", "fp8"] | None = None,
    io_threads: options.Count = 4,
    as_json: options.Json = False,
) -> None:
    """Write a checkpoint again so that its experts are read faster and take less memory.

    Lossless unless `--quantize` is given: `run`, `inspect` and `load` take the packed folder like
    any other and compute the same bits. Experts stay packed in memory too, so that a budget holds
    more of them. After an interruption the same command continues.

    Args:
        out: Folder of the packed checkpoint; it is created.
        code: planes: lossless compression of bf16 matrices to about 70 % of their bytes; none:
            unchanged, each expert stored contiguously.  [default: planes]
        quantize: Quantise experts to 4 or 8 bits in the format of compressed-tensors or gpt-oss,
            which transformers and others also load. Lossy; reports the error.
        io_threads: Reads in flight at once.
    """
    console.quiet_transformers(ctx.obj)
    from moe_runtime.checkpoints.packing import pack_checkpoint, staging_of
    from moe_runtime.checkpoints.packing.quantized_writer import REPORT_NAME
    from moe_runtime.errors import CheckpointError

    if str(out) == "-":
        raise ValueError("OUT -: expected the name of a folder (./- is one of that name)")
    has_written = is_done = False
    try:
        with console.loading_bar() as progress:

            def show(stage: str, done: int, total: int) -> None:
                nonlocal has_written
                has_written = True
                progress(stage, done, total)

            found = pack_checkpoint(
                model, out, code, quantize, io_threads=io_threads, progress=show
            )
        is_done = True
    except CheckpointError:
        has_written = staging_of(out).exists()  # without files, a second try would fail again
        raise
    finally:
        if has_written and not is_done:
            staging = staging_of(out)
            way_on = "no file was whole yet; the same command begins again"
            if staging.exists():
                way_on = f"the files that are whole stay in {staging}; the same command goes on"
                way_on += " from there"
            console.say_line(way_on)
    if as_json:
        values = dataclasses.asdict(found) | {"folder": str(found.folder), "ratio": found.ratio}
        console.print_json(values)
        return
    is_lossy = found.quantize is not None
    rows = [
        ("experts", f"{found.num_experts}" + ("" if is_lossy else ", each read in one run")),
        ("as they were", format_bytes(found.expert_bytes)),
        ("packed", f"{format_bytes(found.packed_bytes)}, {found.ratio:.3f} of it"),
    ]
    console.print_rows(f"{found.folder}", rows, to_stderr=False)
    if is_lossy:
        title = f"{found.quantize} is not lossless; {REPORT_NAME} has the error of each layer"
        _print_errors(title, found.errors)


def _print_errors(title: str, errors: Sequence["MatrixError"]) -> None:
    """The error of each matrix over all layers, in percent of the weights."""
    rows = []
    for matrix in dict.fromkeys(error.matrix for error in errors):
        own = [error for error in errors if error.matrix == matrix]
        shares = [error.relative_rms for error in own]
        worst = max(own, key=lambda error: error.worst_relative_rms)
        place = f"expert {worst.worst_expert} of {worst.module}"
        spread = f"{min(shares):.2%} to {max(shares):.2%}"
        rows.append((matrix, spread, f"{worst.worst_relative_rms:.2%}, {place}"))
    columns = [("matrix", "left"), ("relative RMS error of layers", "left"), ("worst", "left")]
    console.print_table(title, columns, rows)
