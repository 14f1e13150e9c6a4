"""Chunks, wires, replicas, moves, sparse copies and switched parallelism against one process."""

from collections.abc import Callable

import pytest
import torch
from parallel_layer import assert_equal_to_dense, assert_same, dense_answer, make_problem
from parallel_moves import (
    adaptive,
    moved,
    overlapped,
    timings,
    train_and_move,
    train_sparsely,
    train_switching_layer,
    with_copies,
)
from rank_pool import RankPool
from thread_transport import ThreadGroup

from moe_runtime.parallel import (
    ExpertSlots,
    Overlap,
    ParallelExperts,
    Rebalancer,
    expert_parallel,
    keep_in_place,
)
from moe_runtime.parallel.cluster import Link
from moe_runtime.research.hecate import CopyRules, SparseExperts, hidden_experts
from moe_runtime.research.parallelism_switching import cheapest_degree
from moe_runtime.routing import Routing

Ranks = Callable[[int], RankPool]


def random_placement(num_ranks: int, num_experts: int, seed: int) -> ExpertSlots:
    """Every expert somewhere, and some more copies; ranks of different sizes."""
    random = torch.Generator().manual_seed(seed)
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        num = int(torch.randint(1, num_ranks + 1, (), generator=random))
        for rank in torch.randperm(num_ranks, generator=random)[:num].tolist():
            ranks[rank].append(expert)
    return ExpertSlots.from_ranks(ranks, num_experts)


@pytest.mark.parametrize("skew", ["zipf", "one"])
def test_any_overlap_equals_dense(skew, ranks):
    """Chunks; and six columns in two, four (uneven) and six panels, with and without chunks."""
    problem = make_problem([11, 0], num_experts=5, num_choices=2, seed=2, skew=skew)
    slots = ExpertSlots.contiguous(5, 2)
    chunks = [(1, degree, local) for degree in (1, 2, 4, 8) for local in (True, False)]
    ways = [*chunks, (2, 1, True), (4, 2, False), (6, 4, True)]
    for panels, degree, is_local_first in ways[skew == "one" :: 2]:
        overlap = Overlap(degree=degree, is_local_first=is_local_first, panels=panels)
        answers = ranks(2).run(overlapped, problem, slots, overlap)
        assert_equal_to_dense(problem, slots, answers)


def test_a_function_cannot_make_panels():
    routing = Routing(torch.zeros((3, 1), dtype=torch.int64), torch.ones(3, 1), 1)
    with pytest.raises(ValueError, match="2 panels need experts that compute columns apart"):
        expert_parallel(
            torch.ones(3, 4), routing, lambda rows, counts: rows, overlap=Overlap(panels=2)
        )


def test_any_placement_equals_one_process(ranks):
    """Flat, and the last one over two machines."""
    for seed in range(2, 6):
        problem = make_problem([4, 9, 0, 6], num_experts=6, num_choices=3, seed=seed, skew="zipf")
        slots, grid = random_placement(4, 6, seed), (2, 2) if seed == 5 else None
        answers = ranks(4).run(overlapped, problem, slots, Overlap(degree=4), "exact", grid)
        assert_equal_to_dense(problem, slots, answers)


@pytest.mark.parametrize(("wire", "error"), [("bf16", 2**-8), ("fp8", 2**-4)])
def test_lossy_wires_are_close(wire, error, ranks):
    """Rounding a row changes it by half a unit in the last place: 2^-9 for bf16, 2^-4 relative to
    the largest of a group for e4m3 (4 bits of mantissa, one of them implied)."""
    problem = make_problem([20, 20], num_experts=4, num_choices=2, seed=0, dim_model=130)
    slots = ExpertSlots.contiguous(4, 2)
    exact = ranks(2).run(overlapped, problem, slots, Overlap())
    lossy = ranks(2).run(overlapped, problem, slots, Overlap(degree=2), wire)
    for one, other in zip(exact, lossy, strict=True):
        for a, b in ((one.y_TD, other.y_TD), (one.x_grad, other.x_grad)):
            relative = (a - b).norm() / a.norm()
            # A product of two matrices and a gate pass on errors about three times as large.
            assert 0 < relative < 3 * error


def named_experts(found: list) -> dict[str, torch.Tensor]:
    """The experts of both layers that a rank holds, by layer and name."""
    return {f"{i}.{name}": t for i, names in enumerate(found[1:]) for name, t in names.items()}


