"""How a script of measurements ends that is interrupted, or cannot begin."""

from __future__ import annotations

import sys
from collections.abc import Callable

from moe_runtime.errors import MoERuntimeError


def run_script(main: Callable[[], int]) -> int:
    """Exit code of a script: 130 where it was interrupted, 2 where it was refused, and a line."""
    try:
        return main()
    except MoERuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; rows that were measured are kept where they are saved", file=sys.stderr)
        return 130
