"""An engine whose steps several processes take together: the answers of one process's engine."""

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import moe_families
import numpy as np
import peft
import pytest
from parallel_serving import (
    answered,
    answered_without_numbers,
    ended_within_a_step,
    failed_cuts,
    refusals,
    served_until_a_kill,
)
from rank_pool import RankPool
from tiny_checkpoints import save, tiny_model
from transformers import AutoModelForCausalLM

from moe_runtime.errors import RankFailureError
from moe_runtime.inference.expert_partition import COUNTED
from moe_runtime.inference.inspection import inspect_checkpoint
from moe_runtime.parallel.communication.transport import Arriving, LocalTransport
from moe_runtime.serving.following import Follower
from moe_runtime.serving.plans import Plan, Plans
from moe_runtime.serving.requests import EngineOptions, GenerationRequest
from moe_runtime.serving.scheduling import Sequence, ignore_event

Ranks = Callable[[int], RankPool]
KINDS = ("GptOssForCausalLM", "Qwen3NextForCausalLM", "JambaForCausalLM")
LONG_KINDS = (
    *("DeepseekV3ForCausalLM", "Cohere2MoeForCausalLM", "MixtralForCausalLM"),
    *("DeepseekV32ForCausalLM", "Qwen3MoeForCausalLM", "GraniteMoeHybridForCausalLM"),
)
# `load` in several processes has the others.
FORMATS = ("gpt_oss-mxfp4", "smallest")
GREEDY = EngineOptions(prompt_tokens=16)
EXACT = EngineOptions(exact=True, prompt_tokens=16, idle_prompt_tokens=16)


def assert_same(alone: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """To the bit: steps have the same rows, and a row is computed by the same kernels."""
    together = parts[0]
    assert together["answers"] == alone["answers"]
    assert together["stop"] == alone["stop"] == 1
    one, all_of_them = alone["stats"], together["stats"]
    for name in ("steps", "prompt_tokens", "generated_tokens", "prefix_hit_tokens", "finished"):
        assert getattr(all_of_them, name) == getattr(one, name), name
    assert visits(all_of_them.experts) == visits(one.experts)
    for name in ("hits", "late_hits", "misses", "bytes_read", "expert_slots", "budget_bytes"):
        own = [getattr(part["own"], name) for part in parts]
        assert getattr(all_of_them.experts, name) == sum(own), name


def visits(stats: Any) -> int:
    return stats.hits + stats.late_hits + stats.misses


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=pytest.mark.long if str(f) in LONG_KINDS else (), id=str(f))
        for f in moe_families.FAMILIES
        if str(f) in KINDS + LONG_KINDS
    ],
)
def test_families_answer_as_in_one_process(family, tmp_path, ranks):
    folder = str(save(tiny_model(family), tmp_path, sharded=False))
    engine = EXACT if str(family) == KINDS[0] else GREEDY
    loading = {"dtype": "float32", "host_memory": "64MiB"}
    alone = answered(folder, engine, loading)
    assert_same(alone, ranks(2).run(answered, folder, engine, loading))


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_answered_as_in_one_process(kind, checkpoint, checkpoint_in, ranks):
    """The last one with experts that do not fit."""
    folder = checkpoint if kind == "smallest" else checkpoint_in(kind)
    memory: Any = "64MiB"
    if kind == "smallest":
        memory = inspect_checkpoint(folder, max_tokens=256).smallest_budget_bytes + 100_000
    loading = {"host_memory": memory}
    alone = answered(str(folder), EXACT, loading)
    assert_same(alone, ranks(2).run(answered, str(folder), EXACT, loading))


