"""`policy="auto"` chooses from the routing of earlier runs, and changes no bit of the output."""

from pathlib import Path
from typing import Any

import pytest
import torch

import moe_runtime
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.inference.steps import LayerRouting, Listener
from moe_runtime.lab.replay import choice
from moe_runtime.lab.traces import read_trace
from moe_runtime.lab.traces.recent import read_recent
from moe_runtime.models.pocket import pocket_path
from moe_runtime.types import RuntimeStats

SLOTS, LEAST_STEPS = 30, 16


def generate(**settings: str) -> tuple[torch.Tensor, RuntimeStats]:
    summary = inspect_checkpoint(pocket_path(), max_tokens=128)
    budget = summary.smallest_budget_bytes + (SLOTS - 2) * summary.slot_bytes
    model: Any = moe_runtime.load(
        pocket_path(), device="cpu", host_memory=budget, max_tokens=128, **settings
    )
    torch.manual_seed(0)
    with model.moe:
        out = model.generate(
            torch.arange(5, 25)[None],
            max_new_tokens=LEAST_STEPS + 12,
            min_new_tokens=LEAST_STEPS + 12,
            do_sample=True,
            temperature=2.0,
        )
        model.moe.check()
        return out, model.moe.stats()


def test_auto_learns_from_the_run_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice, "LEAST_STEPS", LEAST_STEPS)
    plain, named = generate()
    assert (named.policy, named.shares, named.policy_reason) == ("lru", "even", "")
    adaptive, sharing = generate(policy="lfu-aging", shares="adaptive")
    assert torch.equal(adaptive, plain)
    assert sharing.shares == "adaptive"
    signature = inspect_checkpoint(pocket_path()).signature
    assert read_recent(signature, pocket_path()) is None  # only `auto` keeps it

    trace = tmp_path / "trace.npz"
    first, unknowing = generate(policy="auto", prefetch="auto", predictor="auto", trace=str(trace))
    assert torch.equal(first, plain)
    assert unknowing.policy == "lru"
    assert "0 steps" in unknowing.policy_reason
    kept = read_recent(signature, pocket_path())
    assert kept is not None
    assert kept.num_steps == LEAST_STEPS + 11  # the first new token comes from the prompt
    recorded = read_trace(trace)  # both are kept; the trace has the prompt too
    assert recorded.num_steps == kept.num_steps + 1
    assert recorded.expert_bytes == 192 << 10
    assert (recorded.expert_ids[-kept.num_tokens :] == kept.expert_ids).all()

    second, knowing = generate(policy="auto")
    assert torch.equal(second, plain)
    assert "times with" in knowing.policy_reason
    summary = inspect_checkpoint(pocket_path(), max_tokens=128)
    assert summary.choice_for(SLOTS).policy == knowing.policy


def test_layers_are_announced_only_to_learners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all experts are resident, a listener costs a layer more time than its experts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    summary = inspect_checkpoint(pocket_path(), max_tokens=64)
    few = summary.smallest_budget_bytes + 4 * summary.slot_bytes
    for budget, prefetch, heard in (
        ("1GiB", "auto", (0, 0)),
        ("1GiB", "enforce", (0, 1)),
        (few, "enforce", (1, 1)),
    ):
        options: Any = {"policy": "auto", "prefetch": prefetch, "host_memory": budget}
        model: Any = moe_runtime.load(pocket_path(), device="cpu", max_tokens=64, **options)
        with model.moe:
            model.generate(torch.arange(5, 9)[None], max_new_tokens=4, min_new_tokens=4)
            listeners = model._steps.listeners
            assert (len(listeners.routing_listeners), len(listeners.demand_listeners)) == heard
    kept = read_recent(inspect_checkpoint(pocket_path()).signature, pocket_path())
    assert kept is not None
    assert kept.num_steps == 3  # of the last one


@pytest.mark.parametrize("policy", ["lru", "mrs", "reuse"])
def test_listeners_of_resident_experts_get_the_same_events(policy: str) -> None:
    """Natively without listeners that read ahead, else expert by expert."""

    class Notes(Listener):
        wants_routing = wants_demands = True

        def __init__(self, *, reads_ahead: bool) -> None:
            self.reads_ahead = reads_ahead
            self.events: list[tuple[str, int, list[int], list[int]]] = []

        def note(self, kind: str, routing: LayerRouting) -> None:
            experts = [key.expert for key in routing.keys]
            self.events.append((kind, routing.layer, experts, routing.ids_TK.flatten().tolist()))

        def routed(self, routing: LayerRouting) -> None:
            self.note("routed", routing)

        def demanded(self, routing: LayerRouting) -> None:
            self.note("demanded", routing)

    found, new_tokens = [], 8
    for reads_ahead in (False, True):
        model: Any = moe_runtime.load(pocket_path(), device="cpu", policy=policy, max_tokens=64)
        listener = Notes(reads_ahead=reads_ahead)
        with model.moe, model._steps.listeners.also(listener):
            given = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens}
            out = model.generate(torch.arange(5, 25)[None], **given)
            model.moe.check()
        found.append((out.tolist(), listener.events))
    assert found[0] == found[1]
    events = found[0][1]
    assert len(events) == 2 * 6 * new_tokens
    assert [kind for kind, *_ in events[::2]] == ["routed"] * 6 * new_tokens


def test_a_replay_policy_is_refused_with_a_hint() -> None:
    for name in ("lec", "predicted", "belady"):
        with pytest.raises(ValueError, match=f"'{name}' is only for `moe-runtime replay`"):
            moe_runtime.load(pocket_path(), policy=name)
