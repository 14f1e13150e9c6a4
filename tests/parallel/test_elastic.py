"""Groups of processes that change: answers have the same bits, and the fewest experts move."""

import random
from typing import Any

import pytest
from parallel_serving import answered

from moe_runtime.errors import RankFailureError
from moe_runtime.inference.expert_partition import ExpertPartition
from moe_runtime.parallel.communication.elastic import ElasticError, ElasticGroup
from moe_runtime.parallel.communication.transport import LocalTransport
from moe_runtime.serving.requests import EngineOptions

EXACT = EngineOptions(exact=True, prompt_tokens=16, idle_prompt_tokens=16)


def test_answers_go_on_in_the_next_group(checkpoint, monkeypatch):
    """Greedy, sampled, with log-probabilities, experts and a cancellation; a process joins, or is
    lost, at many steps."""
    said: list[str] = []
    alone = answered(str(checkpoint), EXACT, {})
    draw = random.Random(3)

    def is_awaited(_: ElasticGroup) -> bool:
        if draw.random() < 0.1:
            raise RankFailureError("rank 1 of 2 has ended", ranks=(1,))
        return draw.random() < 0.1

    monkeypatch.setattr(ElasticGroup, "is_awaited", property(is_awaited))
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    group = ElasticGroup("localhost", 0, (1, 1), said.append)
    changed = answered(str(checkpoint), EXACT, {"group": group})
    for one, other in zip(alone["answers"], changed["answers"], strict=True):
        # a new group has no prefixes
        assert one[:2] + one[3:] == other[:2] + other[3:]
    assert said.count("another process joins") > 2
    assert said.count("rank 1 of 2 has ended") > 2
    assert "1 processes divide the model; 0 experts moved" in said


@pytest.mark.parametrize("seed", range(3))
def test_the_fewest_experts_move(seed):
    draw = random.Random(seed)
    sizes = (12, 7)
    partition = ExpertPartition(LocalTransport(), sizes)
    before: dict[str, list[set[int]]] = {"0": [{*range(size)} for size in sizes]}
    for _ in range(12):
        names = ["0", *draw.sample("abcde", draw.randrange(5))]
        holders = partition._divide(names)
        now = {
            name: [{e for e, held in enumerate(layer) if held == [rank]} for layer in holders]
            for rank, name in enumerate(names)
        }
        num_moved = 0
        for layer, size in enumerate(sizes):
            shares = [len(now[name][layer]) for name in names]
            assert sum(shares) == size
            assert max(shares) - min(shares) <= 1
            kept = [before[name][layer] if name in before else set[int]() for name in names]
            rest = size % len(names)
            # the fullest keep a larger share
            most = sorted(map(len, kept), reverse=True)
            least = size - sum(
                min(held, size // len(names) + (place < rest)) for place, held in enumerate(most)
            )
            moved = sum(
                len(now[name][layer] - held) for name, held in zip(names, kept, strict=True)
            )
            assert moved == least
            num_moved += moved
        assert partition._num_moved == num_moved
        before = now


def test_a_process_that_differs_or_is_late_is_refused():
    first = ElasticGroup("localhost", 0, (1, 2))
    with pytest.raises(RankFailureError, match=f"localhost:{first.port} cannot be opened"):
        ElasticGroup("localhost", first.port, (1, 2))
    other = ElasticGroup("localhost", first.port)
    first.agree("model", {"the dtype": "float32", "the version": "1"})
    other.agree("model", {"the dtype": "float32", "the version": "1"})
    with pytest.raises(ElasticError, match="differs from the service in the version; start it"):
        other.agree("model", {"the dtype": "float32", "the version": "2"})
    first.close()
    nothing: Any = None
    with pytest.raises(ElasticError, match="the service that this process joined has ended"):
        other.form(nothing)
