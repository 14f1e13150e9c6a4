"""Values that every floor of the runtime shares. Standard library only."""

from dataclasses import dataclass
from typing import NamedTuple


class ExpertKey(NamedTuple):
    """The name of one routed expert.

    Attributes:
        layer: index of the Mixture-of-Experts layer, counted over such layers only (0 is the first
            layer that has experts, whatever its place in the model).
        expert: index of the expert within its layer.
    """

    layer: int
    expert: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSignature:
    """What must agree before a trace, a map or a predictor of one model is used with another.

    Attributes:
        model_type: the ``model_type`` of the checkpoint's configuration.
        num_layers: number of Mixture-of-Experts layers.
        num_experts: number of routed experts in the widest layer.
        top_k: experts that a token visits in a layer.
        vocab_size: number of token ids.
    """

    model_type: str
    num_layers: int
    num_experts: int
    top_k: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """Counters of an expert store since it was opened or last reset.

    Every request for an expert is exactly one of hit, late hit or miss.

    Attributes:
        hits: experts that lay in the fastest tier when they were asked for.
        late_hits: experts whose read was under way when they were asked for.
        misses: experts that had to be demanded from a slower tier.
        bytes_read: bytes read from the checkpoint's files, alignment included.
        demand_bytes: the part of ``bytes_read`` that a waiting layer had asked for.
        readahead_bytes: the part of ``bytes_read`` that was read before it was asked for.
        evictions: experts that gave their slot to another one.
        stall_s: seconds that computation waited for an expert.
        expert_slots: experts that fit into the fastest tier at once.
        slot_bytes: size of one slot.
        guesses: experts whose prefetch was started and not taken back; each is at last useful,
            late or wasted, unless it still waits for its layer.
        useful_guesses: prefetched experts that lay ready when a layer asked for them.
        late_guesses: prefetched experts that were on their way when a layer asked for them.
        wasted_guesses: prefetched experts that gave up their slot without having been asked for.
        cancelled_guesses: prefetches that were taken back before their read began.
    """

    hits: int
    late_hits: int
    misses: int
    bytes_read: int
    demand_bytes: int
    readahead_bytes: int
    evictions: int
    stall_s: float
    expert_slots: int
    slot_bytes: int
    guesses: int = 0
    useful_guesses: int = 0
    late_guesses: int = 0
    wasted_guesses: int = 0
    cancelled_guesses: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeStats:
    """What a loaded model did so far; the value of ``model.moe.stats()``.

    Attributes:
        hits: experts that lay in the fastest tier when a layer asked for them.
        late_hits: experts that were on their way when a layer asked for them.
        misses: experts that a layer had to demand.
        stall_s: seconds that computation waited for experts.
        bytes_read: bytes read from the checkpoint's files for experts, alignment included.
        readahead_bytes: the part of ``bytes_read`` that was read before it was asked for.
        expert_slots: experts that fit into the fastest tier at once.
        slot_bytes: size of one slot.
        budget_bytes: host memory that the runtime was allowed to allocate.
        dense_bytes: bytes of everything but the routed experts.
        expert_bytes: bytes of all routed experts of the checkpoint.
        baseline_rss_bytes: resident memory of the process after its imports, before loading.
        peak_rss_bytes: highest resident memory of the process so far, as the kernel counts it.
        load_s: seconds that loading took.
        guesses: experts whose prefetch was started; each is at last useful, late or wasted.
        useful_guesses: prefetched experts that lay ready when a layer asked for them.
        late_guesses: prefetched experts that were on their way when a layer asked for them.
        wasted_guesses: prefetched experts that gave up their slot without having been asked for.
        prefetch: whether experts are prefetched now, and why.
        predict_s: seconds spent on guessing.
        policy: the eviction policy.
        shares: how the slots are divided over the layers: even or adaptive.
        policy_reason: why this policy, where it was not named; empty where it was.
    """

    hits: int
    late_hits: int
    misses: int
    stall_s: float
    bytes_read: int
    readahead_bytes: int
    expert_slots: int
    slot_bytes: int
    budget_bytes: int
    dense_bytes: int
    expert_bytes: int
    baseline_rss_bytes: int
    peak_rss_bytes: int
    load_s: float
    guesses: int = 0
    useful_guesses: int = 0
    late_guesses: int = 0
    wasted_guesses: int = 0
    prefetch: str = "off"
    predict_s: float = 0.0
    policy: str = "lru"
    shares: str = "even"
    policy_reason: str = ""
