"""What is kept of a model's routing, and which policy that speaks for."""

from pathlib import Path

import numpy as np
import pytest
from synthetic_routes import make_routes
from traces import trace_of

from moe_runtime.errors import MoERuntimeWarning
from moe_runtime.lab.replay import choice as choice_module
from moe_runtime.lab.replay.choice import ONLINE, choose_policy
from moe_runtime.lab.replay.untimed import replay_demand
from moe_runtime.lab.traces import Trace, recent
from moe_runtime.lab.traces.recent import RecentRouting, read_recent, recent_path
from moe_runtime.lab.traces.workload import workload_of
from moe_runtime.policies.eviction import Setting, make_policy
from moe_runtime.policies.prediction import Routes, Shape
from moe_runtime.types import ModelSignature

SHAPE = Shape(num_layers=3, num_experts=8, top_k=2)
MODEL = ModelSignature(model_type="made-up", num_layers=3, num_experts=8, top_k=2, vocab_size=50)
CHECKPOINT = Path("made-up")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def record(num_steps: int, num_sequences: int = 1, first_expert: int = 0) -> None:
    recording = RecentRouting(MODEL, CHECKPOINT)
    take_steps(recording, num_steps, num_sequences, first_expert)
    recording.close()


def take_steps(
    recording: RecentRouting, num_steps: int, num_sequences: int = 1, first_expert: int = 0
) -> None:
    """A prompt, and steps that decode behind it; an expert tells them apart."""
    recording.begin_request(num_sequences=num_sequences)
    rows = np.arange(num_sequences)
    for step in range(num_steps):
        if not recording.wants_step():
            continue
        phase, places = "decode" if step else "prefill", np.full(num_sequences, step)
        recording.begin_step(phase=phase, token_ids=rows, positions=places, sequences=rows)
        for layer in range(3):
            ids = np.tile([(first_expert + step) % 8, 7], (num_sequences, 1))
            recording.routing(layer, ids, np.full(ids.shape, 0.5))


def kept_routing() -> Trace:
    kept = read_recent(MODEL, CHECKPOINT)
    assert kept is not None
    return kept


def test_decode_steps_are_kept_and_prompts_are_not():
    assert read_recent(MODEL, CHECKPOINT) is None
    record(5, num_sequences=2)
    kept = kept_routing()
    assert kept.num_steps == 4
    assert set(kept.step_phase) == {1}
    assert kept.expert_ids[:, 0, 0].tolist() == [1, 1, 2, 2, 3, 3, 4, 4]
    assert kept.token_position.tolist() == [1, 1, 2, 2, 3, 3, 4, 4]


def test_of_a_pass_with_a_prompt_the_sequences_that_decode_are_kept():
    recording = RecentRouting(MODEL, CHECKPOINT)
    recording.begin_request(num_sequences=3)
    assert recording.wants_step()
    recording.begin_step(
        phase="prefill",
        token_ids=np.array([10, 20, 21, 22, 30, 40]),
        positions=np.array([4, 0, 1, 2, 9, 0]),
        sequences=np.array([0, 1, 1, 1, 2, 3]),
    )
    for layer in range(3):
        recording.routing(layer, np.arange(6)[:, None] + [0, 1], np.full((6, 2), 0.5))
    recording.close()
    kept = kept_routing()
    assert kept.token_id.tolist() == [10, 30]  # 40 is a prompt of one token
    assert kept.token_request.tolist() == [0, 1]
    assert kept.expert_ids[:, 2].tolist() == [[0, 1], [4, 5]]
    assert kept.num_steps == 1


def test_the_latest_steps_are_kept_of_a_run_and_of_several(monkeypatch):
    monkeypatch.setattr(recent, "KEPT_STEPS", 6)
    monkeypatch.setattr(recent, "FILE_STEPS", 6)
    record(4)
    record(4, first_expert=3)
    kept = kept_routing()
    assert kept.expert_ids[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 6]
    assert kept.token_request.tolist() == [0, 0, 0, 1, 1, 1]
    record(20)
    monkeypatch.setattr(recent, "KEPT_TOKENS", 8)
    monkeypatch.setattr(recent, "FILE_TOKENS", 8)
    recording = RecentRouting(MODEL, CHECKPOINT)
    take_steps(recording, 6, num_sequences=3)
    assert [step.num_tokens for step in recording._steps] == [3, 3]


def test_listening_takes_a_hundredth_of_the_time_behind_the_first_burst():
    now_s = 0.0
    recording = RecentRouting(MODEL, CHECKPOINT, clock=lambda: now_s)
    bursts_s = 2 * recent.BURST * MODEL.num_layers * recent.LAYER_S
    assert [recording.wants_step() for _ in range(200)] == [k < recent.BURST for k in range(200)]
    now_s = 99 * bursts_s
    assert not recording.wants_step()
    now_s = 101 * bursts_s
    assert sum(recording.wants_step() for _ in range(200)) == recent.BURST


