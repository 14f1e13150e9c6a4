"""Groups of processes, started once for all tests of a file."""

from collections.abc import Callable, Iterator

import pytest
from rank_pool import RankPool


@pytest.fixture(scope="module")
def _pools() -> Iterator[dict[int, RankPool]]:
    """No longer: threads of the many groups that tests of layouts leave behind ask for work a
    hundred times a second, a third of a core for the rest of the session."""
    pools: dict[int, RankPool] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(_pools: dict[int, RankPool]) -> Callable[[int], RankPool]:
    """`ranks(n)`: a pool of `n` processes; a new one if a failed test broke the last."""

    def get(size: int) -> RankPool:
        if size not in _pools or not _pools[size].is_usable:
            _pools[size] = RankPool(size)
        return _pools[size]

    return get
