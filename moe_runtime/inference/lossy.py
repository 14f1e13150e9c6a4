"""Lossy alternatives to reading missing experts, for steps of a few tokens; off by default.

An expert is missing if it is not resident, even if it is being read. Longer steps, such as prompts,
and calls with gradients compute every chosen expert.

Shape suffixes: T tokens, K choices a token, E experts of a layer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from moe_runtime.checkpoints.expert_map import ExpertMap
from moe_runtime.config import STAND_IN, format_bytes, parse_routing
from moe_runtime.errors import UnsupportedModelError
from moe_runtime.inference.known_classes import RouterForm, router_form, tensors_of
from moe_runtime.kernels.decode_step.expert_choice import rank_experts, weigh_experts
from moe_runtime.kernels.expert_mlp import ExpertWeights
from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat
from moe_runtime.kernels.quantized.rounding import quantize
from moe_runtime.memory.store import ExpertStore
from moe_runtime.types import ExpertKey

if TYPE_CHECKING:
    from moe_runtime.inference.expert_layer import OffloadedExperts

MOST_TOKENS = 16
"""Most tokens of a step with lossy rules."""
GROUP_COLS = 32
"""Columns per scale in copies; if they do not divide the columns, a row has one scale."""
MOST_SHARE = 0.7
"""Most bytes of copies, as a share of the experts' bytes."""
READS_AT_ONCE = 2
"""Reads for later steps begin only while fewer reads are in flight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossyRules:
    """The lossy options of a model.

    Attributes:
        margin: of `routing="cache-aware:MARGIN"`; 0 for exact routing.
        skip_below: missing experts with a smaller share of a token's weights are skipped.
        stands_in: int4 copies replace missing experts (`misses="stand-in"`).
    """

    margin: float = 0.0
    skip_below: float = 0.0
    stands_in: bool = False

    @classmethod
    def of(cls, routing: str, skip_below: float, misses: str) -> LossyRules:
        """Parses the options. Raises ValueError: one is unknown."""
        if not 0 <= skip_below < 1:
            raise ValueError(f"skip_below must be in [0, 1), got {skip_below!r}")
        return cls(
            margin=parse_routing(routing),
            skip_below=float(skip_below),
            stands_in=misses == STAND_IN,
        )

    @property
    def named(self) -> list[str]:
        """Names of the options that are on."""
        asked = {
            "routing cache-aware": self.margin,
            "skip_below": self.skip_below,
            "misses stand-in": self.stands_in,
        }
        return [name for name, value in asked.items() if value]

    @staticmethod
    def refuse_exact(loading: Mapping[str, Any]) -> None:
        """Refuses lossy options of `load` for an exact engine. Raises ValueError: residency changes
        results, or keys and values are rounded."""
        if (kept := loading.get("kv_cache", "exact")) != "exact":
            raise ValueError(
                f"exact keeps every bit, and kv_cache {kept} rounds keys and values: leave one of "
                "them out"
            )
        names = ("routing", "skip_below", "misses")
        given = [loading.get(n, d) for n, d in zip(names, ("exact", 0.0, "device"), strict=True)]
        if found := LossyRules.of(*given).named:
            raise ValueError(
                f"exact answers as if nothing else ran, and {found[0]} depends on what is in "
                "memory: leave one of them out"
            )

    def require_effect(
        self, model: torch.nn.Module, block_names: Sequence[str], *, top_k: int, lacks_slots: bool
    ) -> None:
        """Raises ValueError: the rules would have no effect. Raises UnsupportedModelError: a router
        is unknown."""
        if self.named and not lacks_slots:
            raise ValueError(
                f"{self._words} for missing experts, and here every expert fits in memory, so it "
                "would change nothing: leave it out, or give less host_memory"
            )
        if top_k == 1 and (self.margin or self.skip_below):
            raise ValueError(
                f"{self._words} for all but a token's best expert, and here a token has a single "
                "expert, so it would change nothing: leave it out"
            )
        for name in block_names if self.margin else ():
            _router_of(model, name)

    @property
    def _words(self) -> str:
        return f"{' and '.join(self.named)} {'is' if len(self.named) == 1 else 'are'}"


def apply_rules(
    rules: LossyRules,
    model: torch.nn.Module,
    block_names: Sequence[str],
    modules: Sequence[OffloadedExperts],
    store: ExpertStore[Any],
) -> None:
    """Applies the rules to the layers of a model on the CPU. Raises UnsupportedModelError: a router
    is unknown."""
    for block_name, experts in zip(block_names, modules, strict=True):
        if rules.margin:
            router, form = _router_of(model, block_name)
            rule = ResidentsFirst(store, experts.layer, form, rules.margin)
            router.register_forward_hook(cast(Any, torch.compiler.disable(rule)))
        if rules.skip_below or rules.stands_in:
            experts.miss_rules = MissRules(
                store, experts.layer, rules.skip_below, stands_in=rules.stands_in
            )


def _router_of(model: torch.nn.Module, block_name: str) -> tuple[torch.nn.Module, RouterForm]:
    parts = [*model.get_submodule(block_name).modules()]
    found = [(part, form) for part in parts if (form := router_form(part)) is not None]
    if len(found) != 1:
        raise UnsupportedModelError(
            f"{block_name}: routing cache-aware needs a router whose scores are known, found "
            f"{len(found)} of them; expected routing exact"
        )
    return found[0]


class ResidentsFirst:
    """A hook of a router: a resident expert replaces a missing one with almost the same score.

    The scores of residents are raised by ``margin`` times the sum of the token's chosen scores,
    unbiased. (The cache prior of arXiv:2412.00099 raises logits by a share of their range.) A
    token's best expert stays. The router's formula weighs the new experts.
    """

    def __init__(
        self, store: ExpertStore[Any], layer: int, form: RouterForm, margin: float
    ) -> None:
        self._store = store
        self._layer = layer
        self._form = form
        self._margin = margin

    def __call__(
        self, router: torch.nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Logits ``[T, E]``, new weights and ids ``[T, K]``; None if nothing changes."""
        logits_TE, weights_TK, ids_TK = output
        if len(ids_TK) > MOST_TOKENS or weights_TK.requires_grad:
            return None
        chosen = ids_TK.tolist()
        held = self._resident({expert for row in chosen for expert in row})
        if all(held.issuperset(row) for row in chosen):
            return None
        form = self._form.choice
        others = [t for name, t in tensors_of(router).items() if name not in ("weight", "bias")]
        scores_TE = rank_experts(logits_TE, form, others[0] if others else None)
        unbiased_TE = rank_experts(logits_TE, form)
        if form.scores != "sigmoid":
            scores_TE = unbiased_TE = unbiased_TE.softmax(-1)
        raised_T = (self._margin * unbiased_TE.gather(1, ids_TK).sum(1)).tolist()
        scores = scores_TE.tolist()
        # the best expert of each token will be resident, also for the other tokens
        held = self._resident(range(logits_TE.shape[1]))
        held |= {max(row, key=own.__getitem__) for row, own in zip(chosen, scores, strict=True)}
        taken = [
            prefer_held(own, row, held, raised)
            for own, row, raised in zip(scores, chosen, raised_T, strict=True)
        ]
        pairs = [*zip(itertools.chain(*chosen), itertools.chain(*taken), strict=True)]
        num_replaced = sum(old != new for old, new in pairs)
        if not num_replaced:
            return None
        self._store.count(replaced=num_replaced)
        ids_now_TK = torch.tensor(taken)
        weights = weigh_experts(logits_TE, ids_now_TK, form, weights_TK.dtype)
        is_same_T1 = (ids_now_TK == ids_TK).all(1, keepdim=True)
        return logits_TE, torch.where(is_same_T1, weights_TK, weights), ids_now_TK

    def _resident(self, experts: set[int] | range) -> set[int]:
        missing = self._store.missing([ExpertKey(self._layer, expert) for expert in experts])
        return {*experts}.difference(key.expert for key in missing)


