"""Imports of `load` and `moe-runtime run`: only the rooms that they need."""

import json
import subprocess
from pathlib import Path

import pytest
from warm_python import warm_python

import moe_runtime.models.pocket

POCKET = str(Path(moe_runtime.models.pocket.__file__).parent)
# The warm interpreter has imported torch and transformers, and this project, which is forgotten.
FORGET = """
import sys
for name in [name for name in sys.modules if name.split(".")[0] == "moe_runtime"]:
    del sys.modules[name]
"""
REPORT = """
import json, sys
print("\\n" + json.dumps([name for name in sys.modules if name.split(".")[0] == "moe_runtime"]))
"""
# Rooms that a model in one process without a device has nothing to do with.
FOREIGN = {"layer", "parallel", "research", "routing", "serving", "training"}


def imported(*parts: str) -> list[list[str]]:
    """The modules of this project that are imported after each part of some code has run, one part
    after another in one process."""
    code = FORGET + "".join(part + REPORT for part in parts)
    command = [warm_python(), "-P", "-c", code, POCKET]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in printed.splitlines() if line.startswith('["moe_runtime')]


def room(name: str) -> str:
    return name.split(".")[1] if "." in name else name


LOAD = """
import sys, torch, moe_runtime
model = moe_runtime.load(sys.argv[1], host_memory="28MiB", max_tokens=64)
model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4)
"""
RUN = """
from moe_runtime.cli.main import main
words = ["--prompt", "The", "--max-new-tokens", "2", "--host-memory", "28MiB"]
assert main(["run", sys.argv[1], *words]) == 0
"""


@pytest.fixture(scope="module")
def loaded_and_run() -> list[list[str]]:
    """After `load`, and after the command, which needs more."""
    found = imported(LOAD, RUN)
    assert len(found) == 2
    return found


@pytest.fixture
def loaded(loaded_and_run: list[list[str]]) -> list[str]:
    return loaded_and_run[0]


def test_a_loaded_model_needs_nothing_of_rooms_for_other_purposes(loaded):
    assert {name for name in loaded if room(name) in {*FOREIGN, "lab", "cli"}} == set()


def test_of_policies_and_predictors_only_those_asked_for_are_imported(loaded):
    assert "moe_runtime.policies.eviction.learned" not in loaded
    predictors = {name for name in loaded if name.startswith("moe_runtime.policies.prediction.")}
    assert predictors == {"moe_runtime.policies.prediction.base"}


def test_the_command_run_needs_nothing_of_training_or_of_simulated_machines(loaded_and_run):
    found = loaded_and_run[1]
    assert "moe_runtime.inference.generation" in found
    assert {name for name in found if room(name) in FOREIGN} == set()
    labs = {".".join(name.split(".")[:3]) for name in found if room(name) == "lab"}
    # `policy=auto` replays the latest routing, which lies in a trace
    assert labs <= {"moe_runtime.lab", "moe_runtime.lab.traces", "moe_runtime.lab.replay"}


def test_a_table_of_names_imports_what_is_asked_for_and_refuses_other_names():
    (found,) = imported("""
import sys
from moe_runtime.policies.prediction import PREDICTORS
assert "eam" in PREDICTORS and len(PREDICTORS) == len(list(PREDICTORS))
assert PREDICTORS["popularity"].name == "popularity"
assert "nonsense" not in PREDICTORS and PREDICTORS.get("nonsense") is None
try:
    from moe_runtime.policies.prediction import Nonsense
except ImportError as error:
    assert "Nonsense" in str(error)
else:
    raise AssertionError("imported a name that nothing has")
""")
    assert "moe_runtime.policies.prediction.estimator" in found
    assert "moe_runtime.policies.prediction.matched" not in found
