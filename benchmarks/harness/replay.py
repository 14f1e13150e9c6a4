"""How many experts a cache would have to read for a recorded decode: LRU and Belady's optimum.

Written apart from the product's policies, so that the two can be held against each other. One
layer at a time; a step asks for a set of experts at once, and none of the set is evicted for
another of it. All experts have one size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NEVER = 1 << 62

Steps = Sequence[frozenset[int]]


@dataclass(frozen=True, slots=True)
class Routes:
    """Experts of every token in order: `prompt[layer][token]` and `decode[layer][token]`."""

    prompt: tuple[tuple[frozenset[int], ...], ...]
    decode: tuple[tuple[frozenset[int], ...], ...]


def read_routes(trace_file: Path, num_decode: int) -> Routes:
    """Takes the last prompt and the last `num_decode` decoded tokens of a recorded trace."""
    from moe_runtime.lab.traces import PHASES, read_trace

    trace = read_trace(trace_file)
    phases = trace.step_phase.tolist()
    decode_steps = [step for step, phase in enumerate(phases) if PHASES[phase] == "decode"]
    prompt_steps = [step for step, phase in enumerate(phases) if PHASES[phase] == "prefill"]
    prompt = trace.expert_ids[trace.tokens_of(prompt_steps[-1])]
    warmup = [trace.expert_ids[trace.tokens_of(step)] for step in decode_steps[:-num_decode]]
    decode = [trace.expert_ids[trace.tokens_of(step)] for step in decode_steps[-num_decode:]]
    num_layers = trace.expert_ids.shape[1]

    def of_layer(block, layer: int) -> list[frozenset[int]]:
        return [frozenset(experts) for experts in block[:, layer].tolist()]

    return Routes(
        prompt=tuple(
            tuple(step for block in (prompt, *warmup) for step in of_layer(block, layer))
            for layer in range(num_layers)
        ),
        decode=tuple(
            tuple(step for block in decode for step in of_layer(block, layer))
            for layer in range(num_layers)
        ),
    )


def misses_per_token(routes: Routes, num_slots: int) -> tuple[float, float]:
    """Misses a decoded token over all layers: under LRU, and at Belady's optimum.

    Both start from what LRU holds after the prompt, and count the decoded tokens only.
    """
    lru = optimum = 0
    for prompt, decode in zip(routes.prompt, routes.decode, strict=True):
        resident: dict[int, int] = {}
        lru_misses(prompt, num_slots, resident)
        optimum += belady_misses(decode, num_slots, set(resident))
        lru += lru_misses(decode, num_slots, resident)
    num_tokens = len(routes.decode[0])
    return lru / num_tokens, optimum / num_tokens


def lru_misses(steps: Steps, num_slots: int, resident: dict[int, int]) -> int:
    """Misses of a least-recently-used cache; `resident` (in order of use) is carried on."""
    misses = 0
    for wanted in steps:
        misses += len(wanted - resident.keys())
        for expert in sorted(wanted):
            resident.pop(expert, None)
            resident[expert] = expert
        # What this step wants is the newest, so the oldest can go without looking.
        while len(resident) > max(num_slots, len(wanted)):
            del resident[next(iter(resident))]
    return misses


def belady_misses(steps: Steps, num_slots: int, resident: set[int]) -> int:
    """The fewest misses possible: evicts what is wanted again last (Belady, 1966).

    O(n log n) in the number of requests for a fixed number of experts. `resident` is carried on.
    """
    uses: dict[int, list[int]] = {}
    for time, wanted in enumerate(steps):
        for expert in wanted:
            uses.setdefault(expert, []).append(time)

    def next_use(expert: int, time: int) -> int:
        later = uses.get(expert, [])
        place = bisect_right(later, time)
        return later[place] if place < len(later) else NEVER

    misses = 0
    for time, wanted in enumerate(steps):
        misses += len(wanted - resident)
        excess = len(wanted | resident) - max(num_slots, len(wanted))
        others = sorted(resident - wanted, key=lambda expert: -next_use(expert, time))
        resident.difference_update(others[: max(0, excess)])
        resident |= wanted
    return misses
