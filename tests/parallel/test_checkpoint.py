"""Experts saved by logical number under one layout are found under any other."""

from collections.abc import Callable

from parallel_checkpoint import load, save
from rank_pool import RankPool

Ranks = Callable[[int], RankPool]


def test_resumes_on_other_ranks_with_other_replicas(tmp_path, ranks):
    path = str(tmp_path)
    ranks(2).run(save, path, [[0, 2, 3], [1, 0]], 5)
    assert ranks(4).run(load, path, [[3], [1, 0], [], [2, 0]], 5) == [True] * 4


def test_slices_are_found_in_other_slices(tmp_path, ranks):
    """Two slices of each expert, then four, then whole ones with copies."""
    path = str(tmp_path / "halves")
    ranks(2).run(save, path, 2, 5)
    assert ranks(4).run(load, path, 4, 5) == [True] * 4
    assert ranks(4).run(load, path, [[3], [1, 0], [], [2, 0]], 5) == [True] * 4
    path = str(tmp_path / "quarters")
    ranks(4).run(save, path, 4, 6)
    assert ranks(4).run(load, path, 2, 6) == [True] * 4
    assert ranks(2).run(load, path, [[0, 1], [2, 3]], 6) == [True] * 2
