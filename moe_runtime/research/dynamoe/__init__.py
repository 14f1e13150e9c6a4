"""DynaMoE's recompilation: after each step, triggers look at the model and alter it.

One alters the capacity of layers whose experts run in padded buffers, as compiled graphs need. The
other lets tokens go where the gate sent them an epoch ago, so places are known before the gate.

Sources: the triggers, scores and cache of FlexFlow's example for DynaMoE. Its rule for capacities
is not public: that of `CapacityRule` is ours.

Shape suffixes: T tokens, D model width, E experts, K choices of a token, C rows of a buffer, S
sequences, L tokens of a sequence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.kernels.operands import without_autocast
from moe_runtime.layer import Experts, MoELayer
from moe_runtime.layer.experts import compute_dtype
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.routing import Routing, RoutingContext, SigmoidTopK, SoftmaxTopK
from moe_runtime.routing.capacity import expert_slots
from moe_runtime.training.checkpoint import MAPPING, require_kinds
from moe_runtime.training.optimizer import Optimizer, StepOutcome
from moe_runtime.training.run_config import RecompileConfig

GRID = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0)
"""Capacity factors, so that a layer has few shapes to compile."""
_MARGIN, _STEPS, _MOST_DROPPED, _DECAY = 1.1, 50, 1e-3, 0.99


@dataclass
class Recompile:
    """Alters the model whenever a trigger asks for it; `count` says how often it did."""

    trigger: Callable[[], bool]
    alter: Callable[[], None]
    count: int = 0

    def on_condition(self) -> None:
        if self.trigger():
            self.alter()
            self.count += 1


class CapacityRule:
    """Chooses a layer's capacity factor for the next step.

    It grows at once if more than a thousandth of a step's choices are dropped. It shrinks if the
    need of 50 steps in a row, with a margin of a tenth, fits into a smaller factor of `GRID`.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.needs: deque[float] = deque(maxlen=_STEPS)

    def observe(self, need: float, dropped_share: float) -> float:
        """The next factor.

        Args:
            need: the factor at which the step would have dropped nothing.
        """
        self.needs.append(need)
        factor = self.factor
        if dropped_share > _MOST_DROPPED:
            factor = max(factor, min(_fitting(need), GRID[-1]))
        elif len(self.needs) == _STEPS:
            factor = min(factor, _fitting(_MARGIN * max(self.needs)))
        if factor != self.factor:
            self.factor = factor
            self.needs.clear()
        return factor


def _fitting(need: float) -> float:
    return next((factor for factor in GRID if factor >= need), math.inf)


