"""A row of the table of what a loaded model supports, and how two answers are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

EQUAL = "as transformers"
# Both sides compute in fp32 and differ only in how sums are ordered: a few hundred products of
# order one leave an error near 1e-6 of the largest element, once more for a pass backwards. A wrong
# weight anywhere leaves 1e-2.
MAX_RELATIVE_ERROR = {
    torch.float32: 2e-5,
    # a dozen roundings of 2^-8 of what is summed, through three layers
    torch.bfloat16: 12 * 2**-8,
}


@dataclass(frozen=True)
class Feature:
    """Something that a model of transformers can be asked.

    Attributes:
        group: the part of the table.
        name: what it is.
        trial: asks a model, which may use an empty folder, and returns what it answered. For a
            model of transformers, which is frozen and in evaluation mode, and for a loaded one.
        answer: `EQUAL`, or a part of the line by which it is refused.
        methods: public methods and properties of `PreTrainedModel` and `GenerationMixin` that it
            is about; the row is left out where transformers has none of them.
        family: of the checkpoint.
        leaves_model: whether the model is afterwards as it was before.
        is_long: says little that another row does not, and takes long: tried by make test-long.
    """

    group: str
    name: str
    trial: Callable[[Any, Path], Any]
    answer: str = EQUAL
    methods: tuple[str, ...] = ()
    family: str = "mixtral"
    leaves_model: bool = False
    is_long: bool = False

    def __str__(self) -> str:
        return f"{self.group}: {self.name}"


def outcome(call: Callable[[], Any]) -> Any:
    """What a call returns, or what it raises and the first line of it: as much of an answer.

    Further lines are a compiler's, say, and name files that are never the same twice.
    """
    try:
        return call()
    except (ValueError, TypeError, ImportError, RuntimeError, AttributeError, OSError) as error:
        return type(error).__name__, str(error).partition("\n")[0]
    except AssertionError as error:  # how torch says that it has no CUDA
        return type(error).__name__, str(error)


def assert_same(found: Any, expected: Any) -> None:
    """Compares two answers: floating-point tensors within rounding, everything else exactly."""
    if isinstance(expected, Tensor):
        assert found.shape == expected.shape
        assert found.dtype == expected.dtype
        if not expected.is_floating_point():
            assert torch.equal(found, expected)
            return
        where = torch.isfinite(expected)
        assert torch.equal(torch.isfinite(found), where)
        if where.any():
            largest = expected[where].abs().max()
            error = (found[where] - expected[where]).abs().max()
            assert error <= MAX_RELATIVE_ERROR[expected.dtype] * largest
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, nn.Module):
        assert isinstance(found, nn.Module)
    else:
        assert found == expected, (found, expected)
