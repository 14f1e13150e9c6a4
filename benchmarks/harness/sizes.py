"""Sizes as people write them."""

from __future__ import annotations

import re

UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3}
UNITS |= {"MB": 10**6, "GB": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text: str) -> int:
    """Bytes of a size such as `7GiB`, `512MB` or `1000`.

    Raises:
        ValueError: not a number with a known unit.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in UNITS:
        raise ValueError(f"expected a size such as 7GiB or 512MB, got {text!r}")
    return int(float(match[1]) * UNITS[match[2].upper()])