def test_an_adapter_on_experts_is_each_owners_part(checkpoint, tmp_path, ranks):
    settings = peft.LoraConfig(
        r=3,
        target_modules=["v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), settings)
    model.save_pretrained(tmp_path)
    loading = {"host_memory": "64MiB", "adapter": str(tmp_path)}
    alone = answered(str(checkpoint), GREEDY, loading)
    assert alone["answers"] != answered(str(checkpoint), GREEDY, {})["answers"]
    assert_same(alone, ranks(2).run(answered, str(checkpoint), GREEDY, loading))


@pytest.mark.parametrize("seed", range(2))
def test_a_process_that_dies_at_any_step_is_named(seed, checkpoint):
    pool = RankPool(3)
    victim = (seed + 1) % 3
    try:
        pool.start(served_until_a_kill, str(checkpoint), victim, seed)
        for rank in {0, 1, 2} - {victim}:
            is_ok, outcome = pool.collect_of(rank)
            assert is_ok, outcome
            message, ranks = outcome
            assert ranks == (victim,), message
            assert message.startswith(f"rank {victim} of 3 has ended")
    finally:
        pool.close()


def test_what_several_processes_lack_is_refused(checkpoint, ranks):
    first, second = ranks(2).run(refusals, str(checkpoint))
    assert second[0] == "requests go to the first process; the others follow it"
    for said in (first, second):
        assert said[1].startswith("ranks disagree about the engine's steps (its checksum)")
    assert first[2:] == [
        f"{what}: a model in several processes takes none; leave it out"
        for what in ("an adapter", "pictures")
    ]


def test_an_engine_may_be_closed_while_a_step_ends_an_answer(checkpoint, ranks):
    (reasons, failure), _ = ranks(2).run(ended_within_a_step, str(checkpoint))
    assert (reasons, failure) == (["length"], None)


def test_logits_that_are_no_numbers_end_one_answer(checkpoint, ranks):
    (*spoilt, is_same, failure), _ = ranks(2).run(answered_without_numbers, str(checkpoint))
    for reason, message in spoilt:
        assert reason == "error"
        assert "not finite" in message
    assert is_same
    assert failure is None


def test_what_changes_the_next_step_ends_all(checkpoint, ranks):
    assert ranks(2).run(failed_cuts, str(checkpoint)) == ["no room for the state"] * 2


def test_tokens_that_were_not_told_are_a_disagreement():
    follower = Follower.__new__(Follower)
    follower._chosen, follower._counts = deque(), Counter(steps=3)
    sequence = Sequence(GenerationRequest(prompt_ids=(1,), max_new_tokens=1), ignore_event, 1, "")
    for tell in (follower._add_token, lambda one, _: follower._add_logprobs(one, 1, None)):
        with pytest.raises(RankFailureError, match="disagree after step 3"):
            tell(sequence, None)


def test_a_plan_arrives_as_it_was_sent():
    draw = np.random.default_rng(0)
    for size in (0, 1, 40):
        plan = Plan(
            kind="step",
            beside_tokens=int(draw.integers(1 << 20)),
            state=int(draw.integers(1 << 32)),
            chosen=[
                (int(draw.integers(1 << 18)), end) for end in ("stop", None) for _ in range(size)
            ],
            cancelled=draw.integers(1 << 40, size=size).tolist(),
            came=[
                (
                    number,
                    [7] * (number % 2),
                    GenerationRequest(
                        prompt_ids=tuple(draw.integers(9, size=number + 1).tolist()),
                        max_new_tokens=number,
                        num_prompt_logprobs=[None, 0, 2][number % 3],
                        client="日本語\udc80",
                        prefix_owner='"',
                        priority=-number,
                        returns_routing=number % 2 == 0,
                    ),
                )
                for number in range(size)
            ],
        )
        assert Plan.of(plan.numbers()) == plan


def test_what_travels_with_a_step_is_small():
    """A plan without new requests is one message, however long the service has run."""
    sent: list[tuple[int, int]] = []

    class Counted(LocalTransport):
        size = 2

        def routes(self, sent_CP, received_CP) -> Any:
            sent.append((int(sent_CP.sum()), int(received_CP.sum())))
            return [sent_CP]

        def exchange(self, rows_RD, route, *, reverse=False, out=None):
            return Arriving(lambda: rows_RD.new_zeros((sent[-1][1], 1)))

    now_s = [0.0]
    plans = Plans(Counted(), clock=lambda: now_s[0])
    plans.send("step", 1)
    for token in range(12):
        plans.chose(token, None)
    plans.send("step", 2, [3], 256)
    assert sent == [(32, 0), (0, len(COUNTED)), (32, 0)]
    now_s[0] = 1.0
    plans.send("step", 3)
    assert sent[3:] == [(32, 0), (0, len(COUNTED))]
    plans.send("rest", 3)
    assert sent[5:] == [(32, 0), (0, len(COUNTED))]
