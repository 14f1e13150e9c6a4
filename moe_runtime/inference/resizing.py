"""A loaded model whose experts get more memory, or less, while it is used."""

from dataclasses import replace

from moe_runtime.inference.handle import RuntimeHandle


def is_resizable(handle: RuntimeHandle) -> bool:
    """Whether a model's experts lie in host memory as they do in the files: not in a code, and not
    below those of a device."""
    return handle._host_store is None


def resize_cache(handle: RuntimeHandle, num_slots: int) -> int:
    """Has a model keep so many experts in memory; changes no bit of what it computes.

    Args:
        handle: of a model that ``is_resizable``.
        num_slots: ``MIN_SLOTS`` at least.

    Returns:
        How many it keeps now: more than asked for while experts are in use or being read, fewer
        where memory cannot be had.
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
