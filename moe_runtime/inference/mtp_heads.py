"""A checkpoint's own multi-token head drafts for its model.

Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. The head is a layer that
takes the model's last hidden state of a token and the embedding of the next token. For further
tokens it continues from its own output.

Shape suffixes: Q new tokens, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_runtime.checkpoints.checkpoint import Checkpoint, Progress
from moe_runtime.checkpoints.expert_map import map_experts
from moe_runtime.checkpoints.opening import packed_among
from moe_runtime.checkpoints.transformers_private import (
    HEADS_WITHOUT_SETTINGS,
    head_of_further_tokens,
)
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.budget import CONTEXT_STEP, plan_memory
from moe_runtime.inference.draft_models import CPU, IN_PASS, CachedDrafts, DraftPlan, ModelText
from moe_runtime.inference.drafts import Offer
from moe_runtime.inference.expert_layer import OffloadedExperts, bind_slots
from moe_runtime.inference.loading import (
    finish_dense,
    policy_maker,
    replace_experts,
    signature_of,
)
from moe_runtime.inference.steps import Steps
from moe_runtime.inference.warming import read_experts
from moe_runtime.memory.source import ExpertSource, Slab
from moe_runtime.memory.store import ExpertStore
from moe_runtime.policies.eviction.base import PolicyChoice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_AHEAD = 4
"""Most tokens of a draft; the head was trained for the first."""


class HeadPlan(DraftPlan):
    """The multi-token head of a checkpoint."""

    def __init__(self, target: Checkpoint, model: PreTrainedModel) -> None:
        """Raises UnsupportedModelError: the checkpoint has no known head."""
        self._name, text = "mtp", target.config.get_text_config(decoder=True)
        known = getattr(text, "num_mtp_layers", None)
        num_heads = int(text.model_type in HEADS_WITHOUT_SETTINGS) if known is None else known
        own = re.compile(rf"^(model\.)?(mtp\.(?!layers\.[1-9])|layers\.{text.num_hidden_layers}\.)")
        entries = {name: entry for name, entry in target.entries.items() if own.search(name)}
        if not num_heads or not entries:
            raise UnsupportedModelError(
                f"draft mtp: expected a checkpoint with a head for further tokens, found none in "
                f"{target.folder}; give lookup or a small model"
            )
        if target.runs is not None or target.folder.is_file():
            found = "a GGUF file" if target.folder.is_file() else "a packed one"
            raise UnsupportedModelError(
                f"draft mtp: expected a head in a safetensors checkpoint, got {found}, "
                f"{target.folder}; give lookup or a small model"
            )
        head, conversions = head_of_further_tokens(model)
        # without stamps: the target checks the same files
        self._checkpoint = replace(
            target,
            config=head.config,
            entries=entries,
            packed=packed_among(target.folder, entries) if target.packed else {},
            conversions=conversions,
            stamps={},
        )
        self._model: Any = head
        self._experts = map_experts(head, self._checkpoint, may_be_dense=True)
        self._in_pass = IN_PASS

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of all weights, and of hidden states and a cache for ``num_tokens``."""
        return super().bytes_for(num_tokens) + num_tokens * self._width_bytes

    @property
    def context_step_bytes(self) -> int:
        return super().context_step_bytes + CONTEXT_STEP * self._width_bytes

    @property
    def _width_bytes(self) -> int:
        return self._checkpoint.config.hidden_size * self._checkpoint.dtype.itemsize

    def load(self, target: Any, max_tokens: int, progress: Progress | None = None) -> HeadDrafts:
        head, experts, store = self._model, self._experts, None
        modules = replace_experts(head, experts, lambda *own: OffloadedExperts(*own, following=()))
        finish_dense(head, self._checkpoint, experts, CPU, progress)
        if modules:
            num_slots, slot_bytes = len(experts.layouts), experts.slot_bytes
            plan = plan_memory(
                num_slots * slot_bytes,
                dense_bytes=0,
                reserve_bytes=0,
                slot_bytes=slot_bytes,
                num_experts=num_slots,
            )
            choice = PolicyChoice(policy="lru", adaptive=False, reason="")
            signature = signature_of(self._checkpoint, experts)
            policy = policy_maker(choice, signature, experts.layouts)(plan)
            source, slab = ExpertSource(experts.layouts), Slab(num_slots, slot_bytes)
            streams = plan.stream_slots()
            store = ExpertStore(source, slab, policy, bind_slots(experts), stream_slots=streams)
            for module in modules:
                module.store = store
                module.list_parameters(self._checkpoint.dtype, CPU)
            read_experts(modules, progress)
        head.tie_with_main_model(target)
        return HeadDrafts(head, target, store, max_tokens)


