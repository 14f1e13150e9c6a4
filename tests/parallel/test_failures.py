"""A rank that dies, stalls or runs something else: the others end in time and name it."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from parallel_failures import (
    PATIENCE_S,
    TIMEOUT_S,
    dispatch_with,
    train_until_failure,
    wait_beside_the_dead,
    wait_for_the_stalled,
)
from rank_pool import RankPool


@pytest.fixture
def pool() -> Iterator[RankPool]:
    pool = RankPool(3)
    yield pool
    pool.close()


def strike(pool: RankPool, folder: Path, seed: int, number: int, *settings: float) -> int:
    """Sends a signal to a rank that trains: in forward passes, backward passes and sums of
    gradients, with chunks and panels. Returns the rank."""
    draw = random.Random(seed)
    victim = draw.randrange(3)
    shape = draw.choice([1, 2, 4]), draw.choice([1, 2])
    pool.start(train_until_failure, *shape, str(folder), *settings)
    # torch handles failures while a group is being made.
    while len(list(folder.iterdir())) < pool.size:
        time.sleep(0.01)
    time.sleep(draw.uniform(0.0, 0.3))
    pid = pool.processes[victim].pid
    assert pid is not None
    os.kill(pid, number)
    return victim


@pytest.mark.parametrize("seed", range(2))
def test_a_rank_killed_at_any_moment_is_named(seed, pool, tmp_path):
    victim = strike(pool, tmp_path, seed, signal.SIGKILL)
    results = pool.collect()
    assert results[victim] == (False, f"rank {victim} ended")
    for rank in {0, 1, 2} - {victim}:
        is_ok, outcome = results[rank]
        assert is_ok, outcome
        message, ranks, seconds = outcome
        assert ranks == (victim,), message
        assert message.startswith(f"rank {victim} of 3 has ended")
        # A death is seen, not waited for.
        assert seconds < PATIENCE_S / 2


def test_who_waits_names_who_is_at_fault():
    """Each waits for a time limit, so they wait at once: for rows of a rank that stalls, behind a
    rank that waits for a dead one, and at another step of the group, and in another group."""
    works = [(dispatch_with, "stall", 2), (wait_beside_the_dead, 2, PATIENCE_S)]
    pools = [RankPool(3), RankPool(3), RankPool(4)]
    try:
        for pool, work in zip(pools, [*works, (wait_for_the_stalled,)], strict=True):
            pool.start(*work)
        stalled, dead, elsewhere = (pool.collect() for pool in pools)
        pid = pools[2].processes[3].pid
    finally:
        for pool in pools:
            pool.close()
    late = f"did not arrive within {TIMEOUT_S:g} s"
    for results, said in ((stalled, late), (dead, "has ended")):
        for is_ok, (message, ranks, seconds) in results[:2]:
            assert is_ok
            assert ranks == (2,)
            assert message.startswith(f"rank 2 of 3 {said}")
            assert seconds < PATIENCE_S / 2
    # Ranks of the group of 1, 2 and 3; the pair of 0 and 1 has no number for the culprit.
    assert all(is_ok for is_ok, _ in elsewhere), elsewhere
    assert [ranks for _, (_, ranks, _) in elsewhere] == [(), (2,), (2,), ()]
    messages = [message for _, (message, _, _) in elsewhere]
    assert f":{pid} (host and number) of another group did not arrive" in messages[0]
    assert all(message.startswith(f"rank 2 of 3 {late}") for message in messages[1:3])


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_a_rank_stopped_at_any_moment_is_named_alone(seed, pool, tmp_path):
    victim = strike(pool, tmp_path, seed, signal.SIGSTOP, TIMEOUT_S)
    for rank in {0, 1, 2} - {victim}:
        is_ok, outcome = pool.collect_of(rank)
        assert is_ok, outcome
        message, ranks, _ = outcome
        assert ranks == (victim,), message
        assert message.startswith(f"rank {victim} of 3 did not arrive within {TIMEOUT_S:g} s")


DIFFERENCES = {
    "width": "the width of the rows: rank 1 has 8, rank 0 has 4",
    "version": "the dispatch protocol: rank 1 has 5, rank 0 has 4",
    # Their messages would not even have the same length.
    "placement": "the number of slots of a rank: rank 1 has 4, rank 0 has 2",
}


@pytest.mark.parametrize(("what", "message"), DIFFERENCES.items(), ids=DIFFERENCES.keys())
def test_ranks_that_differ_are_told_in_what(what, message, pool):
    results = pool.run(dispatch_with, what, 1)
    assert results[0][1] == results[2][1] == (1,)
    assert f"disagree about {message}" in results[0][0]
    assert results[1][1] == (0, 2)
