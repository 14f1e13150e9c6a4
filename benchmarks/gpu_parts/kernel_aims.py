"""What `kernels.py` is held to: each figure that is aimed at beside the measured one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
}
# Beside the same layer in bf16, which reads 3.6 to 3.9 times as many bytes as 4-bit codes and twice
# as many as fp8. With many tokens bytes do not count, and decoding costs.
PACKED_FEW_TOKENS = ("T=1", "T=4", "T=8")
PACKED_AIMS = {"few": 1.6, "many": 0.7}


def compared(results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every figure that is aimed at beside the measured one, of what was measured."""
    for name, row in results["products"].items():
        yield _aim(name, "ratio", PRODUCT_AIMS[name], row["ratio"])
    for name, row in results["packed"].items():
        is_decoded = name.endswith(PACKED_FEW_TOKENS)
        yield _aim(name, "ratio", PACKED_AIMS["few" if is_decoded else "many"], row["ratio"])
    for name, shape in results["shapes"].items():
        ours, peer = (shape["backends"].get(backend, {}) for backend in (OURS, PEER))
        found = dict(ours)
        for passes in ("forward", "both"):
            if f"{passes}_s" in ours and f"{passes}_s" in peer:
                found[f"{passes}_of_peer"] = peer[f"{passes}_s"] / ours[f"{passes}_s"]
        for field, asked in AIMS[name].items():
            if found.get(field) is not None:
                yield _aim(name, field, asked, found[field])
        if found.get("kept_bytes") is not None:
            # Beside the closed form: gate weights, the order of the rows and their offsets.
            rows = shape["T"] * shape["K"]
            asked = found["closed_form_bytes"] + (2 + 8) * rows + 8 * (shape["E"] + 1) + 4096
            yield _aim(name, "kept_bytes", asked, found["kept_bytes"])


def _aim(what: str, field: str, asked: float, measured: float) -> dict[str, Any]:
    is_upper = field.endswith(("_s", "_bytes"))
    holds = measured <= asked if is_upper else measured >= asked
    return {"what": what, "field": field, "asked": asked, "measured": measured, "holds": holds}


def aim_line(aim: dict[str, Any]) -> str:
    """One comparison for the terminal."""
    sign = "<=" if aim["field"].endswith(("_s", "_bytes")) else ">="
    verdict = "holds" if aim["holds"] else "MISSED"
    return (
        f"{aim['what']:45} {aim['field']:16} {sign} {aim['asked']:<12.6g} "
        f"{aim['measured']:<12.6g} {verdict}"
    )
