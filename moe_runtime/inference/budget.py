"""What the machine has free, and how a budget is divided."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import psutil
import torch

from moe_runtime.config import Budget, format_bytes
from moe_runtime.errors import CapacityError
from moe_runtime.inference.kv_cache import room_for
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
"""Of experts in flight while a prompt streams through a layer: enough to keep a disk busy."""

FIXED_RESERVE_BYTES = 9 * 2**20
"""For buffers of the tokenizer, generation and allocator, records, and code of libraries; 7 MiB
measured."""

ENTRY_BYTES = 8 * 2**10
"""For each expert: its layout, views and entries in the store."""

BUFFER_SHARE = 1 / 8
"""Of the dense weights, for buffers of libraries; half of it was used when measured."""

MIN_SLOTS = 2
"""Fewest slots that work: one expert computes while the next one is read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """How a tier's budget is divided.

    Attributes:
        dense_bytes: weights that are always resident.
        reserve_bytes: KV cache, activations and what the allocator keeps.
        num_slots: experts that fit at once.
    """

    budget_bytes: int
    dense_bytes: int
    reserve_bytes: int
    slot_bytes: int
    num_slots: int

    def stream_slots(self, stream_bytes: int = STREAM_BYTES) -> int:
        """Slots that a streamed prompt may take from the cache, for so many bytes in flight."""
        return max(MIN_SLOTS, min(self.num_slots // 4, stream_bytes // self.slot_bytes))


def smallest_budget(dense_bytes: int, reserve_bytes: int, slot_bytes: int) -> int:
    """The smallest budget in bytes with which a model runs."""
    return dense_bytes + reserve_bytes + MIN_SLOTS * slot_bytes


def plan_memory(
    budget_bytes: int,
    *,
    dense_bytes: int,
    reserve_bytes: int,
    slot_bytes: int,
    num_experts: int,
    max_tokens: int | None = None,
    option: str | None = None,
    embedding_bytes: int = 0,
) -> MemoryPlan:
    """Gives what the dense weights and the reserve leave of a budget to expert slots.

    Where not all experts fit, the ``embedding_bytes`` of the dense weights stay in their files.
    ``max_tokens`` and ``option`` are named in the error. Raises CapacityError: the budget is too
    small; names the smallest that works.
    """
    if dense_bytes + reserve_bytes + num_experts * slot_bytes > budget_bytes:
        dense_bytes -= embedding_bytes
    smallest = smallest_budget(dense_bytes, reserve_bytes, slot_bytes)
    if budget_bytes < smallest:
        reserved = "activations"
        if max_tokens is not None:
            reserved = f"KV cache and activations of {max_tokens} tokens"
        given = f"a budget of {format_bytes(budget_bytes)}"
        if option is not None:
            given = f"a {option} of {format_bytes(budget_bytes)}"
        raise CapacityError(
            f"{given} is too small: the smallest that works is "
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
    """Bytes to set aside for the KV cache of ``max_tokens`` tokens of a batch, and activations of
    those in a pass: ``in_pass`` at most, or all.

    The KV cache is counted with ``room_for`` it, and twice for one layer, because growing it
    copies. Activations are a few copies of the hidden states, and the routed rows. Policies and
    predictors count as the largest of them. Values of the largest quantised matrix are written out
    for many rows, of dense ones where ``writes_dense``: a GPU multiplies these as they lie. A part
    of an expert is copied while it is put in order.
    """
    config, dtype = checkpoint.config, checkpoint.dtype
    kv_token = kv_bytes_per_token(config, dtype, kv_cache)
    passed = min(max_tokens, in_pass or max_tokens)
    activations = passed * activation_bytes_per_token(config, dtype, signature.top_k)
    logits = 4 * config.get_text_config().vocab_size * 4
    buffers = FIXED_RESERVE_BYTES + int(BUFFER_SHARE * dense_bytes)
    num_experts = signature.num_layers * signature.num_experts
    entries = ENTRY_BYTES * num_experts + most_remembered_bytes(shape_of(signature))
    code = kept_code_bytes(_weight_shapes(config), dtype, passed)
    tokens = room_for(max_tokens) * kv_token + activations
    largest = experts.largest_quantised if writes_dense else experts.largest_in_experts
    written = largest * dtype.itemsize + experts.scratch_bytes
    return tokens + logits + buffers + entries + code + written


def _weight_shapes(config: PreTrainedConfig) -> set[tuple[int, int]]:
    """Shapes of the weights of attention and experts."""
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
    """Bytes by which the reserve is smaller, at least, for each token less; with activations where
    all tokens are in one pass (None)."""
    activations = 0 if in_pass else activation_bytes_per_token(config, dtype, top_k)
    return kv_bytes_per_token(config, dtype, kv_cache) + activations


def kv_bytes_per_token(
    config: PreTrainedConfig, dtype: torch.dtype, kv_cache: str = "exact"
) -> int:
    """Bytes of the KV cache, and of one layer more: what it is copied into, or widened."""
    text, width = config.get_text_config(), widest_head(config)
    heads = largest_of(text, "num_key_value_heads") or text.num_attention_heads
    kv_layer = 2 * heads * width * dtype.itemsize
    kept = kv_layer if kv_cache == "exact" else 2 * heads * row_bytes(width)
    return kept * text.num_hidden_layers + kv_layer


def activation_bytes_per_token(config: PreTrainedConfig, dtype: torch.dtype, top_k: int) -> int:
    """Bytes of hidden states, and of a token's rows at its experts."""
    return config.get_text_config().hidden_size * (12 * 4 + top_k * dtype.itemsize)


def widest_head(config: PreTrainedConfig) -> int:
    """Values of a head of attention, in the layers where they are most."""
    text = config.get_text_config()
    found = largest_of(text, "head_dim", "global_head_dim")
    return found or text.hidden_size // text.num_attention_heads


def largest_of(text: PreTrainedConfig, *names: str) -> int:
    """The largest number that one of some attributes has in any layer; 0 where none is a number."""
    # transformers refuses to read such as differ between layers, from the release that knows them
    layers = text.per_layer_config if getattr(text, "per_layer_attributes", None) else [text]
    values = (getattr(layer, name, None) for layer in layers for name in names)
    return max((value for value in values if isinstance(value, int)), default=0)


def resolve_budget(budget: Budget, available_bytes: int, place: str) -> int:
    """The bytes of a budget, given what a place has free. Raises CapacityError: the budget exceeds
    what is free."""
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
    """Host memory that this process may still take: the machine's, or its control group's."""
    free = psutil.virtual_memory().available
    group = control_group_free_bytes()
    return free if group is None else min(free, group)


def control_group_free_bytes() -> int | None:
    """Bytes left in the process's control group, or None where none limits memory. The page cache
    counts as free. A limit also binds the groups below it: the least of all levels counts."""
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
    """Highest resident memory of this process so far, by the kernel's own counter."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return peak * 1024


def set_up_libraries(dtype: torch.dtype) -> None:
    """Runs the operations of loading, forward passes and sampling on a few values.

    Torch's matrix libraries set themselves up at their first call, and every operation pages in its
    code: some 20 MiB which no model asked for.
    """
    with torch.inference_mode():
        _set_up_layers(dtype)
        _set_up_sampling()
    _set_up_numpy()


def _set_up_layers(dtype: torch.dtype) -> None:
    functional = torch.nn.functional
    ids = torch.arange(8)
    rows = functional.embedding(ids, torch.zeros(8, 64, dtype=dtype)) + 1
    wide, weight = rows.float(), torch.zeros(64, 64, dtype=dtype)
    heads = rows.view(1, 1, 8, 64)
    functional.linear(rows, weight)
    for num_rows in (1, 8):
        functional.linear(wide[:num_rows], weight.float())
    functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    wide_heads = heads.float()
    functional.scaled_dot_product_attention(wide_heads, wide_heads, wide_heads, is_causal=True)
    torch.bmm(wide.unsqueeze(1), wide.unsqueeze(2))
    chosen = torch.topk(torch.softmax(wide, dim=-1), 2)
    (chosen.values / chosen.values.sum(-1, keepdim=True)).to(dtype)
    angles = torch.outer(1.0 / 10.0 ** (torch.arange(0, 64, 2) / 64), ids.float())
    angles.cos().mul_(0.5).to(dtype)
    angles.sin()
    normal = wide * wide.square().mean(-1, keepdim=True).rsqrt()
    halves = torch.cat((-rows[:, 32:], rows[:, :32]), dim=-1)
    gated = functional.silu(rows) * halves + normal.to(dtype)
    out = torch.zeros(8, 64, dtype=dtype)
    out[ids] = functional.pad(gated[ids], (0, 0, 0, 8))[:8]
    out.new_empty(1, 2, 8, 64).narrow(-2, 0, 8).copy_(heads)
    out.transpose(0, 1).reshape(-1)
    torch.equal(out, torch.stack(list(out)))
    torch.allclose(out, out)
    out.clone().normal_().uniform_()
    torch.zeros(128, dtype=torch.uint8).view(dtype)


def _set_up_sampling() -> None:
    scores = torch.zeros(1, 64)
    ids = torch.ones(1, 8, dtype=torch.int64)
    in_order, order = torch.sort(scores, descending=False)
    removed = in_order.softmax(dim=-1).cumsum(dim=-1) <= 0.1
    removed[..., -1:] = False
    scores = scores.masked_fill(removed.scatter(1, order, removed), -float("inf"))
    with torch.random.fork_rng(devices=[]):
        torch.multinomial(torch.softmax(scores / 0.5, dim=-1), num_samples=1).squeeze(1)
    scores.argmax(-1)
    places = (ids.cumsum(-1) - 1).masked_fill(ids == 0, 1)
    done = torch.isin(ids[:, -1], torch.tensor([0])) | torch.full((1,), False)
    ids = torch.cat((ids, (ids[:, -1] * (1 - done.long()))[:, None]), dim=-1)
    ids.mul(2).eq(places[:, :1]).any(dim=-1).logical_not().all().item()
    ids.max().item()


def _set_up_numpy() -> None:
    counts = np.zeros((8, 8), np.float32)
    np.add.at(counts, (np.arange(8), np.arange(8)), 1.0)
    chance = (counts @ counts).sum(axis=1) / np.maximum(np.sqrt(counts).max(axis=1), 1.0)
    np.argsort(-chance, kind="stable")
    np.linalg.norm(counts)
    np.tensordot(counts[None], counts, axes=2)
    np.einsum("cx,cx->c", counts, counts)
    np.exp(np.where(chance > 0, chance, 0)).astype(np.float16)
    flat = np.unique(np.repeat(np.arange(8), 2), return_inverse=True)[1].astype(np.int32)
    np.bincount(flat, weights=flat, minlength=9).cumsum()
    np.split(np.searchsorted(flat, flat, side="right"), [4])
    np.concatenate([flat, np.diff(flat), np.flatnonzero(flat)]).tobytes()


DEFAULT_TOKENS = 4096
"""Tokens that memory is set aside for by default, if the model knows as many."""


def known_positions(config: PreTrainedConfig) -> int | None:
    """Tokens of the longest sequence that a model knows; None where its configuration says none."""
    known = getattr(config.get_text_config(), "max_position_embeddings", None)
    return known if isinstance(known, int) else None


CONTEXT_STEP = 1024
"""More than that by default comes in such steps."""
CONTEXT_SHARE = 16
"""It takes what all experts leave, or a sixteenth of their room where not all of them fit."""


class Context(NamedTuple):
    """Tokens that memory is set aside for, and why so many."""

    max_tokens: int
    reason: str


def tokens_to_plan_for(config: PreTrainedConfig, max_tokens: int | None) -> int:
    """``max_tokens``, or where that is None the positions that a model knows, of 4096 at most.
    Raises ValueError: fewer than one."""
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
    """Bytes by which `reserve_for` grows with each `CONTEXT_STEP` beyond the default; with
    activations where all tokens are in one pass (None)."""
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
    """The context where none is asked for.

    Args:
        known: positions that the model knows, if it says so.
        reserve_bytes: of `tokens_to_plan_for` no number.
        slot_bytes: of each of ``num_experts``.
        embedding_bytes: of the dense ones, which stay in their files where not all experts fit.
        step_bytes: of `context_step_bytes`.
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
