"""A transformers model over two ranks equals the same model in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from moe_families import FAMILIES
from parallel_transformers import outputs
from rank_pool import RankPool
from tiny_checkpoints import save, tiny_model

from moe_runtime.engine.expert_parallel import register_expert_parallelism
from moe_runtime.errors import UnsupportedModelError


def has_interface() -> bool:
    try:
        from transformers.distributed.expert_parallel import EPImplementation  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.skipif(not has_interface(), reason="transformers before 5.23")
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_two_ranks_equal_one_process(
    name: str, tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    family = next(family for family in FAMILIES if family.folder == name)
    path = str(save(tiny_model(family), tmp_path, sharded=False))
    logits, tokens, gradient = outputs(path, False)
    for theirs in ranks(2).run(outputs, path, True):
        # fp64, summed in another order.
        torch.testing.assert_close(theirs[0], logits, rtol=1e-9, atol=1e-12)
        assert torch.equal(theirs[1], tokens)
        torch.testing.assert_close(theirs[2], gradient, rtol=1e-9, atol=1e-12)


def test_older_transformers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    with pytest.raises(UnsupportedModelError, match=r"5\.23 or newer can"):
        register_expert_parallelism()