def test_the_file_has_as_many_tokens_at_most_as_a_run(monkeypatch):
    record(6, num_sequences=3)  # five steps, of more tokens than are kept from now on
    monkeypatch.setattr(recent, "KEPT_TOKENS", 8)
    monkeypatch.setattr(recent, "FILE_TOKENS", 8)
    recording = RecentRouting(MODEL, CHECKPOINT)
    take_steps(recording, 2, first_expert=4)
    recording.close()
    assert kept_routing().expert_ids[:, 0, 0].tolist() == [4, 4, 4, 5, 5, 5, 5]
    (before,) = recording._before or []
    assert before.expert_ids.base is None
    assert before.num_tokens == 6
    record(2, num_sequences=9)  # one step of more is kept alone
    assert kept_routing().num_tokens == 9


def test_a_run_writes_now_and_then_and_adds_nothing_twice():
    now_s = 0.0
    record(3)
    recording = RecentRouting(MODEL, CHECKPOINT, clock=lambda: now_s)
    take_steps(recording, 4, first_expert=2)
    assert kept_routing().num_steps == 2
    now_s = recent.WRITE_EVERY_S
    take_steps(recording, 2)
    assert kept_routing().expert_ids[:, 0, 0].tolist() == [1, 2, 3, 4, 5]
    recording.close()
    assert kept_routing().expert_ids[:, 0, 0].tolist() == [1, 2, 3, 4, 5, 1]


def test_others_cannot_read_what_was_said(cache):
    folder = recent_path(MODEL, CHECKPOINT).parent
    folder.mkdir(parents=True, mode=0o755)  # of an earlier version
    record(3)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_damaged_or_unwritable_cache_fails_nothing(cache):
    record(3)
    path = recent_path(MODEL, CHECKPOINT)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(MoERuntimeWarning, match=f"not used: {path}"):
        assert read_recent(MODEL, CHECKPOINT) is None
    with pytest.warns(MoERuntimeWarning, match="not used"):
        record(3)  # replaces it
    assert read_recent(MODEL, CHECKPOINT) is not None
    path.unlink()
    path.parent.rmdir()
    path.parent.write_text("a file where the folder should be")
    record(3)
    assert read_recent(MODEL, CHECKPOINT) is None


def hot_and_cold(num_tokens: int = 210) -> Routes:
    """Every third token visits experts 0 and 1, the others take turns: LRU lets the two go."""
    turns = [2 * (t // 3) + t % 3 - 1 for t in range(num_tokens)]
    ids = np.array(
        [
            [0, 1] if t % 3 == 0 else [2 + 2 * (turn % 3), 3 + 2 * (turn % 3)]
            for t, turn in enumerate(turns)
        ]
    )
    ids = np.repeat(ids[:, None], 3, axis=1)
    return Routes(
        shape=SHAPE,
        expert_ids=ids.astype(np.int64),
        gate_weights=np.full(ids.shape, 0.5, np.float32),
        token_ids=np.arange(num_tokens),
        offsets=np.array([0, num_tokens]),
    )


def test_the_policy_that_misses_least_is_taken_and_the_reason_says_so():
    trace = trace_of(hot_and_cold())
    choice = choose_policy(trace.signature, trace, num_slots=15)
    assert choice.policy != "lru"

    def misses(name: str, adaptive: bool) -> int:
        setting = Setting(shape=SHAPE)
        replay = replay_demand(
            workload_of(trace),
            lambda _: make_policy(name, num_slots=15, setting=setting, adaptive=adaptive),
            15,
        )
        return replay.num_accesses - replay.num_hits

    found = misses(choice.policy, choice.adaptive)
    assert found < misses("lru", adaptive=False)
    assert f"missed {found} times" in choice.reason
    assert f"lru {misses('lru', adaptive=False)}" in choice.reason
    assert choose_policy(trace.signature, trace, num_slots=15) == choice


def test_a_policy_that_takes_time_must_save_as_much(monkeypatch):
    monkeypatch.setattr(choice_module, "CANDIDATES", ("lru",))  # against online policies alone
    trace = trace_of(hot_and_cold(600))
    by_misses = choose_policy(trace.signature, trace, num_slots=15)
    assert by_misses.policy == ONLINE
    large = choose_policy(trace.signature, trace, num_slots=15, expert_bytes=1 << 40)
    assert large == by_misses
    assert choose_policy(trace.signature, trace, num_slots=15, expert_bytes=1000).policy == "lru"


def test_without_reason_to_change_it_is_lru():
    trace = trace_of(make_routes(SHAPE, num_sequences=2, length=30))
    assert choose_policy(MODEL, None, 9).policy == "lru"
    assert "0 steps" in choose_policy(MODEL, None, 9).reason
    few = trace.steps(0, 10)
    assert "10 steps" in choose_policy(few.signature, few, 9).reason
    for num_slots, reason in ((2, "latest 60 steps"), (23, "latest 60 steps"), (24, "all experts")):
        assert reason in choose_policy(trace.signature, trace, num_slots).reason
