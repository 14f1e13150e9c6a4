"""Stands in for OpenVINO's runtime: a stateful request that counts what it is given."""

from pathlib import Path
from typing import Any

import numpy as np


class Core:
    def read_model(self, path: Path) -> str:
        return path.read_text()


class Request:
    def reset_state(self) -> None:
        self._sums: Any = None
        self._length = 0

    def infer(self, given: dict[str, Any]) -> dict[str, Any]:
        ids, places = given["input_ids"], given["position_ids"]
        count, width = ids.shape
        # Ids go on where the last ones ended, and everything so far is looked at.
        assert places.tolist() == [list(range(self._length, self._length + width))] * count
        self._length += width
        assert given["attention_mask"].tolist() == [[1] * self._length] * count
        assert given["beam_idx"].tolist() == list(range(count))
        self._sums = ids.sum(1) + (0 if self._sums is None else self._sums)
        logits = np.zeros((count, width, 97))
        logits[np.arange(count), -1, self._sums % 97] = 1
        return {"logits": logits}


class Compiled:
    def create_infer_request(self) -> Request:
        return Request()


def compile_model(model: str, device: str, options: dict[str, Any]) -> Compiled:
    return Compiled()
