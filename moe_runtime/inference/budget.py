"""Free memory of the machine, and the division of a budget."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
import torch

from moe_runtime.config import Budget, format_bytes
from moe_runtime.errors import CapacityError
from moe_runtime.kernels.decode_step.rounded_rows import row_bytes
from moe_runtime.kernels.linear.op import kept_code_bytes
from moe_runtime.policies.prediction.base import most_remembered_bytes, shape_of
from moe_runtime.types import ModelSignature

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from moe_runtime.checkpoints.checkpoint import Checkpoint
    from moe_runtime.checkpoints.expert_map import ExpertMap

AUTO_SHARE = 0.9
"""Share of the free memory that an ``auto`` budget takes."""

STREAM_BYTES = 64 * 2**20
"""Experts in flight while a prompt streams through a layer; enough to keep a disk busy."""

FIXED_RESERVE_BYTES = 9 * 2**20
"""Buffers of tokenizer, generation and allocator, records, code of libraries; 7 MiB measured."""

ENTRY_BYTES = 8 * 2**10
"""Layout, views and store entries of an expert."""

BUFFER_SHARE = 1 / 8
"""Buffers of libraries, as a share of the dense weights. Half of it was used when measured."""

MIN_SLOTS = 2
"""Fewest slots that work: one expert computes while the next one is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """How a tier's budget is divided.

    Attributes:
        dense_bytes: weights that are always resident.
        reserve_bytes: KV cache, activations and what the allocator keeps.
        num_slots: experts that fit.
    """

    budget_bytes: int
    dense_bytes: int
    reserve_bytes: int
    slot_bytes: int
    num_slots: int

    def stream_slots(self, stream_bytes: int = STREAM_BYTES) -> int:
        """Slots that a streamed prompt may take from the cache, for ``stream_bytes`` in flight."""
        return max(MIN_SLOTS, min(self.num_slots // 4, stream_bytes // self.slot_bytes))


def smallest_budget(dense_bytes: int, reserve_bytes: int, slot_bytes: int) -> int:
    """The smallest working budget, in bytes."""
    return dense_bytes + reserve_bytes + MIN_SLOTS * slot_bytes


def plan_memory(
    budget_bytes: int,
    *,
    dense_bytes: int,
    reserve_bytes: int,
    slot_bytes: int,
    num_experts: int,
    max_tokens: int | None = None,
    option: str = "budget",
    embedding_bytes: int = 0,
) -> MemoryPlan:
    """Divides a budget: dense weights, the reserve, and slots for experts from the rest.

    If not all experts fit, embeddings (``embedding_bytes``) stay in their files. The error names
    ``max_tokens`` and ``option``. Raises CapacityError: the budget is too small; names the smallest
    that works.
    """
    if dense_bytes + reserve_bytes + num_experts * slot_bytes > budget_bytes:
        dense_bytes -= embedding_bytes
    smallest = smallest_budget(dense_bytes, reserve_bytes, slot_bytes)
    if budget_bytes < smallest:
        reserved = "activations"
        if max_tokens is not None:
            reserved = f"KV cache and activations of {max_tokens} tokens"
        raise CapacityError(
            f"a {option} of {format_bytes(budget_bytes)} is too small: the smallest that works is "
            f"{format_bytes(smallest, up=True)} ({smallest} bytes): {format_bytes(dense_bytes)} "
            f"of dense weights, {format_bytes(reserve_bytes)} for {reserved}, "
            f"and {MIN_SLOTS} experts of {format_bytes(slot_bytes)}",
            smallest_bytes=smallest,
        )
    slots = (budget_bytes - dense_bytes - reserve_bytes) // slot_bytes
    return MemoryPlan(
        budget_bytes=budget_bytes,
        dense_bytes=dense_bytes,
        reserve_bytes=reserve_bytes,
        slot_bytes=slot_bytes,
        num_slots=min(slots, num_experts),
    )


def reserve_for(
    checkpoint: Checkpoint,
    experts: ExpertMap,
    signature: ModelSignature,
    *,
    max_tokens: int,
    dense_bytes: int,
    kv_cache: str = "exact",
    in_pass: int | None = None,
    writes_dense: bool = True,
) -> int:
    """Bytes to reserve for ``max_tokens`` tokens of a batch, ``in_pass`` of them in one pass.

    - KV cache: with ``room_for`` growth, and one layer twice, because growing copies it.
    - Activations: a few copies of the hidden states, and the routed rows.
    - Policies and predictors: the largest of them.
    - Dequantised values of the largest matrix. ``writes_dense`` includes dense matrices; a GPU
      multiplies these packed.
    - Scratch to reorder a part of an expert.
    """
    config, dtype = checkpoint.config, checkpoint.dtype
    kv_token = kv_bytes_per_token(config, dtype, kv_cache)
    passed = min(max_tokens, in_pass or max_tokens)
    activations = passed * activation_bytes_per_token(config, dtype, signature.top_k)
    logits = 4 * config.get_text_config().vocab_size * 4
    buffers = FIXED_RESERVE_BYTES + int(BUFFER_SHARE * dense_bytes)
    entries = ENTRY_BYTES * len(experts.layouts) + most_remembered_bytes(shape_of(signature))
    code = kept_code_bytes(_weight_shapes(config), dtype, passed)
    tokens = room_for(max_tokens) * kv_token + activations
    largest = experts.largest_quantised if writes_dense else experts.largest_in_experts
    written = largest * dtype.itemsize + experts.scratch_bytes
    return tokens + logits + buffers + entries + code + written


def _weight_shapes(config: PreTrainedConfig) -> set[tuple[int, int]]:
    text = config.get_text_config()
    hidden, heads, head_dim = text.hidden_size, text.num_attention_heads, widest_head(config)
    inner = largest_of(text, "moe_intermediate_size") or largest_of(text, "intermediate_size")
    widths = [heads * head_dim, (largest_of(text, "num_key_value_heads") or heads) * head_dim]
    widths += [inner] if inner else []
    shapes = {(width, hidden) for width in widths}
    return shapes | {(hidden, width) for width in (widths[0], widths[-1])}


def reserve_per_token(
    config: PreTrainedConfig, dtype: torch.dtype, top_k: int, kv_cache: str, *, in_pass: int | None
) -> int:
    """Bytes that the reserve loses, at least, per token less. With activations if a pass has all
    tokens (``in_pass`` None)."""
    activations = 0 if in_pass else activation_bytes_per_token(config, dtype, top_k)
    return kv_bytes_per_token(config, dtype, kv_cache) + activations


def kv_bytes_per_token(
    config: PreTrainedConfig, dtype: torch.dtype, kv_cache: str = "exact"
) -> int:
    """Bytes of the KV cache, and of one layer more, to copy or widen a layer into."""
    text, width = config.get_text_config(), widest_head(config)
    heads = largest_of(text, "num_key_value_heads") or text.num_attention_heads
    kv_layer = 2 * heads * width * dtype.itemsize
    kept = kv_layer if kv_cache == "exact" else 2 * heads * row_bytes(width)
    return kept * text.num_hidden_layers + kv_layer


def activation_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype, top_k: int) -> int:
    """Bytes of hidden states and of a token's routed rows."""
    return config.get_text_config().hidden_size * (12 * 4 + top_k * dtype.itemsize)


NUM_RECORDED, RECORDED_TOKENS = 4, 4
"""Recorded steps in parts that memory is reserved for, and tokens of each. Larger ones leave room
for fewer; steps of one graph keep less."""
_PARTS_BYTES = 2**16
"""Partial sums of a layer that a GPU with up to 256 multiprocessors adds for few tokens."""
_SEGMENT_BYTES = 2 * 20 * 2**20 + 2 * 2**20
"""What torch allocates at a time, for two streams' blocks above 1 MiB, and for smaller ones."""


def recorded_bytes(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    signature: ModelSignature,
    num_tokens: int,
    *,
    in_parts: bool,
) -> int:
    """Bytes of the device that one recorded decode step of so many tokens keeps for its replays.

    A step in parts keeps the rows of every layer, since the host works between the parts.
    """
    text, top_k = config.get_text_config(), signature.top_k
    kept = num_tokens * (4 * text.vocab_size + signature.num_layers * 16 * top_k)
    if in_parts:
        inner = largest_of(text, "moe_intermediate_size") or largest_of(text, "intermediate_size")
        rows = text.hidden_size * dtype.itemsize + top_k * (inner * dtype.itemsize + 16)
        sums = top_k * text.hidden_size * 4
        kept += signature.num_layers * (num_tokens * (rows + sums) + _PARTS_BYTES)
    return kept


def most_recorded_bytes(
    config: PreTrainedConfig, dtype: torch.dtype, signature: ModelSignature
) -> int:
    """Bytes that all recordings together may keep."""
    return NUM_RECORDED * recorded_bytes(config, dtype, signature, RECORDED_TOKENS, in_parts=True)


def bytes_for_recordings(
    config: PreTrainedConfig, dtype: torch.dtype, signature: ModelSignature
) -> int:
    """Bytes of the device to reserve for recorded decode steps: what they keep, and the memory of
    one step at work, which they share."""
    text = config.get_text_config()
    at_work = activation_bytes_per_token(config, dtype, signature.top_k) + 8 * text.vocab_size
    kept = most_recorded_bytes(config, dtype, signature)
    return kept + NUM_RECORDED * RECORDED_TOKENS * at_work + _SEGMENT_BYTES


def widest_head(config: PreTrainedConfig) -> int:
    """The largest head dimension of any layer."""
    text = config.get_text_config()
    found = largest_of(text, "head_dim", "global_head_dim")
    return found or text.hidden_size // text.num_attention_heads


def largest_of(text: PreTrainedConfig, *names: str) -> int:
    """The largest integer that one of the attributes has in any layer; 0 if none has one."""
    # newer transformers refuse to read attributes that differ between layers
    layers = text.per_layer_config if getattr(text, "per_layer_attributes", None) else [text]
    values = (getattr(layer, name, None) for layer in layers for name in names)
    return max((value for value in values if isinstance(value, int)), default=0)


def resolve_budget(budget: Budget, available_bytes: int, place: str) -> int:
    """The bytes of a budget. Raises CapacityError: it exceeds the free ``available_bytes``."""
    resolved = budget.resolve(available_bytes, auto_share=AUTO_SHARE)
    if resolved > available_bytes:
        raise CapacityError(
            f"a budget of {format_bytes(resolved)} exceeds the {format_bytes(available_bytes)} "
            f"that are free on {place}; give less, or 'auto'"
        )
    return resolved


def available_device_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


def available_host_bytes() -> int:
    """Free host memory: of the machine, or less if the control group limits it."""
    free = psutil.virtual_memory().available
    group = control_group_free_bytes()
    return free if group is None else min(free, group)


def control_group_free_bytes() -> int | None:
    """Bytes left in the process's control group; None if no group limits memory. The page cache
    counts as free. A limit also binds the groups below it, so the smallest of all levels counts."""
    memberships = Path("/proc/self/cgroup")
    if not memberships.is_file():
        return None
    free = []
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            root, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "usage_in_bytes"
            free += _levels(Path(root), path, limit, f"memory.{usage}", "total_inactive_file")
        elif controllers == "":
            for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
                files = ("memory.max", "memory.current", "inactive_file")
                free += _levels(Path(root), path, *files)
    return min(free, default=None)


def _levels(root: Path, path: str, limit: str, usage: str, cache: str) -> list[int]:
    group = root / path.lstrip("/")
    free = []
    for level in (group, *group.parents):
        if not level.is_relative_to(root):
            break
        found = _free_in(level, limit, usage, cache)
        if found is not None:
            free.append(found)
    return free


def _free_in(group: Path, limit: str, usage: str, cache: str) -> int | None:
    try:
        most = (group / limit).read_text().strip()
        used = int((group / usage).read_text())
        stat = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    # the first version of control groups writes "no limit" as a number near 2**63
    if most == "max" or int(most) >= 2**60:
        return None
    fields = dict(line.split() for line in stat.splitlines())
    return max(0, int(most) - used + int(fields.get(cache, 0)))


def resident_bytes() -> int:
    """Resident memory of this process now."""
    return psutil.Process().memory_info().rss


def peak_resident_bytes() -> int:
    """Highest resident memory of this process so far, from the kernel's counter."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return peak * 1024


def set_up_libraries(dtype: torch.dtype) -> None:
    """Runs the operations of forward passes, sampling and policies once, on a few values.

    Matrix libraries allocate at their first call, and every operation pages in its code. These
    18 MiB then count as the libraries', not as the model's.
    """
    functional = torch.nn.functional
    with torch.inference_mode(), torch.random.fork_rng(devices=[]):
        ids = torch.arange(8)
        rows = functional.embedding(ids, torch.zeros(8, 64, dtype=dtype))
        weight = torch.zeros(64, 64)
        for x in (rows, rows.float(), rows[:1].float()):
            functional.silu(functional.linear(x, weight.to(x.dtype)))
            heads = x.view(1, 1, -1, 64)
            functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        wide = rows.float()
        torch.bmm(wide.unsqueeze(1), wide.unsqueeze(2))
        torch.cat((wide.cos(), wide.sin())).square().mean(-1, keepdim=True).rsqrt()
        scores, order = torch.sort(wide[:1])
        removed = scores.softmax(-1).cumsum(-1) <= 0.1
        scores = scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)
        torch.multinomial(scores.softmax(-1), 1)
        torch.isin(scores.topk(2).indices, ids).any(-1).all().item()
    counts = np.ones((8, 8), np.float32)
    np.linalg.norm(np.einsum("cx,cx->c", counts @ counts, counts).astype(np.float16))
    np.searchsorted(np.unique(np.argsort(counts, kind="stable")), np.arange(8))


ROOM_TOKENS = 64
ROOM_SHARE = 16
"""A full cache grows by 64 tokens, over all its sequences, and a sixteenth of its length."""


def room_for(num_tokens: int, num_sequences: int = 1) -> int:
    """Tokens of room per sequence when a cache grows. Several sequences together never take more
    room than one with all their tokens."""
    return num_tokens + ROOM_TOKENS // num_sequences + num_tokens // ROOM_SHARE


DEFAULT_TOKENS = 4096
"""Default context, if the model has as many positions."""


def known_positions(config: PreTrainedConfig) -> int | None:
    """``max_position_embeddings`` of a model; None if its configuration has no number."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) else None


CONTEXT_STEP = 1024
"""The default context grows beyond 4096 in steps of this many tokens."""
CONTEXT_SHARE = 16
"""The default context takes the memory that all experts leave. If not all fit, it takes a sixteenth
of theirs."""


class Context(NamedTuple):
    """Tokens that memory is reserved for, and the reason for the number."""

    max_tokens: int
    reason: str


def tokens_to_plan_for(config: PreTrainedConfig, max_tokens: int | None) -> int:
    """``max_tokens``; by default the model's positions, 4096 at most. Raises ValueError: fewer than
    one."""
    if max_tokens is None:
        known = known_positions(config)
        return DEFAULT_TOKENS if known is None else min(DEFAULT_TOKENS, known)
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    return max_tokens


def context_step_bytes(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    top_k: int,
    kv_cache: str = "exact",
    in_pass: int | None = None,
) -> int:
    """Bytes that `reserve_for` gains per `CONTEXT_STEP` beyond the default. With activations if a
    pass has all tokens (``in_pass`` None)."""
    room = room_for(2 * CONTEXT_STEP) - room_for(CONTEXT_STEP)
    activations = 0 if in_pass else activation_bytes_per_token(config, dtype, top_k)
    return room * kv_bytes_per_token(config, dtype, kv_cache) + CONTEXT_STEP * activations


def default_context(
    known: int | None,
    budget_bytes: int,
    *,
    dense_bytes: int,
    reserve_bytes: int,
    slot_bytes: int,
    num_experts: int,
    embedding_bytes: int,
    step_bytes: int,
) -> Context:
    """The context without ``max_tokens``.

    Args:
        known: positions of the model, if its configuration names them.
        reserve_bytes: of the least context, `tokens_to_plan_for` of None.
        slot_bytes: of one expert.
        embedding_bytes: part of ``dense_bytes``; stays in its files if not all experts fit.
        step_bytes: from `context_step_bytes`.
    """
    least = DEFAULT_TOKENS if known is None else min(DEFAULT_TOKENS, known)
    if known is None:
        return Context(least, "as the model names no length")
    if least == known:
        return Context(least, "all that the model knows")
    room = budget_bytes - dense_bytes - reserve_bytes
    beside = room - num_experts * slot_bytes
    spare = beside if beside >= 0 else max(0, room + embedding_bytes) // CONTEXT_SHARE
    more = spare // step_bytes * CONTEXT_STEP
    if least + more >= known:
        return Context(known, "all that the model knows")
    if beside >= 0:
        return Context(least + more, f"of the model's {known}, what all experts leave")
    return Context(least + more, f"of the model's {known}, the rest of memory is for experts")
