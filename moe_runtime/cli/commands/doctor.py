"""``moe-runtime doctor``: what this machine offers, and what to do where it falls short."""

import dataclasses
from pathlib import Path

import typer

import moe_runtime
from moe_runtime.cli import options
from moe_runtime.cli.console import Session, print_json, print_table

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def doctor(
    ctx: typer.Context,
    path: options.MeasuredPath = Path("."),
    read_size: options.ReadSize = "12MiB",
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Look at processor, kernels, GPU, memory and disk, and say what to do where they fall short.

    Takes a few seconds. Exit code 2 when something does not work at all.
    """
    session: Session = ctx.obj
    session.begin(debug=debug, as_json=as_json)
    read_bytes = options.bytes_of(read_size, "--read-size")
    if not 4096 <= read_bytes <= 1 << 30:
        raise ValueError(f"--read-size must lie between 4KiB and 1GiB, got {read_size!r}")
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    from moe_runtime.cli.machine import examine

    findings = examine(path, read_bytes)
    healthy = all(finding.status != "problem" for finding in findings)
    if as_json:
        print_json(
            {
                "version": moe_runtime.__version__,
                "healthy": healthy,
                "findings": [dataclasses.asdict(finding) for finding in findings],
            }
        )
    else:
        columns = [("", "left"), ("", "left"), ("", "left")]
        rows = [
            (
                _MARKS[finding.status],
                finding.name,
                f"{finding.value}\n→ {finding.advice}" if finding.advice else finding.value,
            )
            for finding in findings
        ]
        print_table(f"moe-runtime {moe_runtime.__version__}", columns, rows)
    if not healthy:
        raise typer.Exit(2)
