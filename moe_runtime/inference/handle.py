"""The handle of a loaded model: statistics, self-check, resizing and closing."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from moe_runtime.checkpoints.absent import refuse_copy
from moe_runtime.inference.budget import MemoryPlan, peak_resident_bytes
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction.base import PolicyChoice
from moe_runtime.types import ExpertCounters, ModelSignature, RuntimeStats

if TYPE_CHECKING:
    from torch import Tensor

    from moe_runtime.inference.learning import KeptLearning, RoutingRecord
    from moe_runtime.lab.traces.timeline import Timeline
    from moe_runtime.memory.prefetcher import Prefetcher


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedFacts:
    """What is known of a model once it is loaded.

    Attributes:
        signature: what traces and predictors of this model agree on.
        device_plan: None for a model on the CPU.
        dense_bytes: of everything but the routed experts.
        baseline_rss_bytes: resident memory of the process after its imports, before loading.
        load_s: seconds that loading took.
        choice: the eviction policy, and why ``auto`` took it.
    """

    signature: ModelSignature
    host_plan: MemoryPlan
    device_plan: MemoryPlan | None
    dense_bytes: int
    expert_bytes: int
    baseline_rss_bytes: int
    load_s: float
    choice: PolicyChoice


class RuntimeHandle:
    """``model.moe``: statistics, self-check and the end of a model with offloaded experts. A
    context manager: leaving it closes the store. Every call of the model is refused afterwards."""

    def __init__(
        self,
        store: ExpertStore[ExpertWeights],
        facts: LoadedFacts,
        *,
        host_store: ExpertStore[Tensor] | None = None,
        recorder: RoutingRecord | None = None,
        prefetcher: Prefetcher | None = None,
        timeline: Timeline | None = None,
        learning: KeptLearning | None = None,
    ) -> None:
        """Takes over the stores, the recorder and the prefetcher.

        Raises:
            CheckpointError: another process has begun the trace or the timeline.
        """
        self.facts = facts
        self.recorder = recorder
        self.prefetcher = prefetcher
        self._store = store
        self._host_store = host_store
        self._timeline = timeline
        self._learning = learning
        self._closed = False
        # no other process may write them
        with contextlib.ExitStack() as stack:
            if self._timeline is not None:
                stack.callback(self._timeline.close)
                self._timeline.hold()
            if self.recorder is not None:
                self.recorder.hold()
            stack.pop_all()

    def stats(self) -> RuntimeStats:
        """Counters since the model was loaded or they were reset."""
        facts = self.facts
        fastest, slowest = self._store.stats(), (self._host_store or self._store).stats()
        counted = {f.name: getattr(fastest, f.name) for f in dataclasses.fields(ExpertCounters)}
        counted["readahead_bytes"] = slowest.readahead_bytes
        return RuntimeStats(
            **counted,
            bytes_read=slowest.bytes_read,
            copied_bytes=0 if facts.device_plan is None else fastest.bytes_read,
            budget_bytes=facts.host_plan.budget_bytes,
            dense_bytes=facts.dense_bytes,
            expert_bytes=facts.expert_bytes,
            baseline_rss_bytes=facts.baseline_rss_bytes,
            peak_rss_bytes=peak_resident_bytes(),
            load_s=facts.load_s,
            policy=facts.choice.policy,
            shares="adaptive" if facts.choice.adaptive else "even",
            policy_reason=facts.choice.reason,
            prefetch="off" if self.prefetcher is None else self.prefetcher.describe(),
            predict_s=0.0 if self.prefetcher is None else self.prefetcher.stats().predict_s,
        )

    def reset_stats(self) -> None:
        """Sets the counters to zero, as after a warm-up."""
        self._store.reset_stats()
        if self.prefetcher is not None:
            self.prefetcher.reset_stats()
        if self._host_store is not None:
            self._host_store.reset_stats()

    def check(self) -> None:
        """Proves that the entries of every tier agree with each other.

        Raises:
            AssertionError: they do not.
            MoERuntimeError: the process is a fork of the one that loaded the model.
        """
        self._store.check()
        if self._host_store is not None:
            self._host_store.check()

    def close(self) -> None:
        """Ends reads under way, gives up the experts' memory and finishes trace and timeline. Does
        nothing in a fork of the process that loaded the model."""
        if self._closed or self._store.is_forked:
            return
        self._closed = True
        with contextlib.ExitStack() as stack:
            # Each of them, even if another one fails.
            if self.recorder is not None:
                stack.callback(self.recorder.close)
            if self._timeline is not None:
                stack.callback(self._timeline.close)
            if self._learning is not None:
                stack.callback(self._learning.close)
            self._store.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        refuse_copy()

    def __enter__(self) -> RuntimeHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def is_resizable(handle: RuntimeHandle) -> bool:
    """Whether experts lie in host memory as in the files: not in a code, nor below a device."""
    return handle._host_store is None


def resize_cache(handle: RuntimeHandle, num_slots: int) -> int:
    """Has a model that ``is_resizable`` keep so many experts in memory, ``MIN_SLOTS`` at least.

    Returns how many it keeps now: more while experts are in use or being read, fewer where memory
    cannot be had.
    """
    store, facts = handle._store, handle.facts
    plan = replace(facts.host_plan, num_slots=num_slots)
    streamed = 0
    if store.decides_later:
        streamed = min(plan.stream_slots(), facts.signature.top_k, num_slots // 4)
    found = store.resize(
        num_slots, shared_slots=num_slots - streamed, stream_slots=plan.stream_slots()
    )
    taken = plan.dense_bytes + plan.reserve_bytes + found * plan.slot_bytes
    handle.facts = replace(facts, host_plan=replace(plan, num_slots=found, budget_bytes=taken))
    return found
