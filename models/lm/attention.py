"""Grouped-query attention with per-head norms and rotary positions, as in Qwen3, on divided
sequences.

Sources: Ainslie et al., "GQA" (2023); Su et al., "RoFormer" (2021); Qwen3 technical report (2025)
for the norms on queries and keys; Megatron's sequence parallelism (Korthikanti et al., 2022);
context parallelism of Llama 3 (Dubey et al., 2024). The attention itself is torch's.

Shapes: B sequences, C tokens of context, c of them here, T = B * C, D model width, H query heads, G
key-value heads, W head width.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn import functional as F

from moe_runtime.models.lm.config import LanguageModelConfig
from moe_runtime.models.lm.layers import Linear, rms_norm
from moe_runtime.routing import Routing, ZeroRouting


class SequencePart:
    """This process's part of each sequence, `index` of `size`.

    A token attends to those before it, so the back of a sequence is more work than the front. For
    attention a sequence is therefore folded: into `2 * folds` chunks, taken in turn from the front
    and from the back (the head-tail order of Llama 3's context parallelism and of torch's).
    """

    def __init__(self, mesh: DeviceMesh, *, folds: int = 1) -> None:
        self._mesh = mesh
        self._folds = folds
        self.index, self.size = mesh.get_local_rank(), mesh.size()

    def own(self, whole: Tensor) -> Tensor:
        """This process's `[B, c, ...]` of `[B, C, ...]`."""
        context = whole.shape[1]
        order = fold_order(self._folds)
        for number, name in ((self.size, "tp * parallel.cp"), (len(order), "cp * 2")):
            if context % number:
                raise ValueError(
                    f"sequences of {context} tokens do not divide into {number} equal parts "
                    f"(parallel.{name})"
                )
        width = context // self.size
        folded = _chunks_in(whole, order)
        return folded.narrow(1, self.index * width, width)

    def gather(self, part: Tensor) -> Tensor:
        """`[B, C, ...]` from every process's `[B, c, ...]`, in order; a collective call."""
        divided = DTensor.from_local(part, self._mesh, [Shard(1)], run_check=False)
        folded = divided.full_tensor(grad_placements=[Partial()])
        order = fold_order(self._folds)
        return _chunks_in(folded, [order.index(chunk) for chunk in range(len(order))])

    def runs(self, num_tokens: int) -> list[range]:
        """Positions of the tokens here, as consecutive runs."""
        assert self.size == self._folds, "other divisions cut through runs"
        width = num_tokens // 2
        own = fold_order(self._folds)[2 * self.index : 2 * self.index + 2]
        return [range(chunk * width, (chunk + 1) * width) for chunk in own]

    def own_choices(self, routing: Routing, num_sequences: int) -> Routing:
        """A gate's decisions for the tokens here."""

        def rows(all_T: Tensor) -> Tensor:
            return self.own(all_T.unflatten(0, (num_sequences, -1))).flatten(0, 1)

        zero = routing.zero
        return replace(
            routing,
            ids_TK=rows(routing.ids_TK),
            weights_TK=rows(routing.weights_TK),
            slots_TK=None if routing.slots_TK is None else rows(routing.slots_TK),
            zero=None
            if zero is None
            else ZeroRouting(rows(zero.ids_TK), rows(zero.weights_TK), zero.num_experts),
        )


def fold_order(folds: int) -> list[int]:
    """Chunk numbers by part: first and last, second and last but one, ..."""
    if folds == 1:
        return [0]
    return [chunk for part in range(folds) for chunk in (part, 2 * folds - 1 - part)]


def _chunks_in(whole: Tensor, order: list[int]) -> Tensor:
    if len(order) == 1:
        return whole
    chunks = whole.chunk(len(order), 1)
    return torch.cat([chunks[number] for number in order], dim=1)


def causal_mask(num_queries: int, first: int, device: torch.device) -> Tensor:
    """`[q, first + q]` bool: the visible tokens of a run."""
    shape = (num_queries, first + num_queries)
    return torch.ones(shape, dtype=torch.bool, device=device).tril(first)


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary position embedding for all positions."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_positions: int, theta: float) -> None:
        super().__init__()
        self._head_dim, self._theta = head_dim, theta
        for name, table in self._tables(max_positions).items():
            self.register_buffer(name, table, persistent=False)

    def _tables(self, max_positions: int) -> dict[str, Tensor]:
        exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
        frequencies = 1.0 / self._theta**exponents
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        return {"cos": angles.cos()[:, None, :], "sin": angles.sin()[:, None, :]}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As in `nn.Module`; recomputes the tables, since `to_empty` leaves no values."""
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
    """A rotation; its gradient is the inverse rotation and needs no inputs."""

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
    # A compiler fuses this form, and second derivatives need it.
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
    together. ``part`` is the part of each sequence that this process attends for; None for all of
    it.
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
        runs = None if self.part is None else self.part.runs(context)
        queries, keys, values = self.heads(x, rotary, runs)
        if self.part is None or runs is None:
            attended = self._attend(queries, keys, values)
        else:
            # one exchange for both
            keys, values = self.part.gather(torch.stack([keys, values], dim=-1)).unbind(dim=-1)
            attended = torch.cat(
                [
                    # keys after the last query are not needed
                    self._attend(some, keys[:, : run.stop], values[:, : run.stop], first=run.start)
                    for some, run in zip(queries.split(list(map(len, runs)), 1), runs, strict=True)
                ],
                dim=1,
            )
        return self.o_proj(attended.reshape(batch, context, -1))

    def heads(
        self, x: Tensor, rotary: RotaryTable, runs: Sequence[range] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `[B, C, H, W]`, keys and values `[B, C, G, W]` of tokens at the positions of the
        runs; at 0, 1, ... if omitted."""
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim))
        queries_keys, values = heads.split(
            [self.num_heads + self.num_kv_heads, self.num_kv_heads], dim=2
        )
        gains = torch.cat(
            [self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1)]
        )
        queries_keys = rotary(rms_norm(queries_keys, gains, self.eps).to(values.dtype), runs)
        queries, keys = queries_keys.split([self.num_heads, self.num_kv_heads], dim=2)
        return queries, keys, values

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, first: int = 0) -> Tensor:
        """`[B, q, H, W]` for queries from position `first`, over all keys up to them."""
        mask = causal_mask(queries.shape[1], first, queries.device) if first else None
        return F.scaled_dot_product_attention(
            queries.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=self.num_kv_heads != self.num_heads,
        ).transpose(1, 2)
