"""Settings that hold for the whole suite."""

import contextlib
import functools
import gc
import importlib.util
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Nothing in this suite may download, even where a network is at hand. Set before any test file
# imports huggingface_hub, which reads them once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The models here are so small that handing work to a second thread costs more than it saves: ten
# times more where two test processes share two cores. Read when torch is first imported; tests
# about threads set the number themselves.
os.environ["OMP_NUM_THREADS"] = "1"
# And threads that wait for one another sleep: where those of two test processes share two cores,
# who spins keeps off who is waited for, and such tests take twice the time.
os.environ["OMP_WAIT_POLICY"] = "passive"
# What `run` keeps of a model's routing must not end up in the cache of who runs the suite.
_CACHE = tempfile.TemporaryDirectory(prefix="moe-runtime-tests-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(_CACHE.name, "torchinductor")
# Importing files leaves no garbage to look for; `pytest_collection_finish` enables this again.
gc.disable()
# Set by CI for the tools it calls; the scripts in benchmarks/, which some tests start, import their
# neighbours.
os.environ.pop("PYTHONSAFEPATH", None)
# Where no bytecode is kept, every process of the suite, and every program that a test starts,
# compiles this project and its tests anew: that takes as long as most of the tests do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A suite that a shell runs in the background ignores Ctrl-C, and so would the programs that tests
# start to interrupt them: what is ignored stays ignored in them, what is handled does not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Without a GPU the Triton kernels run in Triton's interpreter, on CPU tensors. Triton looks at this
# when it is imported, which settings of a folder may do.
if not _has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"


# What else chooses by the processor, so that a forced instruction set stands for a machine that has
# no better one: torch's own kernels, and the products of MKL and oneDNN that it calls.
_OTHER_LIBRARIES = {
    "avx512bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "portable": ("default", "SSE4_2", "SSE41"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--isa",
        help="instruction set of the native kernels, torch and MKL (avx512bf16, avx512, avx2 or "
        "portable), of the native kernels alone (amx), or none: as if there were no native library",
    )


def _force_isa(isa: str) -> None:
    """Before anything imports torch; child processes inherit all of it."""
    folder = Path(__file__).parent / "support" / "forced_isa"
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    os.environ.update(zip(names, _OTHER_LIBRARIES.get(isa, ()), strict=False))
    os.environ["MOE_SUITE_ISA"] = isa
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    # Not by its name, under which this Python may have imported another file as it started.
    spec = importlib.util.spec_from_file_location("forced_isa", folder / "sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    from moe_runtime.kernels.native import describe

    if isa not in (*describe().isas, "none"):
        raise pytest.UsageError(f"--isa: expected one of {describe().isas} or none, got {isa!r}")


def pytest_configure(config: pytest.Config) -> None:
    """Settings that must be there before the first test file is imported."""
    hypothesis.settings.register_profile(
        "suite",
        deadline=None,
        derandomize="CI" in os.environ and config.getoption("--hypothesis-seed") is None,
        print_blob=True,
        # The first is a clock. The second is about fixtures that examples change; the folders and
        # models that properties here take from fixtures are read, or written anew, by each example.
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,
        ],
    )
    hypothesis.settings.load_profile("suite")
    if config.getoption("--isa") is not None:
        _force_isa(config.getoption("--isa"))
    if hasattr(config, "workerinput"):
        _rewrite_a_share(config)
    else:
        from warm_python import warm_python_server

        resources = contextlib.ExitStack()
        resources.enter_context(warm_python_server())
        config.add_cleanup(resources.close)


def _rewrite_a_share(config: Any) -> None:
    """Rewrite asserts of some test files, as pytest does: it finds there what another worker kept.

    In a new checkout each worker would rewrite all of them, which takes it twelve seconds.
    """
    from _pytest.assertion import rewrite

    state = config.stash.get(rewrite.assertstate_key, None)
    place, count = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[place::count]:
        kept = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
        if state is None or rewrite._read_pyc(path, kept) or not rewrite.try_makedirs(kept.parent):
            continue
        stamp, code = rewrite._rewrite_test(path, config)
        rewrite._write_pyc(state, code, stamp, kept)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run on this machine, and begin with the slow tests."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    absent = [item for item in items if _lacks_gpu(item) or _lacks_isa(item)]
    if absent:
        left_out = set(absent)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=absent)


def _lacks_gpu(item: pytest.Item) -> bool:
    return item.get_closest_marker("gpu") is not None and not _has_cuda()


def _lacks_isa(item: pytest.Item) -> bool:
    """Whether a test of one instruction set is for another processor or build."""
    if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
        return False
    isa = item.callspec.params.get("isa")
    return isa in _OTHER_LIBRARIES.keys() | {"amx"} and isa not in _isas()


@functools.cache
def _isas() -> tuple[str, ...]:
    from moe_runtime.kernels.native import describe

    return tuple(describe().isas)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from walking, again and again, through what lives till the end."""
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Start every test from the same random state and threads, whatever ran before it."""
    random.seed(0)
    # Tests of the light rooms must not pay for importing these.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    torch, num_threads = sys.modules.get("torch"), None
    if torch is not None:
        # torch.manual_seed formats the stack for each kind of device that is not there
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_available():
            torch.cuda.manual_seed_all(0)
        num_threads = torch.get_num_threads()
    yield
    if torch is not None and torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