def prefer_held(
    scores_E: Sequence[float], chosen: Sequence[int], held: Container[int], raised: float
) -> list[int]:
    """A token's experts in the order of ``chosen``, with scores of ``held`` experts ``raised``. The
    best of the chosen stays."""
    best = max(chosen, key=scores_E.__getitem__)
    lacking = (expert for expert in chosen if expert != best and expert not in held)
    weakest = sorted(lacking, key=scores_E.__getitem__)
    others = (e for e in range(len(scores_E)) if e in held and e not in chosen)
    rivals = sorted(others, key=lambda expert: -scores_E[expert])
    place_of = {
        old: new
        for old, new in zip(weakest, rivals, strict=False)
        if scores_E[new] + raised >= scores_E[old]
    }
    return [place_of.get(expert, expert) for expert in chosen]


class MissRules:
    """Skips or replaces missing experts of a layer.

    A choice is light if it has less than a share of its token's weights and is not the token's
    heaviest. A missing expert is skipped if all its choices in the step are light. The others keep
    their weights.

    Int4 copies, if there are any, replace the remaining missing experts. These are read later for
    further steps, while the link is idle.
    """

    def __init__(
        self, store: ExpertStore[Any], layer: int, least_share: float, *, stands_in: bool
    ) -> None:
        self._store = store
        self._layer = layer
        self._least_share = least_share
        self._copies: dict[ExpertKey, ExpertWeights] | None = {} if stands_in else None

    def takes(self, num_tokens: int) -> bool:
        """Whether the rules apply to a step of ``num_tokens``."""
        return num_tokens <= MOST_TOKENS

    def keep_copy(self, key: ExpertKey, weights: ExpertWeights) -> None:
        """Makes the int4 copy of an expert. Raises ValueError: its weights are not finite."""
        assert self._copies is not None
        self._copies[key] = rounded_copy(weights)

    def without_light(
        self, rows: Mapping[int, list[int]], weights_TK: Tensor
    ) -> Mapping[int, list[int]]:
        """The experts to compute, with their rows ``t * K + k``."""
        if not self._least_share:
            return rows
        missing = self._store.missing([ExpertKey(self._layer, expert) for expert in rows])
        if not missing:
            return rows
        heaviest_T1 = weights_TK.amax(1, keepdim=True)
        least_T1 = self._least_share * weights_TK.sum(1, keepdim=True)
        is_light_R = ((weights_TK < least_T1) & (weights_TK < heaviest_T1)).flatten().tolist()
        left_out = {
            key.expert for key in missing if all(is_light_R[row] for row in rows[key.expert])
        }
        if not left_out:
            return rows
        self._store.count(skipped=sum(len(rows[expert]) for expert in left_out))
        return {expert: own for expert, own in rows.items() if expert not in left_out}

    def split(
        self, keys: list[ExpertKey]
    ) -> tuple[list[ExpertKey], list[tuple[ExpertKey, ExpertWeights]]]:
        """The experts to lease, and the copies of the others."""
        missing = self._store.missing(keys) if self._copies else ()
        if not missing:
            return keys, []
        assert self._copies is not None
        copies = [(key, self._copies[key]) for key in missing]
        return [key for key in keys if key not in missing], copies

    def answered(self, keys: Sequence[ExpertKey], num_choices: int) -> None:
        """Counts choices that copies answered, and reads their experts later."""
        self._store.count(stood_in=num_choices)
        self._store.read_later(keys, READS_AT_ONCE)


