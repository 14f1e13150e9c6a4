"""ExFlow's exchange: a token stays at the process of its first expert, until the next layer's.

The residual row of a token moves once a layer, and only if its next first expert lies elsewhere.
From there its other choices are dispatched as always. Every process has the context of all tokens,
so attention may be computed anywhere: keys and values travel to all.

The paper's treatment of further choices is not public; that they go and return is ours.

Shape suffixes: B sequences of C tokens, R rows here, D model, P ranks, K choices, G key-value
heads, W head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moe_runtime.errors import UnsupportedModelError
from moe_runtime.models.lm.blocks import Block
from moe_runtime.models.lm.model import LanguageModel
from moe_runtime.parallel import ParallelExperts, Transport
from moe_runtime.routing import GATES

_ALONE = ("softmax_topk", "sigmoid_topk")
"""Gates that look at a token alone, so that it may be routed anywhere."""


@dataclass
class Sent:
    """Bytes that this process sent to others.

    Attributes:
        moved: rows of the residual stream.
        implied: rows to further choices, and their results, as the routing implies them.
        context: keys and values.
    """

    moved: int = 0
    implied: int = 0
    context: int = 0


class StayingTokens:
    """Rows of the residual stream that are here, with the numbers of their tokens.

    Attributes:
        numbers_R: `sequence * C + position` of each row, ascending within the rank it came from.
        sent: counts all exchanges.
    """

    def __init__(self, x_RD: Tensor, numbers_R: Tensor, transport: Transport) -> None:
        self.x_RD, self.numbers_R = x_RD, numbers_R
        self.transport, self.sent = transport, Sent()

    def move(self, ranks_R: Tensor) -> None:
        """Moves rows to the ranks given for each; a collective call."""
        order = torch.argsort(ranks_R, stable=True)
        counts_P = torch.bincount(ranks_R, minlength=self.transport.size)
        arrived = self._exchange(counts_P, self.x_RD[order], self.numbers_R[order, None])
        self.x_RD, self.numbers_R = arrived[0], arrived[1][:, 0]
        here = int(counts_P[self.transport.rank])
        self.sent.moved += (len(order) - here) * _bytes_of(self.x_RD)

    def everywhere(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors `[R, ...]` of all ranks, in the order of the numbers; a collective call."""
        size, rows = self.transport.size, len(self.numbers_R)
        counts_P = torch.full((size,), rows, device=self.numbers_R.device)
        flat = [tensor.flatten(1).repeat(size, 1) for tensor in tensors]
        *parts, numbers = self._exchange(counts_P, *flat, self.numbers_R[:, None].repeat(size, 1))
        self.sent.context += (size - 1) * rows * sum(map(_bytes_of, flat))
        order = torch.argsort(numbers[:, 0])
        shapes = [tensor.shape[1:] for tensor in tensors]
        return [part[order].unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]

    def _exchange(self, counts_P: Tensor, *rows: Tensor) -> list[Tensor]:
        received_P = self.transport.exchange_numbers(counts_P[:, None])[:, 0]
        (route,) = self.transport.routes(counts_P[None], received_P[None])
        return [self.transport.exchange(own.contiguous(), route).wait() for own in rows]


@torch.no_grad()
def hidden_states(
    model: LanguageModel, ids_BC: Tensor, *, stays: bool = True
) -> tuple[Tensor, Sent]:
    """Last hidden states `[B, C, D]`, normed, of sequences that all processes know.

    Each process has an equal run of tokens at first, and the whole result at the end; the call is
    collective.

    Args:
        model: evaluated, with `ParallelExperts` of whole experts, one copy of each.
        stays: False returns every token to where it began after each layer, as without ExFlow.

    Raises:
        UnsupportedModelError: a gate looks at more than a token, or experts have copies or slices.
    """
    experts = [_experts_of(block) for block in model.own_blocks()]
    transport = next(own.transport for own in experts if own is not None)
    total = ids_BC.numel()
    first, last = (total * (transport.rank + end) // transport.size for end in (0, 1))
    numbers = torch.arange(first, last, device=ids_BC.device)
    tokens = StayingTokens(model.embedding(ids_BC.flatten()[first:last]), numbers, transport)
    for block, own in zip(model.own_blocks(), experts, strict=True):
        assert isinstance(block, Block), "pairs of layers were refused"
        tokens.x_RD = tokens.x_RD + _attend(block, model, tokens, ids_BC.shape[1])
        if own is not None and block.routed is not None:
            ids_RK = block.routed.route(block.feed_forward_norm(tokens.x_RD)).ids_TK
            if stays:
                tokens.move(_rank_of(own, ids_RK[:, 0]))
                ids_RK = block.routed.route(block.feed_forward_norm(tokens.x_RD)).ids_TK
            is_away = _rank_of(own, ids_RK.flatten()) != transport.rank
            tokens.sent.implied += 2 * int(is_away.sum()) * _bytes_of(tokens.x_RD)
        tokens.x_RD = tokens.x_RD + block.feed_forward(block.feed_forward_norm(tokens.x_RD))
    before = tokens.sent.context
    (x_TD,) = tokens.everywhere(model.norm(tokens.x_RD))
    tokens.sent.context = before  # layers do not exchange the result
    return x_TD.view(*ids_BC.shape, -1), tokens.sent


def _experts_of(block: object) -> ParallelExperts | None:
    if not isinstance(block, Block):
        raise UnsupportedModelError("tokens that stay go through layers one by one, not pairs")
    layer = block.routed
    if layer is None:
        return None
    known = tuple(GATES[name] for name in _ALONE)
    if type(layer.gate) not in known or layer.gate.capacity is not None:
        raise UnsupportedModelError(
            f"{type(layer.gate).__name__} looks at more than a token: tokens that stay need a gate "
            f"of {' or '.join(_ALONE)}, without capacity"
        )
    own = layer.experts
    if not isinstance(own, ParallelExperts) or own.has_copies or own.slots.num_slices > 1:
        raise UnsupportedModelError(
            "tokens stay with whole experts, one copy of each: spread them with `spread_experts`"
        )
    return own


def _rank_of(experts: ParallelExperts, ids_N: Tensor) -> Tensor:
    first = [held[0] for (held,) in experts.slots.holders]
    slots = torch.tensor(first, device=ids_N.device)
    return slots[ids_N] // experts.slots.slots_per_rank


def _attend(block: Block, model: LanguageModel, tokens: StayingTokens, context: int) -> Tensor:
    """Attention `[R, D]` of the rows here over the contexts of their sequences."""
    positions_R, sequences_R = tokens.numbers_R % context, tokens.numbers_R // context
    runs = [range(at, at + 1) for at in positions_R.tolist()]
    rows_1RD = block.attention_norm(tokens.x_RD)[None]
    queries, keys, values = block.attention.heads(rows_1RD, model.rotary, runs)
    keys, values = tokens.everywhere(keys[0], values[0])
    keys_RC, values_RC = (
        all_T.unflatten(0, (-1, context))[sequences_R] for all_T in (keys, values)
    )
    mask_RC = torch.arange(context, device=positions_R.device) <= positions_R[:, None]
    attended = scaled_dot_product_attention(
        queries[0][:, :, None], keys_RC.transpose(1, 2), values_RC.transpose(1, 2),
        attn_mask=mask_RC[:, None, None], enable_gqa=True,
    )  # fmt: skip
    return block.attention.o_proj(attended.flatten(1))


def _bytes_of(rows: Tensor) -> int:
    return rows.shape[1] * rows.element_size()
