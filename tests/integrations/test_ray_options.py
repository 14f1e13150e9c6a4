"""`moe-runtime generate --ray`: what reaches Ray, what is refused; without the package ray."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from moe_runtime.cli.main import main
from moe_runtime.serving.batches import batch_run


@pytest.fixture
def words(tmp_path, monkeypatch) -> list[str]:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('"The for statement"\n')
    return ["generate", "models/pocket", "--prompts", str(prompts), "-o", str(tmp_path / "out")]


def test_options_arrive(words, monkeypatch):
    told: list[Any] = []

    def run_batch(*_: Any, answer: Any, **__: Any) -> Any:
        told.append(answer)
        raise KeyboardInterrupt

    module = SimpleNamespace(answer_on_ray=lambda *given: given[:2])
    monkeypatch.setitem(sys.modules, "moe_runtime.integrations.ray", module)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(batch_run, "run_batch", run_batch)
    main([*words, "--ray", "head:6379", "--ray-engines", "3"])
    main([*words, "--ray", "auto"])
    main(words)
    assert told == [("head:6379", 3), ("auto", None), None]


def test_what_is_refused(words, monkeypatch, capsys):
    assert main([*words, "--ray-engines", "2"]) == 2
    assert "--ray-engines is for a cluster: give --ray ADDRESS too" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([*words, "--ray", "auto"]) == 2
    assert "pip install 'moe-runtime[ray]'" in capsys.readouterr().err
