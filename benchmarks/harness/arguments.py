"""Types of arguments that say what is wrong with them."""

import argparse
from collections.abc import Callable
from pathlib import Path


def at_least(least: int) -> Callable[[str], int]:
    """Numbers from one on.

    Raises:
        ArgumentTypeError: when called with what is none.
    """

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"expected a number of at least {least}, got {text!r}")
        return number

    return parse


positive = at_least(1)


def present_folder(text: str) -> Path:
    """A folder that is there.

    Raises:
        ArgumentTypeError: it is not.
    """
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text}")
    return Path(text)


def new_file(text: str) -> Path:
    """A file to write, whose folder is there: hours of measuring must not end in its absence.

    Raises:
        ArgumentTypeError: it is not.
    """
    present_folder(str(Path(text).parent))
    return Path(text)
