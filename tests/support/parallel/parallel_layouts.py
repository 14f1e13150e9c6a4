"""All layouts of a number of ranks."""

from collections.abc import Iterator, Sequence
from itertools import combinations

from moe_runtime.parallel import ParallelLayout

_SIZES = ("tp", "cp", "pp", "etp", "ep")


def legal_layouts(world_size: int) -> Iterator[ParallelLayout]:
    """Every layout of a number of ranks."""
    for pp in _divisors(world_size):
        stage = world_size // pp
        for tp in _divisors(stage):
            for cp in _divisors(stage // tp):
                for etp in _divisors(stage):
                    for ep in _divisors(stage // etp):
                        yield ParallelLayout(
                            world_size=world_size, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep
                        )


def with_every_pair(layouts: Sequence[ParallelLayout]) -> list[ParallelLayout]:
    """Some of the layouts, in which any two sizes occur together that do so in one of all."""
    pairs = {
        layout: set(combinations([(name, getattr(layout, name)) for name in _SIZES], 2))
        for layout in layouts
    }
    missing, found = set().union(*pairs.values()), []
    while missing:
        found.append(max(pairs, key=lambda layout: len(pairs[layout] & missing)))
        missing -= pairs[found[-1]]
    return found


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
