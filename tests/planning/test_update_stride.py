"""Deep Optimizer States' stride, against a simulation of every subgroup."""

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_runtime.lab.simulate.scaling import TaskGraph
from moe_runtime.training.offload.device_updates import (
    UpdateSpeeds,
    best_stride,
    params_per_s,
    takes_turns,
)

CPU, DEVICE, IN, OUT = range(4)
LARGEST = 8
GROUPS = 24 * LARGEST


def simulated(stride: int | None, speeds: UpdateSpeeds) -> float:
    """Subgroups of one parameter through four resources, each doing one thing at a time."""
    graph = TaskGraph()
    gone: list[int] = []
    turns = islice(takes_turns(stride), GROUPS)
    for is_on_device in turns:
        if is_on_device:
            # a buffer is free when the subgroup that had it is back
            before = gone[-speeds.buffers : len(gone) - speeds.buffers + 1]
            there = graph.add(
                speeds.bytes_in / speeds.to_device_bytes_per_s, resource=IN, after=before
            )
            done = graph.add(1 / speeds.device_params_per_s, resource=DEVICE, after=[there])
            to_host_s = speeds.bytes_out / speeds.to_host_bytes_per_s
            gone.append(graph.add(to_host_s, resource=OUT, after=[done]))
        else:
            on_cpu_s = 1 / speeds.cpu_params_per_s + 1 / speeds.downcast_params_per_s
            done = graph.add(on_cpu_s, resource=CPU)
            in_s = speeds.host_bytes_in / speeds.to_device_bytes_per_s
            graph.add(in_s, resource=IN, after=[done])
    return GROUPS / graph.run().makespan_s


RATES = st.floats(0.0, 1.0).map(lambda x: 10 ** (9 + 1.5 * x))


@settings(max_examples=20)
@given(RATES, RATES, RATES, RATES, st.sampled_from([2, 4]))
def test_the_chosen_stride_is_as_fast_as_any(cpu, device, there, back, buffers):
    """Within a tenth of the best stride by simulation: filling and draining take up to two of 24
    periods, which the formula leaves out."""
    speeds = UpdateSpeeds(
        cpu_params_per_s=cpu,
        device_params_per_s=5 * device,
        to_device_bytes_per_s=10 * there,
        to_host_bytes_per_s=10 * back,
        buffers=buffers,
    )
    best = max(simulated(stride, speeds) for stride in (None, *range(1, LARGEST + 1)))
    assert simulated(best_stride(speeds, largest=LARGEST), speeds) >= 0.9 * best


def test_values_worked_out_by_hand():
    """Two billion updates a second on the CPU, 25 GB/s each way."""
    speeds = UpdateSpeeds(
        cpu_params_per_s=2e9,
        device_params_per_s=25e9,
        to_device_bytes_per_s=25e9,
        to_host_bytes_per_s=25e9,
        downcast_params_per_s=8e9,
        buffers=3,
    )
    wanted = {None: 1.6e9, 1: 2.083e9, 2: 3.2e9, 3: 2.4e9, 4: 2.133e9}
    for stride, value in wanted.items():
        assert params_per_s(stride, speeds) == pytest.approx(value, rel=1e-3)
    assert best_stride(speeds) == 2


def test_a_slow_link_leaves_all_to_the_cpu():
    speeds = UpdateSpeeds(
        cpu_params_per_s=2e9,
        device_params_per_s=25e9,
        to_device_bytes_per_s=1e8,
        to_host_bytes_per_s=1e8,
        host_bytes_in=0,
    )
    assert best_stride(speeds) is None
    assert not any(islice(takes_turns(None), 9))
    assert list(islice(takes_turns(3), 6)) == [False, False, True] * 2
