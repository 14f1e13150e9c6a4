"""How a sequence is folded for context parallelism."""

from typing import Any

import pytest
import torch

from moe_runtime.models.lm.attention import SequencePart, causal_mask


class OneOf:
    """Stands for the mesh of the processes that divide a sequence."""

    def __init__(self, index: int, size: int) -> None:
        self._index, self._size = index, size

    def get_local_rank(self) -> int:
        return self._index

    def size(self) -> int:
        return self._size


def part_of(index: int, size: int, folds: int) -> SequencePart:
    mesh: Any = OneOf(index, size)
    return SequencePart(mesh, folds=folds)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_part_attends_to_as_many_pairs(size):
    """Counted in the masks that attention uses."""
    context = 2 * size * 3
    pairs, seen = [], []
    for index in range(size):
        runs = part_of(index, size, size).runs(context // size)
        masks = [causal_mask(len(run), run.start, torch.device("cpu")) for run in runs]
        assert [mask.shape[1] for mask in masks] == [run.stop for run in runs]
        pairs.append(sum(int(mask.sum()) for mask in masks))
        seen += [position for run in runs for position in run]
    assert sorted(seen) == list(range(context))
    assert set(pairs) == {context * (context + 1) // 2 // size}


@pytest.mark.parametrize(("size", "folds"), [(2, 1), (2, 2), (6, 2), (6, 3), (8, 4)])
def test_own_tokens_are_those_of_the_runs(size, folds):
    """Tensor parallelism divides each part of attention's division further."""
    context = 48
    whole = torch.arange(context).expand(2, -1)
    own = torch.stack([part_of(index, size, folds).own(whole)[1] for index in range(size)])
    assert sorted(own.flatten().tolist()) == list(range(context))
    inner = size // folds
    for index in range(folds):
        found = own[index * inner : (index + 1) * inner].flatten().tolist()
        expected: list[int] = list(range(context))
        if folds > 1:
            runs = part_of(index, folds, folds).runs(context // folds)
            expected = [position for run in runs for position in run]
        assert found == expected


def test_sequences_that_cannot_be_folded():
    with pytest.raises(ValueError, match=r"6 tokens do not divide into 4 equal parts"):
        part_of(0, 2, 2).own(torch.zeros(1, 6))
