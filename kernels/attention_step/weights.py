"""The weights of an attention layer, with the record that the native kernel reads prepared once.

Shape suffixes: D model, N values of a row of queries, keys and values, M mixed values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from moe_runtime.kernels.native import DTYPE_CODES


class HeadNorm(NamedTuple):
    """A root-mean-square normalisation of queries or keys, before they are turned.

    Attributes:
        weight: As long as a head, which it then normalises, or as all heads together.
        eps: Added to the mean of squares.
    """

    weight: Tensor
    eps: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AttentionWeights:
    """What an attention layer multiplies, normalises and scales by.

    The object remembers addresses: make it once for a place in memory, anew when the place changes.

    Attributes:
        qkv: `[N, D]`, the rows of all queries, then keys, then values, one head after another; it
            may be quantised, and so may the output weights.
        output: `[D, M]`, M the values of all query heads.
        qkv_bias: `[N]` or None.
        output_bias: `[D]` or None.
        q_norm: Normalises queries; None for a layer that does not.
        k_norm: Normalises keys.
        num_heads: Query heads, a multiple of `num_key_heads`.
        num_key_heads: Heads of keys and of values.
        key_dim: Values of a query or key head.
        value_dim: Values of a value head.
        scale: Factor of the scores.
        sinks: `[num_heads]`, a further score of each query head whose weight is left out, or None.
        pairs_share: Whether cosines and sines come once for the two values of a pair, a half of the
            usual ones.
        dtype: Of all tensors.
        num_queries: Values of all queries of a token.
        record: What the native kernel reads, or None when it cannot use these weights.
    """

    qkv: Tensor
    output: Tensor
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sinks: Tensor | None = None
    pairs_share: bool = False
    dtype: torch.dtype = field(init=False)
    num_queries: int = field(init=False)
    record: bytes | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks the shapes and writes the record.

        Raises:
            ValueError: Shapes or dtypes do not belong together.
        """
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
        object.__setattr__(self, "record", self._native_record())

    @property
    def num_keys(self) -> int:
        """Values of all keys of a token."""
        return self.num_key_heads * self.key_dim

    def tensors(self) -> list[Tensor]:
        """All tensors that there are, but the sinks, whose dtype may be another."""
        norms = [norm.weight for norm in (self.q_norm, self.k_norm) if norm is not None]
        biases = [bias for bias in (self.qkv_bias, self.output_bias) if bias is not None]
        return [self.qkv, self.output, *biases, *norms]

    def _native_record(self) -> bytes | None:
        """The C struct `AttentionLayer`."""
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
