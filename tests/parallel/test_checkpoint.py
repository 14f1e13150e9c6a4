"""Experts saved by logical number under one placement are found under any other."""

from collections.abc import Callable
from pathlib import Path

from parallel_checkpoint import load, save
from rank_pool import RankPool


def test_resumes_on_other_ranks_with_other_replicas(
    tmp_path: Path, ranks: Callable[[int], RankPool]
) -> None:
    path = str(tmp_path)
    ranks(2).run(save, path, [[0, 2, 3], [1, 0]], 5)
    assert ranks(4).run(load, path, [[3], [1, 0], [], [2, 0]], 5) == [True] * 4
