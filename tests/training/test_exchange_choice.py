"""What "auto" of `[parallel]` weighs: times by hand, and moves that were tried before."""

import numpy as np
import pytest

from moe_runtime.lab.simulate.scaling import LayerSchedule
from moe_runtime.parallel import ExpertSlots
from moe_runtime.parallel.cluster import Cluster, Link
from moe_runtime.parallel.parallel_experts import RebalanceRule, rank_loads
from moe_runtime.training.exchange_choice import (
    DEGREES,
    ExchangeChoice,
    RoutedLayerShape,
    SecondsOfMoves,
    row_bytes,
)

SHAPE = RoutedLayerShape(rows=1200, row_bytes=100, num_experts=6, expert_numbers=50, number_bytes=2)
FREE = Link(alpha_s=0.0, bytes_per_s=1e18)
PLAIN = LayerSchedule(is_local_first=True)


def cluster_of(link: Link, *, flops_per_s: float = 1e6, each: int = 3) -> Cluster:
    return Cluster(
        num_ranks=3, ranks_per_node=each, intra=link, inter=link, flops_per_s=flops_per_s
    )


def test_a_pass_takes_the_products_of_the_busiest_rank():
    """Where rows travel for nothing: three ranks with 1200 rows each, 300 operations a row, half
    of the backward pass's too."""
    choice = ExchangeChoice(cluster_of(FREE), SHAPE, [PLAIN])
    operations = 3 * 1200 * 1.5 * 2 * 50
    for shares in ([1, 1, 1], [4, 1, 1], [0, 2, 1]):
        found = choice.layer_s(np.array(shares), PLAIN)
        assert found == pytest.approx(operations * max(shares) / sum(shares) / 1e6)
    assert choice.gather_s() == pytest.approx(operations / 3 / 1e6)
    assert not choice.gathers


def test_experts_are_gathered_where_that_is_less_to_send():
    """Four of six experts of 100 bytes, against two thirds of 1200 rows of 100 bytes, there and
    back."""
    link = Link(alpha_s=0.0, bytes_per_s=1e4)
    choice = ExchangeChoice(cluster_of(link, flops_per_s=1e12), SHAPE, [PLAIN])
    assert choice.gather_s() == pytest.approx(400 / 1e4, rel=1e-3)
    assert choice.layer_s(np.ones(3), PLAIN) == pytest.approx(2 * 80_000 / 1e4, rel=1e-3)
    assert choice.gathers


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        (FREE, 1),  # nothing to hide
        (Link(alpha_s=0.1, bytes_per_s=1e6), 1),  # each message costs more than it hides
        (Link(alpha_s=0.0, bytes_per_s=3e5), 2),  # two hide all products
        (Link(alpha_s=0.0, bytes_per_s=1e6), 8),
        (Link(alpha_s=0.0, bytes_per_s=3e5, occupies_compute=True), 1),  # nothing is hidden
    ],
)
def test_rows_travel_in_as_many_chunks_as_hide_the_most(link, expected):
    schedules = [LayerSchedule(degree=degree, is_local_first=True) for degree in DEGREES]
    assert ExchangeChoice(cluster_of(link), SHAPE, schedules).best(np.ones(3)).degree == expected


def test_an_exchange_stays_unless_another_is_clearly_faster():
    schedules = [LayerSchedule(degree=degree, is_local_first=True) for degree in DEGREES]
    choice = ExchangeChoice(cluster_of(FREE), SHAPE, schedules)
    assert choice.best(np.ones(3), schedules[2]) is schedules[2]


def test_a_move_saves_products_and_takes_messages():
    """All load on the first two experts: on one rank before, on two ranks as proposed."""
    choice = ExchangeChoice(cluster_of(FREE), SHAPE, [PLAIN])
    loads_E = np.array([5.0, 5, 0, 0, 0, 0])
    before = ExpertSlots.contiguous(6, 3)
    after = ExpertSlots.from_ranks([[0, 2], [1, 3], [4, 5]], 6)
    products_s = 3 * 1200 * 1.5 * 2 * 50 / 1e6
    assert choice.saved_s(loads_E, before, after) == pytest.approx(products_s / 2)
    assert choice.saved_s(loads_E, after, before) == pytest.approx(-products_s / 2)
    costs = SecondsOfMoves(choice, 7)
    assert costs.gain(loads_E, before, after) == pytest.approx(7 * products_s / 2)
    slow = ExchangeChoice(cluster_of(Link(alpha_s=0.5, bytes_per_s=1e3)), SHAPE, [PLAIN])
    # two messages; weights and moments of two experts of 100 bytes, by three ranks
    assert slow.move_s(2) == pytest.approx(2 * 0.5 + 2 * 100 * 3 / 3 / 1e3)


@pytest.mark.parametrize(
    ("wire", "precision", "expected"),
    [
        ("exact", "float32", 4 * 256),
        ("exact", "bfloat16", 2 * 256),
        ("bf16", "float32", 2 * 256),
        ("fp8", "float32", (256 + 2 * 4 + 2 * 256) / 2),  # two scales there, bf16 back
    ],
)
def test_a_row_takes_the_bytes_of_its_wire(wire, precision, expected):
    assert row_bytes(256, wire, precision) == expected


class Balance:
    """Gains by the load of the busiest rank, and moves of one price."""

    def __init__(self, price: float) -> None:
        self._price = price

    def gain(self, loads_E: np.ndarray, before: ExpertSlots, after: ExpertSlots) -> float:
        return rank_loads(loads_E, before).max() - rank_loads(loads_E, after).max()

    def cost(self, num_transfers: int) -> float:
        return self._price


def test_a_move_waits_for_a_quarter_of_its_cost_unless_the_next_look_pays_it_back():
    """Every look promises a gain of 7, which comes true if the loads stay."""
    here = ExpertSlots.contiguous(4, 2)
    still, other = np.array([8.0, 8, 1, 1]), np.array([8.0, 1, 1, 8])

    def moves(price: float, loads: list[np.ndarray]) -> list[bool]:
        rule = RebalanceRule(4, costs=Balance(price), decay=0)
        return [rule.look(loads_E, here)[0] is not None for loads_E in loads]

    assert moves(6, [still] * 3) == [True] * 3
    assert moves(32, [still] * 4) == [False, False, True, False]
    assert moves(6, [still, other] * 3) == [True, *[False] * 5]
    assert moves(8, [still, other] * 3) == [False] * 6
    assert moves(32, [still, other, still, still, still, still]) == [*[False] * 4, True, False]
