"""What `kernels.py` is held to: each figure that is aimed at beside the measured one."""

from __future__ import annotations

from moe_runtime.benchmarks.gpu_parts.gpu_results import GpuResults
from moe_runtime.benchmarks.gpu_parts.kernel_products import PROJECTIONS

OURS, PEER = "moe_runtime", "grouped_mm"
# What is aimed at on an H100: at least, or for seconds at most. `of_peer`: times as fast as PEER.
MANY_TOKENS = {
    "forward_tflops": 480,
    "both_tflops": 430,
    "forward_of_peer": 1.2,
    "both_of_peer": 1.2,
}
DECODING = {"graph_read_of_copy": 0.7, "forward_of_peer": 1.0}
AIMS: dict[str, dict[str, float]] = {
    "120b": MANY_TOKENS,
    "fine-grained": {**MANY_TOKENS, "forward_tflops": 330, "both_tflops": 330},
    "qwen3-30b T=65536": MANY_TOKENS,
    "qwen3-30b T=16384": MANY_TOKENS,
    "qwen3-30b T=128": {"forward_s": 0.45e-3, "forward_of_peer": 1.0, "both_of_peer": 1.0},
    "qwen3-30b T=8": DECODING,
    "qwen3-30b T=1": DECODING,
    "olmoe-1b-7b T=1": DECODING,
    "tiny": {"forward_s": 1.0, "both_of_peer": 1.0},
}
PRODUCT_AIMS = {
    "grouped product": 0.9,
    "sampled dense-dense": 0.9,
    "dense-sparse": 0.9,
    "skewed loads, beside padding": 1.0,
    "combine, beside a copy": 0.7,
    PROJECTIONS: 1.5,
}
# Beside the same layer in bf16, which reads 3.6 to 3.9 times as many bytes as 4-bit codes and twice
# as many as fp8. With many tokens bytes do not count, and decoding costs.
PACKED_FEW_TOKENS = ("T=1", "T=4", "T=8")
PACKED_AIMS = {"few": 1.6, "many": 0.7}


def note_aims(results: GpuResults) -> None:
    """Writes every figure that is aimed at beside the measured one, of what was measured."""
    results.settings["aims"] = {}
    for name in results.systems:
        if (ratio := results.value(name, "ratio")) is not None:
            few = "few" if name.endswith(PACKED_FEW_TOKENS) else "many"
            results.aim(name, "ratio", PRODUCT_AIMS.get(name, PACKED_AIMS[few]), ratio)
    for name, shape in results.settings["shapes"].items():

        def value(field: str, name: str = name) -> float | None:
            if not field.endswith("_of_peer"):
                return results.value(f"{name}, {OURS}", field)
            seconds = field.replace("_of_peer", "_s")
            ours, peer = (results.value(f"{name}, {one}", seconds) for one in (OURS, PEER))
            return peer / ours if ours is not None and peer is not None else None

        for field, asked in AIMS[name].items():
            if (measured := value(field)) is not None:
                results.aim(name, field, asked, measured, at_most=field.endswith("_s"))
        if (kept := value("kept_bytes")) is not None:
            # Beside the closed form: gate weights, the order of the rows and their offsets.
            rows = shape["T"] * shape["K"]
            asked = shape["closed_form_bytes"] + (2 + 8) * rows + 8 * (shape["E"] + 1) + 4096
            results.aim(name, "kept_bytes", asked, kept, at_most=True)
    results.write()