def padded_experts(
    experts: Experts,
    num_rows: Callable[[int], int],
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    """As `Experts.forward`, with a buffer of `num_rows(T)` rows for each expert, full or not."""
    num_tokens, top_k = ids_TK.shape
    num_experts, rows = experts.num_experts, num_rows(num_tokens)
    x_TD = x_TD.to(compute_dtype(x_TD))
    places_TK = expert_slots(ids_TK, weights_TK, num_experts, policy="token")
    is_sent_TK = ids_TK < num_experts
    places_TK = torch.where(is_sent_TK, ids_TK * rows + places_TK, num_experts * rows)
    tokens = torch.arange(num_tokens, device=x_TD.device).repeat_interleave(top_k)
    empty = x_TD.new_zeros(num_experts * rows + 1, x_TD.shape[1])
    buffer = empty.index_copy(0, places_TK.flatten(), x_TD[tokens])[:-1]
    own = experts.stacked(x_TD.dtype)
    hidden = buffer.unflatten(0, (num_experts, rows)) @ own.gate_up.mT
    hidden = hidden if own.gate_up_bias is None else hidden + own.gate_up_bias[:, None]
    out = experts.activation(hidden) @ own.down.mT
    out = out if own.down_bias is None else out + own.down_bias[:, None]
    padded = F.pad(out.flatten(0, 1), (0, 0, 0, 1))
    return (weights_TK[..., None] * padded[places_TK]).sum(1).to(x_TD.dtype)


def check_layers(model: LanguageModel, recompile: RecompileConfig) -> None:
    """Refuses layers that cannot be altered."""
    for layer in model.routed_layers():
        gate = layer.gate
        is_plain = type(layer.experts) is Experts and gate.num_groups == 1 and layer.zero is None
        if not recompile.reuse_at and (gate.capacity is None or not is_plain):
            raise UnsupportedModelError(
                "research.recompile runs experts in buffers of equal size: give "
                "model.moe.capacity_factor, without num_groups and zero_experts"
            )
        is_known = type(gate) in (SoftmaxTopK, SigmoidTopK) and gate.capacity is None
        if recompile.reuse_at and not is_known:
            raise UnsupportedModelError(
                "research.recompile.reuse_at is for the gates softmax_topk and sigmoid_topk, "
                "without capacity_factor"
            )


class AdaptedCapacity:
    """The capacity of one layer, and what its gate needed since the last step."""

    def __init__(self, layer: MoELayer, *, adapts: bool) -> None:
        assert isinstance(layer.experts, Experts), "other layers were refused"
        assert layer.gate.capacity is not None, "other layers were refused"
        self._gate, self._found = layer.gate, list[tuple[float, float]]()
        self.rule = CapacityRule(layer.gate.capacity.factor)
        layer.experts.forward = partial(padded_experts, layer.experts, self._num_rows)
        if adapts:
            layer.gate.register_forward_hook(self._note)

    def trigger(self) -> bool:
        if not self._found:
            return False
        needs, dropped = zip(*self._found, strict=True)
        self._found.clear()
        before = self.rule.factor
        return self.rule.observe(max(needs), sum(dropped) / len(dropped)) != before

    def alter(self) -> None:
        assert self._gate.capacity is not None, "other layers were refused"
        self._gate.capacity = replace(self._gate.capacity, factor=self.rule.factor)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.rule.factor, "needs": list(self.rule.needs)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rule.factor = state["factor"]
        self.rule.needs.extend(state["needs"])
        self.alter()

    def _num_rows(self, num_tokens: int) -> int:
        assert self._gate.capacity is not None, "other layers were refused"
        return self._gate.capacity.slots_per_expert(
            num_tokens, self._gate.top_k, self._gate.num_experts
        )

    def _note(self, gate: nn.Module, inputs: tuple[Any, ...], routing: Routing) -> None:
        if gate.training and routing.demand_E is not None:
            demand_E = routing.demand_E.double()
            dropped = 1 - float(routing.counts_E.sum() / demand_E.sum())
            self._found.append((float(demand_E.max() / demand_E.mean()), dropped))


class AssignmentCache:
    """Choices of the gates for sequences that were seen before.

    A layer's score is a running mean of the share of tokens whose experts are those of the last
    time. While the mean score of all layers is at least `least`, tokens go to the experts of the
    last time, with the weights that the gate gives these now.
    """

    def __init__(self, layers: Sequence[MoELayer], least: float) -> None:
        self._least, self.is_used = least, False
        self.scores = [0.0] * len(layers)
        self._known: list[dict[bytes, Tensor]] = [{} for _ in layers]
        for number, layer in enumerate(layers):
            layer.gate.register_forward_hook(partial(self._look_up, number))

    def trigger(self) -> bool:
        return (sum(self.scores) >= self._least * len(self.scores)) != self.is_used

    def alter(self) -> None:
        self.is_used = not self.is_used

    def state_dict(self) -> dict[str, Any]:
        known = [{key.hex(): ids for key, ids in layer.items()} for layer in self._known]
        return {"scores": list(self.scores), "is_used": self.is_used, "known": known}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scores, self.is_used = list(state["scores"]), state["is_used"]
        self._known = [
            {bytes.fromhex(key): ids for key, ids in layer.items()} for layer in state["known"]
        ]

    def _look_up(
        self,
        number: int,
        gate: SoftmaxTopK,
        inputs: tuple[Tensor, RoutingContext],
        routing: Routing,
    ) -> Routing | None:
        if not (gate.training and torch.is_grad_enabled()):
            return None
        tokens_T = inputs[1].token_ids_T
        assert tokens_T is not None, "the language model gives the numbers of tokens"
        shape = (inputs[1].num_sequences, -1)
        fresh_SLK = routing.ids_TK.unflatten(0, shape).to(torch.int16)
        keys = [row.numpy().tobytes() for row in tokens_T.view(shape).cpu()]
        known, used_SLK = self._known[number], fresh_SLK.clone()
        again = [place for place, key in enumerate(keys) if key in known]
        for place in again:
            used_SLK[place] = known[keys[place]]
        if again:
            pairs = (fresh_SLK[again].sort(-1).values, used_SLK[again].sort(-1).values)
            share = float(torch.eq(*pairs).all(-1).double().mean())
            self.scores[number] = _DECAY * self.scores[number] + (1 - _DECAY) * share
        known.update({key: row.clone() for key, row in zip(keys, fresh_SLK, strict=True)})
        if not (again and self.is_used and routing.logits_TE is not None):
            return None
        ids_TK = used_SLK.flatten(0, 1).long()
        with without_autocast(ids_TK.device.type):
            logits_TE = routing.logits_TE
            is_softmax = gate.score == "softmax"
            scores_TE = logits_TE.softmax(-1) if is_softmax else logits_TE.sigmoid()
            weights_TK = gate.weights(logits_TE, scores_TE, ids_TK) * gate.scale
        return replace(routing, ids_TK=ids_TK, weights_TK=weights_TK)


class RecompilingOptimizer(Optimizer):
    """AdamW in memory; after each step, triggers may alter the model."""

    def __init__(self, model: LanguageModel, *options: Any, recompile: RecompileConfig) -> None:
        super().__init__(model, *options)
        layers = list(model.routed_layers())
        self.altered: dict[str, AdaptedCapacity | AssignmentCache] = {}
        if recompile.reuse_at:
            self.altered["assignments"] = AssignmentCache(layers, recompile.reuse_at)
        else:
            for number, layer in enumerate(layers):
                own = AdaptedCapacity(layer, adapts=recompile.adapt_capacity)
                self.altered[f"layer {number}"] = own
        self.recompiles = [Recompile(one.trigger, one.alter) for one in self.altered.values()]

    def step(self, rate: float) -> StepOutcome:
        outcome = super().step(rate)
        for one in self.recompiles:
            one.on_condition()
        return outcome

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "altered": {name: one.state_dict() for name, one in self.altered.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        found = state.get("altered")
        require_kinds(found, dict.fromkeys(self.altered, MAPPING), "the state of recompilation")
        super().load_state_dict({name: part for name, part in state.items() if name != "altered"})
        for name, one in self.altered.items():
            one.load_state_dict(dict(found or {})[name])