class TestSparseCopies:
    def test_any_plan_equals_plain_expert_parallelism(self, ranks):
        """In half of the cases the plan gets more copies after the gate (calibration)."""
        owners = ExpertSlots.from_ranks([[0, 3], [1], [2, 4, 5], []], 6)
        for seed in (0, 3, 5, 6):
            random = torch.Generator().manual_seed(seed)
            plan, extra = (
                [
                    torch.randperm(6, generator=random)[:number].tolist()
                    for number in torch.randint(7, (4,), generator=random).tolist()
                ]
                for _ in range(2)
            )
            problem = make_problem([5, 8, 0, 3], num_experts=6, num_choices=3, seed=seed)
            overlap = Overlap(degree=1 + seed % 2, is_local_first=seed % 4 > 1)
            settings = (plan, seed % 2 == 0, overlap, extra if seed > 3 else None)
            answers = ranks(4).run(with_copies, problem, owners, *settings)
            assert_equal_to_dense(problem, owners, answers)

    def test_training_with_copies_is_training_without(self, ranks):
        """Forecasts, calibration, copies made again in the backward pass, and new owners."""
        plain = ranks(4).run(train_sparsely, None)
        expected = {name: t for found, *_ in plain for name, t in named_experts(found).items()}
        calibration = {"token_s": 1.0, "expert_s": 0.5}
        for rules, every in (
            (CopyRules(max_experts=5, slots_per_rank=2, ranks_per_node=2, rematerialise=True), 4),
            (CopyRules(max_experts=1, slots_per_rank=3, **calibration), 3),
        ):
            results = ranks(4).run(train_sparsely, rules, every)
            assert sum(num_sent for _, num_sent, _ in results) > 10
            assert results[0][2] > 0
            held = [named_experts(found) for found, *_ in results]
            # Every expert has one owner.
            assert sorted(name for names in held for name in names) == sorted(expected)
            for (found, *_), names in zip(results, held, strict=True):
                assert_same(torch.stack(found[0]), torch.stack(plain[0][0][0]), f"losses, {rules}")
                for name, tensor in names.items():
                    assert_same(tensor, expected[name], f"{name}, {rules}")

    def test_what_is_hidden_and_what_cannot_be(self):
        assert hidden_experts(2e-3, 1e9, 400_000) == 5
        for wrong, message in (
            ({"token_s": 1.0}, "needs token_s and expert_s"),
            ({"window": 0}, "window must be at least 1"),
        ):
            with pytest.raises(ValueError, match=message):
                CopyRules(max_experts=1, slots_per_rank=1, **wrong)
        rules = CopyRules(max_experts=1, slots_per_rank=1, ranks_per_node=2)
        with pytest.raises(ValueError, match="1 ranks are not a whole number of machines of 2"):
            SparseExperts(4, 8, 8, rules=rules)

    def test_tokens_prefer_a_copy_on_their_machine(self):
        """Expert 0 on ranks 0, 2 and 3, two ranks a machine; expert 1 on rank 0 alone."""
        slots = ExpertSlots.from_ranks([[0, 1], [], [0], [0]], 2, ranks_per_node=2)
        ids = torch.tensor([[0], [0], [1]])
        ways = [
            slots.table(rank, torch.device("cpu")).slots_of(ids).flatten().tolist()
            for rank in range(4)
        ]
        assert ways == [[0, 0, 1], [0, 0, 1], [4, 4, 1], [6, 6, 1]]
        without = ExpertSlots.from_ranks([[0, 1], [], [0], [0]], 2)
        assert without.table(1, torch.device("cpu")).slots_of(ids).flatten().tolist() == [4, 6, 1]


def test_every_degree_of_parallelism_is_equal(ranks):
    for num_experts, degrees in ((1, [0, 1, 2, 4]), (2, [0, 1, 2, 1]), (8, [0, 1])):
        problem = make_problem([5, 0, 9, 2], num_experts=num_experts, num_choices=1, seed=4)
        results = ranks(4).run(adaptive, problem, degrees)
        expected = dense_answer(problem)
        for index in range(len(degrees)):
            answers = [result[index] for result in results]
            assert_same(torch.cat([a.y_TD for a in answers]), expected.y_TD, "y")
            assert_same(torch.cat([a.x_grad for a in answers]), expected.x_grad, "x.grad")
            for rank in range(4):
                for a, b in zip(
                    answers[rank].parameter_grads, results[rank][0].parameter_grads, strict=True
                ):
                    assert_same(a, b, f"gradients of degree {degrees[index]}")


def test_parallelism_switched_while_training_changes_no_loss(ranks):
    """Batches of 1 to 400 tokens: few tokens go to all slices, many have the weights gathered."""
    link = Link(alpha_s=1e-7, bytes_per_s=1e9)
    for num_experts, chosen in ((1, {0, 4}), (2, {0, 2})):
        fixed = ranks(4).run(train_switching_layer, num_experts, 1, link)
        switched = ranks(4).run(train_switching_layer, num_experts, None, link)
        assert all(degrees == switched[0][1] for _, degrees in switched)
        assert chosen <= set(switched[0][1])
        for (losses, _), (expected, _) in zip(switched, fixed, strict=True):
            assert_same(torch.stack(losses), torch.stack(expected), "losses")


