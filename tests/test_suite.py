"""What the suite promises of itself: no test depends on a clock."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from warm_python import warm_python

from moe_runtime.kernels.native import describe
from moe_runtime.policies.eviction.compiled import is_available

TESTS = Path(__file__).parent
LOOK = """
import torch
from moe_runtime.kernels.native import describe
from moe_runtime.policies.eviction.compiled import is_available
print()
print("found", describe().isa, is_available(), torch.backends.cpu.get_cpu_capability(), flush=True)
"""
LOOK_IN_A_CHILD = f"""
import subprocess, sys
subprocess.run([sys.executable, "-P", "-c", {LOOK!r}], check=True)
"""


def test_no_example_of_a_property_is_timed():
    assert settings.default is not None
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
    # Set once, in conftest.py: what a test sets for itself is forgotten in the next one.
    own = [
        path.relative_to(TESTS)
        for path in TESTS.rglob("test_*.py")
        if path != Path(__file__)
        and any(word in path.read_text() for word in ("deadline=", "suppress_health_check"))
    ]
    assert own == []


@pytest.mark.long  # the suite's own option, which make test-isa uses
@pytest.mark.parametrize("isa", ["avx2", "none"])
def test_an_instruction_set_is_forced_from_the_start(isa, tmp_path):
    """In the tests and in the programs that they start; torch's own kernels follow."""
    if isa not in (*describe().isas, "none"):
        pytest.skip(f"this machine or this build has no {isa}")
    # A conftest file of a folder that pytest is given comes before its options are known.
    (tmp_path / "early.py").write_text("import moe_runtime.kernels.native\n")
    test = tmp_path / "test_look.py"
    test.write_text(f"def test_look():\n    exec({LOOK!r})\n    exec({LOOK_IN_A_CHILD!r})\n")
    command = [sys.executable, "-P", "-m", "pytest", "-sq", "-p", "no:cacheprovider"]
    command += ["--confcutdir", "/", "-c", str(TESTS.parent / "pyproject.toml")]
    command += ["--isa", isa, "-p", "early", "-p", "conftest", str(test)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(tmp_path)])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    name = "None" if isa == "none" else isa
    torch_name = "AVX2" if isa == "avx2" else ""
    seen = [line.split() for line in done.stdout.splitlines() if line.startswith("found ")]
    assert len(seen) == 2, done.stdout + done.stderr
    for _, found, is_compiled, capability in seen:
        assert found == name
        assert is_compiled == str(isa != "none" and is_available())
        assert capability.startswith(torch_name)


SEEN = """
import atexit, os, sys, threading
print(sys.argv, os.getcwd(), os.environ["A"], sys.stdin.read(), __name__, threading.active_count())
print("said", file=sys.stderr)
atexit.register(print, "last")
sys.exit(3)
"""


@pytest.mark.parametrize(
    "code",
    [SEEN, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    ids=["ends", "killed"],
)
def test_a_program_that_is_forked_is_as_one_that_is_started(code, tmp_path):
    real, forked = (
        subprocess.run(
            [python, "-P", "-c", code, "word"],
            input="in",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "A": "value"},
            check=False,
        )
        for python in (sys.executable, warm_python())
    )
    found, wanted = ((one.returncode, one.stdout, one.stderr) for one in (forked, real))
    assert found == wanted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_a_program_that_is_forked_ends_it(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = [warm_python(), "-P", "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=subprocess.DEVNULL) as program:
        assert program.stdout is not None
        here = int(program.stdout.readline())
        program.send_signal(number)
        assert program.stdout.read() == b""  # until nobody holds it any more
        assert program.wait() == -number
    assert here != program.pid
