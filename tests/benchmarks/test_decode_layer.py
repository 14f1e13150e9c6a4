"""How much Python a layer of a decode step runs through: a count, whatever the machine."""

from collections import Counter

import pytest
from decode_layer import layer_calls
from harness.decode_step import load_resident

from moe_runtime.kernels.linear import native_row_limit
from moe_runtime.kernels.native import native_library
from moe_runtime.models.pocket import pocket_path

MOST_CALLS = 40
MOST_FILES = 10


@pytest.fixture(scope="module")
def calls() -> Counter[tuple[str, str]]:
    library = native_library()
    if library is None:
        pytest.skip("the native library was not built")
    model = load_resident(pocket_path())
    if not native_row_limit(library, model.dtype):
        pytest.skip("torch computes this dtype here")
    with model.moe:
        return layer_calls(model)


def test_a_resident_layer_takes_few_calls_in_few_files(calls: Counter[tuple[str, str]]) -> None:
    assert calls.total() <= MOST_CALLS, calls
    assert len({file for file, _ in calls}) <= MOST_FILES, calls


def test_the_count_sees_the_whole_layer(calls: Counter[tuple[str, str]]) -> None:
    """Attention, both normalisations, the router and the experts."""
    names = Counter({name: number for (_, name), number in calls.items()})
    assert names["FusedAttention.__call__"] == 1
    assert names["SmallBatchRMSNorm.forward"] == 2
    assert names["OffloadedExperts.forward"] == 1
    assert names["ExpertStep.__call__"] == 1
    assert any(file.startswith("kernels/") for file, _ in calls)
