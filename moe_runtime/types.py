"""Values shared by all layers of the runtime. Standard library only."""

from dataclasses import dataclass, fields
from typing import NamedTuple


class ExpertKey(NamedTuple):
    """A routed expert: its layer, counted over layers with experts, and its index."""

    layer: int
    expert: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSignature:
    """The facts of a model that must match before its trace, map or predictor is used.

    `num_layers` counts layers with experts, `num_experts` the routed experts of the widest one.
    """

    model_type: str
    num_layers: int
    num_experts: int
    top_k: int
    vocab_size: int

    @staticmethod
    def parse(value: object) -> "ModelSignature":
        """A signature from a file's JSON; ValueError if a value is impossible."""
        kinds = {field.name: field.type for field in fields(ModelSignature)}
        if not isinstance(value, dict) or set(value) != set(kinds):
            raise ValueError(f"the signature must have exactly {sorted(kinds)}")
        for name, item in value.items():
            if type(item) is not kinds[name] or (kinds[name] is int and not 0 < item < 2**31):
                raise ValueError(f"the signature has {name} = {item!r}")
        return ModelSignature(**value)


@dataclass(kw_only=True, slots=True)
class ExpertCounters:
    """Counters of requested and prefetched experts; each request is a hit, a late hit or a miss.

    Attributes:
        hits: experts in the fastest tier when a layer asked for them.
        late_hits: experts on their way when a layer asked for them.
        misses: experts that a layer had to demand from a slower tier.
        computed_misses: the misses that the CPU computed where they lay, for a model on a device.
        planned_s: predicted seconds of the misses that were planned (`load(misses="auto")`).
        spent_s: seconds that these took, until the CPU had done its part and the last copy ended.
        miss_cpu_s: measured seconds of one missing expert on the CPU, for one row.
        miss_copy_s: to copy one to the device.
        miss_return_s: to bring the rows that the CPU computed to the device.
        miss_launch_s: to launch the product of one that was copied.
        resident_steps: decode steps that were one graph over experts in slots of the device.
        fetched_steps: those that were one graph, which read missing experts in host memory.
        cut_steps: those that were cut in every layer, to wait for missing experts.
        recorded_bytes: memory of the device that recorded decode steps hold, by its allocator.
        recorded_reserve_bytes: the part of the budget that is reserved for them.
        replaced_choices: choices of tokens that went to a resident expert instead of a missing one
            (`load(routing="cache-aware:LAMBDA")`).
        stand_in_choices: those that a rounded copy answered (`load(misses="stand-in")`).
        skipped_choices: those that were left out (`load(skip_below=W)`).
        stall_s: seconds that computation waited for experts.
        readahead_bytes: the part of the bytes read that was read before it was asked for.
        expert_slots: experts that fit into the fastest tier at once, of `slot_bytes` each.
        guesses: experts whose prefetch was started and not taken back; each becomes useful (ready
            when asked for), late (on its way) or wasted (evicted without a request).
    """

    hits: int = 0
    late_hits: int = 0
    misses: int = 0
    computed_misses: int = 0
    planned_s: float = 0.0
    spent_s: float = 0.0
    miss_cpu_s: float = 0.0
    miss_copy_s: float = 0.0
    miss_return_s: float = 0.0
    miss_launch_s: float = 0.0
    resident_steps: int = 0
    fetched_steps: int = 0
    cut_steps: int = 0
    recorded_bytes: int = 0
    recorded_reserve_bytes: int = 0
    replaced_choices: int = 0
    skipped_choices: int = 0
    stand_in_choices: int = 0
    stall_s: float = 0.0
    readahead_bytes: int = 0
    expert_slots: int = 0
    slot_bytes: int = 0
    guesses: int = 0
    useful_guesses: int = 0
    late_guesses: int = 0
    wasted_guesses: int = 0


@dataclass(kw_only=True, slots=True)
class StoreStats(ExpertCounters):
    """Counters of one tier since it was opened or reset.

    Attributes:
        demand_bytes: bytes read that a waiting layer had asked for.
        cancelled_guesses: prefetches that were taken back before their read began.
    """

    demand_bytes: int = 0
    evictions: int = 0
    cancelled_guesses: int = 0

    @property
    def bytes_read(self) -> int:
        """Bytes read from the tier below or the checkpoint's files, alignment included."""
        return self.demand_bytes + self.readahead_bytes

    @property
    def judged_guesses(self) -> int:
        """Guesses with a known outcome."""
        return self.useful_guesses + self.late_guesses + self.wasted_guesses


@dataclass(kw_only=True, slots=True)
class RuntimeStats(ExpertCounters):
    """Statistics of a loaded model: the value of `model.moe.stats()`.

    Attributes:
        bytes_read: bytes read from the checkpoint's files for experts, alignment included.
        copied_bytes: bytes of experts copied from the host, for a model on a device.
        budget_bytes: host memory that the runtime was allowed to allocate.
        dense_bytes: bytes of everything but the routed experts.
        baseline_rss_bytes: resident memory of the process after its imports, before loading.
        peak_rss_bytes: highest resident memory of the process so far, as the kernel counts it. Of
            dense weights that processes share, each counts an equal part.
        prefetch: whether experts are prefetched now, and why.
        predict_s: seconds spent on predicting.
        shares: how the slots are divided over the layers: even or adaptive.
        kv_cache: how keys and values are kept: exact, or int8 (lossy).
        policy_reason: why this policy, where it was not named; empty where it was.
        draft_bytes: bytes of a model that drafts, with room for its texts.
        draft_steps: steps of one token of a text, of a model that was loaded with a ``draft``.
        drafted_tokens: tokens that were verified in them too.
        accepted_drafts: those of them that were chosen too.
        draft_failures: errors of drafts; after one there are no more drafts.
        drafts_given_up: 1 where experts have a draft's memory, which cost more than it saved.
    """

    bytes_read: int
    budget_bytes: int
    dense_bytes: int
    expert_bytes: int
    baseline_rss_bytes: int
    peak_rss_bytes: int
    load_s: float
    copied_bytes: int = 0
    prefetch: str = "off"
    predict_s: float = 0.0
    policy: str = "lru"
    shares: str = "even"
    policy_reason: str = ""
    kv_cache: str = "exact"
    draft_bytes: int = 0
    draft_steps: int = 0
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    draft_failures: int = 0
    drafts_given_up: int = 0
