"""The Triton kernels that are launched anywhere, as their source has them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import moe_runtime.kernels.grouped_gemm as grouped_gemm

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
