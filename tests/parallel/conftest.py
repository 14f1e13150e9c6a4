"""Groups of processes, started once for all tests of a file."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of plain experts."""
    from text_checkpoint import tiny_text_model

    folder = tmp_path_factory.mktemp("shared")
    tiny_text_model(300).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint_in(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a quantised sample of that name, or a tiny model packed as planes."""
    import quantized_checkpoints
    from text_checkpoint import tiny_text_model

    from moe_runtime.checkpoints.packing import pack_checkpoint

    def write(kind: str) -> Path:
        if kind == "planes":
            tiny_text_model(300).bfloat16().save_pretrained(tmp_path / "plain")
            return pack_checkpoint(tmp_path / "plain", tmp_path / "packed").folder
        sample = next(s for s in quantized_checkpoints.SAMPLES if s.name == kind)
        family = replace(sample.family, config=sample.family.config | {"vocab_size": 300})
        return quantized_checkpoints.write(replace(sample, family=family), tmp_path).folder

    return write
