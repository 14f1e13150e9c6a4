"""The Triton kernels that are launched: anywhere in the source, or while a test runs."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

import moe_runtime.kernels.grouped_gemm as grouped_gemm
from moe_runtime.kernels.triton_support import PreparedLaunch

KERNELS = Path(grouped_gemm.__file__).resolve().parents[1]


def launched_kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Names and definitions."""
    trees = {path: ast.parse(path.read_text()) for path in KERNELS.rglob("*.py")}
    calls = [node for tree in trees.values() for node in ast.walk(tree)]
    names = {
        ast.unparse(call.args[0])
        for call in calls
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("launch", "PreparedLaunch")
        and ast.unparse(call.args[0]) != "self._kernel"
    }
    for node in calls:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield node.name, node


@contextmanager
def launched() -> Iterator[list[str]]:
    """The names of the kernels that are launched meanwhile."""
    names, start = list[str](), PreparedLaunch.__call__

    def named_start(prepared: PreparedLaunch, **tensors: torch.Tensor) -> None:
        names.append(prepared._kernel.__name__)
        start(prepared, **tensors)

    with patch.object(PreparedLaunch, "__call__", named_start):
        yield names
