"""Types of arguments that say what is wrong with them."""

import argparse


def positive(text: str) -> int:
    """A number of at least one.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return number
