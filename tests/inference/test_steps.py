"""A step is parsed once and passed to all listeners."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import moe_runtime
from moe_runtime.errors import CapacityError
from moe_runtime.inference.steps import Listener, Listeners, RequestNumbers, Step
from moe_runtime.lab.traces.format import read_trace
from moe_runtime.models.pocket import pocket_path

TOKENS = torch.tensor([[5, 70, 11, 13]])
NEXT = torch.tensor([[43]])


class Heard(Listener):
    """Records its calls."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self, step: Step) -> None:
        self.told.append(
            (step.phase, step.first_request, list(step.ended), step.positions.tolist())
        )

    def end(self) -> None:
        self.told.append("end")

    def forget(self) -> None:
        self.told.append("forget")


@torch.no_grad()
def test_a_positional_cache_continues_its_request(tmp_path: Path) -> None:
    model: Any = moe_runtime.load(pocket_path(), device="cpu", trace=tmp_path / "t.npz")
    with model.moe:
        cache = model(TOKENS).past_key_values
        model(NEXT, None, None, cache)
    trace = read_trace(tmp_path / "t.npz")
    assert trace.token_id.tolist() == [*TOKENS[0].tolist(), *NEXT[0].tolist()]
    assert set(trace.token_request.tolist()) == {0}


@torch.no_grad()
def test_all_listeners_get_allowed_steps_and_their_end() -> None:
    model: Any = moe_runtime.load(pocket_path(), device="cpu", max_tokens=8)
    heard, others = Heard(), Heard()
    model._steps.listeners.add(heard)
    with model.moe:
        with model._steps.listeners.also(others):
            cache = model(TOKENS).past_key_values
        model(NEXT, past_key_values=cache)
        with pytest.raises(CapacityError):
            model(TOKENS.repeat(1, 3))  # no request of its own: the first one goes on
        model(NEXT, past_key_values=cache)
        with pytest.raises(IndexError):
            model(torch.tensor([[10**6]]))
        model(TOKENS)
    first = [("prefill", 0, [], [0, 1, 2, 3]), "end"]
    assert others.told == first
    told = [one for one in heard.told if one != "forget"]
    assert told == [
        *first,
        *[("decode", 0, [], [4]), "end"],
        *[("decode", 0, [], [5]), "end"],
        ("prefill", 1, [0], [0]),
        *[("prefill", 2, [1], [0, 1, 2, 3]), "end"],
    ]
    assert heard.told.count("forget") >= 2  # of the refused step, and of the failed one


def test_wants_routing_is_read_after_begin() -> None:
    listeners, heard = Listeners(), list[str]()

    class Every(Listener):
        """Hears of every second pass."""

        def begin(self, step: Step) -> None:
            self.wants_routing = not self.wants_routing
            self.wants_demands = not self.wants_routing

    listeners.add(one := Every())
    for _ in range(4):
        listeners.begin({"input_ids": torch.zeros(1, 1, dtype=torch.long)})
        assert (listeners.routing_listeners, listeners.demand_listeners).count((one,)) == 1
        heard.append("routed" if listeners.routing_listeners else "demanded")
    assert heard == ["routed", "demanded"] * 2


def test_requests_end_when_their_thread_begins_others_or_has_ended() -> None:
    numbers = RequestNumbers()

    def begin(num_sequences: int) -> tuple[list[int], list[int]]:
        step = Step({}, (num_sequences, 1))
        numbers.begin(step)
        assert step.first_request == step.begun[0]
        return list(step.begun), list(step.ended)

    with ThreadPoolExecutor(1) as idle:
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            assert idle.submit(begin, 1).result() == ([0], [])
            assert one.submit(begin, 2).result() == ([1, 2], [])
            assert other.submit(begin, 1).result() == ([3], [])
            assert one.submit(begin, 1).result() == ([4], [1, 2])
        assert begin(1) == ([5], [3, 4])
        assert begin(1) == ([6], [5])
    assert begin(1) == ([7], [0, 6])
