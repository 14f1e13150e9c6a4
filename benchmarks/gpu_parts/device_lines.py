"""Rows of `device_decode.py` for the terminal."""

from __future__ import annotations

from moe_runtime.benchmarks.gpu_parts.gpu_results import GpuResults


def decode_line(results: GpuResults, name: str) -> str:
    """One row in words."""
    if isinstance(found := results.systems[name], str):
        return f"{name}: {found}"

    def value(metric: str) -> float:
        return results.value(name, metric) or 0.0

    text = (
        f"{name}: {value('tokens_per_s'):.1f} tokens/s, reads {value('read_of_copy'):.0%} of copy"
    )
    if "prefill_tokens_per_s" in found[0]:
        text += f", prompt {value('prefill_tokens_per_s'):,.0f} tokens/s"
    if "hit_rate" in found[0]:
        text += f", hits {value('hit_rate'):.0%}"
    if value("read_bytes_a_token"):
        text += f", {value('read_bytes_a_token') / 1e6:.1f} MB a token from files"
    if "of_bound" in found[0]:
        text += f", {value('of_bound'):.0%} of the bound"
    if name in results.qualities:
        same = "same bits as" if found[0]["same_bits"] else "other bits than"
        equal, compared = (results.qualities[name][what] for what in ("equal", "compared"))
        text += f", {same} resident ({equal} of {compared} tokens)"
    return text
