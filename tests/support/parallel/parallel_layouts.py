"""All layouts of a number of ranks."""

from collections.abc import Iterator

from moe_runtime.parallel import ParallelLayout


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


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
