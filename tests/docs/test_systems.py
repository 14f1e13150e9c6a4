"""Files, options, keys and names on the page of systems exist."""

import importlib
import json
import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pictures
import pytest
from command_lines import require_sound

from moe_runtime.policies.eviction import LIVE_POLICIES, POLICIES
from moe_runtime.policies.placement.algorithms import check_algorithm
from moe_runtime.policies.prediction import PREDICTORS
from moe_runtime.research.placement_solvers import ALGORITHMS
from moe_runtime.routing import GATES
from moe_runtime.training.run_config import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "systems.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| system ")
]
CODE = re.compile(r"`([^`]+)`")


def name_of(path: str) -> Any:
    """What a dotted name in the text stands for."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def require_key(path: str) -> None:
    """Refuses a key that a training configuration has not."""
    kind: Any = TrainConfig
    for word in path.split("."):
        assert is_dataclass(kind), path
        assert word in {field.name for field in fields(kind)}, path
        kind = get_type_hints(kind)[word]
        kind = next((part for part in get_args(kind) if is_dataclass(part)), kind)


def test_every_row_says_all():
    assert len(ROWS) > 30
    for row in ROWS:
        assert len(row) == 5, row
        assert all(row), row
        assert "](" in row[1], f"{row[0]}: no file"


def test_what_switches_a_system_on_exists():
    for row in ROWS:
        require_switches(row)


def require_switches(row: list[str]) -> None:
    switches = CODE.findall(row[2])
    command = next((text for text in switches if text.startswith("moe-runtime ")), "")
    for text in switches:
        if text.startswith("moe-runtime "):
            require_sound(text.removeprefix("moe-runtime "))
        elif text.startswith("--"):
            require_sound(f"{command.removeprefix('moe-runtime ')} {text}")
        elif text.startswith("moe_runtime."):
            name_of(text)
        elif text.startswith(("run.", "model.", "research.", "parallel.")):
            require_key(text)
        else:
            assert text in GATES or text in {
                "panels",
                "update_stride",
                "parallel",
                "host_bytes_per_s",
            }, text
    for option, value in re.findall(r"--(policy|predictor|algorithm) ([\w-]+)", row[2]):
        if option == "algorithm":
            check_algorithm(value, ALGORITHMS)
        else:
            policies = POLICIES if command.startswith("moe-runtime replay") else LIVE_POLICIES
            assert value in (policies if option == "policy" else PREDICTORS), value


def test_what_was_measured_is_a_results_file():
    for row in ROWS:
        named = [text for text in CODE.findall(row[3]) if text.endswith(".json")]
        assert named or row[3].startswith("tests only"), row
        for name in named:
            assert json.loads((ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8"))


def test_wrong_keys_are_found():
    require_key("run.offload.moments")
    with pytest.raises(AssertionError):
        require_key("run.offload.momentum")


def test_the_comparison_names_results_files():
    text = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    named = [name for name in CODE.findall(text) if name.endswith(".json")]
    assert len(named) > 8
    assert all((ROOT / "benchmarks" / "results" / name).is_file() for name in named)


def test_pictures_are_up_to_date():
    for name, text in pictures.drawn().items():
        assert (pictures.FOLDER / name).read_text(encoding="utf-8") == text, "run pictures.py"
