"""What goes wrong on GPUs alone: kernels compiled anew, chips and settings taken for others."""

import ast
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from launched_kernels import launched_kernels
from torch import Tensor

from moe_runtime.kernels.grouped_gemm import forward
from moe_runtime.kernels.grouped_gemm import tile as tiles
from moe_runtime.kernels.grouped_gemm.tile import GpuLimits, Tile
from moe_runtime.kernels.triton_support import PreparedLaunch, _kind_of, launch

CHANGING = {
    "num_tiles_m", "num_tiles", "num_rows", "num_tokens", "num_slots", "num_blocks", "num_parts",
    "num_partials", "num_strips", "num_places",
}  # fmt: skip
"""Numbers of kernels that follow the batch: others are the model's, and the same in every call."""


def test_no_kernel_is_compiled_anew_for_another_size_of_the_batch():
    """Triton compiles a kernel again where a number is 1, or becomes a multiple of 16."""
    found = dict(launched_kernels())
    assert len(found) >= 17
    for name, kernel in found.items():
        numbers = {argument.arg for argument in kernel.args.args} & CHANGING
        (decorator,) = kernel.decorator_list
        listed = {
            item
            for word in getattr(decorator, "keywords", ())
            for item in ast.literal_eval(word.value)
            if word.arg == "do_not_specialize"
        }
        assert listed == numbers, name


@pytest.mark.parametrize(
    ("capability", "shared_bytes", "num_multiprocessors", "is_wide"),
    [((8, 0), 166_912, 108, False), ((9, 0), 232_448, 132, True), ((10, 0), 232_448, 148, True),
     ((12, 0), 101_376, 170, False)],
)  # fmt: skip
def test_a_chip_is_described_as_it_is(
    monkeypatch, capability, shared_bytes, num_multiprocessors, is_wide
):
    """An RTX 5090 (12.0) comes after Hopper, and multiplies from registers as Ampere does."""
    found = SimpleNamespace(
        major=capability[0],
        shared_memory_per_block_optin=shared_bytes,
        multi_processor_count=num_multiprocessors,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(tiles, "dependent_launch", lambda _: {"IS_CHAINED": capability >= (9, 0)})
    described = tiles.describe_device(torch.device("cuda", 0))
    chains, converts = capability >= (9, 0), capability >= (8, 9)
    assert described == GpuLimits(shared_bytes, is_wide, num_multiprocessors, chains, converts)


def test_a_damaged_table_of_tiles_is_said_once_and_counts_as_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tiles, "SHIPPED", tmp_path / "shipped")
    gpu, rule = "A GPU", Tile(64, 128, 64, 4, 4)
    key = tiles.TileKey("plain", 16, 768, 2048, 64)
    own = tiles.table_path(gpu)
    assert own == tmp_path / "moe_runtime" / "tiles" / "a-gpu.json"
    tiles.write_table(tiles.table_path(gpu, tmp_path / "shipped"), gpu, {key: rule})
    own.parent.mkdir(parents=True)
    own.write_text("{")
    tiles.measured_tiles.cache_clear()
    with pytest.warns(UserWarning, match=r"a-gpu\.json is not a table of tiles .*delete it"):
        assert tiles.measured_tiles(gpu) == {key: rule}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tiles.measured_tiles(gpu) == {key: rule}
    tiles.measured_tiles.cache_clear()


@pytest.fixture
def _precision_is_put_back() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_precision_is_put_back")
def test_the_precision_of_products_is_read_however_it_was_set(monkeypatch):
    monkeypatch.setattr(forward, "is_interpreted", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    x = torch.zeros(1)
    for allows, precision in ((True, "tf32"), (False, "tf32x3")):
        torch.backends.cuda.matmul.allow_tf32 = allows
        assert forward.precision_of(x) == precision
    for name, precision in (("tf32", "tf32"), ("ieee", "tf32x3"), ("none", "tf32x3")):
        torch.backends.cuda.matmul.fp32_precision = name
        assert forward.precision_of(x) == precision
    assert forward.precision_of(x.bfloat16()) == "ieee"


class FakeKernel:
    """Stands for a compiled kernel: says how it was started, by Triton's way or at once."""

    arg_names = ("x_ptr", "size", "BLOCK")

    def __init__(self) -> None:
        self.started: list[str] = []

    def __getitem__(self, grid: tuple[int, ...]) -> "Callable[..., FakeKernel]":
        def run(*values: object, **arguments: object) -> "FakeKernel":
            names = ["x_ptr", "size", "BLOCK", "num_warps", "enable_fp_fusion"]
            assert list(arguments) == (names if arguments else [])
            given = list(arguments.values())[:3] or list(values)
            assert [type(value) for value in given] == [Tensor, int, int]
            self.started.append("found" if arguments else f"at once {given[1:]} {grid}")
            return self

        return run


@pytest.mark.parametrize("is_prepared", [False, True])
def test_what_was_compiled_is_started_at_once_for_the_same_kind_of_arguments(*, is_prepared):
    kernel = FakeKernel()
    prepared = {
        size: PreparedLaunch(kernel, (7,), size=size, BLOCK=64, num_warps=4) for size in (1, 3)
    }

    def start(x: Tensor, size: int) -> None:
        if is_prepared:
            prepared[size](x_ptr=x)
        else:
            launch(kernel, (7,), x_ptr=x, size=size, BLOCK=64, num_warps=4)

    values = torch.zeros(64)
    for x, size in [(values, 3), (values[4:], 3), (values[1:], 3), (values, 1)]:
        start(x, size)
    assert kernel.started == ["found", "at once [3, 64] (7, 1, 1)", "found", "found"]
    start(values.half(), 3)
    start(values[32:], 1)
    assert kernel.started[4:] == ["found", "at once [1, 64] (7, 1, 1)"]


def test_on_rocm_kernels_for_short_tensors_are_not_those_for_long_ones():
    long = torch.empty(2**31, dtype=torch.uint8)  # never touched
    kinds = [_kind_of(x, is_rocm=True) for x in (long, long[:64], long[:64].clone())]
    assert kinds[0] == kinds[1] != kinds[2]
    assert _kind_of(long, is_rocm=False) == _kind_of(long[:64].clone(), is_rocm=False)
