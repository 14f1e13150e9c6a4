"""What the compiler makes of every kernel, for GPUs that need not be there."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launched_kernels import launched_kernels

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "support" / "kernels" / "aot_report.py"
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 65536}
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Instructions, and the rows below which they have nothing to work on: on Hopper a full warp group.
MATRIX_UNITS = {"sm_90": ("wgmma", 64), "sm_100": ("tcgen05", 128)}
LOADING_AHEAD = ("sm_90", "sm_80")
PRODUCTS = ("grouped_gemm_", "block_sparse_")

EXPECTED = {
    *("_combine_fwd", "_combine_bwd", "tile_map"),
    *(f"_token_sort_{step}" for step in ("small", "histogram", "scan", "place")),
    *(
        "grouped_gemm_fwd",
        "grouped_gemm_down_act",
        "grouped_gemm_dw",
        "gate_weight_grad",
        "grouped_bias_grad",
    ),
    *("decode_up", "decode_down", "decode_combine", "decode_up_row", "decode_down_row"),
    *("block_sparse_sdd", "block_sparse_dsd"),
    *(
        "choose_experts_fwd",
        "linear_row_fwd",
        "packed_linear_row_fwd",
        "split_attention_fwd",
        "rms_norm_fwd",
    ),
    "fetch_experts_fwd",
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def compiled(*words: str) -> list[dict[str, Any]]:
    """What `aot_report` found. Triton keeps the binaries, so that only the first run is slow."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(SCRIPT.parent), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, str(SCRIPT), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_that_is_launched_is_compiled():
    """The persistent one where a GPU has what it asks for."""
    assert {name for name, _ in launched_kernels()} == EXPECTED | {"grouped_gemm_persistent"}


def test_some_kernels_fit_and_use_the_features_of_a_gpu():
    """Of each way to compute experts one: of a token, of few in slots, of many in slots."""
    found = compiled("few", "sm_90")
    assert_fits("sm_90", found)
    assert_packed_rows_are_read_16_bytes_at_once_by_few_instructions("sm_90", found)
    assert_products_use_the_matrix_units(found, *MATRIX_UNITS["sm_90"])
    assert_experts_in_slots_are_loaded_ahead_and_16_bytes_at_once(found)


# Only the widest tiles, which need the most registers and shared memory. Each GPU compiles another
# format, dtype and width of a kind of call.
@pytest.mark.long
@pytest.mark.timeout(900)
def test_kernels_fit_and_use_the_features_of_every_gpu():
    """In one process: starting another takes as long as compiling for two GPUs."""
    found = compiled("in-turn", *TARGETS)
    for target in TARGETS:
        assert_all(target, [kernel for kernel in found if kernel["target"] == target])
    pairs = {(kernel["name"], kernel["target"]) for kernel in found}
    assert min(sum(name == one for one, _ in pairs) for name in EXPECTED) >= 2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("target", SHARED_BYTES)
def test_every_tile_fits_and_uses_what_the_gpu_has(target):
    found = compiled("all", target)
    assert {kernel["name"] for kernel in found} >= EXPECTED
    assert_all(target, found)


def assert_all(target: str, found: list[dict[str, Any]]) -> None:
    assert len(found) >= 12
    assert_fits(target, found)
    if target != "gfx942":
        assert_packed_rows_are_read_16_bytes_at_once_by_few_instructions(target, found)
    if target in MATRIX_UNITS:
        products = assert_products_use_the_matrix_units(found, *MATRIX_UNITS[target])
        assert products.count("grouped_gemm_persistent") >= 2
        assert len(products) >= 7
    if target in LOADING_AHEAD:
        assert_experts_in_slots_are_loaded_ahead_and_16_bytes_at_once(found)


# Instructions a weight, all of a step; FP8 takes more where none converts it.
MOST_INSTRUCTIONS = {"mxfp4": 4.7, "fp8-block": 3.6, "int4": 4.0, "nvfp4": 4.8, "q4_k": 5.2}
MOST_WITHOUT_CONVERSION = {"fp8-block": 5.7}


def assert_packed_rows_are_read_16_bytes_at_once_by_few_instructions(
    target: str, kernels: list[dict[str, Any]]
) -> None:
    found = [kernel for kernel in kernels if kernel["what"].startswith("rows ")]
    most = MOST_INSTRUCTIONS
    if target in ("sm_80", "sm_86"):
        most = most | MOST_WITHOUT_CONVERSION
    assert len(found) >= 4
    for kernel in found:
        name = kernel["what"].split()[1]
        assert (kernel["loop"] > 0) == (kernel["name"] != "decode_combine"), kernel
        assert kernel["loop"] <= most[name] * kernel["loop_weights"], kernel
        codes = 16 if name == "fp8-block" else 32
        assert kernel["loop_loads"] * codes >= kernel["loop_weights"], kernel


def assert_fits(target: str, found: list[dict[str, Any]]) -> None:
    """Without spilling."""
    for kernel in found:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES.get(target, 99 * 1024), kernel
        assert 0 < kernel["registers"] <= (512 if target == "gfx942" else 255), kernel


def assert_products_use_the_matrix_units(
    found: list[dict[str, Any]], unit: str, least_rows: int
) -> list[str]:
    """Gives the names of the products."""
    products = [kernel for kernel in found if kernel["name"].startswith(PRODUCTS)]
    assert products
    for kernel in products:
        rows = re.search(r"block_m=(\d+)|(\d+) rows", kernel["what"])
        assert rows is not None
        if int(rows[1] or rows[2]) >= least_rows:
            assert kernel[unit] > 0, kernel
    return [kernel["name"] for kernel in products]


def assert_experts_in_slots_are_loaded_ahead_and_16_bytes_at_once(
    kernels: list[dict[str, Any]],
) -> None:
    found = [kernel for kernel in kernels if kernel["what"].startswith("slots ")]
    few, many = (
        ("decode_up", "decode_down", "decode_combine"),
        ("tile_map", *["grouped_gemm_fwd"] * 2),
    )
    expected = [*few, *many]
    assert [kernel["name"] for kernel in found] == expected * (len(found) // len(expected))
    assert found
    for kernel in found:
        is_product = kernel["name"] not in ("decode_combine", "tile_map")
        assert (kernel["copies"] > 0) == is_product, kernel
        assert kernel["copies_of_16_bytes"] == kernel["copies"], kernel
    for kernel in kernels:
        if not kernel["what"].startswith("trains "):
            continue
        is_product = kernel["name"] in ("grouped_gemm_fwd", "grouped_gemm_down_act")
        assert (kernel["copies"] > 0) == (is_product or kernel["name"] == "grouped_gemm_dw"), kernel
        # gradients read the numbers of their rows ahead, too
        assert not is_product or kernel["copies_of_16_bytes"] == kernel["copies"], kernel
