"""Grouped-query attention with per-head norms and rotary positions, as in Qwen3.

Sources: Ainslie et al., "GQA" (2023); Su et al., "RoFormer" (2021); Qwen3 technical report (2025)
for the norms on queries and keys. The attention itself is torch's.

Shapes: B sequences, C tokens of context, D model width, H query heads, G key-value heads, W head
width.
"""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional as F

from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.layers import Linear, rms_norm
from moe_runtime.models.lm.sequence import SequencePart, causal_mask


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary position embedding for every position of the context.

    Args:
        head_dim: W, even.
        max_positions: number of positions.
        theta: base of the frequencies.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        self._head_dim, self._theta = head_dim, theta
        for name, table in self._tables(max_positions).items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self, max_positions: int) -> dict[str, Tensor]:
        """Cosines and sines, shaped to broadcast over `[B, C, heads, W/2]`."""
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
        frequencies = 1.0 / self._theta**exponents
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        return {"cos": angles.cos()[:, None, :], "sin": angles.sin()[:, None, :]}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in `nn.Module`; the tables are made anew, since `to_empty` leaves no values there."""
        super()._apply(fn, recurse)
        for name, table in self._tables(len(self.cos)).items():
            self.get_buffer(name).copy_(table)
        return self

    def forward(self, x: Tensor, runs: Sequence[range] | None = None) -> Tensor:
        """Rotates `[B, C, heads, W]`; the first half of W pairs with the second."""
        return _Rotate.apply(x, *(_rows(table, x.shape[1], runs) for table in (self.cos, self.sin)))


def _rows(table: Tensor, num_tokens: int, runs: Sequence[range] | None) -> Tensor:
    if runs is None:
        return table[:num_tokens]
    return torch.cat([table[run.start : run.stop] for run in runs])


class _Rotate(torch.autograd.Function):
    """A rotation; its gradient is the rotation back, so nothing of the input need be kept."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: FunctionCtx, grad_y: Tensor
    ) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors  # type: ignore[attr-defined]
        return _rotated(grad_y, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    # A compiler fuses this, and refuses what follows, as a second derivative does.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    out = torch.empty_like(x)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin)
    return out


class Attention(nn.Module):
    """Causal self-attention over whole sequences.

    Queries, keys and values come from one product; norms and rotation run over query and key heads
    together.

    Attributes:
        part: which part of each sequence this process attends for; None for all of it
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim, self.eps = config.head_dim, config.norm_eps
        self.part: SequencePart | None = None
        width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, width, bias=False)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.Parameter(torch.ones(config.head_dim))
        self.k_norm = nn.Parameter(torch.ones(config.head_dim))

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Attends within `[B, C, D]`; returns the same shape."""
        batch, context, _ = x.shape
        heads = self.qkv_proj(x).view(batch, context, -1, self.head_dim)
        queries_keys, values = heads.split(
            [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=2
        )
        gains = torch.cat(
            [self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1)]
        )
        runs = None if self.part is None else self.part.runs(context)
        queries_keys = rotary(rms_norm(queries_keys, gains, self.eps).to(values.dtype), runs)
        queries, keys = queries_keys.split([self.num_heads, self.num_kv_heads], dim=2)
        if self.part is None or runs is None:
            attended = self._attend(queries, keys, values)
        else:
            # One exchange for both.
            keys, values = self.part.gather(torch.stack([keys, values], dim=-1)).unbind(dim=-1)
            attended = torch.cat(
                [
                    # What comes after the last query is of no use to any.
                    self._attend(some, keys[:, : run.stop], values[:, : run.stop], first=run.start)
                    for some, run in zip(queries.split(list(map(len, runs)), 1), runs, strict=True)
                ],
                dim=1,
            )
        return self.o_proj(attended.reshape(batch, context, -1))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, first: int = 0) -> Tensor:
        """`[B, q, H, W]` of queries at the positions from `first` on, over all keys up to them."""
        mask = causal_mask(queries.shape[1], first, queries.device) if first else None
        return F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_kv_heads != self.num_heads,
        ).transpose(1, 2)
