"""Timelines of pipelines, and activations that they hold, by looking at every instant."""

import itertools
import math
from dataclasses import replace

import pytest

from moe_runtime.errors import CapacityError
from moe_runtime.lab.simulate.pipeline import held, most_at_once, most_held, passes_of, timeline
from moe_runtime.lab.simulate.system import SimulatedModel, TrainLayout, simulate_training
from moe_runtime.parallel.cluster import Cluster, Link

FREE = Link(alpha_s=0.0, bytes_per_s=math.inf)
SIZES = [(1, 1), (1, 4), (2, 1), (2, 5), (4, 2), (4, 16), (5, 7)]


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("is_even", [False, True])
def test_passes_follow_their_inputs_and_nothing_overlaps(stages, micro_batches, is_even):
    times = timeline(stages, micro_batches, forward_s=1.0, backward_s=2.0, is_even=is_even)
    for stage, (one, after) in enumerate(itertools.zip_longest(times, times[1:])):
        passes = sorted([*one.forward, *one.backward])
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(passes))
        assert [end - begin for begin, end in one.forward] == [1.0] * micro_batches
        assert [end - begin for begin, end in one.backward] == [2.0] * micro_batches
        for number in range(micro_batches):
            later = one.forward if after is None else after.backward
            assert later[number][1] <= one.backward[number][0]
            if after is not None:
                assert one.forward[number][1] <= after.forward[number][0]
        order = [kind == "forward" for kind, _ in passes_of(stage, stages, micro_batches)]
        assert [begin in {f[0] for f in one.forward} for begin, _ in passes] == order
    # the bubble of a pipeline: a pass of each kind for every other stage
    assert times[0].backward[-1][1] == 3.0 * (micro_batches + stages - 1)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("transfer_s", [0.0, 0.5, 1.0, 3.0, 4.5, 9.0, math.inf])
def test_what_is_held_is_what_every_instant_shows(stages, micro_batches, transfer_s):
    most, sizes = 0, {"forward_s": 1.0, "backward_s": 2.0}
    for one in timeline(stages, micro_batches, **sizes, is_even=transfer_s < math.inf):
        found = held(one, transfer_s)
        for number, intervals in enumerate(found):
            assert intervals[0][0] == one.forward[number][0]
            assert intervals[-1][1] == one.backward[number][1]
            covered = [*one.forward[number], *one.backward[number]]
            assert all(any(b <= at <= e for b, e in intervals) for at in covered)
        away = [intervals for intervals in found if len(intervals) == 2]
        # one transfer at a time in each direction, each as long as it takes
        for ends in ([x[0][1] for x in away], [x[1][0] + transfer_s for x in away]):
            assert all(b - a >= transfer_s for a, b in itertools.pairwise(sorted(ends)))
        every = sorted({at for intervals in found for x in intervals for at in x})
        middles = [(a + b) / 2 for a, b in itertools.pairwise(every)]
        counts = [sum(b < at < e for each in found for b, e in each) for at in middles]
        assert most_at_once(x for each in found for x in each) == max(counts)
        most = max(most, max(counts))
    assert most_held(stages, micro_batches, **sizes, transfer_s=transfer_s) == most
    if transfer_s == math.inf:
        assert most == min(stages, micro_batches)


def test_more_stages_hold_no_more_once_transfers_fit():
    """A transfer as long as the two passes of a micro-batch: all can leave."""
    sizes = {"forward_s": 1.0, "backward_s": 2.0}
    plain = [most_held(n, 64, transfer_s=math.inf, **sizes) for n in (4, 8, 16)]
    fits = [most_held(n, 64, transfer_s=3.0, **sizes) for n in (4, 8, 16)]
    half = [most_held(n, 64, transfer_s=6.0, **sizes) for n in (4, 8, 16)]
    assert plain == [4, 8, 16]
    assert fits[1] == fits[2] <= 4
    # half of them leave
    assert half[2] - half[1] == 4


def test_training_holds_fewer_inputs_with_a_link_to_the_host():
    """Four stages: the first holds the inputs of three more micro-batches, or fewer."""
    cluster = Cluster(
        num_ranks=4, ranks_per_node=4, intra=FREE, inter=FREE, flops_per_s=1e3,
        memory_bytes_per_s=1e3,
    )  # fmt: skip
    model = SimulatedModel(
        num_layers=4, model_dim=8, num_experts=4, top_k=2, expert_hidden=5, dense_parameters=300.0,
        kv_bytes_per_token=7.0,
    )  # fmt: skip
    layout = TrainLayout(stages=4, expert_ranks=1, tokens=4, micro_batches=16)
    found = simulate_training(cluster, model, layout=layout)
    assert found.held_micro_batches == 4
    hosted = replace(cluster, host_bytes_per_s=1e9)
    better = simulate_training(hosted, model, layout=layout)
    assert better.held_micro_batches < 4
    assert better.step_s == found.step_s
    inputs = 4 * 8 * 2
    needed = 16 * (75 + 480) + (better.held_micro_batches - 1) * inputs
    room = {"memory_bytes": (needed + 1) / 0.9, "disk_bytes_per_s": 1e6}
    simulate_training(replace(hosted, **room), model, layout=layout)
    with pytest.raises(CapacityError, match="weights, gradients and optimizer"):
        simulate_training(replace(cluster, **room), model, layout=layout)
    slow = replace(cluster, host_bytes_per_s=1e-9)
    assert simulate_training(slow, model, layout=layout).held_micro_batches == 4


def test_a_link_that_carries_nothing_is_refused():
    with pytest.raises(ValueError, match="rates must be positive"):
        Cluster(
            num_ranks=1, ranks_per_node=1, intra=FREE, inter=FREE, flops_per_s=1.0,
            host_bytes_per_s=0.0,
        )  # fmt: skip
