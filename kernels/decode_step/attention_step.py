"""`attention_step`: an attention layer for one new token of each sequence.

`attention_heads` is the part before the scores, for whole sequences.

Shape suffixes: B sequences, T tokens of a sequence, D model, N values of a row of queries, keys
and values, R rotated values of a head, H query heads, G key heads, S cached tokens, K key width,
V value width, Q values of all queries, M attention outputs of all heads.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from moe_runtime.kernels.decode_step.rounded_rows import round_rows, width_of
from moe_runtime.kernels.decode_step.single_query_attention import (
    MAX_COLUMNS,
    Impl,
    single_query_attention_reference,
)
from moe_runtime.kernels.linear import ROWS_PER_CALL
from moe_runtime.kernels.linear.op import check_status, linear_reference
from moe_runtime.kernels.native import (
    CACHED_CODES,
    DTYPE_CODES,
    NEEDS_TORCH,
    STATUS_NO_MEMORY,
    NativeLibrary,
    chosen_library,
    native_library,
    needs_torch,
)
from moe_runtime.kernels.rms_norm import NormForm, rms_norm_reference

_PLACE = struct.Struct("10q").pack


class RowNorm(NamedTuple):
    """RMS normalisation of queries or keys before the rotary embedding.

    `weight` has the width of a head (each head is normalised), or of all heads together.
    """

    weight: Tensor
    eps: float
    form: NormForm = "rounded"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionWeights:
    """The weights of an attention layer, and the C struct that the native kernel reads.

    The struct holds addresses: make a new object when a weight moves.

    Attributes:
        qkv: `[N, D]`: queries of all heads, then keys, then values. May be quantised, like
            `output`.
        output: `[D, M]`.
        qkv_bias: `[N]` or None.
        output_bias: `[D]` or None.
        num_heads: Query heads, a multiple of `num_key_heads`.
        scale: Factor of the scores.
        sinks: `[num_heads]`: an extra score per query head, which only adds to the softmax's sum.
        pairs_share: Cosines and sines are given once for both values of a rotated pair.
        num_queries: Values of all queries of a token.
        c_struct: The C struct `AttentionLayer`; None if the kernel cannot use these weights.
    """

    qkv: Tensor
    output: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    q_norm: RowNorm | None = None
    k_norm: RowNorm | None = None
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sinks: Tensor | None = None
    pairs_share: bool = False
    dtype: torch.dtype = field(init=False)
    num_queries: int = field(init=False)
    c_struct: bytes | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError if shapes or dtypes do not fit together."""
        object.__setattr__(self, "dtype", self.qkv.dtype)
        object.__setattr__(self, "num_queries", self.num_heads * self.key_dim)
        if self.num_key_heads < 1 or self.num_heads % self.num_key_heads:
            raise ValueError(
                f"{self.num_heads} query heads need key heads that divide them, got "
                f"{self.num_key_heads}"
            )
        rows = self.num_queries + self.num_keys + self.num_key_heads * self.value_dim
        mixed = self.num_heads * self.value_dim
        if self.qkv.ndim != 2 or len(self.qkv) != rows:
            raise ValueError(f"qkv must be [{rows}, D], got {list(self.qkv.shape)}")
        if self.output.ndim != 2 or self.output.shape[1] != mixed:
            raise ValueError(f"output must be [D, {mixed}], got {list(self.output.shape)}")
        for name, bias, size in (
            ("qkv_bias", self.qkv_bias, rows),
            ("output_bias", self.output_bias, len(self.output)),
            ("sinks", self.sinks, self.num_heads),
        ):
            if bias is not None and bias.shape != (size,):
                raise ValueError(f"{name} must be [{size}], got {list(bias.shape)}")
        for name, norm, size in (
            ("q_norm", self.q_norm, self.num_queries),
            ("k_norm", self.k_norm, self.num_keys),
        ):
            if norm is not None and norm.weight.shape not in ((self.key_dim,), (size,)):
                raise ValueError(
                    f"the weight of {name} must be [{self.key_dim}] or [{size}], got "
                    f"{list(norm.weight.shape)}"
                )
        dtypes = {tensor.dtype for tensor in self.tensors()}
        if len(dtypes) > 1:
            raise ValueError(f"all tensors of a layer must have one dtype, got {dtypes}")
        object.__setattr__(self, "c_struct", self._as_c_struct())

    @property
    def num_keys(self) -> int:
        """Values of all keys of a token."""
        return self.num_key_heads * self.key_dim

    def tensors(self) -> list[Tensor]:
        """All tensors except the sinks, which may have another dtype."""
        norms = [norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None]
        biases = [bias for bias in (self.qkv_bias, self.output_bias) if bias is not None]
        return [self.qkv, self.output, *biases, *norms]

    def _as_c_struct(self) -> bytes | None:
        if self.dtype not in DTYPE_CODES or 0 in self.qkv.shape or 0 in self.output.shape:
            return None
        sinks = self.sinks
        if sinks is not None and sinks.dtype not in DTYPE_CODES:
            return None
        tensors = self.tensors() if sinks is None else [*self.tensors(), sinks]
        if not all(tensor.is_cpu and tensor.stride(-1) == 1 for tensor in tensors):
            return None
        words: list[int] = []
        for weight in (self.qkv, self.output):
            product = getattr(weight, "product", None)  # of one that stays quantised
            if product is None:
                words += [weight.data_ptr(), weight.stride(0) * weight.element_size()]
            elif address := product.address(self.dtype):
                words += [address, -1]
            else:
                return None
        if any(norm and norm.form != "rounded" for norm in (self.q_norm, self.k_norm)):
            return None
        norms = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        for tensor in (self.qkv_bias, self.output_bias, *norms):
            words.append(0 if tensor is None else tensor.data_ptr())
        words += [0 if weight is None else len(weight) for weight in norms]
        words += [self.qkv.shape[1], len(self.output), self.num_heads, self.num_key_heads]
        words += [self.key_dim, self.value_dim, DTYPE_CODES[self.dtype]]
        words += [0, 0] if sinks is None else [sinks.data_ptr(), DTYPE_CODES[sinks.dtype]]
        words.append(self.pairs_share)
        epsilons = [0.0 if norm is None else norm.eps for norm in (self.q_norm, self.k_norm)]
        return struct.pack("20q3d", *words, *epsilons, self.scale)


