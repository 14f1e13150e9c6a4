"""The weights of one expert, and the C struct that the native kernel reads.

Shape suffixes: D model in, F hidden, O model out (usually D).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from moe_runtime.kernels.native import DTYPE_CODES

if TYPE_CHECKING:
    from moe_runtime.kernels.lossless import PlanesMatrix
    from moe_runtime.kernels.quantized import QuantizedMatrix, WeightFormat

Matrix: TypeAlias = "Tensor | QuantizedMatrix | PlanesMatrix"


class ExpertShape(NamedTuple):
    """The properties that the experts of one call must share.

    Attributes:
        dtype: Of all tensors; bf16 if a matrix is quantised.
        formats: Empty for plain experts of one dtype. Otherwise the format (or dtype, or None) of
            gate, up and down, then the dtype of the biases or None.
    """

    dim_in: int
    dim_hidden: int
    dim_out: int
    dtype: torch.dtype
    formats: tuple[WeightFormat | str | torch.dtype | None, ...] = ()

    @property
    def bias_dtype(self) -> torch.dtype:
        own = self.formats[-1] if self.formats else None
        return own if isinstance(own, torch.dtype) else self.dtype

    @property
    def row_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes of rows that the native kernel takes."""
        is_coded = bool(self.formats) and "planes" not in self.formats
        return (self.dtype, torch.float32, *([torch.float16] if is_coded else []))


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Views of one expert's row-major matrices: unit stride along the summed dimension.

    Rows, and values of biases, may lie at any distance, so half of a fused `[2F, D]` tensor or
    every other row of an interleaved one need no copy. The object holds addresses: make a new one
    when memory moves. Each matrix may have its own quantised format; plain ones are bf16 then, and
    biases may have a dtype of their own.

    Attributes:
        gate: `[F, D]`, or None for an expert without a gate.
        up: `[F, D]`.
        down: `[O, F]`.
        gate_bias: `[F]` or None, like `up_bias`.
        down_bias: `[O]` or None.
        c_struct: None if the native kernel cannot use these weights.
    """

    gate: Matrix | None
    up: Matrix
    down: Matrix
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    shape: ExpertShape = field(init=False)
    c_struct: bytes | None = field(init=False, repr=False)
    _described: list[object] = field(init=False, repr=False, default_factory=list)

    def __post_init__(self) -> None:
        """Raises ValueError if shapes or dtypes do not fit together."""
        dim_hidden, dim_in = _matrix_shape("up", self.up)
        dim_out, down_hidden = _matrix_shape("down", self.down)
        if down_hidden != dim_hidden:
            raise ValueError(
                f"down must be [*, {dim_hidden}] for up [{dim_hidden}, {dim_in}], "
                f"got {list(self.down.shape)}"
            )
        expected = {
            "gate": (self.gate, (dim_hidden, dim_in)),
            "gate_bias": (self.gate_bias, (dim_hidden,)),
            "up_bias": (self.up_bias, (dim_hidden,)),
            "down_bias": (self.down_bias, (dim_out,)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        if self.gate is None and self.gate_bias is not None:
            raise ValueError("gate_bias was given without gate")
        shape = ExpertShape(dim_in, dim_hidden, dim_out, *self._types())
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "c_struct", self._as_c_struct())

    def _types(self) -> tuple[torch.dtype, tuple[WeightFormat | str | torch.dtype | None, ...]]:
        """The dtype and the formats of the shape."""
        matrices, biases = (self.gate, self.up, self.down), self._biases()
        bias_dtypes = {bias.dtype for bias in biases}
        dtypes = {matrix.dtype for matrix in matrices if isinstance(matrix, Tensor)}
        is_plain = all(matrix is None or isinstance(matrix, Tensor) for matrix in matrices)
        if is_plain and len(dtypes | bias_dtypes) == 1:
            return dtypes.pop(), ()
        if len(bias_dtypes) > 1 or not dtypes <= {torch.bfloat16}:
            raise ValueError(
                "all tensors of an expert must have one dtype, or matrices that are not quantised "
                f"bf16 and biases one dtype, got {dtypes} and {bias_dtypes}"
            )
        formats = (getattr(m, "format", getattr(m, "dtype", None)) for m in matrices)
        return torch.bfloat16, (*formats, biases[0].dtype if biases else None)

    def _biases(self) -> list[Tensor]:
        every = (self.gate_bias, self.up_bias, self.down_bias)
        return [bias for bias in every if bias is not None]

    def _tensors(self) -> list[Tensor]:
        matrices = (self.gate, self.up, self.down)
        return [matrix for matrix in matrices if isinstance(matrix, Tensor)] + self._biases()

    def _as_c_struct(self) -> bytes | None:
        """The C struct `Expert`: three matrices and three biases."""
        if any(not t.is_cpu or isinstance(t, FakeTensor) for t in self._tensors()):
            return None
        if (
            0 in self.shape[:3]
            or not {self.shape.dtype, self.shape.bias_dtype} <= DTYPE_CODES.keys()
        ):
            return None
        words: list[int] = []
        for matrix in (self.gate, self.up, self.down):
            if matrix is None:
                words += (0, 0, 0, 0)
            elif not isinstance(matrix, Tensor):
                found = matrix.native_struct()
                if found is None:
                    return None
                words += found[0]
                self._described.append(found[1])
            elif matrix.stride(-1) == 1 or matrix.shape[-1] == 1:
                words += (matrix.data_ptr(), matrix.stride(0) * matrix.element_size(), 0, 0)
            else:
                return None
        for bias in (self.gate_bias, self.up_bias, self.down_bias):
            words += (
                (0, 0) if bias is None else (bias.data_ptr(), bias.stride(0) * bias.element_size())
            )
        return struct.pack("18q", *words)


def _matrix_shape(name: str, matrix: Matrix) -> tuple[int, int]:
    if len(matrix.shape) != 2:
        raise ValueError(f"{name} must have two dimensions, got {list(matrix.shape)}")
    return matrix.shape[0], matrix.shape[1]
