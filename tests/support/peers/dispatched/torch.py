"""Stands in for torch where a peer only hands lists to a model and takes the largest logit."""

from contextlib import nullcontext as inference_mode

from numpy import array as tensor
from recorded_calls import note

__all__ = ["inference_mode", "set_num_threads", "tensor"]


def set_num_threads(count: int) -> None:
    note("set_num_threads", count)
