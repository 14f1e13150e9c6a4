"""A checkpoint of two layers, and Triton's interpreter where there is no GPU."""

from pathlib import Path

import pytest
import torch
from fetched_models import MOST_REFUSED
from moe_families import Family
from tiny_checkpoints import save, tiny_model
from triton_interpreter import repair_interpreter

from moe_runtime.inference.device import decode_graphs

FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", {"num_hidden_layers": 2})


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    if not torch.cuda.is_available():
        repair_interpreter()


@pytest.fixture(autouse=True)
def _few_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "MOST_REFUSED", MOST_REFUSED)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of random weights, each expert apart."""
    return save(tiny_model(FAMILY), tmp_path_factory.mktemp("family"), sharded=True)
