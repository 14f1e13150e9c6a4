"""Trains the network of the policy ``reuse`` on what a model routed, if that saves misses."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from moe_runtime.lab.replay.experiment import least_slots
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.format import Trace
from moe_runtime.lab.traces.learned import learned_path, write_learned
from moe_runtime.lab.traces.routes import routes_of
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import LRU, LayerShares, even_shares
from moe_runtime.policies.eviction.base import Maker
from moe_runtime.policies.eviction.reuse import LEAST_TOKENS, maker_of, new_estimator, teach
from moe_runtime.policies.prediction.base import shape_of

_HELD_OUT = 5  # the latest fifth of the steps is held out
_CAPACITY = 0.25  # share of the experts that fit in memory while the misses are counted


@dataclass(frozen=True, kw_only=True)
class TeachingResult:
    """What training brought, counted on steps that were not learned from."""

    tokens: int
    held_out_tokens: int
    lru_misses: int
    plain_misses: int  # of ``reuse`` without a network
    taught_misses: int
    kept: Path | None  # where the network lies; None where it saves nothing


def teach_reuse(
    trace: Trace, checkpoint: Path, on_progress: Callable[[str], None] = lambda _: None
) -> TeachingResult:
    """Trains a network, counts its misses on the latest fifth of the steps, and may keep it.

    It is kept if it misses less than ``reuse`` without a network. Later runs of the checkpoint with
    the policy ``reuse`` begin with it.

    Raises:
        ValueError: the trace has too few tokens.
        OSError: the network cannot be written.
    """
    signature, shape = trace.signature, shape_of(trace.signature)
    num_taught = trace.num_steps - trace.num_steps // _HELD_OUT
    learned = routes_of(trace.steps(0, num_taught))
    on_progress("training")
    estimator = new_estimator(shape)
    if not teach(estimator, learned):
        raise ValueError(
            f"{trace.num_tokens} tokens of {learned.num_sequences} requests are too few: expected "
            f"about {2 * LEAST_TOKENS} tokens in several requests; run the model more, or give "
            "traces of `run --trace`"
        )
    held_out = workload_of(trace.steps(num_taught, trace.num_steps))
    num_slots = max(
        round(_CAPACITY * signature.num_layers * signature.num_experts),
        least_slots(signature, "per-layer"),
    )
    shares = even_shares(num_slots, signature.num_layers)

    def misses(name: str, maker: Maker) -> int:
        on_progress(f"replaying {name}")
        replay = replay_demand(held_out, lambda _: LayerShares(maker, shares), num_slots)
        return replay.num_accesses - replay.num_hits

    lru_misses = misses("lru", LRU)
    plain_misses = misses("reuse", maker_of(new_estimator(shape)))
    taught_misses = misses("reuse with the network", maker_of(estimator))
    kept = None
    if taught_misses < plain_misses:
        kept = learned_path(estimator.name, signature, checkpoint)
        write_learned(estimator, signature, kept)
    return TeachingResult(
        tokens=trace.num_tokens,
        held_out_tokens=held_out.trace.num_tokens,
        lru_misses=lru_misses,
        plain_misses=plain_misses,
        taught_misses=taught_misses,
        kept=kept,
    )