def rounded_copy(weights: ExpertWeights) -> ExpertWeights:
    """An expert with int4 matrices and unchanged biases."""
    biases = {name: getattr(weights, name) for name in ("gate_bias", "up_bias", "down_bias")}
    kept = {name: None if bias is None else bias.clone() for name, bias in biases.items()}
    gate = None if weights.gate is None else _rounded(weights.gate)
    return ExpertWeights(gate, _rounded(weights.up), _rounded(weights.down), **kept)


def _rounded(matrix: Any) -> QuantizedMatrix:
    plain = matrix if isinstance(matrix, Tensor) else matrix.dequantize()
    return quantize(plain, _kind(plain.shape[1]))


def _kind(num_cols: int) -> WeightFormat:
    group = GROUP_COLS if num_cols % GROUP_COLS == 0 else 0
    return WeightFormat("uint4", "bf16", group_cols=group, zero=8)


def copied_bytes(experts: ExpertMap) -> int:
    """Bytes of the copies of all experts, and of making one. Raises UnsupportedModelError: copies
    would save too little."""
    total = largest = 0
    for key, layout in experts.layouts.items():
        for name, tensor in zip(experts.matrices[key.layer], layout.tensors, strict=True):
            matrix, _, part = name.partition(".")
            if part not in ("", "codes", "coded"):
                continue
            if len(tensor.shape) == 1 and not part:
                total += tensor.num_bytes
                continue
            packing = experts.packings[key.layer].get(matrix)
            rows, cols = tensor.shape[0], packing.num_cols if packing else tensor.shape[-1]
            kind = _kind(cols)
            total += rows * kind.row_bytes(cols) + 2 * math.prod(kind.scales_shape(rows, cols))
            largest = max(largest, rows * cols)
    stored = sum(layout.tensor_bytes for layout in experts.layouts.values())
    if total > MOST_SHARE * stored:
        raise UnsupportedModelError(
            f"misses stand-in keeps copies in int4 ({format_bytes(total)}) of experts that take "
            f"{format_bytes(stored)}, which saves too little: leave it out"
        )
    return total + 3 * 4 * largest  # a matrix in fp32 and intermediate values