class HeadText(ModelText):
    """One text. The head pairs each token but the first with the state of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self._is_begun = False
        self.states: list[Tensor] = []  # [D], of tokens from `first_state` on
        self.first_state = 0
        self.ahead: Tensor | None = None  # the head's own last state, [1, 1, D]

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens if self._is_begun else tokens[1:]
        self._is_begun |= bool(tokens)

    def offer(self, most: int) -> Offer:
        return Offer(min(most, MOST_AHEAD), 0)

    @property
    def earliest(self) -> int:
        return self.first_state

    @property
    def lacks_states(self) -> bool:
        return self.first_state + len(self.states) < len(self.tokens)

    def take(self, first: int, states_QD: Tensor, most: int) -> None:
        """Adds states from token ``first`` on, ``most`` of them at most. Replaces states of wrong
        drafts."""
        kept = first - self.first_state
        if not 0 <= kept <= len(self.states):  # there is a gap
            self.states, self.first_state, kept = [], first, 0
        self.states = [*self.states[:kept], *states_QD]
        next_pair = self.first + self.num_cached if self.cache is not None else 0
        needless = max(len(self.states) - most, next_pair - self.first_state, 0)
        self.states, self.first_state = self.states[needless:], self.first_state + needless
        if self.first_state > next_pair:
            self.drop()

    def settle(self) -> None:
        """Removes all drafted tokens: the head computed them from its own states."""
        for layer in self.cache.layers if self.tail else ():
            layer.give_back(len(self.tail))
        self.tail = []


class HeadDrafts(CachedDrafts):
    """Drafts from a model's own head."""

    def __init__(
        self, head: Any, target: Any, store: ExpertStore[Any] | None, max_tokens: int
    ) -> None:
        super().__init__(head, max_tokens)
        self._store = store
        self._steps = None if store is None else Steps([store])
        self._states: Tensor | None = None

        def keep(_: Any, __: Any, output: Any) -> None:
            self._states = output.last_hidden_state.detach()

        self._hook = target.get_decoder().register_forward_hook(keep)

    def close(self) -> None:
        self._hook.remove()
        if self._store is not None:
            self._store.close()
        super().close()

    def new(self) -> HeadText:
        return HeadText()

    def passed(self, drafters: Sequence[Any], firsts: Sequence[int], sizes: Sequence[int]) -> None:
        states, self._states = self._states, None
        if states is None or states.shape[:-1].numel() != sum(sizes):
            return
        parts = states.flatten(0, -2).split(list(sizes))
        for text, first, own_QD in zip(drafters, firsts, parts, strict=True):
            if text is not None:
                text.take(first, own_QD, self.context)

    def _pass(self, texts: Sequence[Any], new: Sequence[Sequence[int]]) -> list[int]:
        return [self._next(text, own) for text, own in zip(texts, new, strict=True)]

    def _next(self, text: HeadText, new: Sequence[int]) -> int:
        first = text.first + text.num_cached + len(text.tail)
        states_1QD = text.ahead
        if first < len(text.tokens):
            begin = first - text.first_state
            states_1QD = torch.stack(text.states[begin : begin + len(new)])[None]
        places = torch.arange(first + 1, first + 1 + len(new))[None]
        args, named = (0, states_1QD, places, text.cache), {"input_ids": torch.tensor([[*new]])}
        head, steps = self._model, self._steps
        if steps is None:
            found = head.forward_layer(*args, **named)
        else:
            found = steps.run(head.forward_layer, *args, **named)
        text.ahead = found[:, -1:]
        return int(head.shared_head(text.ahead).argmax())
