"""What the compiler makes of every kernel, for GPUs that need not be there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "kernels" / "aot_report.py"
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 65536}
# A full warp group: below it a matrix instruction of Hopper has nothing to work on.
WARP_GROUP_ROWS = 64
PRODUCTS = ("grouped_gemm_", "block_sparse_")

EXPECTED = {
    *("_combine_fwd", "_combine_bwd", "_token_sort_small", "_token_sort_place", "tile_map"),
    *(
        "grouped_gemm_fwd",
        "grouped_gemm_down_act",
        "grouped_gemm_dw",
        "gate_weight_grad",
        "grouped_bias_grad",
    ),
    *("decode_up", "decode_down", "decode_combine"),
    *("block_sparse_sdd", "block_sparse_dsd"),
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


@cache
def report(target: str, *options: str) -> list[dict[str, Any]]:
    """Every compiled kernel. Triton keeps the binaries, so that only the first run is slow."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(SCRIPT.parent), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, str(SCRIPT), target, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "target", [("sm_90", "all"), ("sm_80",), ("sm_100",), ("gfx942",)], ids=lambda t: t[0]
)
def test_fits_without_spilling(target: tuple[str, ...]) -> None:
    assert_fits(*target)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", ["sm_80", "sm_100", "gfx942"])
def test_every_tile_fits_without_spilling(target: str) -> None:
    """Above, the widest tiles stand for the others wherever Hopper's are not compiled."""
    assert_fits(target, "all")


def assert_fits(*target: str) -> None:
    found = report(*target)
    assert len(found) >= 30
    names = {kernel["name"] for kernel in found}
    assert names >= EXPECTED
    for kernel in found:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES[target[0]], kernel
        assert 0 < kernel["registers"] <= (512 if target[0] == "gfx942" else 255), kernel


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("target", "unit", "least_rows"),
    [(("sm_90", "all"), "wgmma", WARP_GROUP_ROWS), (("sm_100",), "tcgen05", 128)],
    ids=["sm_90", "sm_100"],
)
def test_products_use_the_matrix_units(target: tuple[str, ...], unit: str, least_rows: int) -> None:
    products = [k for k in report(*target) if k["name"].startswith(PRODUCTS)]
    assert len(products) > 15
    for kernel in products:
        rows = re.search(r"block_m=(\d+)|(\d+) rows", kernel["what"])
        assert rows is not None
        if int(rows[1] or rows[2]) >= least_rows:
            assert kernel[unit] > 0, kernel


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", [("sm_90", "all"), ("sm_80",)], ids=["sm_90", "sm_80"])
def test_experts_in_slots_are_loaded_ahead_and_16_bytes_at_once(target: tuple[str, ...]) -> None:
    found = [kernel for kernel in report(*target) if kernel["what"].startswith("slots ")]
    assert [kernel["name"] for kernel in found] == [
        *("decode_up", "decode_down", "decode_combine"),
        *("tile_map", "grouped_gemm_fwd", "grouped_gemm_fwd"),
    ]
    for kernel in found:
        is_product = kernel["name"] not in ("decode_combine", "tile_map")
        assert (kernel["copies"] > 0) == is_product, kernel
        assert kernel["copies_of_16_bytes"] == kernel["copies"], kernel
