"""Fixtures of the kernel tests: every instruction set this machine can run, in turn."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch
from triton_interpreter import repair_interpreter

from moe_runtime.kernels.native import NativeLibrary, native_library

ISAS = ("amx", "avx512bf16", "avx512", "avx2", "portable")


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
        repair_interpreter()


@pytest.fixture
def library() -> Iterator[NativeLibrary]:
    """The native library, left as it was found."""
    found = native_library()
    if found is None:
        pytest.skip("the native library was not built")
    isa, num_threads = found.isa, found.num_threads
    yield found
    found.select_isa(isa)
    found.set_num_threads(num_threads)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest, library: NativeLibrary) -> str:
    """Every instruction set that this machine has, selected; others are not collected."""
    library.select_isa(request.param)
    return request.param


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(42)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written is NaN, so that reading it cannot go unnoticed."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args: object, _original=original, **kwargs: object) -> torch.Tensor:  # type: ignore[no-untyped-def]
            made = _original(*args, **kwargs)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        monkeypatch.setattr(owner, name, poisoned)
