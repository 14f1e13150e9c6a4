"""HybriMoE's schedule of one layer: which experts the CPU computes, the GPU computes, or moves.

Per layer (arXiv 2504.05897): the GPU takes experts that it holds or that have arrived, heaviest
first; the CPU takes those that it does not hold, lightest first, and then helps with light ones
that the GPU holds; the link brings the heaviest missing ones. How many are brought is tried out:
each number is simulated and the best one wins.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridCosts:
    """Measured seconds.

    Attributes:
        cpu_s: of one expert on the CPU, by its number of tokens.
        gpu_s: of one expert on the GPU, by its number of tokens.
        transfer_s: to bring one expert to the GPU; one after the other.
        shared_s: of shared experts, which the GPU computes first.
    """

    cpu_s: Callable[[int], float]
    gpu_s: Callable[[int], float]
    transfer_s: float
    shared_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridPlan:
    """Who computes what, in order.

    Attributes:
        gpu: experts that the GPU computes, in this order; those of ``transferred`` once they are
            there.
        cpu: experts that the CPU computes, in this order.
        transferred: experts that are brought to the GPU, in this order.
        makespan_s: predicted time until both are done.
    """

    gpu: tuple[int, ...]
    cpu: tuple[int, ...]
    transferred: tuple[int, ...]
    makespan_s: float


def plan_hybrid(
    tokens: Mapping[int, int], cached: frozenset[int], costs: HybridCosts
) -> HybridPlan:
    """Plans the active experts of one layer for the least predicted time.

    Args:
        tokens: number of tokens of each active expert.
        cached: experts that the GPU holds; inactive ones are ignored.
        costs: measured costs.

    Raises:
        ValueError: an expert without tokens.
    """
    if any(count < 1 for count in tokens.values()):
        raise ValueError("tokens must list active experts only, each with at least one token")
    missing = _by_load((expert for expert in tokens if expert not in cached), tokens)
    plans = [
        simulate_hybrid(tokens, cached, costs, num_transfers=count)
        for count in range(len(missing) + 1)
    ]
    # Equal times: the plan that moves less.
    return min(plans, key=lambda plan: (plan.makespan_s, len(plan.transferred)))


def simulate_hybrid(
    tokens: Mapping[int, int], cached: frozenset[int], costs: HybridCosts, *, num_transfers: int
) -> HybridPlan:
    """The schedule in which the ``num_transfers`` heaviest missing experts are brought.

    Of the next tasks of GPU and CPU, the one that would end first is taken, until none is left.
    """
    missing = _by_load((expert for expert in tokens if expert not in cached), tokens)
    transferred, cpu_queue = missing[:num_transfers], missing[num_transfers:]
    arrival = {expert: (i + 1) * costs.transfer_s for i, expert in enumerate(transferred)}
    held = _by_load((expert for expert in tokens if expert in cached), tokens)
    gpu_time, cpu_time = costs.shared_s, 0.0
    gpu: list[int] = []
    cpu: list[int] = []
    while held or arrival or cpu_queue:
        from_gpu = _next_for_gpu(held, arrival, gpu_time, tokens)
        from_cpu = cpu_queue[-1] if cpu_queue else (held[-1] if held else None)
        gpu_end = cpu_end = float("inf")
        if from_gpu is not None:
            start = max(gpu_time, arrival.get(from_gpu, 0.0))
            gpu_end = start + costs.gpu_s(tokens[from_gpu])
        if from_cpu is not None:
            cpu_end = cpu_time + costs.cpu_s(tokens[from_cpu])
        if from_gpu is not None and gpu_end <= cpu_end:
            gpu_time = gpu_end
            gpu.append(from_gpu)
            arrival.pop(from_gpu, None)
            held = [expert for expert in held if expert != from_gpu]
        elif from_cpu is not None:
            cpu_time = cpu_end
            cpu.append(from_cpu)
            (cpu_queue if cpu_queue else held).pop()
    return HybridPlan(
        gpu=tuple(gpu),
        cpu=tuple(cpu),
        transferred=tuple(transferred),
        makespan_s=max(gpu_time, cpu_time),
    )


def prefetch_impact(
    expert: int, tokens: Mapping[int, int], cached: frozenset[int], costs: HybridCosts
) -> float:
    """Seconds that a (predicted) layer gains when this expert is brought to the GPU beforehand."""
    without = plan_hybrid(tokens, cached, costs).makespan_s
    return without - plan_hybrid(tokens, cached | {expert}, costs).makespan_s


def _by_load(experts: Iterable[int], tokens: Mapping[int, int]) -> list[int]:
    """Heaviest first, the lower id first among equals."""
    return sorted(experts, key=lambda expert: (-tokens[expert], expert))


def _next_for_gpu(
    held: list[int], arrival: Mapping[int, float], now: float, tokens: Mapping[int, int]
) -> int | None:
    """The heaviest expert that is there, else the one that arrives next."""
    there = _by_load([*held, *(e for e, time in arrival.items() if time <= now)], tokens)
    if there:
        return there[0]
    return min(arrival, key=arrival.__getitem__, default=None)
