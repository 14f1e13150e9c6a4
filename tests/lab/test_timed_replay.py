"""Modelled time: by hand for one layer, and against the plain count of hits."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.lab.replay.timed import LinkModel, Machine, replay_timed
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import LRU, Setting, make_global_policy, make_policy
from moe_runtime.policies.prediction import Routes, Shape
from moe_runtime.policies.prefetch import Controller, PrefetchRules
from moe_runtime.types import ExpertKey

# One expert takes 1 + 3 = 4 seconds on the link.
MACHINE = Machine(bytes_per_s=1.0, latency_s=1.0, expert_bytes=3, layer_s=5.0, expert_s=2.0)


class Told:
    """A predictor that is told the paths of all tokens, and is as sure as it is told to be."""

    needs_history = True

    def __init__(self, ids: np.ndarray, probability: float = 1.0, shift: int = 0) -> None:
        self._ids, self._probability, self._shift = ids, probability, shift
        self._token = -1

    def observe(self, event) -> None:
        self._token += hasattr(event, "token_ids")

    def finish(self, sequence: int) -> None:
        pass

    def predict(self, now: int, horizon: int):
        num_tokens, num_layers, _ = self._ids.shape
        guesses = []
        for ahead in range(1, horizon + 1):
            further, layer = divmod(now + ahead, num_layers)
            if self._token + further < num_tokens:
                for expert in self._ids[self._token + further, layer]:
                    wrong = (int(expert) + self._shift) % 8
                    guesses.append((ExpertKey(layer, wrong), self._probability))
        return guesses


def routes(ids: list[list[list[int]]]) -> Routes:
    array = np.array(ids, dtype=np.int64)
    num_tokens, num_layers, top_k = array.shape
    return Routes(
        shape=Shape(num_layers=num_layers, num_experts=8, top_k=top_k),
        expert_ids=array,
        gate_weights=np.full(array.shape, 1 / top_k, np.float32),
        token_ids=np.zeros(num_tokens, np.int64),
        offsets=np.array([0, num_tokens]),
    )


def test_stalls_by_hand():
    workload = workload_of(trace_of(routes([[[0, 1]], [[1, 2]], [[1, 2]]])))
    replay = replay_timed(workload, LRU(), 3, MACHINE)
    # Two loads of 4 s; then expert 1 computes for 2 of the 4 s that expert 2 takes; then no load.
    assert replay.total.stall_s == pytest.approx(8 + 2)
    assert replay.seconds == pytest.approx(10 + 3 * (5 + 2 * 2))
    assert replay.tokens_per_s == pytest.approx(3 / 37)
    assert (replay.total.hits, replay.total.misses) == (3, 3)
    assert replay.stalls == [(0, 0, 0.0, 8.0), (1, 0, 17.0, 19.0)]


def test_a_shortcut_hides_the_fetches_that_fit_beside_what_it_skips():
    """ScMoE: the same fetches, bandwidth; each wait is shorter by what is known ahead."""
    workload = workload_of(
        trace_of(make_routes(Shape(num_layers=2, num_experts=8, top_k=2), seed=3))
    )
    plain = replay_timed(workload, LRU(), 6, MACHINE)
    for ahead in (0.0, 1.5, MACHINE.layer_s):
        early = replay_timed(workload, LRU(), 6, replace(MACHINE, known_ahead_s=ahead))
        waits = [end - begin for _, _, begin, end in plain.stalls]
        assert early.total.stall_s == pytest.approx(sum(max(0.0, wait - ahead) for wait in waits))
        assert early.total.misses == plain.total.misses
        saved = plain.total.stall_s - early.total.stall_s
        assert early.seconds == pytest.approx(plain.seconds - saved)
    assert saved > 0.2 * plain.total.stall_s
    with pytest.raises(ValueError, match="must be a part of layer_s"):
        replace(MACHINE, known_ahead_s=6.0)


def test_demand_interrupts_a_prefetch_which_goes_on_later():
    link = LinkModel(MACHINE)
    guess, other = ExpertKey(0, 1), ExpertKey(0, 2)
    link.prefetch(guess)
    link.advance(3.0)
    assert link.has_begun(guess)
    assert not link.has_arrived(guess)
    assert link.demand([other], 3.0) == pytest.approx(7.0)
    link.advance(7.5)
    assert not link.has_arrived(guess)
    assert link.demand([guess], 7.5) == pytest.approx(8.0)


@pytest.mark.parametrize("policy", ["lru", "lfu", "slru", "belady", "belady-bypass", "reuse"])
@pytest.mark.parametrize("has_shares", [False, True])
def test_without_prefetch_the_hits_are_those_of_the_plain_replay(policy, has_shares):
    shape = Shape(num_layers=3, num_experts=8, top_k=2)
    workload = workload_of(trace_of(make_routes(shape, num_sequences=3, length=30)))
    # layers fill their shares together, as the first tokens visit other experts
    num_slots = 6 if has_shares else 11

    def make(events):
        setting = Setting(shape=shape, future=events)
        if has_shares:
            return make_policy(policy, num_slots=num_slots, setting=setting)
        return make_global_policy(policy, setting=setting)

    plain = replay_demand(workload, make, num_slots)
    timed = replay_timed(workload, make(workload.keys), num_slots, MACHINE)
    assert timed.total.hits == plain.num_hits
    assert timed.total.misses == plain.num_accesses - plain.num_hits
    assert timed.total.prefetches == 0
    assert timed.seconds == pytest.approx(timed.total.stall_s + workload.num_events * (5 + 2 * 2))


def prefetched(
    predictor, num_slots: int = 12, machine: Machine = MACHINE, controller=None, **rules
):
    shape = Shape(num_layers=3, num_experts=8, top_k=2)
    data = make_routes(shape, num_sequences=3, length=30)
    setting = Setting(shape=shape)
    policy = make_policy("lru", num_slots=num_slots, setting=setting)
    replay = replay_timed(
        workload_of(trace_of(data)),
        policy,
        num_slots,
        machine,
        predictor=predictor(data.expert_ids) if predictor else None,
        rules=PrefetchRules(**rules),
        controller=controller,
    )
    policy.check()
    assert len(policy) <= num_slots
    return replay


def test_true_guesses_save_stalls_and_waste_nothing_and_late_ones_still_wait():
    without, told = prefetched(None), prefetched(Told)
    assert told.total.stall_s < 0.6 * without.total.stall_s
    assert told.total.useful > 0
    assert told.total.useful >= 0.95 * told.total.prefetches
    asked = without.total.hits + without.total.misses
    assert told.total.hits + told.total.late_hits + told.total.misses == asked
    assert sum(layer.stall_s for layer in told.layers) == pytest.approx(told.total.stall_s)
    slow = replace(MACHINE, bytes_per_s=0.25)  # 13 s for an expert, 9 s for a layer
    replay = prefetched(Told, machine=slow, horizon=1)
    assert replay.total.late_hits > 0
    assert replay.total.stall_s > 0


def test_wrong_guesses_are_wasted_bytes_and_unlikely_ones_are_not_read():
    assert prefetched(lambda ids: Told(ids, probability=0.1)).total.prefetches == 0
    wrong = prefetched(lambda ids: Told(ids, shift=3))
    summary = wrong.total.summary(MACHINE.expert_bytes)
    assert summary["wasted_bytes"] > 0
    assert summary["prefetch_bytes"] == summary["wasted_bytes"] + summary["useful_bytes"]
    assert wrong.total.stall_s > prefetched(None).total.stall_s


@pytest.mark.parametrize("waste", [0.0, 0.2])
def test_no_more_is_loaded_in_vain_than_the_rules_allow(waste):
    wrong = prefetched(lambda ids: Told(ids, shift=3), waste=waste, allowance=5.0, window=4).total
    loads = wrong.misses + wrong.prefetches
    assert wrong.prefetches - wrong.useful <= waste * loads + 5 + 4
    allowed = prefetched(lambda ids: Told(ids, shift=3), waste=1.0).total
    assert allowed.prefetches - allowed.useful > 2 * (wrong.prefetches - wrong.useful)


def test_a_controller_keeps_guesses_that_pay_and_drops_others():
    slow = replace(MACHINE, predict_s=0.2)
    for predictor, pays in ((Told, True), (lambda ids: Told(ids, shift=3), False)):
        off, on = prefetched(None, machine=slow), prefetched(predictor, machine=slow)
        controller = Controller()
        auto = prefetched(predictor, machine=slow, controller=controller)
        assert controller.verdict.startswith("on: " if pays else "off: ")
        assert (on.seconds < off.seconds) == pays
        assert min(on.seconds, off.seconds) < auto.seconds < max(on.seconds, off.seconds)
