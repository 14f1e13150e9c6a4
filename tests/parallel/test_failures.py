"""A rank that dies, stalls or runs something else: the others end in time and name it."""

from collections.abc import Iterator

import pytest
from parallel_failures import TIMEOUT_S, dispatch_with
from rank_pool import RankPool


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


def test_a_rank_that_dies_is_named_at_once(pool: RankPool) -> None:
    results = pool.try_run(dispatch_with, "die", 1)
    assert results[1] == (False, "rank 1 ended")
    for rank in (0, 2):
        is_ok, (message, ranks, seconds) = results[rank]
        assert is_ok
        assert ranks == (1,)
        assert message.startswith("rank 1 of 3 has ended")
        assert seconds < TIMEOUT_S


def test_a_rank_that_stalls_is_named_in_time(pool: RankPool) -> None:
    results = pool.try_run(dispatch_with, "stall", 2, 2 * TIMEOUT_S)
    for rank in (0, 1):
        is_ok, (message, ranks, seconds) = results[rank]
        assert is_ok
        assert ranks == (2,)
        assert "rank 2 of 3 did not arrive within 2 s" in message
        # The rest of a second is for a machine that is busy with other things.
        assert seconds < TIMEOUT_S + 1


def test_ranks_that_differ_are_told_in_what(pool: RankPool) -> None:
    results = pool.run(dispatch_with, "width", 1)
    assert results[0][1] == results[2][1] == (1,)
    assert "disagree about the width of the rows: rank 1 has 8, rank 0 has 4" in results[0][0]
    assert results[1][1] == (0, 2)
