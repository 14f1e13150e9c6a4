"""ScatterMoE's layer of experts, in bf16 on a GPU: its Triton kernels move no padded rows.

What `prepare` moves to the GPU lies there before calls are timed.
"""

from collections.abc import Callable
from typing import Any

INSTALL = "pip install torch numpy git+https://github.com/shawntan/scattermoe"
PACKAGES = ("scattermoe", "torch", "triton")
CASES = ("experts",)


class Peer:
    """Needs ``top_k``."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("scattermoe needs an NVIDIA GPU, and torch sees none here")
        from scattermoe.mlp import GLUMLP  # type: ignore[import-not-found]

        self._torch, self._layer, self._top_k = torch, GLUMLP, settings["top_k"]

    def load_experts(self, gate: Any, up: Any, down: Any) -> None:
        """Copy the weights to the GPU as bf16: ``[E, F, D]`` twice, ``[E, D, F]``."""
        torch, (count, dim_hidden, dim_model) = self._torch, gate.shape
        with torch.device("meta"):
            sizes = (dim_model, dim_hidden, count, self._top_k)
            experts = self._layer(*sizes, activation=torch.nn.SiLU())
        # The activation of the second half multiplies the first half.
        both = torch.cat([self._placed(up), self._placed(gate)], dim=1)
        parts = {"experts.weight": both, "output_experts.weight": self._placed(down)}
        experts.load_state_dict(parts, assign=True)
        self._experts = experts.eval()

    def prepare(self, x: Any, ids: Any, weights: Any) -> Callable[[], Any]:
        """A call that returns ``[T, D]`` once it is computed; ids ``[T, K]``, weights fp32."""
        torch, rows = self._torch, self._placed(x)
        chosen, shares = torch.from_numpy(ids).cuda(), torch.from_numpy(weights).cuda().to(rows)

        def call() -> Any:
            with torch.no_grad():
                out = self._experts(rows, shares, chosen)
            torch.cuda.synchronize()
            return out

        return call

    def fetch(self, out: Any) -> Any:
        return out.view(self._torch.int16).cpu().numpy()

    def _placed(self, bits: Any) -> Any:
        return self._torch.from_numpy(bits.view("int16")).cuda().view(self._torch.bfloat16)
