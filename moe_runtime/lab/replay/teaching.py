"""Trains the network of the policy ``reuse`` on what a model routed, if that saves misses."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.lab.replay.experiment import least_slots
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.learned import keep_learned, learned_path
from moe_runtime.lab.traces.routes import routes_of
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import Setting, make_policy
from moe_runtime.policies.eviction.reuse import LEAST_TOKENS, new_estimator, teach
from moe_runtime.policies.prediction.base import shape_of

_HELD_OUT = 5  # one step of so many, the latest ones, is not learned from
_CAPACITY = 0.25  # share of the experts that fit in memory while the misses are counted


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What training brought, counted on steps that were not learned from."""

    tokens: int
    held_out_tokens: int
    lru_misses: int
    plain_misses: int  # of ``reuse`` without a network
    taught_misses: int
    kept: Path | None  # where the network lies; None where it saves nothing


def teach_reuse(
    trace: Trace, checkpoint: Path, on_progress: Callable[[str], None] = lambda _: None
) -> Lesson:
    """Trains a network, counts its misses on the latest fifth of the steps, and keeps it.

    Later runs of the checkpoint with the policy ``reuse`` begin with it.

    Raises:
        ValueError: the trace has too few tokens.
    """
    signature = trace.signature
    num_taught = trace.num_steps - trace.num_steps // _HELD_OUT
    learned = routes_of(trace.steps(0, num_taught))
    if learned.num_tokens < 2 * LEAST_TOKENS:
        raise ValueError(
            f"{trace.num_tokens} tokens were recorded, at least {2.5 * LEAST_TOKENS:,.0f} are "
            "needed: run the model more, or give traces of `run --trace`"
        )
    held_out = workload_of(trace.steps(num_taught, trace.num_steps))
    num_slots = max(
        round(_CAPACITY * signature.num_layers * signature.num_experts),
        least_slots(signature, "per-layer"),
    )
    misses = []
    for name, training in (("lru", None), ("reuse", None), ("reuse", learned)):
        on_progress("training" if training is not None else f"replaying {name}")
        setting = Setting(shape=shape_of(signature), training=training)
        replay = replay_demand(
            held_out,
            lambda _, n=name, s=setting: make_policy(n, num_slots=num_slots, setting=s),
            num_slots,
        )
        misses.append(replay.num_accesses - replay.num_hits)
    kept = None
    if misses[2] < misses[1]:
        on_progress("training on all")
        estimator = new_estimator(shape_of(signature))
        teach(estimator, routes_of(trace))
        kept = learned_path(estimator.name, signature, checkpoint)
        keep_learned(estimator, signature, kept)
    return Lesson(
        tokens=trace.num_tokens,
        held_out_tokens=held_out.trace.num_tokens,
        lru_misses=misses[0],
        plain_misses=misses[1],
        taught_misses=misses[2],
        kept=kept,
    )
