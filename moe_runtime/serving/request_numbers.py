"""Whose tokens a forward pass computes, for those who learn from requests and record them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_runtime.inference.steps import RequestNumbers, Step


class EngineRequests:
    """The numbers by which a model's listeners know an engine's requests."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._ended: list[int] = []

    def end(self, sequence: int) -> None:
        """A sequence has ended; listeners hear of it with the next pass.

        Args:
            sequence: its number in the engine.
        """
        if sequence in self._numbers:
            self._ended.append(self._numbers.pop(sequence))

    def name(self, cache: Any, sequences: Sequence[int], num_new: Sequence[int]) -> Any:
        """Makes a pass with a cache know whose tokens it computes.

        Args:
            cache: of the pass, of any kind.
            sequences: numbers of the sequences in the engine.
            num_new: tokens of each.
        """

        def number_requests(numbers: RequestNumbers, step: Step) -> None:
            begun = [number for number in sequences if number not in self._numbers]
            step.begun = range(numbers.next, numbers.next + len(begun))
            numbers.next = step.begun.stop
            self._numbers.update(zip(begun, step.begun, strict=True))
            step.ended, self._ended = self._ended, []
            step.requests = np.repeat([self._numbers[number] for number in sequences], num_new)
            step.first_request = int(step.requests[0])

        cache.number_requests = number_requests
        return cache
