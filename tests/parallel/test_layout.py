"""Layouts: the laws of their groups, and training under each of them equals one process."""

from collections.abc import Iterator
from itertools import product
from math import prod
from pathlib import Path

import pytest
from parallel_language_model import compare_gradients, meshes, refused

from moe_runtime.parallel import ParallelLayout
from moe_runtime.training.run_config import ParallelConfig


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def legal_layouts(world_size: int) -> Iterator[ParallelLayout]:
    """Every layout of a number of ranks."""
    for pp in divisors(world_size):
        stage = world_size // pp
        for tp, etp in product(divisors(stage), repeat=2):
            for cp, ep in product(divisors(stage // tp), divisors(stage // etp)):
                yield ParallelLayout(world_size=world_size, tp=tp, cp=cp, pp=pp, etp=etp, ep=ep)


PLACED = {"placement": Path("p.json")}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"transport": "panels", "experts": "sparse", "copies": 2}, "transport panels needs"),
        ({"experts": "switching", "wire": "bf16"}, "send rows as they are, got the wire bf16"),
        ({"experts": "rebalanced", **PLACED}, "and rebalanced ones lie elsewhere from step"),
        ({"experts": "rebalanced", "etp": 2}, r"rebalanced are whole, etp \(2\) cuts them"),
        ({"etp": 2, **PLACED}, r"placement places whole experts, etp \(2\) cuts them"),
        ({"copies": 2}, "copies are for experts that are rebalanced or sparse, not static"),
        ({"experts": "sparse"}, "give copies, such as 2"),
    ],
)
def test_exchanges_that_do_not_go_together_are_refused(settings, expected):
    with pytest.raises(ValueError, match=expected):
        ParallelConfig(**settings)


@pytest.mark.parametrize("world_size", [1, 4, 6, 8])
def test_groups_partition_the_ranks(world_size):
    for layout in legal_layouts(world_size):
        for side in ("dense", "expert"):
            degrees = layout.degrees(side)
            assert prod(degrees.values()) == world_size
            for name, degree in degrees.items():
                groups = layout.groups(side, name)
                assert sorted(rank for group in groups for rank in group) == list(range(world_size))
                assert {len(group) for group in groups} == {degree}
                for group in groups:
                    places = [layout.coordinates(rank, side) for rank in group]
                    assert [place[name] for place in places] == list(range(degree))
                    assert len({tuple(p[o] for o in degrees if o != name) for p in places}) == 1
        assert layout.groups("dense", "pp") == layout.groups("expert", "pp")
        stages = world_size // layout.pp
        assert all(len(g) == stages for g in layout.groups("dense", "tp", "cp", "dp"))
        assert all(len(g) == layout.etp * layout.ep for g in layout.groups("expert", "etp", "ep"))


def test_ranks_of_megatrons_example():
    """TP 2, CP 2, DP 2 beside ETP 1, EP 8: attention and experts fold over the same 8 ranks."""
    layout = ParallelLayout(world_size=8, tp=2, cp=2, ep=8)
    assert (layout.dp, layout.edp, layout.loss_parts) == (2, 1, 4)
    assert layout.groups("dense", "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("dense", "cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("dense", "dp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("expert", "etp", "ep") == [list(range(8))]


def test_bad_input():
    for degrees, message in (
        ({"tp": 3}, r"tp \* cp \* pp = 3 \* 1 \* 1 = 3 does not divide the 8 ranks"),
        ({"etp": 2, "ep": 2, "edp": 4}, r"edp = 2 \* 2 \* 1 \* 4 = 16, but there are 8 ranks"),
        ({"ep": 0}, "ep must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            ParallelLayout(world_size=8, **degrees)
    with pytest.raises(ValueError, match="expert side has the dimensions etp, ep, edp, pp"):
        ParallelLayout(world_size=8).groups("expert", "tp")


def test_meshes_have_the_groups_of_the_layout(ranks):
    layout = ParallelLayout(world_size=4, tp=2, ep=4)
    found = ranks(4).run(meshes, layout)[3]
    assert found == [
        *[("pp", "dp", "cp", "tp"), [3], [1, 3], [3], [2, 3]],
        *[("pp", "edp", "ep", "etp"), [3], [3], [0, 1, 2, 3], [3]],
    ]


def test_layout_of_another_world(ranks):
    messages = ranks(2).run(refused, ParallelLayout(world_size=4))
    assert messages == ["the layout is of 4 ranks, but 2 run"] * 2


def test_the_language_model_under_layouts_of_two_ranks(ranks):
    """Loss, norm and every gradient, in fp64: every way to divide the dense part and the experts.
    Every second is sharded; of the stages one has tied ends."""
    divided: list[dict[str, int]] = [
        {"tp": 2, "ep": 2}, {"pp": 2}, {"cp": 2, "etp": 2}, {"ep": 2}, {"pp": 2}, {"tp": 2}
    ]  # fmt: skip
    layouts = [ParallelLayout(world_size=2, **degrees) for degrees in divided]
    assert ranks(2).run(compare_gradients, layouts) == [len(layouts)] * 2


def test_the_language_model_under_layouts_of_four_ranks(ranks):
    """Dimensions in pairs: attention and experts fold over the same ranks."""
    divided: list[dict[str, int]] = [
        {"tp": 2, "cp": 2, "ep": 4}, {"pp": 2, "cp": 2, "etp": 2}, {"tp": 2, "etp": 2, "ep": 2}
    ]  # fmt: skip
    layouts = [ParallelLayout(world_size=4, **degrees) for degrees in divided]
    assert ranks(4).run(compare_gradients, layouts) == [len(layouts)] * 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "part"), [(2, 0), *((4, p) for p in range(3)), *((8, p) for p in range(13))]
)
def test_the_language_model_under_every_layout(size, part, ranks):
    layouts = list(legal_layouts(size))[part :: {2: 1, 4: 3, 8: 13}[size]]
    assert ranks(size).run(compare_gradients, layouts) == [len(layouts)] * size
