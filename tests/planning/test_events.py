"""The event simulator against schedules worked out by hand, and against a literal replay."""

from itertools import pairwise

import numpy as np
import pytest

from moe_runtime.lab.simulate.scaling import TaskGraph


def test_a_chain_adds_up_and_a_fork_does_not():
    graph = TaskGraph()
    assert graph.run().makespan_s == 0
    first = graph.add(1.0, resource=0)
    left = graph.add(2.0, resource=0, after=[first])
    right = graph.add(5.0, resource=1, after=[first])
    graph.add(1.0, resource=0, after=[left, right])
    timeline = graph.run()
    assert timeline.start_s.tolist() == [0, 1, 1, 6]
    assert timeline.makespan_s == 7
    assert timeline.busy_s(0) == 4
    assert timeline.busy_s(1) == 5


def test_a_resource_takes_what_is_ready_first():
    graph = TaskGraph()
    late = graph.add(3.0)
    graph.add(1.0, resource=0, after=[late])
    graph.add(2.0, resource=0)
    graph.add(4.0, resource=0)
    timeline = graph.run()
    # Task 1 has the lowest number but is ready last: 0-2, 2-6, then 6-7.
    assert timeline.start_s.tolist() == [0, 6, 0, 2]


@pytest.mark.parametrize("seed", range(5))
def test_random_graphs_keep_every_rule(seed):
    random = np.random.default_rng(seed)
    graph, durations, resources, before = TaskGraph(), [], [], []
    for task in range(60):
        durations.append(float(random.integers(0, 5)))
        resources.append(int(random.integers(-1, 4)))
        earlier = random.choice(task, min(task, 2), replace=False).tolist() if task else []
        before.append(earlier)
        graph.add(durations[-1], resource=resources[-1], after=earlier)
    timeline = graph.run()
    np.testing.assert_allclose(timeline.finish_s - timeline.start_s, durations)
    ready = [max((timeline.finish_s[e] for e in earlier), default=0.0) for earlier in before]
    assert (timeline.start_s >= ready).all()
    for resource in range(4):
        mine = sorted(
            (timeline.start_s[t], timeline.finish_s[t], ready[t])
            for t in range(60)
            if resources[t] == resource
        )
        for (_, end, _), (start, _, since) in pairwise(mine):
            assert start >= end
            # Never idle while something is ready.
            assert start == max(end, since) or start == since
