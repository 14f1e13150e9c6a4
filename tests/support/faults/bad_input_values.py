"""Values that no sound file or command line has, and ways to damage a file."""

import json
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

_DEEP = "[" * 3000 + "]" * 3000

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 9, 10**6, 2**31, 2**63, 10**30, 10**400),
    *(0.5, -0.5, 1e308, 1e-300, float("nan"), float("inf"), float("-inf")),
    *("", "9", "auto", "lots", "x" * 5000, "line\nbreak \x1b[31m", "\ud800"),
    *([], [1], [-1, "a"], [[[]]], [None] * 3, {}, {"a": 1}, {"": {}}),
)
"""What stands where a JSON value of another kind belongs."""

WORDS = (
    *("", " ", "0", "-1", "1", "2", "9", "1e-40", "1e400", "-0.0", "nan", "inf", "-inf", "0.5"),
    *("9" * 400, "1" + "0" * 400 + "GiB", "7GiB", "7XiB", "1e9999GiB", "auto", "all", "none"),
    *("lru", "LRU", "lru,", ",", ",,1", "1,2", "1,,2", "0x10", "٣", "1_000", "x" * 100_000),
    *("no/such", "models/pockett", ".", "..", "~nobody", "/", "/dev/null", "text.txt", "model"),
    *("🦊", "a\nb", "\x1b[31m", "\udcff", "--", "{", "%s%n", "None", "True"),
)
"""What stands where an option's value belongs."""


def damaged_json(rng: Random, value: Any, times: int) -> Any:
    """A copy of a JSON value with some of its parts replaced, removed or added."""
    copy = json.loads(json.dumps(value))
    for _ in range(times):
        node, key = copy, None
        while isinstance(node, dict | list) and node and (key is None or rng.random() < 0.7):
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            parent, key = node, rng.choice(keys)
            node = parent[key]
        if key is None:
            return rng.choice(VALUES)
        if rng.random() < 0.15:
            del parent[key]
        else:
            parent[key] = deepcopy(rng.choice(VALUES))  # later damage may go into it
    return copy


def damaged_text(rng: Random, text: bytes) -> bytes:
    """The bytes of a text file, damaged."""
    at = rng.randrange(len(text) + 1)
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: text[:at],
        lambda: b"\xef\xbb\xbf" + text,
        lambda: text[:at] + b"\xff\xfe\x00" + text[at:],
        lambda: text.decode().encode("utf-16"),
        lambda: text[:at] + text[at + 1 :],
        lambda: text.replace(b"{", b'{"a": NaN, ', 1),
        lambda: text.replace(b"{", b'{"a": ' + _DEEP.encode() + b", ", 1),
        lambda: text.replace(b"{", b'{"model_type": 1, "model_type": 2, ', 1),
        lambda: _DEEP.encode(),
        lambda: b"",
        lambda: text + text,
        lambda: rng.randbytes(200),
    )
    return rng.choice(ways)()


def damaged_bytes(rng: Random, raw: bytes) -> bytes:
    """The bytes of a binary file, damaged; often near its beginning or end."""
    edge = min(len(raw), 400)
    at = rng.choice((rng.randrange(edge), len(raw) - 1 - rng.randrange(edge)))
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: raw[:at],
        lambda: raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :],
        lambda: raw[:at] + rng.randbytes(8) + raw[at + 8 :],
        lambda: raw[at:],
        lambda: raw + rng.randbytes(7),
        lambda: raw[:at] + raw[at + 5 :],
        lambda: raw[:8] + raw,
    )
    return rng.choice(ways)()


def put_odd_file(rng: Random, path: Path, good: Path) -> bool:
    """Puts something in a path's place that is not a file of the expected kind.

    Args:
        rng: chooses what.
        path: where; nothing may be there.
        good: a folder of sound files, one of which may be of another kind.

    Returns:
        Whether opening it may wait for ever, which a text from a pipe is allowed to.
    """

    def huge() -> None:
        with path.open("wb") as file:
            file.truncate(40 << 30)

    def fifo() -> bool:
        os.mkfifo(path)
        return True

    others = sorted(file for file in good.iterdir() if file.is_file())
    ways: tuple[Callable[[], Any], ...] = (
        lambda: None,
        path.mkdir,
        path.touch,
        huge,
        fifo,
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to("/dev/null"),
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("nowhere"),
        lambda: path.write_bytes(rng.randbytes(3000)),
        lambda: path.write_bytes(rng.choice(others).read_bytes()),
    )
    return rng.choice(ways)() is True
