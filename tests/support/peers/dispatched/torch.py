"""Stands in for torch where a peer only hands lists to a model and takes the largest logit."""

from contextlib import nullcontext as inference_mode
from typing import Any

import numpy as np

__all__ = ["inference_mode", "set_num_threads", "tensor"]


def tensor(values: list[Any], device: str) -> Any:
    return np.array(values)


def set_num_threads(count: int) -> None: ...