def attention_step(
    x_BD: Tensor,
    weights: AttentionWeights,
    cos_BR: Tensor,
    sin_BR: Tensor,
    key_BGSK: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None = None,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Computes an attention layer for one new token per sequence and caches its key and value.

    Queries and keys are normalised if the layer has norms, then rotated (RoPE, Su et al., 2021, in
    halves as in Llama). Every operation is rounded to the dtype.

    Args:
        x_BD: fp32, bf16 or fp16, as everything else except the mask.
        cos_BR: `[B, R]`, or `[1, R]` for all sequences; R even, at most the key width. The rest of
            a head is not rotated. With `pairs_share`, 2 R values are rotated.
        key_BGSK: Unit stride along K; the last token is overwritten. Keys and values may be int8,
            as `round_rows` gives them.
        mask_BS: fp32, added to the scores, or None.
        impl: `native` (C, CPU, inference only), `reference` (torch), or `auto`: native if possible.

    Returns:
        `[B, D]` in the dtype of `x`. The kernel's result for a sequence does not depend on the
        others, and has the bits of `linear`, `rms_norm` and `single_query_attention` in turn.

    Raises:
        ValueError: Shapes do not fit, `impl` is unknown, or the named kernel cannot take the input.
        NativeUnavailableError: `impl="native"` and the library was not built.
    """
    arguments = (x_BD, weights, cos_BR, sin_BR, key_BGSK, value_BGSV)
    problem = _problem(*arguments, mask_BS)
    if problem:
        raise ValueError(problem)
    unable = _native_problem(*arguments)
    is_usual = impl == "auto" and not unable  # in every step
    library = native_library() if is_usual else chosen_library(impl, unable)
    if library is None:
        return attention_step_reference(*arguments, mask_BS)
    return _run_native(library, *arguments[:4], [arguments[4:]], mask_BS)


def attention_steps(
    x_BD: Tensor,
    weights: AttentionWeights,
    cos_BR: Tensor,
    sin_BR: Tensor,
    cached: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """`attention_step` of several sequences with caches of different lengths.

    `cached` has the keys `[1, G, S, K]` and values `[1, G, S, V]` of each sequence, with room for
    the new token at the end. A sequence gets the bits of a call of its own.
    """
    library = native_library()
    rows = [
        (x_BD[b : b + 1], weights, cos_BR[b : b + 1], sin_BR[b : b + 1], *place)
        for b, place in zip(range(len(x_BD)), cached, strict=True)
    ]
    if library is not None and all(_native_problem(*row) is None for row in rows):
        x, cos, sin = (part.contiguous() for part in (x_BD, cos_BR, sin_BR))
        return _run_native(library, x, weights, cos, sin, cached, None)
    return torch.cat([attention_step(*row) for row in rows])


def _problem(
    x: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor,
    key: Tensor, value: Tensor, mask: Tensor | None,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments, or None."""
    if x.ndim != 2 or x.shape[1] != weights.qkv.shape[1]:
        return f"x must be [B, {weights.qkv.shape[1]}], got {list(x.shape)}"
    batch, length = x.shape[0], key.shape[-2] if key.ndim == 4 else 0
    heads = weights.num_key_heads
    widths = [key.shape[-1], value.shape[-1]] if key.ndim == value.ndim == 4 else []
    if key.dtype is torch.uint8 and widths:
        widths = [width_of(key), width_of(value)]
    if (
        length == 0
        or key.shape[:3] != (batch, heads, length)
        or value.shape[:3] != (batch, heads, length)
        or widths != [weights.key_dim, weights.value_dim]
        or key.dtype is not value.dtype
    ):
        return (
            f"key and value must be [{batch}, {heads}, S, {weights.key_dim}] and "
            f"[{batch}, {heads}, S, {weights.value_dim}] with a place for the new token, got "
            f"{list(key.shape)} and {list(value.shape)}"
        )
    turned = cos.shape[-1] * (2 if weights.pairs_share else 1)
    if cos.ndim != 2 or cos.shape != sin.shape or turned % 2 or turned > weights.key_dim:
        return (
            f"cos and sin must be [B, R] that turn an even number of {weights.key_dim} values, got "
            f"{list(cos.shape)} and {list(sin.shape)}"
        )
    if cos.shape[0] not in (1, batch):
        return f"cos and sin must be of 1 or {batch} sequences, got {len(cos)}"
    if mask is not None and (mask.shape != (batch, length) or mask.dtype != torch.float32):
        return f"mask must be fp32 [{batch}, {length}], got {mask.dtype} {list(mask.shape)}"
    return None


def _native_problem(
    x: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor, key: Tensor, value: Tensor
) -> str | None:
    """Why the C kernel cannot take these (valid) arguments, or None."""
    dtype = weights.dtype
    if weights.c_struct is None:
        return "weights must be fp32, bf16 or fp16 CPU tensors with unit stride"
    cached = () if key.dtype is torch.uint8 else (key, value)
    for tensor in (x, cos, sin, *cached):
        if tensor.dtype is not dtype or not tensor.is_cpu:
            return f"it needs CPU tensors of {dtype}, got {tensor.dtype} on {tensor.device}"
    if not (x.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
        return "it needs x, cos and sin without gaps"
    if not 0 < x.shape[0] <= ROWS_PER_CALL:
        return f"it takes 1 to {ROWS_PER_CALL} sequences, got {len(x)}"
    if weights.key_dim > MAX_COLUMNS:
        return f"keys have at most {MAX_COLUMNS} elements, got {weights.key_dim}"
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        return f"keys and values need unit stride, got {key.stride()} and {value.stride()}"
    is_inference = not torch.is_grad_enabled() and forward_ad._current_level < 0
    return NEEDS_TORCH if not is_inference and needs_torch(x, *weights.tensors()) else None


def _run_native(
    library: NativeLibrary, x: Tensor, weights: AttentionWeights, cos: Tensor, sin: Tensor,
    cached: Sequence[tuple[Tensor, Tensor]], mask: Tensor | None,
) -> Tensor:  # fmt: skip
    """The kernel alone. Sequences are split evenly between the pairs of `cached`."""
    batch, size = x.shape[0], x.element_size()
    mask = None if mask is None else mask.contiguous()
    places = b""
    for key, value in cached:  # a function call for each would take longer than the work itself
        (k_outer, k_inner, k_row, _), (v_outer, v_inner, v_row, _) = key.stride(), value.stride()
        kept = key.element_size()
        places += _PLACE(
            key.data_ptr(), k_outer * kept, k_inner * kept, k_row * kept,
            value.data_ptr(), v_outer * kept, v_inner * kept, v_row * kept,
            key.shape[2], CACHED_CODES[key.dtype],
        )  # fmt: skip
    # a row of queries, keys and values; queries normalised, and turned; mixed values
    scratch = x.new_empty(
        batch * (weights.qkv.shape[0] + 2 * weights.num_queries + weights.output.shape[1])
    )
    out = x.new_empty((batch, weights.output.shape[0]))
    status = library.attention_step(
        weights.c_struct, x.data_ptr(), batch,
        cos.data_ptr(), sin.data_ptr(), 0 if cos.shape[0] == 1 else cos.shape[1] * size,
        cos.shape[1], places, len(cached), None if mask is None else mask.data_ptr(),
        scratch.data_ptr(), out.data_ptr(), torch.get_num_threads() == library.num_threads,
    )  # fmt: skip
    if status:
        check_status(status, batch, weights.qkv.shape[1])
    return out


def attention_heads(
    query_BTQ: Tensor, key_BTN: Tensor, weights: AttentionWeights, cos_BTR: Tensor, sin_BTR: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalises (if the layer does) and rotates the queries and keys of whole sequences.

    Args:
        query_BTQ: fp32, bf16 or fp16, as everything else.
        cos_BTR: `[B, T, R]`, or `[1, T, R]` for all sequences, as in `attention_step`.

    Returns:
        Queries `[B, H, T, K]` and keys `[B, G, T, K]`, by the native kernel if possible. A row has
        the same bits whatever the other rows and the number of threads are.

    Raises:
        ValueError: Shapes do not fit.
    """
    (batch, tokens), turned = query_BTQ.shape[:2], cos_BTR.shape[-1]
    angles = {(batch, tokens, turned), (1, tokens, turned)}
    turned *= 2 if weights.pairs_share else 1
    if (
        query_BTQ.shape != (batch, tokens, weights.num_queries)
        or key_BTN.shape != (batch, tokens, weights.num_keys)
        or cos_BTR.shape not in angles
        or sin_BTR.shape != cos_BTR.shape
        or turned % 2
        or turned > weights.key_dim
    ):
        raise ValueError(
            f"expected queries [B, T, {weights.num_queries}], keys [B, T, {weights.num_keys}] and "
            f"angles [B or 1, T, R] that turn an even number of {weights.key_dim} values, got "
            f"{list(query_BTQ.shape)}, {list(key_BTN.shape)}, {list(cos_BTR.shape)} and "
            f"{list(sin_BTR.shape)}"
        )
    library, given = native_library(), (query_BTQ, key_BTN, cos_BTR, sin_BTR)
    if (
        library is None
        or weights.c_struct is None
        or not batch * tokens
        or any(tensor.dtype is not weights.dtype or not tensor.is_cpu for tensor in given)
        or needs_torch(*given, *weights.tensors())
    ):
        return heads_reference(query_BTQ, key_BTN, weights, cos_BTR, sin_BTR)
    query_BTQ, key_BTN, cos_BTR, sin_BTR = (tensor.contiguous() for tensor in given)
    query_BHTK = query_BTQ.new_empty((batch, weights.num_heads, tokens, weights.key_dim))
    key_BGTK = key_BTN.new_empty((batch, weights.num_key_heads, tokens, weights.key_dim))
    status = library.attention_heads(
        weights.c_struct, query_BTQ.data_ptr(), key_BTN.data_ptr(), batch * tokens, tokens,
        cos_BTR.data_ptr(), sin_BTR.data_ptr(), cos_BTR.shape[0] * tokens, cos_BTR.shape[2],
        query_BHTK.data_ptr(), key_BGTK.data_ptr(), library.shares_threads(),
    )  # fmt: skip
    if status == STATUS_NO_MEMORY:
        raise MemoryError(f"no memory for the heads of {tokens} tokens")
    return query_BHTK, key_BGTK


def attention_step_reference(
    x_BD: Tensor,
    weights: AttentionWeights,
    cos_BR: Tensor,
    sin_BR: Tensor,
    key_BGSD: Tensor,
    value_BGSV: Tensor,
    mask_BS: Tensor | None = None,
) -> Tensor:
    """The specification of `attention_step` in torch; every operation rounds to the dtype."""
    qkv_BN = linear_reference(x_BD, weights.qkv, weights.qkv_bias)
    num_values = weights.num_key_heads * weights.value_dim
    if weights.pairs_share:
        cos_BR, sin_BR = (torch.cat((angles, angles), dim=-1) for angles in (cos_BR, sin_BR))
    query, key, value = qkv_BN.split([weights.num_queries, weights.num_keys, num_values], dim=1)
    query_BHD = _heads(normed(query, weights.q_norm), weights.key_dim)
    key_BGD = _heads(normed(key, weights.k_norm), weights.key_dim)
    new_BGD, value_BGV = rotated(key_BGD, cos_BR, sin_BR), _heads(value, weights.value_dim)
    if key_BGSD.dtype is torch.uint8:
        new_BGD, value_BGV = round_rows(new_BGD), round_rows(value_BGV)
    key_BGSD[:, :, -1], value_BGSV[:, :, -1] = new_BGD, value_BGV
    turned_BHD = rotated(query_BHD, cos_BR, sin_BR)
    mixed_BHV = single_query_attention_reference(
        turned_BHD, key_BGSD, value_BGSV, mask_BS, weights.scale, weights.sinks
    )
    return linear_reference(mixed_BHV.flatten(1), weights.output, weights.output_bias)


def heads_reference(
    query_BTQ: Tensor, key_BTN: Tensor, weights: AttentionWeights, cos_BTR: Tensor, sin_BTR: Tensor
) -> tuple[Tensor, Tensor]:
    """The specification of `attention_heads` in torch; every operation rounds to the dtype."""
    batch, tokens = query_BTQ.shape[:2]
    if weights.pairs_share:
        cos_BTR, sin_BTR = (torch.cat((angles, angles), dim=-1) for angles in (cos_BTR, sin_BTR))
    cos, sin = (angles.expand(batch, -1, -1).flatten(0, 1) for angles in (cos_BTR, sin_BTR))

    def heads(values_BTN: Tensor, norm: RowNorm | None) -> Tensor:
        rows = _heads(normed(values_BTN.flatten(0, 1), norm), weights.key_dim)
        return rotated(rows, cos, sin).unflatten(0, (batch, tokens)).transpose(1, 2)

    return heads(query_BTQ, weights.q_norm), heads(key_BTN, weights.k_norm)


def _heads(values: Tensor, dim: int) -> Tensor:
    return values.unflatten(1, (-1, dim))


def normed(row_BN: Tensor, norm: RowNorm | None) -> Tensor:
    if norm is None:
        return row_BN
    groups = row_BN.unflatten(1, (-1, len(norm.weight)))
    return rms_norm_reference(groups, norm.weight, norm.eps, norm.form).flatten(1)


def rotated(heads: Tensor, cos_BR: Tensor, sin_BR: Tensor) -> Tensor:
    """Rotary embedding of the first R values of heads `[B, H, D]`, in halves."""
    turned, rest = heads.split([cos_BR.shape[-1], heads.shape[-1] - cos_BR.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    crossed = torch.cat((-second, first), dim=-1)
    return torch.cat((turned * cos_BR[:, None] + crossed * sin_BR[:, None], rest), dim=-1)
