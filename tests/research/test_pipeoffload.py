"""PipeOffload: which micro-batches leave, and files that are gone afterwards."""

from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import nn
from training_runs import CONFIG, error_of, write_run

from moe_runtime.lab.simulate.pipeline import timeline
from moe_runtime.models.lm.parallel import Stage
from moe_runtime.research import pipeoffload
from moe_runtime.research.pipeoffload import StageOffload, chosen, waits_of
from moe_runtime.training.run_config import ParallelConfig


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [4, 9])
def test_waits_are_passes_in_between(stages, micro_batches):
    """As a timeline has them; the last stage goes back at once."""
    times = timeline(stages, micro_batches, forward_s=1.0, backward_s=2.0)
    for stage, one in enumerate(times):
        begins = [begin for begin, _ in (*one.forward, *one.backward)]
        expected = [
            sum(begun[1] <= at < back[0] for at in begins)
            for begun, back in zip(one.forward, one.backward, strict=True)
        ]
        assert waits_of(stage, stages, micro_batches, "1f1b") == expected
    assert not any(expected)
    assert waits_of(0, stages, micro_batches, "gpipe") == [micro_batches - 1] * micro_batches


def test_the_longest_waits_are_chosen():
    waits = [1, 3, 5, 5, 5, 5, 3, 1, 0]
    for share in (0.0, 0.12, 0.3, 0.5, 0.8, 1.0):
        found = chosen(waits, share)
        number = min(int(share * len(waits)), 8)
        best = max(combinations(waits, number), key=sum)
        assert sorted(waits[n] for n in found) == sorted(best)
    assert chosen([2] * 9, 0.34) == {0, 3, 6}


def test_activations_return_with_their_bits(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeoffload, "SMALLEST_BYTES", 1)
    torch.manual_seed(0)
    module: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module.stage = Stage(0, 2)  # pyright: ignore[reportAttributeAccessIssue]
    x = torch.randn(5, 8)
    module(x).sum().backward()
    expected = [p.grad for p in module.parameters()]
    offload = StageOffload(
        tmp_path / "new",
        module,
        4,
        ParallelConfig(pp=2, offload=0.5),  # pyright: ignore[reportArgumentType]
    )
    assert [*tmp_path.iterdir()] == []
    moved = []
    for _ in range(4):
        module.zero_grad()
        with offload.saving():
            loss = module(x).sum()
        moved.append(offload.moved_bytes)
        loss.backward()
        assert all(
            torch.equal(p.grad, e) for p, e in zip(module.parameters(), expected, strict=True)
        )
    with torch.no_grad(), offload.saving():
        module(x)
    # the two that wait longest: the inputs of both products, and what tanh gave
    assert moved == [0, 480, 960, 960]
    offload.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["offload=0.5"], "offload is for a pipeline: give pp above 1"),
        (["offload=2", "pp=2"], "offload must lie in [0, 1], got 2"),
        (["offload=0.5", "pp=2", "schedule=zbv"], "the schedule 1f1b or gpipe"),
        (["offload=0.5", "pp=2", "zero=1"], "leave tp and zero out"),
        (["offload=0.5", "pp=2"], "run.recompute keeps no activations"),
    ],
)
def test_what_cannot_be_offloaded_is_refused(settings, message, tmp_path, capsys):
    path: Path = write_run(tmp_path, config=CONFIG)
    words = [part for one in settings for part in ("--set", f"parallel.{one}")]
    recompute = ("--set", "run.recompute=true") if "recompute" in message else ()
    assert message in error_of(capsys, path, *words, *recompute)
