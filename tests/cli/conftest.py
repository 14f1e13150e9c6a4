"""A checkpoint on disk, and a stand-in for `moe_runtime.load` where it is not the subject."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_runtime.cli.main import main
from moe_runtime.types import RuntimeStats

STATS = RuntimeStats(
    hits=90,
    late_hits=4,
    misses=6,
    stall_s=0.25,
    bytes_read=3 * 2**20,
    readahead_bytes=2**20,
    expert_slots=12,
    slot_bytes=2**18,
    budget_bytes=2**30,
    dense_bytes=2**20,
    expert_bytes=6 * 2**20,
    baseline_rss_bytes=2**28,
    peak_rss_bytes=2**29,
    load_s=0.5,
)


@dataclass
class FakeRuntime:
    """What a loaded model carries as ``moe``."""

    closed: bool = False

    def stats(self) -> RuntimeStats:
        assert not self.closed
        return STATS

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeLoad:
    """Loads with transformers alone, and remembers how it was called."""

    options: dict[str, Any] = field(default_factory=dict)
    runtime: FakeRuntime = field(default_factory=FakeRuntime)
    model: Any = None
    error: BaseException | None = None

    def __call__(self, path: str, **options: Any) -> Any:
        self.options = {"path": path, **options}
        if self.error is not None:
            raise self.error
        from transformers import AutoModelForCausalLM

        options["progress"]("reading", 1, 2)
        self.model = AutoModelForCausalLM.from_pretrained(path)
        self.runtime = self.model.moe = FakeRuntime()
        return self.model


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint with a tokenizer."""
    from text_checkpoint import save_text_checkpoint

    folder = tmp_path_factory.mktemp("checkpoint")
    save_text_checkpoint(folder)
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line with which a command refuses its words."""

    def refused(*words: str) -> str:
        assert main([*words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("moe-runtime: error: ")
        assert err.count("\n") == 1
        assert err.rstrip("\n").isprintable()
        return err

    return refused


@pytest.fixture
def fake_load(monkeypatch: pytest.MonkeyPatch) -> FakeLoad:
    """Replaces ``moe_runtime.load``."""
    import moe_runtime

    fake = FakeLoad()
    # Not setattr, which would first resolve the lazy name and import the whole engine.
    monkeypatch.setitem(vars(moe_runtime), "load", fake)
    return fake
