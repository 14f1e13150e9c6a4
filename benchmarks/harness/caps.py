"""Memory caps as words."""

from moe_runtime.config import parse_bytes

GIB = 1 << 30


def parse_cap(text: str) -> int | None:
    """The bytes of a memory cap; None for ``none``.

    Raises:
        ValueError: it is no size.
    """
    return None if text == "none" else parse_bytes(text)


def cap_label(cap_bytes: int | None) -> str:
    """A cap as people say it."""
    if cap_bytes is None:
        return "none"
    return f"{cap_bytes / GIB:.3g} GiB"
