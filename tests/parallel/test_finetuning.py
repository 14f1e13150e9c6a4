"""`finetune` in several processes: what one process trains and leaves."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from finetuning_runs import GPT_OSS, MIXTRAL, checkpoint_of, config_of, finetuned
from parallel_runs import draws_of_adapters, finetuned_together
from rank_pool import RankPool
from safetensors.torch import load_file

from moe_runtime.training.finetune.finetune_run import prepare

LORA = {"lora": {"rank": 2}, "merge": True}


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(run.glob("model/*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [(GPT_OSS, {}), (MIXTRAL, LORA)],
    ids=["whole experts, transposed, with biases", "adapters"],
)
def test_two_processes_train_and_leave_what_one_does(
    family, changes, tmp_path: Path, ranks: Callable[[int], RankPool]
):
    """Experts divided, or adapters alike; fp32 in another order of sums."""
    model = checkpoint_of(family, tmp_path / "first")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone, _ = finetuned(config_of(model, tmp_path / "one", export_dtype="float32", **changes))
    found = ranks(2).run(finetuned_together, str(model), str(tmp_path / "two"), changes)
    assert found[0] == found[1] == pytest.approx(alone, rel=1e-5)
    expected, left = (weights_of(tmp_path / name / "run") for name in ("one", "two"))
    assert left.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(left[name], weight, rtol=1e-3, atol=2e-5)
    held = [*(tmp_path / "two" / "run" / "experts").glob("*.records")]
    assert not held, "what was brought together for the export is removed"
    if not changes:
        place = tmp_path / "one"
        assert ranks(2).run(finetuned_together, str(model), str(place), changes, True) == [[], []]
        held = [*(place / "run" / "experts").glob("*.records")]
        assert held, "what one process wrote, and the checkpoint names, stays"
        for name, weight in weights_of(place / "run").items():
            assert bool((weight == expected[name]).all())


def test_processes_begin_alike_and_drop_out_apart(tmp_path, ranks):
    """The first one as a process alone does; and goes on with what it would have dropped."""
    model = str(checkpoint_of(MIXTRAL, tmp_path / "first"))
    for name in ("one", "two", "three"):
        (tmp_path / name).mkdir()
    whole = ranks(2).run(draws_of_adapters, model, str(tmp_path / "two"), 3)
    alone, _ = draws_of_adapters(model, str(tmp_path / "one"), 1)
    assert alone == whole[0][0] == whole[1][0]
    assert whole[0][1][0] != whole[1][1][0]
    begun = ranks(2).run(draws_of_adapters, model, str(tmp_path / "three"), 1)
    rest = ranks(2).run(draws_of_adapters, model, str(tmp_path / "three"), 3, True)
    for (_, draws), (_, one), (_, two) in zip(whole, begun, rest, strict=True):
        assert one + two == draws


@pytest.mark.parametrize(
    ("size", "changes", "reason"),
    [
        (3, {}, r"micro_batches \(2\) must be a multiple of the 3 processes.*; give 3"),
        (2, {"run": {"trace": "trace.npz"}}, "--trace records a run of one process"),
    ],
    ids=["parts", "trace"],
)
def test_what_processes_cannot_share_is_refused(size, changes, reason, tmp_path):
    several: Any = SimpleNamespace(size=size)
    with pytest.raises(ValueError, match=reason):
        prepare(config_of(tmp_path, tmp_path, **changes), ranks=several)
