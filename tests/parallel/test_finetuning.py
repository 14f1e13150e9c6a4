"""`finetune` in several processes: what one process trains and leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from finetuning_runs import GPT_OSS, MIXTRAL, checkpoint_of, config_of, finetuned
from parallel_runs import finetuned_together
from rank_pool import RankPool
from safetensors.torch import load_file

LORA = {"lora": {"rank": 2}, "merge": True}


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(run.glob("model/*.safetensors")):
        found |= load_file(file)
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [(MIXTRAL, {}), (GPT_OSS, {}), (MIXTRAL, LORA)],
    ids=["whole experts", "transposed, with biases", "adapters"],
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


def test_parts_that_processes_cannot_share_are_refused(tmp_path, ranks):
    model = checkpoint_of(MIXTRAL, tmp_path / "first")
    data = {"context": 16, "tokens_per_step": 64, "micro_batches": 1}
    changes = {"data": {"sources": {"text": {"files": ["text.txt"]}}, **data}}
    with pytest.raises(AssertionError, match=r"micro_batches \(1\) must be a multiple of the 2"):
        ranks(2).run(finetuned_together, str(model), str(tmp_path), changes)