def test_a_measured_link_is_the_slowest_ranks(ranks):
    """1 ms for 1 KiB and 2 ms for 1 MiB as the first rank's clock tells, twice that on the other:
    through two points there is one line."""
    (measured, link), (theirs, other_link) = ranks(2).run(timings)
    assert measured == [(1 << 10, pytest.approx(1e-3)), (1 << 20, pytest.approx(2e-3))]
    assert theirs == [(1 << 10, pytest.approx(2e-3)), (1 << 20, pytest.approx(4e-3))]
    per_byte = 2e-3 / ((1 << 20) - (1 << 10))
    assert link == other_link
    assert link.bytes_per_s == pytest.approx(1 / per_byte)
    assert link.alpha_s == pytest.approx(2e-3 - (1 << 10) * per_byte)


def test_cheapest_degree_follows_the_cost():
    """Few tokens and large experts move tokens to all slices; many tokens move weights."""
    beta = 1e-9
    choose = {"num_experts": 1, "num_ranks": 8, "alpha_s": 1e-6, "beta_s_per_byte": beta}
    degrees = (0, 1, 2, 4, 8)
    assert cheapest_degree(degrees, row_bytes=1e3, expert_bytes=1e8, **choose) == 8
    assert cheapest_degree(degrees, row_bytes=1e8, expert_bytes=1e3, **choose) == 0
    # Brute force over the formula: row bytes r times there, back, and both again for gradients;
    # slices of the run gathered and scattered.
    rows, expert = 1e6, 8e6

    def cost(degree: int) -> float:
        gathered = 7 if degree == 0 else 8 // degree - 1
        return 2 * gathered * expert / 8 + 4 * degree * rows

    assert cheapest_degree(degrees, row_bytes=rows, expert_bytes=expert, **choose) == min(
        degrees, key=cost
    )


class TestMoves:
    def test_moving_changes_no_loss(self, ranks):
        """Moves with replicas and with the optimizer's states, while training."""
        placements = [[[5, 0, 1], [2, 3, 4]], [[0, 1, 2, 3], [4, 5, 0]], [[3, 4, 5], [0, 1, 2, 5]]]
        still = ranks(2).run(train_and_move, placements, 0)
        going = ranks(2).run(train_and_move, placements, 2)
        assert_same(torch.stack(going[0][0]), torch.stack(still[0][0]), "losses")

    def test_rebalancing_while_training_changes_no_loss(self, ranks):
        """Six experts and two replicas by what was counted, every third step."""
        still = ranks(2).run(train_and_move, [], 0)
        (losses, looks), (_, others) = ranks(2).run(train_and_move, [], 0, 3)
        assert_same(torch.stack(losses), torch.stack(still[0][0]), "losses")
        assert len(looks) == 3
        assert looks == others
        assert sum(look.num_transfers for look in looks) > 0
        assert all(look.balance_after >= look.balance_before for look in looks)

    def test_bad_rules_of_rebalancing(self):
        experts = ParallelExperts(4, 8, 8)
        with pytest.raises(ValueError, match="decay in"):
            Rebalancer(experts, decay=1.0)
        with pytest.raises(ValueError, match="1 replicas are more than 1 devices have a use for"):
            Rebalancer(experts, num_replicas=1)

    def test_what_stays_keeps_its_slot(self):
        old = ExpertSlots.from_ranks([[0, 1, 2], [3, 4, 5]], 6)
        new = keep_in_place([[2, 0, 5], [4, 1, 3]], old)
        assert new.experts_of(0) == [0, 5, 2]
        assert new.experts_of(1) == [3, 4, 1]

    @pytest.mark.parametrize("seed", range(8))
    def test_a_move_is_exact_and_sends_the_least(self, seed):
        """Whatever a rank gets and did not have is sent once, and nothing else."""
        old, new = random_placement(4, 6, seed), random_placement(4, 6, seed + 100)
        held = [set(new.experts_of(rank)) - {-1} for rank in range(4)]
        # A second copy on the same rank, as a balancer may want it.
        doubled = [[*sorted(experts), min(experts, default=-1)] for experts in held]
        new = keep_in_place(doubled, old)
        results = ThreadGroup(4).run(moved, old, new)
        least = sum(len(held[rank] - set(old.experts_of(rank))) for rank in range(4))
        assert [transfers for _, transfers, _ in results] == [least] * 4
        assert sum(sent for *_, sent in results) == least
        for rank, (tensor, *_) in enumerate(results):
            expected = torch.tensor(new.experts_of(rank), dtype=torch.float64).clamp(min=0)
            is_there = torch.tensor(new.experts_of(rank)) >= 0
            assert torch.equal(tensor[is_there], expected[is_there, None].expand(-1, 3))
            stays = [e for e in old.experts_of(rank) if e in held[rank]]
            for expert in stays:
                place = old.experts_of(rank).index(expert)
                assert place >= new.slots_per_rank or new.experts_of(rank)[place] == expert

    def test_experts_that_lie_nowhere_or_do_not_exist(self):
        with pytest.raises(ValueError, match="expert 1 lies nowhere"):
            ExpertSlots.from_ranks([[0], [2]], 3)
        with pytest.raises(ValueError, match="hold expert 7 of a layer of 3"):
            ExpertSlots.from_ranks([[0, 1], [2, 7]], 3)
