"""What the stand-ins of peers' packages have in common: a log of calls, and what they say.

They run in the process of a peer, so they use the standard library alone (and numpy where the real
package gives arrays). The next token after some ids is their sum modulo 97, as the test has it.
"""

import json
import os
from collections.abc import Sequence
from typing import Any


def note(name: str, *args: Any, **options: Any) -> None:
    """Adds a call to the log, a line of JSON."""
    with open(os.environ["RECORDED_CALLS"], "a") as file:
        file.write(json.dumps([name, list(args), options], default=str) + "\n")


def continuation(ids: Sequence[int], num_new: int) -> list[int]:
    """The tokens that are said after some ids, each one counted in for the next."""
    said: list[int] = []
    for _ in range(num_new):
        said.append((sum(ids) + sum(said)) % 97)
    return said
