"""ScMoE (Cai et al. 2024): routed experts that read an earlier representation than their block.

The experts of a block are known, and their tokens or weights can travel, while its attention
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from moe_runtime.layer.moe import MoELayer
from moe_runtime.routing import Routing

Shortcut = Literal["output", "middle", "input"]


@dataclass(frozen=True, eq=False)
class ScMoEParts:
    """The modules of a pair of blocks. Attention is called with `(x, **arguments)`, the rest with
    `(x)`.

    Attributes:
        first_attention, mlp: Of the block before.
        second_attention: Of the block with the experts.
        shared: The expert that every token visits, on the present representation.
        routed: The routed experts, on the shortcut; without shared experts of its own.
        make_norm: Makes the normalisation before each of them.
    """

    first_attention: nn.Module
    mlp: nn.Module
    second_attention: nn.Module
    shared: nn.Module
    routed: MoELayer
    make_norm: Callable[[], nn.Module]


class ScMoEBlock(nn.Module):
    """A block with a dense feed-forward, then one with a shared and routed experts.

    With pre-normalisation left out:

        a = x + attention_1(x)
        m = a + mlp(a)
        b = m + attention_2(m)
        y = b + shared(b) + routed(shortcut)

    Args:
        parts: The modules.
        shortcut: What the routed experts read. `middle`: `a`, the paper's position 2, which it
            recommends; `output`: `m`, position 1; `input`: `x`, position 3. The earlier, the more
            computation hides the experts' transfers.
        on_routing: Called with the routing as soon as it is known, before anything that it can
            overlap with: the place to begin fetching the chosen experts.
        executor: Runs the routed experts beside the rest of the block where no gradient is wanted
            (one thread is enough; the result is the same).

    Raises:
        ValueError: `shortcut` is unknown, or the routed layer has shared experts of its own.
    """

    def __init__(
        self,
        parts: ScMoEParts,
        *,
        shortcut: Shortcut = "middle",
        on_routing: Callable[[Routing], None] | None = None,
        executor: Executor | None = None,
    ) -> None:
        super().__init__()
        if shortcut not in get_args(Shortcut):
            raise ValueError(f"shortcut must be 'output', 'middle' or 'input', got {shortcut!r}")
        if parts.routed.shared is not None:
            raise ValueError("the routed layer of ScMoE must have shared_experts=0: the block has")
        self.first_attention, self.mlp = parts.first_attention, parts.mlp
        self.second_attention, self.shared = parts.second_attention, parts.shared
        self.routed = parts.routed
        self.first_attention_norm, self.mlp_norm = parts.make_norm(), parts.make_norm()
        self.second_attention_norm, self.shared_norm = parts.make_norm(), parts.make_norm()
        self.shortcut_norm = parts.make_norm()
        self.shortcut: Shortcut = shortcut
        self.on_routing = on_routing
        self.executor = executor

    def forward(
        self,
        x: Tensor,
        *,
        token_ids: Tensor | None = None,
        previous_logits: Tensor | None = None,
        padding_mask: Tensor | None = None,
        **attention_arguments: Any,
    ) -> Tensor:
        """`[..., S, D]` to `[..., S, D]`.

        Args:
            x: The residual stream.
            token_ids, previous_logits: For the gate, as in `MoELayer.forward`.
            padding_mask: Likewise, for the routed experts alone.
            attention_arguments: Go to both attentions.
        """
        start = partial(
            self._start,
            token_ids=token_ids,
            previous_logits=previous_logits,
            padding_mask=padding_mask,
        )
        pending = start(x) if self.shortcut == "input" else None
        middle = x + self.first_attention(self.first_attention_norm(x), **attention_arguments)
        if self.shortcut == "middle":
            pending = start(middle)
        output = middle + self.mlp(self.mlp_norm(middle))
        if self.shortcut == "output":
            pending = start(output)
        assert pending is not None, "one of the three shortcuts was taken"
        h = output + self.second_attention(
            self.second_attention_norm(output), **attention_arguments
        )
        return h + self.shared(self.shared_norm(h)) + pending()

    def _start(self, source: Tensor, **arguments: Any) -> Callable[[], Tensor]:
        """Routes the shortcut; returns a function that gives the routed experts' output."""
        normed = self.shortcut_norm(source)
        routing = self.routed.route(normed, **arguments)
        if self.on_routing is not None:
            self.on_routing(routing)
        # grad mode and autocast belong to a thread: another thread would compute other numbers
        is_plain = not (torch.is_grad_enabled() or torch.is_autocast_enabled(normed.device.type))
        if self.executor is None or not is_plain:
            return self.routed.begin(normed, routing)
        future: Future[Tensor] = self.executor.submit(_without_grad, self.routed, normed, routing)
        return future.result


@torch.no_grad()
def _without_grad(layer: MoELayer, x: Tensor, routing: Routing) -> Tensor:
    return layer.compute(x, routing)
