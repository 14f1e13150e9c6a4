"""The implementations of `expert_mlp` behind one signature, and which of them a device gets."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from torch import Tensor

from moe_runtime.kernels.expert_mlp.parameter_gradients import EVERY_GRADIENT, ParameterGradients
from moe_runtime.kernels.expert_mlp.rows import Gradients, Needs, RoutedBatch
from moe_runtime.kernels.native import DTYPE_CODES, native_library, require_native

# A module and its class; imported when first used.
_CLASSES = {
    "native": ("moe_runtime.kernels.expert_mlp.implementations.native_path", "NativePath"),
    "torch": ("moe_runtime.kernels.expert_mlp.implementations.torch_path", "TorchPath"),
    "triton": ("moe_runtime.kernels.expert_mlp.implementations.triton_path", "TritonPath"),
}


class Path(Protocol):
    """An implementation."""

    def infer(self, batch: RoutedBatch) -> Tensor:
        """The output ``[T, D]`` of tokens when nothing is kept for a backward pass."""
        ...

    def forward(self, batch: RoutedBatch, *, keeps: bool) -> tuple[Tensor, Tensor]:
        """The output, and the pre-activations ``[R, Z]`` of the sorted rows if it `keeps` them.

        Without gate weights the rows of `x` are sorted by expert already, and so is the output; it
        is zero after the last expert's row. Experts of several widths take tokens alone, and keep
        what `backward` reads in a form of their own.
        """
        ...

    def backward(
        self,
        grad_TD: Tensor,
        batch: RoutedBatch,
        kept: Tensor,
        *,
        needs: Needs,
        parameter_gradients: ParameterGradients = EVERY_GRADIENT,
    ) -> Gradients:
        """The gradients that are needed; with empty `kept` it computes the pre-activations again.

        Every element of a gradient is written, those of experts without rows with zero; unless
        `parameter_gradients` says otherwise.
        """
        ...


def path_of(impl: str, x: Tensor) -> Path:
    """The implementation of a name; arguments and errors as in `resolve_path`."""
    module, name = _CLASSES[resolve_path(impl, x)]
    return cast(Path, getattr(import_module(module), name)())


def resolve_path(impl: str, x: Tensor) -> str:
    """Which implementation a name means.

    Args:
        impl: `triton`, `native`, `torch`, or `auto`, which goes by the device: Triton on a GPU, the
            C kernels on a CPU that has them, torch otherwise.
        x: The input: where it lies, and its dtype.

    Raises:
        NativeUnavailableError: `impl="native"` and the library was not built.
        ValueError: `impl="native"` cannot take `x`.
    """
    if impl == "native":
        require_native()
        if not _is_native(x):
            raise ValueError(
                f"impl='native' needs fp32, bf16 or fp16 on the CPU, got {x.dtype} on {x.device}"
            )
    if impl != "auto":
        return impl
    if x.is_cuda:
        return "triton"
    return "native" if _is_native(x) and native_library() is not None else "torch"


def _is_native(x: Tensor) -> bool:
    return x.is_cpu and x.dtype in DTYPE_CODES
