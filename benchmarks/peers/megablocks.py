"""MegaBlocks' dropless layer of experts, in bf16 on a GPU: a cuBLAS product for each of them.

Built with ``GROUPED_GEMM_CUTLASS=1`` one for all. Not run on a GPU by this project; with its CUDA
operators in plain torch and its Triton kernel interpreted, 0.10.0 gives what fp64 does, to bf16.
"""

from collections.abc import Callable
from typing import Any

INSTALL = (
    "pip install torch==2.7.0 numpy setuptools wheel && pip install --no-build-isolation "
    "'megablocks[gg]==0.10.0' (with a CUDA 12 toolkit, where the GPU is)"
)
PACKAGES = ("megablocks", "grouped_gemm", "torch", "triton")
CASES = ("experts",)


class Peer:
    """Needs ``top_k``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("megablocks needs an NVIDIA GPU, and torch sees none here")
        from megablocks.layers import arguments, dmoe  # type: ignore[import-not-found]

        self._torch, self._top_k = torch, settings["top_k"]
        self._arguments, self._layer = arguments.Arguments, dmoe.ParallelDroplessMLP

    def load_experts(self, gate: Any, up: Any, down: Any) -> None:
        """Copy the weights to the GPU as bf16: ``[E, F, D]`` twice, ``[E, D, F]``."""
        count, dim_hidden, dim_model = gate.shape
        sizes = {"hidden_size": dim_model, "ffn_hidden_size": dim_hidden, "moe_num_experts": count}
        kind = {"mlp_type": "glu", "mlp_impl": "grouped", "bf16": True, "fp16": False}
        gate_of = {"activation_fn": self._torch.nn.functional.silu, "moe_top_k": self._top_k}
        self._experts = self._layer(self._arguments(**sizes, **kind, **gate_of, bias=False)).eval()
        # Rows of every matrix, `down` included, are hidden units of an expert.
        for name, bits in {"w1": gate, "v1": up, "w2": down.swapaxes(1, 2).copy()}.items():
            getattr(self._experts.mlp, name).data.copy_(self._placed(bits).flatten(0, 1))

    def prepare(self, x: Any, ids: Any, weights: Any) -> Callable[[], Any]:
        """A call that returns ``[T, D]`` once it is computed; ids ``[T, K]``, weights fp32."""
        torch, rows = self._torch, self._placed(x)
        chosen, shares = torch.from_numpy(ids).cuda(), torch.from_numpy(weights).cuda().to(rows)

        def call() -> Any:
            with torch.no_grad():
                out = self._experts(rows, None, shares, chosen)
            torch.cuda.synchronize()
            return out

        return call

    def fetch(self, out: Any) -> Any:
        return out.view(self._torch.int16).cpu().numpy()

    def _placed(self, bits: Any) -> Any:
        return self._torch.from_numpy(bits.view("int16")).cuda().view(self._torch.bfloat16)
