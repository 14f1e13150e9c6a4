"""Facts about a checkpoint, and the slots that a budget gives, from headers alone."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_runtime.checkpoints.expert_map import ExpertMap, map_experts
from moe_runtime.checkpoints.opening import build_on_meta, found_headers, open_checkpoint
from moe_runtime.config import DRAFTS, MISSES, STAND_IN, check_draft, require_known
from moe_runtime.inference.budget import (
    CONTEXT_STEP,
    Context,
    context_step_bytes,
    default_context,
    known_positions,
    plan_memory,
    reserve_for,
    reserve_per_token,
    smallest_budget,
    tokens_to_plan_for,
)
from moe_runtime.inference.kv_cache import require_roundable
from moe_runtime.inference.loading import (
    AUTO,
    check_names,
    plan_draft,
    resolve_policy,
    signature_of,
)
from moe_runtime.inference.lossy import copied_bytes
from moe_runtime.inference.steps import most_in_pass
from moe_runtime.policies.eviction.base import PolicyChoice
from moe_runtime.types import ModelSignature

if TYPE_CHECKING:
    from moe_runtime.checkpoints.checkpoint import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSummary:
    """A Mixture-of-Experts checkpoint, from its headers.

    Attributes:
        path: the folder, or the name on the hub if only headers were read.
        model_type: family in the configuration.
        architecture: class of the model in transformers.
        num_layers: layers with routed experts.
        num_experts: routed experts in the widest layer.
        total_experts: of all layers.
        expert_dtype: type of the experts in the files.
        bits_per_weight: of an expert in the files, scales included.
        dense_bytes: everything but the routed experts, in memory on a CPU.
        bytes_per_expert: the largest expert.
        slot_bytes: a slot for any expert, alignment included.
        stand_in_bytes: copies for ``misses="stand-in"``, else 0.
        draft_bytes: a draft model with memory for its texts, or 0.
        reserve_bytes: KV cache and activations of ``max_tokens``, buffers, stand-ins and drafts.
        known_tokens: limit of `context_for`; None if ``max_tokens`` was given.
        context_step_bytes: growth of the reserve per 1024 more tokens.
        token_bytes: least reduction of the reserve per token less.
        signature: the shape that traces and predictors must match.
    """

    path: Path
    model_type: str
    architecture: str
    num_layers: int
    num_experts: int
    total_experts: int
    top_k: int
    expert_dtype: str
    bits_per_weight: float
    dense_bytes: int
    embedding_bytes: int
    expert_bytes: int
    bytes_per_expert: int
    slot_bytes: int
    stand_in_bytes: int
    draft_bytes: int
    reserve_bytes: int
    max_tokens: int
    token_bytes: int
    known_tokens: int | None
    context_step_bytes: int
    signature: ModelSignature

    @property
    def smallest_budget_bytes(self) -> int:
        """The smallest working host budget on a CPU."""
        least_bytes = self.dense_bytes - self.embedding_bytes
        return smallest_budget(least_bytes, self.reserve_bytes, self.slot_bytes)

    @property
    def token_expert_bytes(self) -> int:
        """Bytes of experts that a token needs, from memory or disk."""
        return self.num_layers * self.top_k * self.bytes_per_expert

    def tokens_per_s(self, resident_share: float, memory_speed: float, disk_speed: float) -> float:
        """Upper bound of decoded tokens per second, for two speeds in bytes per second.

        Assumes evenly used experts; skewed use misses less. Ignores the time of products and of the
        KV cache.
        """
        dense_bytes = self.dense_bytes - self.embedding_bytes
        read_bytes = (1 - min(resident_share, 1)) * self.token_expert_bytes
        all_bytes = dense_bytes + self.token_expert_bytes
        return 1 / (all_bytes / memory_speed + read_bytes / disk_speed)

    def tokens_for(self, budget_bytes: int) -> int:
        """Tokens, up to ``max_tokens``, that fit in a host budget; 0 if it is too small."""
        short_bytes = max(0, self.smallest_budget_bytes - budget_bytes)
        return max(0, self.max_tokens - -(-short_bytes // self.token_bytes))

    def context_for(self, budget_bytes: int) -> Context:
        """The context that ``load`` reserves memory for with a host budget."""
        if self.known_tokens is None:
            return Context(self.max_tokens, "as asked for, or the least by default")
        return default_context(
            self.known_tokens,
            budget_bytes,
            dense_bytes=self.dense_bytes,
            reserve_bytes=self.reserve_bytes,
            slot_bytes=self.slot_bytes,
            num_experts=self.total_experts,
            embedding_bytes=self.embedding_bytes,
            step_bytes=self.context_step_bytes,
        )

    def choice_for(self, num_slots: int) -> PolicyChoice:
        """The eviction policy that ``policy="auto"`` takes for ``num_slots``."""
        return resolve_policy(
            AUTO, AUTO, self.signature, self.path, num_slots, expert_bytes=self.slot_bytes
        )

    def slots_for(self, budget_bytes: int) -> int:
        """Slots that a host budget gives. Raises CapacityError: the budget is too small."""
        more = self.context_for(budget_bytes).max_tokens - self.max_tokens
        plan = plan_memory(
            budget_bytes,
            dense_bytes=self.dense_bytes,
            reserve_bytes=self.reserve_bytes + more * self.context_step_bytes // CONTEXT_STEP,
            slot_bytes=self.slot_bytes,
            num_experts=self.total_experts,
            max_tokens=self.max_tokens,
            embedding_bytes=self.embedding_bytes,
        )
        return plan.num_slots


def inspect_checkpoint(
    path_or_id: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    max_tokens: int | None = None,
    cache_code: str = "none",
    misses: str = "device",
    kv_cache: str = "exact",
    draft: str | Path = "none",
    verify: bool = False,
    progress: Progress | None = None,
) -> CheckpointSummary:
    """Reads the facts of a checkpoint without loading weights.

    Options are those of ``load``. For a model on the hub, only headers and small files are read.

    Args:
        verify: read every weight and refuse NaN and infinity; downloads the model.
        progress: called with the current work, the bytes done and the total bytes.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or incomplete.
        UnsupportedModelError: the checkpoint is sound but not supported.
        ValueError: an option is unknown.
    """
    check_names(AUTO, AUTO, AUTO, cache_code, kv_cache=kv_cache)
    require_known("misses", misses, MISSES)
    check_draft(draft)
    with ExitStack() as headers:
        found = path_or_id
        if not verify:
            found = headers.enter_context(found_headers(path_or_id, progress))
        if draft not in DRAFTS:
            draft = headers.enter_context(found_headers(draft, progress))
        checkpoint = open_checkpoint(found, dtype, progress=progress)
        known = known_positions(checkpoint.config) if max_tokens is None else None
        max_tokens = tokens_to_plan_for(checkpoint.config, max_tokens)
        model = build_on_meta(checkpoint)
        require_roundable(model, kv_cache)
        experts = map_experts(model, checkpoint, codes_dense=cache_code != "none")
        cached, landing_bytes = experts, 0
        if cache_code != "none":
            from moe_runtime.inference.cache_code import coded_experts

            cached, landing_bytes = coded_experts(experts, torch.device("cpu"))
        if verify:
            from moe_runtime.checkpoints.expert_tensors import verify_weights

            verify_weights(checkpoint, experts, progress)
        stand_in_bytes = copied_bytes(experts) if misses == STAND_IN else 0
        drafting = plan_draft(draft, checkpoint, model, progress)
        draft_bytes = drafting.bytes_for(max_tokens)
        layouts = experts.layouts.values()
        dense_bytes = experts.dense_bytes(checkpoint.dtype)
        signature = signature_of(checkpoint, experts)
        reserve_bytes = reserve_for(
            checkpoint,
            cached,
            signature,
            max_tokens=max_tokens,
            dense_bytes=dense_bytes,
            kv_cache=kv_cache,
            in_pass=(in_pass := most_in_pass(model, torch.device("cpu"))),
        )
        per_token = checkpoint.config, checkpoint.dtype, experts.top_k, kv_cache
        beyond = None if in_pass is None or max_tokens <= in_pass else in_pass
        summary = CheckpointSummary(
            path=checkpoint.folder,
            model_type=checkpoint.config.model_type,
            architecture=type(model).__name__,
            num_layers=len(experts.modules),
            num_experts=max(module.num_experts for module in experts.modules),
            total_experts=len(experts.layouts),
            top_k=experts.top_k,
            expert_dtype=" and ".join(experts.type_names),
            bits_per_weight=_bits_per_weight(experts),
            dense_bytes=dense_bytes,
            embedding_bytes=experts.embedding_bytes,
            expert_bytes=sum(layout.tensor_bytes for layout in layouts),
            bytes_per_expert=max(layout.tensor_bytes for layout in layouts),
            slot_bytes=cached.slot_bytes,
            stand_in_bytes=stand_in_bytes,
            draft_bytes=draft_bytes,
            reserve_bytes=landing_bytes + stand_in_bytes + draft_bytes + reserve_bytes,
            max_tokens=max_tokens,
            known_tokens=known,
            context_step_bytes=context_step_bytes(*per_token, in_pass=in_pass)
            + drafting.context_step_bytes,
            token_bytes=reserve_per_token(*per_token, in_pass=beyond),
            signature=signature,
        )
    return summary if summary.path.exists() else replace(summary, path=Path(path_or_id))


def _bits_per_weight(experts: ExpertMap) -> float:
    num_bytes = num_weights = 0
    for key, layout in experts.layouts.items():
        num_bytes += layout.tensor_bytes
        for name, tensor in zip(experts.matrices[key.layer], layout.tensors, strict=True):
            matrix, _, part = name.partition(".")
            if part in ("codes", "coded"):
                packing = experts.packings[key.layer][matrix]
                num_weights += tensor.shape[0] * packing.num_cols
            elif not part:
                num_weights += math.prod(tensor.shape)
    return num_bytes * 8 / num_weights
