"""Rows of `device_decode.py` for the terminal."""

from __future__ import annotations

from typing import Any


def decode_line(row: dict[str, Any]) -> str:
    """One row in words."""
    name = f"{row['after_s']:5.1f} s  {row['system']:12} "
    if "errors" in row:
        errors = ", ".join(f"{key} {value:.4f}" for key, value in row["errors"].items())
        verdict = "rounding alone" if row["is_equal_up_to_rounding"] else "OTHER LOGITS"
        return f"{name} errors of logits in deviations: {errors}: {verdict}"
    if "experts" in row:
        name += f"{row['experts']:11} {row['cache']:8}"
    elif "share" in row:
        name += f"{row['share']:4.0%} {row['misses']:6} {row.get('cache', '-'):8}"
        if row.get("host_share", 1.0) < 1.0:
            name += f" RAM for {row['host_share']:.0%}"
    if "obstacle" in row:
        return f"{name} {row['obstacle']}"
    text = f"{name} {row['tokens_per_s']:7.1f} tokens/s, reads {row['read_of_copy']:4.0%} of copy"
    if "prefill_tokens_per_s" in row:
        text += f", prompt {row['prefill_tokens_per_s']:,.0f} tokens/s"
    if "hit_rate" in row:
        text += f", hits {row['hit_rate']:.0%}"
    if row.get("read_bytes_a_token"):
        text += f", {row['read_bytes_a_token'] / 1e6:.1f} MB a token from files"
    if "of_bound" in row:
        text += f", {row['of_bound']:.0%} of the bound"
    return text + _agreement(row)


def _agreement(row: dict[str, Any]) -> str:
    text = ""
    if "beside_resident" in row:
        found = row["beside_resident"]
        same = "same bits as" if found["is_bit_equal"] else "other bits than"
        text = f", {same} resident ({found['equal_tokens']} of {found['of_tokens']} tokens)"
    if "error" in row:
        text += f", error {row['error']:.4f}"
        text += "" if row["is_equal_up_to_rounding"] else ": OTHER LOGITS"
    return text
